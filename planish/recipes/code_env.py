"""A programming problem as an environment: the policy writes a program, tests that it may not see
decide.

An answer holds its program in a code block; the last block counts. With one turn that is all. With
more, a program that fails a public test comes back with what it did there, and the policy writes
another; the episode ends with a program that passes all public tests, or with the last turn.

    reward = score + format_coef * (format - 1)

`score`: 1 if the last program passes every test, else 0; or, with `reward="fraction"`, the part of
the tests that it passes, of the hidden ones where others were shown. `format`: the last answer has
a code block. An answer without an end costs `format_coef` and ends the episode.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import chz

from planish.recipes.code_problems import CodeProblem
from planish.recipes.process_sandbox import process_sandbox
from planish.renderers import Message, get_text_content
from planish.rl.environments.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from planish.rl.types import Env, EnvGroupBuilder, Metrics, StopReason, Trajectory
from planish.runlog.model_renderer import model_renderer
from planish.sandbox import FunctionTest, Limits, Outcome, ProgramTest, Sandbox, TestResult

BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL)
CLIPPED = 400
"""Characters of an input, an output or an error that a policy is shown."""
NO_PROGRAM = "There is no program in the answer. Write it between ```python and ```."


@chz.chz
class Rules:
    max_turns: int = chz.field(default=1, doc="programs in an episode")
    reward: Literal["all", "fraction"] = "all"
    format_coef: float = 0.1
    limits: Limits = Limits()


@dataclass
class CodeEnv(MessageEnv):
    """One problem; `prefix` comes before it, such as worked examples."""

    rules: Rules
    problem: CodeProblem
    sandbox: Sandbox
    prefix: Sequence[Message] = ()
    history: list[Message] = field(default_factory=list)
    turns: int = 0
    score: float = 0.0
    """Of the last program, once it is known."""
    has_form: bool = False

    async def initial_observation(self) -> list[Message]:
        self.history = [*self.prefix, {"role": "user", "content": instruction(self.problem)}]
        return self.history

    async def step(self, message: Message) -> MessageStepResult:
        self.turns += 1
        self.history = [*self.history, message]
        program = read_program(get_text_content(message))
        is_last = self.turns == self.rules.max_turns
        complaint = None if is_last else await self._complaint(program)
        if complaint is not None:
            self.history = [*self.history, {"role": "user", "content": complaint}]
            return MessageStepResult(0.0, False, self.history, logs={"complaint": complaint})
        await self._grade(program)
        stop = StopReason.MAX_TURNS if is_last and self.turns > 1 else None
        return MessageStepResult(
            self._reward(), True, self.history, logs={"score": self.score}, stop_reason=stop
        )

    async def stopped_by_limit(self, reason: StopReason) -> tuple[float, Metrics]:
        """The last program counts, whatever came of the public tests."""
        if self.turns:
            answer = next(
                message for message in reversed(self.history) if message["role"] == "assistant"
            )
            await self._grade(read_program(get_text_content(answer)))
        return self._reward(), {}

    async def _complaint(self, program: str | None) -> str | None:
        """What the policy is told of its program; None if nothing is wrong with it."""
        if program is None:
            return NO_PROGRAM
        for test in self.problem.public_tests:
            result = await test.run(self.sandbox, program)
            if result.outcome is not Outcome.PASSED:
                return report(test, result) + " Write the whole program again."
        return None

    async def _grade(self, program: str | None) -> None:
        self.has_form = program is not None
        self.score = 0.0
        if program is None:
            return
        tests = self._deciding_tests()
        passed = 0
        for test in tests:
            if (await test.run(self.sandbox, program)).outcome is Outcome.PASSED:
                passed += 1
            elif self.rules.reward == "all":
                return
        self.score = passed / len(tests)

    def _deciding_tests(self) -> Sequence[ProgramTest]:
        """A part of the tests is earned by what was not shown; all of them cannot be had by it
        alone.
        """
        is_partial = self.rules.reward == "fraction" and self.rules.max_turns > 1
        return self.problem.hidden_tests if is_partial else self.problem.tests

    def _reward(self) -> float:
        return self.score + self.rules.format_coef * (self.has_form - 1.0)


@dataclass(frozen=True)
class CodeGroup(EnvGroupBuilder):
    """`size` attempts at the same problem."""

    model_name: str
    renderer_name: str | None
    rules: Rules
    problem: CodeProblem
    prefix: tuple[Message, ...]
    size: int
    tag: str = "code"

    async def make_envs(self) -> Sequence[Env]:
        renderer = model_renderer(self.model_name, self.renderer_name)
        sandbox = process_sandbox(self.rules.limits)
        cost = -self.rules.format_coef
        return [
            EnvFromMessageEnv(
                renderer,
                CodeEnv(self.rules, self.problem, sandbox, self.prefix),
                failed_parse_reward=cost,
                context_overflow_reward=cost,
            )
            for _ in range(self.size)
        ]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Metrics of whole episodes, also of those that an answer without an end broke off."""
        return [(0.0, metrics_of(code_env(env))) for env in env_group]

    def logging_tags(self) -> list[str]:
        return [self.tag]


def code_env(env: Env) -> CodeEnv:
    assert isinstance(env, EnvFromMessageEnv)
    assert isinstance(env.message_env, CodeEnv)
    return env.message_env


def metrics_of(env: CodeEnv) -> Metrics:
    correct = float(env.score == 1.0)
    metrics: Metrics = {"correct": correct, "format": float(env.has_form)}
    if env.rules.reward == "fraction":
        metrics["tests_passed"] = env.score
    if env.rules.max_turns > 1:
        metrics |= {
            "correct_at_once": correct * (env.turns == 1),
            "repaired": correct * (env.turns > 1),
        }
    return metrics


def instruction(problem: CodeProblem) -> str:
    """The question, and what an answer looks like."""
    if problem.function is None:
        how = "Write a Python program that reads standard input and prints the answer, between ```python and ```."
    else:
        how = "Write it in Python, between ```python and ```."
    start = (
        f"\n\nBegin with:\n```python\n{problem.starter_code}\n```" if problem.starter_code else ""
    )
    return f"{problem.question}{start}\n\n{how}"


def as_answer(source: str) -> str:
    """A program in the form that is asked for."""
    return f"```python\n{source}\n```"


def read_program(text: str) -> str | None:
    """The last code block."""
    blocks = BLOCK.findall(text)
    return blocks[-1] if blocks else None


def report(test: ProgramTest, result: TestResult) -> str:
    """What a program did in a test, and what it should have done, in words."""
    if isinstance(test, FunctionTest):
        arguments = ", ".join(map(repr, test.arguments))
        asked = f"{test.function}({clipped(arguments)}) must return {clipped(repr(test.returned))}."
        answered = f"It returned {clipped(result.answer)}."
    else:
        asked = f"For the input\n{clipped(test.stdin)}\nit must print\n{clipped(test.stdout)}\n"
        answered = f"It printed\n{clipped(result.answer)}\n"
    match result.outcome:
        case Outcome.TIME:
            answered = "It took too long."
        case Outcome.OUTPUT:
            answered = "It printed without end."
        case Outcome.FAILED:
            errors = result.execution.stderr.decode(errors="replace").strip().splitlines()
            answered = f"It failed: {clipped(errors[-1] if errors else f'exit code {result.execution.exit_code}')}."
    return f"{asked} {answered}"


def clipped(text: str) -> str:
    text = text.rstrip()
    return text if len(text) <= CLIPPED else f"{text[:CLIPPED]} ... ({len(text)} characters)"
