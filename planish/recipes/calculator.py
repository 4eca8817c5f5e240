"""Use a calculator: arithmetic that is too hard for the model alone, and a tool that computes it.

    python -m planish.recipes.calculator                      the embedded model, two numbers of
                                                              three digits
    python -m planish.recipes.calculator operands=4           longer expressions

The policy may call the tool `calculator`, reads the result, and answers. Only the number in the
final answer is rewarded, not the call. So the policy learns to use the tool where it helps.

    reward = 1 if the last number of the final answer is the value, else 0
             -0.1 for an answer that is cut off

Problems are generated without end from (seed, position). Test problems are never trained on. The
prompt begins with worked examples, since small models do not know the format of tool calls.
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
from planish.recipes.rl_options import RLOptions, run
from planish.renderers import Message, get_text_content
from planish.rl.environments.message_env import EnvFromMessageEnv
from planish.rl.environments.problem_datasets import ProblemDatasetBuilder
from planish.rl.types import Env, Metrics, RLDataset
from planish.tool_use import AgentToolMessageEnv, build_agent_tool_env, tool
from planish.training.option_rules import GROUP_SIZE, at_least, between, check_fields

NUM_EXAMPLE_PROBLEMS = 3
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
    """The sizes of problems."""

    operands: int = chz.field(default=2, doc="numbers per problem", metadata=between(2, 10))
    digits: int = chz.field(
        default=3,
        doc="maximum digits of a number; the minimum is one less",
        metadata=between(2, 12),
    )

    def sample(self, rng: random.Random) -> str:
        """Return a random expression such as (318 + 45) * 27."""
        expression = str(self._number(rng))
        for count in range(2, self.operands + 1):
            operation = rng.choice("+-*")
            expression = f"{expression} {operation} {self._number(rng)}"
            if count < self.operands:
                expression = f"({expression})"
        return expression

    def _number(self, rng: random.Random) -> int:
        """Return a random number with `digits` or `digits` - 1 digits."""
        return rng.randrange(10 ** max(0, self.digits - 2), 10**self.digits)


def example_problems(kind: Kind) -> list[str]:
    """Return the expressions of the worked examples, one for each operation. They are the same in
    every prompt.
    """
    rng = random.Random("shown")
    shown: list[str] = []
    for operation in "*+-"[:NUM_EXAMPLE_PROBLEMS]:
        while f" {operation} " not in (expression := kind.sample(rng)):
            pass
        shown.append(expression)
    return shown


def question(expression: str) -> Message:
    """Return the message that asks for the value."""
    return {"role": "user", "content": f"What is {expression}?"}


@cache
def few_shot_messages(kind: Kind) -> tuple[Message, ...]:
    """Return the worked examples: question, call of the tool, its result, answer."""
    messages: list[Message] = []
    for expression in example_problems(kind):
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
    """Rewards an episode with 1 if it ended with the right number, else with 0."""

    expression: str

    @cached_property
    def value(self) -> Fraction:
        """The value of the expression."""
        return evaluate(self.expression)

    def is_right(self, messages: Sequence[Message]) -> bool:
        """Return whether the last message is an answer with the right number."""
        last = messages[-1]
        return last["role"] == "assistant" and last_number(get_text_content(last)) == self.value

    async def __call__(self, messages: list[Message]) -> float:
        """Return the reward of an episode."""
        return float(self.is_right(messages))


@chz.chz
class CalculatorDatasetBuilder(ProblemDatasetBuilder):
    """Groups for random problems, and held-out problems for the test."""

    kind: Kind = Kind()
    test_problems: int = 64

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return (training dataset, test dataset). Without test problems, the latter is None."""
        held_out = self._held_out()

        def sample_expression(rng: random.Random) -> str:
            expression = self.kind.sample(rng)
            while expression in held_out:
                expression = self.kind.sample(rng)
            return expression

        return self.generated(sample_expression), self.evaluation(sorted(held_out))

    def make_env(self, problem: str) -> EnvFromMessageEnv:
        """Return the environment of one attempt at an expression."""
        return build_agent_tool_env(
            self.renderer,
            [calculator],
            [*few_shot_messages(self.kind), question(problem)],
            Grader(problem),
            max_turns=MAX_TURNS,
        )

    def episode_metrics(self, env: Env) -> Metrics:
        """Return whether an episode ended with the right number."""
        assert isinstance(env, EnvFromMessageEnv)
        game = env.message_env
        assert isinstance(game, AgentToolMessageEnv)
        assert isinstance(game.reward_fn, Grader)
        return {"correct": float(game.reward_fn.is_right(game.history))}

    def _held_out(self) -> set[str]:
        """Return the test problems. They are the same for every seed, so that runs can be
        compared.
        """
        rng = random.Random("test")
        shown = set(example_problems(self.kind))
        held_out: set[str] = set()
        while len(held_out) < self.test_problems:
            held_out |= {self.kind.sample(rng)} - shown
        return held_out


@chz.chz
class Options(Kind, RLOptions):
    """Options of the recipe."""

    log_path: str = "/tmp/planish-examples/calculator"
    batch_size: int = chz.field(default=8, doc="problems per step", metadata=at_least(1))
    group_size: int = chz.field(default=8, doc="attempts per problem", metadata=GROUP_SIZE)
    test_problems: int = chz.field(
        default=64,
        doc="number of test problems, which are never trained on; 0 = no evaluation",
        metadata=between(0, 1000),
    )
    learning_rate: float = 2e-4
    max_tokens: int = 64
    eval_temperature: float | None = chz.field(
        default=None,
        doc="sampling temperature in evaluations; none = temperature, because the embedded model "
        "copies the worked examples when it answers greedily",
    )
    max_steps: int | None = 20
    eval_every: int = 10


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    check_fields(options)
    builder = training_run.build(
        CalculatorDatasetBuilder, options, kind=training_run.build(Kind, options)
    )
    return run(options, builder, recipe_name="calculator", service_client=service_client)


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
