"""A programming problem as an environment: the policy writes a program, and tests grade it.

An answer has its program in a code block; the last block counts. With one turn, the episode ends
there. With several turns, a program that fails a public test is sent back with a report of the
failure, and the policy writes another one. The episode ends when a program passes all public tests,
or after the last turn.

    reward = score + format_coef * (format - 1)

`score` is 1 if the last program passes every test, else 0. With `reward="fraction"` it is the
fraction of tests that pass; if public tests were shown, only the hidden tests count. `format` is 1
if the last answer has a code block. An answer that is cut off costs `format_coef` and ends the
episode.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import chz

from planish.recipes.code_problems import CodeProblem
from planish.renderers import Message, get_text_content
from planish.rl.environments.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from planish.rl.types import Env, Metrics, StopReason
from planish.sandbox import FunctionTest, Limits, Outcome, ProgramTest, Sandbox, TestResult

CODE_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL)
MAX_REPORT_CHARACTERS = 400
"""Maximum characters of an input, an output or an error that the policy sees."""
NO_PROGRAM = "There is no program in the answer. Write it between ```python and ```."


@chz.chz
class Rules:
    """How an episode runs and is rewarded."""

    max_turns: int = chz.field(default=1, doc="maximum number of programs in an episode")
    reward: Literal["all", "fraction"] = "all"
    format_coef: float = 0.1
    limits: Limits = Limits()


@dataclass
class CodeEnv(MessageEnv):
    """One problem. `prefix` comes before it, such as worked examples."""

    rules: Rules
    problem: CodeProblem
    sandbox: Sandbox
    prefix: Sequence[Message] = ()
    history: list[Message] = field(default_factory=list)
    turns: int = 0
    score: float = 0.0
    """Score of the last program; 0 before it is graded."""
    has_program: bool = False

    async def initial_observation(self) -> list[Message]:
        """Return the prefix and the problem."""
        self.history = [*self.prefix, {"role": "user", "content": instruction(self.problem)}]
        return self.history

    async def step(self, message: Message) -> MessageStepResult:
        """Report a failed public test, or grade the program and end the episode."""
        self.turns += 1
        self.history = [*self.history, message]
        program = read_program(get_text_content(message))
        is_last = self.turns == self.rules.max_turns
        failure_report = None if is_last else await self._failure_report(program)
        if failure_report is not None:
            self.history = [*self.history, {"role": "user", "content": failure_report}]
            return MessageStepResult(
                0.0, False, self.history, logs={"failure_report": failure_report}
            )
        await self._grade(program)
        stop = StopReason.MAX_TURNS if is_last and self.turns > 1 else None
        return MessageStepResult(
            self._reward(), True, self.history, logs={"score": self.score}, stop_reason=stop
        )

    async def stopped_by_limit(self, reason: StopReason) -> tuple[float, Metrics]:
        """Grade the last program, whether or not it passed the public tests."""
        if self.turns:
            answer = next(
                message for message in reversed(self.history) if message["role"] == "assistant"
            )
            await self._grade(read_program(get_text_content(answer)))
        return self._reward(), {}

    async def _failure_report(self, program: str | None) -> str | None:
        """Return the report on a program that fails a public test; None if it passes them all."""
        if program is None:
            return NO_PROGRAM
        for test in self.problem.public_tests:
            result = await test.run(self.sandbox, program)
            if result.outcome is not Outcome.PASSED:
                return report(test, result) + " Write the whole program again."
        return None

    async def _grade(self, program: str | None) -> None:
        self.has_program = program is not None
        self.score = 0.0
        if program is None:
            return
        tests = self._grading_tests()
        passed = 0
        for test in tests:
            if (await test.run(self.sandbox, program)).outcome is Outcome.PASSED:
                passed += 1
            elif self.rules.reward == "all":
                return
        self.score = passed / len(tests)

    def _grading_tests(self) -> Sequence[ProgramTest]:
        """Return the tests that the score counts. A fraction counts hidden tests only: a program
        could be written to pass just the tests that it was shown.
        """
        is_partial = self.rules.reward == "fraction" and self.rules.max_turns > 1
        return self.problem.hidden_tests if is_partial else self.problem.tests

    def _reward(self) -> float:
        return self.score + self.rules.format_coef * (self.has_program - 1.0)


@cache
def process_sandbox(limits: Limits) -> Sandbox:
    """Return the sandbox of this process with these limits. All environments share it, so that its
    limit on concurrent programs applies to all of them.
    """
    # Group builders are pickled for rollout processes. So they hold the limits instead of a
    # sandbox, and each process makes its own sandbox.
    return Sandbox(limits)


def episode_metrics(env: Env) -> Metrics:
    """Return the metrics of a finished episode."""
    assert isinstance(env, EnvFromMessageEnv)
    code = env.message_env
    assert isinstance(code, CodeEnv)
    correct = float(code.score == 1.0)
    metrics: Metrics = {"correct": correct, "format": float(code.has_program)}
    if code.rules.reward == "fraction":
        metrics["tests_passed"] = code.score
    if code.rules.max_turns > 1:
        metrics |= {
            "correct_at_once": correct * (code.turns == 1),
            "repaired": correct * (code.turns > 1),
        }
    return metrics


def instruction(problem: CodeProblem) -> str:
    """Return the question with instructions on the format of the answer."""
    if problem.function is None:
        format_instruction = (
            "Write a Python program that reads standard input and prints the answer, between "
            "```python and ```."
        )
    else:
        format_instruction = "Write it in Python, between ```python and ```."
    start = (
        f"\n\nBegin with:\n```python\n{problem.starter_code}\n```" if problem.starter_code else ""
    )
    return f"{problem.question}{start}\n\n{format_instruction}"


def code_block(source: str) -> str:
    """Return a program as an answer in the requested format."""
    return f"```python\n{source}\n```"


def read_program(text: str) -> str | None:
    """Return the last code block; None if there is none."""
    blocks = CODE_BLOCK.findall(text)
    return blocks[-1] if blocks else None


def report(test: ProgramTest, result: TestResult) -> str:
    """Describe what a test expects and what the program did instead."""
    if isinstance(test, FunctionTest):
        arguments = ", ".join(map(repr, test.arguments))
        requirement = (
            f"{test.function}({truncate(arguments)}) must return {truncate(repr(test.returned))}."
        )
        actual = f"It returned {truncate(result.answer)}."
    else:
        requirement = (
            f"For the input\n{truncate(test.stdin)}\nit must print\n{truncate(test.stdout)}\n"
        )
        actual = f"It printed\n{truncate(result.answer)}\n"
    match result.outcome:
        case Outcome.TIME:
            actual = "It took too long."
        case Outcome.OUTPUT:
            actual = "It printed without end."
        case Outcome.FAILED:
            errors = result.execution.stderr.decode(errors="replace").strip().splitlines()
            actual = (
                "It failed: "
                f"{truncate(errors[-1] if errors else f'exit code {result.execution.exit_code}')}."
            )
    return f"{requirement} {actual}"


def truncate(text: str) -> str:
    """Return the text, cut after MAX_REPORT_CHARACTERS characters with a note of its length."""
    text = text.rstrip()
    return (
        text
        if len(text) <= MAX_REPORT_CHARACTERS
        else f"{text[:MAX_REPORT_CHARACTERS]} ... ({len(text)} characters)"
    )
