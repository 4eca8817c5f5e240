"""Sums of two whole numbers, drawn as many as one wants; those of the test are never trained on, in
either order.

The policy is shown that an answer is the equation, "3 + 4 = 7": small models that are bad at
writing a sum alone are fair at finishing an equation. The last number of a message is its answer.

    reward = correct + 0.1 * (format - 1)

`format`: the message is an equation that ends, or the number alone.
"""

import random
import re
from collections.abc import Set
from dataclasses import dataclass
from functools import partial

import chz

from planish.errors import UserError
from planish.recipes.arithmetic_expressions import last_number
from planish.recipes.generated_dataset import ENDLESS, GeneratedDataset
from planish.renderers import Message, Renderer
from planish.rl.environments.datasets import ProblemDataset
from planish.rl.environments.problem_env import ProblemEnv, ProblemGroupBuilder
from planish.rl.types import RLDataset, RLDatasetBuilder
from planish.runlog.model_renderer import model_renderer

TEST_SUMS = 100
ANSWER = re.compile(r"(\d+ \+ \d+ = )?\d+\.?")


@dataclass(frozen=True)
class Sum:
    left: int
    right: int

    @property
    def question(self) -> str:
        return f"What is {self.left} + {self.right}?"

    @property
    def answer(self) -> int:
        return self.left + self.right

    @property
    def pair(self) -> tuple[int, int]:
        """The same for both orders."""
        return min(self.left, self.right), max(self.left, self.right)


SHOWN = (Sum(4, 3), Sum(12, 25))


class SumEnv(ProblemEnv):
    def __init__(self, renderer: Renderer, problem: Sum, *, shows_examples: bool = True) -> None:
        super().__init__(renderer, convo_prefix=shown_exchanges() if shows_examples else None)
        self.problem = problem

    def get_question(self) -> str:
        return self.problem.question

    def check_format(self, sample_str: str) -> bool:
        return ANSWER.fullmatch(sample_str.strip()) is not None

    def check_answer(self, sample_str: str) -> bool:
        return last_number(sample_str) == self.problem.answer

    def get_reference_answer(self) -> str:
        return str(self.problem.answer)


def sum_env(
    problem: Sum, model_name: str, renderer_name: str | None, *, shows_examples: bool = True
) -> SumEnv:
    """The environment by names, which pickle."""
    return SumEnv(model_renderer(model_name, renderer_name), problem, shows_examples=shows_examples)


def shown_exchanges() -> list[Message]:
    """The worked examples in front of a question."""
    return [message for shown in SHOWN for message in exchange(shown)]


def exchange(shown: Sum) -> list[Message]:
    """A worked example."""
    equation = f"{shown.left} + {shown.right} = {shown.answer}"
    return [{"role": "user", "content": shown.question}, {"role": "assistant", "content": equation}]


@chz.chz
class SumDatasetBuilder(RLDatasetBuilder):
    model_name: str
    renderer_name: str | None = None
    max_operand: int = chz.field(default=20, doc="the largest number that is added")
    batch_size: int = chz.field(default=16, doc="sums a step")
    group_size: int = chz.field(default=8, doc="answers to each sum")
    eval_problems: int | None = chz.field(
        default=None, doc=f"sums a test; none = {TEST_SUMS}, or a third of all"
    )
    seed: int = 0

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        tests = held_out_sums(self.max_operand, self.eval_problems)
        held_out = {test.pair for test in tests} | {shown.pair for shown in SHOWN}

        def draw_group(rng: random.Random) -> ProblemGroupBuilder:
            return self._group(draw_sum(rng, self.max_operand, held_out), self.group_size)

        train = GeneratedDataset(draw_group, self.batch_size, self.seed, ENDLESS)
        return train, ProblemDataset(
            tests, lambda test: self._group(test, 1), len(tests)
        ) if tests else None

    def _group(self, problem: Sum, size: int) -> ProblemGroupBuilder:
        make_env = partial(sum_env, problem, self.model_name, self.renderer_name)
        return ProblemGroupBuilder(make_env, size, "arithmetic")


def held_out_sums(max_operand: int, count: int | None) -> list[Sum]:
    """The sums of the test: the same for every seed, so that runs can be compared."""
    pairs = (max_operand + 1) * (max_operand + 2) // 2
    most = pairs // 2
    count = min(TEST_SUMS, pairs // 3) if count is None else count
    if count > most:
        raise UserError(
            f"eval_problems={count}: with max_operand={max_operand} there are {pairs} sums, half of which are trained on; "
            f"give at most {most}, or a larger max_operand"
        )
    rng = random.Random("test")
    taken = {shown.pair for shown in SHOWN}
    tests: list[Sum] = []
    while len(tests) < count:
        tests.append(draw_sum(rng, max_operand, taken))
        taken.add(tests[-1].pair)
    return tests


def draw_sum(rng: random.Random, max_operand: int, held_out: Set[tuple[int, int]]) -> Sum:
    while True:
        drawn = Sum(rng.randint(0, max_operand), rng.randint(0, max_operand))
        if drawn.pair not in held_out:
            return drawn
