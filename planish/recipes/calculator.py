"""Use a calculator: arithmetic too hard to do in the head, and a tool that does it.

    python -m planish.recipes.calculator                      the embedded model, two numbers of
        three digits
    python -m planish.recipes.calculator operands=4           longer expressions

The policy may call the tool `calculator`, reads what it computes, and answers. Nothing rewards the
call: only the number in the final answer counts, so the tool is used as far as it helps.

    reward = 1 if the last number of the final answer is the value, else 0; -0.1 for an answer without an end

Problems are drawn by (seed, position), endlessly; those of the test are kept out of training. The
prompt begins with worked examples, since small models know no form of tool calls by heart.
"""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.recipes import training_run
from planish.recipes.arithmetic_expressions import decimal, evaluate, last_number
from planish.recipes.generated_dataset import GeneratedDataset
from planish.recipes.rl_options import RLOptions, run
from planish.renderers import Message, get_text_content
from planish.rl.environments.datasets import ProblemDataset
from planish.rl.environments.message_env import EnvFromMessageEnv
from planish.rl.types import Env, EnvGroupBuilder, Metrics, RLDataset, RLDatasetBuilder, Trajectory
from planish.runlog.model_renderer import model_renderer
from planish.tool_use import AgentToolMessageEnv, build_agent_tool_env, tool

SHOWN_PROBLEMS = 3
MAX_TURNS = 4
PRESETS: dict[str, dict[str, Any]] = {
    "hard": {"operands": 4, "digits": 4, "max_tokens": 96, "max_steps": 200},
}


@tool
async def calculator(expression: str) -> str:
    """Compute an arithmetic expression."""
    return decimal(evaluate(expression))


@chz.chz
class Kind:
    """What problems look like."""

    operands: int = chz.field(default=2, doc="numbers in a problem")
    digits: int = chz.field(default=3, doc="of each number, or one less")

    def draw(self, rng: random.Random) -> str:
        """An expression such as (318 + 45) * 27, whose inner operations come first."""
        expression = str(self._number(rng))
        for count in range(2, self.operands + 1):
            operation = rng.choice("+-*")
            expression = f"{expression} {operation} {self._number(rng)}"
            if count < self.operands:
                expression = f"({expression})"
        return expression

    def _number(self, rng: random.Random) -> int:
        """Of `digits` digits, or one less."""
        return rng.randrange(10 ** max(0, self.digits - 2), 10**self.digits)


def shown_problems(kind: Kind) -> list[str]:
    """Worked examples, the same in every prompt: one of each operation, while there are enough."""
    rng = random.Random("shown")
    shown: list[str] = []
    for operation in "*+-"[:SHOWN_PROBLEMS]:
        while f" {operation} " not in (expression := kind.draw(rng)):
            pass
        shown.append(expression)
    return shown


def question(expression: str) -> Message:
    return {"role": "user", "content": f"What is {expression}?"}


@cache
def first_messages(kind: Kind) -> tuple[Message, ...]:
    messages: list[Message] = []
    for expression in shown_problems(kind):
        value = decimal(evaluate(expression))
        arguments = json.dumps({"expression": expression})
        messages += [
            question(expression),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {"name": calculator.name, "arguments": arguments},
                    }
                ],
            },
            {"role": "tool", "content": value},
            {"role": "assistant", "content": value},
        ]
    return tuple(messages)


@dataclass(frozen=True)
class Grader:
    """Whether an episode ended with the right number."""

    expression: str

    @cached_property
    def value(self) -> Fraction:
        return evaluate(self.expression)

    def is_right(self, messages: Sequence[Message]) -> bool:
        last = messages[-1]
        return last["role"] == "assistant" and last_number(get_text_content(last)) == self.value

    async def __call__(self, messages: list[Message]) -> float:
        return float(self.is_right(messages))


@dataclass(frozen=True)
class CalculatorGroup(EnvGroupBuilder):
    """`size` attempts at the same problem."""

    model_name: str
    renderer_name: str | None
    kind: Kind
    expression: str
    size: int

    async def make_envs(self) -> Sequence[Env]:
        renderer = model_renderer(self.model_name, self.renderer_name)
        return [
            build_agent_tool_env(
                renderer,
                [calculator],
                [*first_messages(self.kind), question(self.expression)],
                Grader(self.expression),
                max_turns=MAX_TURNS,
            )
            for _ in range(self.size)
        ]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Metrics of whole episodes, also of those that an answer without an end broke off."""
        grader = Grader(self.expression)
        return [
            (0.0, {"correct": float(grader.is_right(history))})
            for history in map(history_of, env_group)
        ]


def history_of(env: Env) -> list[Message]:
    assert isinstance(env, EnvFromMessageEnv)
    assert isinstance(env.message_env, AgentToolMessageEnv)
    return env.message_env.history


@chz.chz
class CalculatorDatasetBuilder(RLDatasetBuilder):
    model_name: str
    renderer_name: str | None = None
    kind: Kind = Kind()
    batch_size: int = chz.field(default=16, doc="problems a step")
    group_size: int = chz.field(default=8, doc="attempts at each problem")
    test_problems: int = 64
    seed: int = 0

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        held_out = self._held_out()

        def draw_group(rng: random.Random) -> CalculatorGroup:
            while (expression := self.kind.draw(rng)) in held_out:
                pass
            return self._group(expression, self.group_size)

        train = GeneratedDataset(draw_group, self.batch_size, self.seed)
        if not held_out:
            return train, None
        return train, ProblemDataset(
            sorted(held_out), lambda expression: self._group(expression, 1), len(held_out)
        )

    def _held_out(self) -> set[str]:
        """The same for every seed, so that runs can be compared."""
        rng = random.Random("test")
        shown = set(shown_problems(self.kind))
        held_out: set[str] = set()
        while len(held_out) < self.test_problems:
            held_out |= {self.kind.draw(rng)} - shown
        return held_out

    def _group(self, expression: str, size: int) -> CalculatorGroup:
        return CalculatorGroup(self.model_name, self.renderer_name, self.kind, expression, size)


@chz.chz
class Options(RLOptions):
    log_path: str = "/tmp/planish-examples/calculator"
    operands: int = chz.field(default=2, doc="numbers in a problem")
    digits: int = chz.field(default=3, doc="of each number, or one less")
    batch_size: int = chz.field(default=8, doc="problems a step")
    group_size: int = chz.field(default=8, doc="attempts at each problem")
    test_problems: int = chz.field(
        default=64, doc="problems that are tested and never trained on; 0 = no tests"
    )
    learning_rate: float = 2e-4
    max_tokens: int = chz.field(default=64, doc="longest answer")
    eval_temperature: float | None = chz.field(
        default=None,
        doc="of tests; none = temperature: with 0 the embedded model copies the worked examples at once",
    )
    max_steps: int | None = 20
    eval_every: int = chz.field(default=10, doc="steps between tests; 0 = never")


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train; returns the run directory."""
    training_run.require(
        options,
        operands=(2 <= options.operands <= 10, "a whole number from 2 to 10"),
        digits=(2 <= options.digits <= 12, "a whole number from 2 to 12"),
        batch_size=(options.batch_size >= 1, "a whole number of at least 1"),
        group_size=(
            options.group_size >= 2,
            "at least 2: attempts are compared within their group",
        ),
        test_problems=(0 <= options.test_problems <= 1000, "a whole number from 0 to 1000"),
    )
    builder = CalculatorDatasetBuilder(
        model_name=options.model_name,
        renderer_name=options.renderer_name,
        kind=Kind(operands=options.operands, digits=options.digits),
        batch_size=options.batch_size,
        group_size=options.group_size,
        test_problems=options.test_problems,
        seed=options.seed,
    )
    return run(options, builder, recipe_name="calculator", service_client=service_client)


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
