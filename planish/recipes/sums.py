"""Sums of two whole numbers, generated without end. A test sum is never trained on, in either
order.

The worked examples answer with the whole equation, "3 + 4 = 7", since small models complete an
equation better than they write a number alone. The last number of a message is its answer.

    reward = correct + 0.1 * (format - 1)

`format`: the message is the equation or the number alone, and ends with a stop sequence.
"""

import random
import re
from collections.abc import Set
from dataclasses import dataclass

import chz

from planish.errors import UserError
from planish.recipes.arithmetic_expressions import last_number
from planish.renderers import Message, Renderer
from planish.rl.environments.datasets import ENDLESS_NUM_BATCHES
from planish.rl.environments.problem_datasets import ProblemDatasetBuilder
from planish.rl.environments.problem_env import ProblemEnv
from planish.rl.types import RLDataset

NUM_TEST_SUMS = 100
ANSWER_FORMAT = re.compile(r"(\d+ \+ \d+ = )?\d+\.?")


@dataclass(frozen=True)
class Sum:
    """A problem: `left` + `right`."""

    left: int
    right: int

    @property
    def question(self) -> str:
        """The question as text."""
        return f"What is {self.left} + {self.right}?"

    @property
    def answer(self) -> int:
        """The result."""
        return self.left + self.right

    @property
    def pair(self) -> tuple[int, int]:
        """The two numbers in order, the same for a + b and b + a."""
        return min(self.left, self.right), max(self.left, self.right)

    @property
    def swapped(self) -> "Sum":
        """The sum with its numbers in the other order."""
        return Sum(self.right, self.left)


EXAMPLE_SUMS = (Sum(4, 3), Sum(12, 25))


class SumEnv(ProblemEnv):
    """One sum, after worked examples if `shows_examples`."""

    def __init__(self, renderer: Renderer, problem: Sum, *, shows_examples: bool = True) -> None:
        super().__init__(renderer, convo_prefix=worked_examples() if shows_examples else None)
        self.problem = problem

    def get_question(self) -> str:
        """Return the question."""
        return self.problem.question

    def check_format(self, sample_str: str) -> bool:
        """Return whether the text is the equation or a number alone."""
        return ANSWER_FORMAT.fullmatch(sample_str.strip()) is not None

    def check_answer(self, sample_str: str) -> bool:
        """Return whether the last number of the text is the result."""
        return last_number(sample_str) == self.problem.answer

    def get_reference_answer(self) -> str:
        """Return the result."""
        return str(self.problem.answer)


def worked_examples() -> list[Message]:
    """Return the worked examples that come before a question."""
    return [message for example in EXAMPLE_SUMS for message in worked_example(example)]


def worked_example(problem: Sum) -> list[Message]:
    """Return a worked example as a question and its answer."""
    equation = f"{problem.left} + {problem.right} = {problem.answer}"
    return [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": equation},
    ]


@chz.chz
class SumDatasetBuilder(ProblemDatasetBuilder):
    """Groups for random sums, and held-out sums for the test."""

    max_operand: int = chz.field(default=20, doc="largest operand")
    eval_problems: int | None = chz.field(
        default=None, doc=f"number of test sums; none = {NUM_TEST_SUMS}, or a third of all"
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return (training dataset, test dataset). Without test sums, the latter is None."""
        test_sums = held_out_sums(self.max_operand, self.eval_problems)
        held_out = {test.pair for test in test_sums} | {example.pair for example in EXAMPLE_SUMS}

        def sample_problem(rng: random.Random) -> Sum:
            return random_sum(rng, self.max_operand, held_out)

        return self.generated(sample_problem, ENDLESS_NUM_BATCHES), self.evaluation(test_sums)

    def make_env(self, problem: Sum) -> SumEnv:
        """Return the environment of one answer."""
        return SumEnv(self.renderer, problem)

    def tag(self) -> str:
        """Return "arithmetic"."""
        return "arithmetic"


def held_out_sums(max_operand: int, count: int | None) -> list[Sum]:
    """Return `count` test sums (None: NUM_TEST_SUMS, or a third of all if those are fewer). They
    are the same for every seed, so that runs can be compared.
    """
    pairs = num_sums(max_operand)
    max_tests = pairs // 2
    count = min(NUM_TEST_SUMS, pairs // 3) if count is None else count
    if count > max_tests:
        raise UserError(
            f"eval_problems={count}: with max_operand={max_operand} there are {pairs} sums, half "
            f"of which are trained on; give at most {max_tests}, or a larger max_operand"
        )
    rng = random.Random("test")
    excluded_pairs = {example.pair for example in EXAMPLE_SUMS}
    test_sums: list[Sum] = []
    while len(test_sums) < count:
        test_sums.append(random_sum(rng, max_operand, excluded_pairs))
        excluded_pairs.add(test_sums[-1].pair)
    return test_sums


def split_sums(largest: int, test_size: int, rng: random.Random) -> tuple[list[Sum], list[Sum]]:
    """Return (training sums, `test_size` test sums) of two numbers from 0 to `largest`, in a random
    order. A test sum occurs in one order of its numbers only. Neither order occurs in training.
    """
    sums = [Sum(left, right) for left in range(largest + 1) for right in range(left, largest + 1)]
    rng.shuffle(sums)
    test = [rng.choice((problem, problem.swapped)) for problem in sums[:test_size]]
    train = [order for problem in sums[test_size:] for order in (problem, problem.swapped)]
    return list(dict.fromkeys(train)), test


def num_sums(largest: int) -> int:
    """Return the number of sums of two numbers from 0 to `largest`, where a + b and b + a count
    once.
    """
    return (largest + 1) * (largest + 2) // 2


def random_sum(rng: random.Random, max_operand: int, held_out: Set[tuple[int, int]]) -> Sum:
    """Return a random sum of numbers up to `max_operand` whose pair is not in `held_out`."""
    while True:
        candidate = Sum(rng.randint(0, max_operand), rng.randint(0, max_operand))
        if candidate.pair not in held_out:
            return candidate
