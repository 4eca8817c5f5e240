"""Sums of two whole numbers: the generated data of the recipes.

Three modules present the sums in different ways:

    sum_tasks.py          RL environments, prompts for a teacher, rubrics for a judge
    sum_comparisons.py    comparisons of a better and a worse answer
    wordy_sums.py         chats, comparisons and prompts with a known rule, for RLHF

A test sum is never trained on, in either order of its numbers. The comparisons of courteous and of
exchanged answers are an exception: they hold out a question in one order only.
"""

import random
from collections.abc import Set
from dataclasses import dataclass

from planish.errors import UserError
from planish.renderers import Message

NUM_TEST_SUMS = 100


@dataclass(frozen=True)
class Sum:
    """A problem: `left` + `right`."""

    left: int
    right: int

    @property
    def terms(self) -> str:
        """The sum without its result, such as "3 + 4"."""
        return f"{self.left} + {self.right}"

    @property
    def question(self) -> str:
        """The question as text."""
        return f"What is {self.terms}?"

    @property
    def prompt(self) -> Message:
        """The question as a message."""
        return {"role": "user", "content": self.question}

    @property
    def answer(self) -> int:
        """The result."""
        return self.left + self.right

    @property
    def pair(self) -> tuple[int, int]:
        """The two numbers in order, the same for a + b and b + a."""
        return min(self.left, self.right), max(self.left, self.right)

    @property
    def orders(self) -> tuple["Sum", ...]:
        """The sum and the one with its numbers swapped, or the sum alone if its numbers are equal."""
        return (self,) if self.left == self.right else (self, Sum(self.right, self.left))


EXAMPLE_SUMS = (Sum(4, 3), Sum(12, 25))
EXAMPLE_PAIRS = frozenset(example.pair for example in EXAMPLE_SUMS)


def worked_examples() -> list[Message]:
    """Return the worked examples that come before a question."""
    return [message for example in EXAMPLE_SUMS for message in worked_example(example)]


def worked_example(problem: Sum) -> list[Message]:
    """Return a worked example as a question and its answer. The answer is the whole equation, since
    small models complete an equation better than they write a number alone.
    """
    return [
        problem.prompt,
        {"role": "assistant", "content": f"{problem.terms} = {problem.answer}"},
    ]


def all_sums(largest: int, *, in_both_orders: bool = False) -> list[Sum]:
    """Return the sums of two numbers from 0 to `largest`, in ascending order. Of a + b and b + a,
    only the one with the smaller number first is included, unless `in_both_orders`.
    """
    numbers = range(largest + 1)
    return [
        Sum(left, right) for left in numbers for right in numbers if in_both_orders or left <= right
    ]


def num_sums(largest: int) -> int:
    """Return the number of sums of two numbers from 0 to `largest`, where a + b and b + a count
    once.
    """
    return (largest + 1) * (largest + 2) // 2


def require_training_sums(test_size: int, count: int) -> None:
    """Raise UserError unless some of `count` sums are left for training."""
    if not 0 <= test_size < count:
        raise UserError(
            f"test_size={test_size}: there are {count} sums; give fewer, or a larger largest"
        )


def split_sums(largest: int, test_size: int, rng: random.Random) -> tuple[list[Sum], list[Sum]]:
    """Return (training sums, `test_size` test sums) of two numbers from 0 to `largest`, in a random
    order. A test sum occurs in one order of its numbers only. Neither order occurs in training.
    """
    sums = all_sums(largest)
    require_training_sums(test_size, len(sums))
    rng.shuffle(sums)
    # A choice is made for equal numbers too, so that it takes the same random numbers.
    test = [rng.choice((problem, problem.orders[-1])) for problem in sums[:test_size]]
    return [order for problem in sums[test_size:] for order in problem.orders], test


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
    excluded_pairs = set(EXAMPLE_PAIRS)
    test_sums: list[Sum] = []
    while len(test_sums) < count:
        test_sums.append(random_sum(rng, max_operand, excluded_pairs))
        excluded_pairs.add(test_sums[-1].pair)
    return test_sums


def untrained_pairs(test_sums: list[Sum]) -> Set[tuple[int, int]]:
    """Return the pairs of numbers that are not trained on: those of tests and worked examples."""
    return EXAMPLE_PAIRS | {test.pair for test in test_sums}


def random_sum(rng: random.Random, max_operand: int, held_out: Set[tuple[int, int]]) -> Sum:
    """Return a random sum of numbers up to `max_operand` whose pair is not in `held_out`."""
    while True:
        candidate = Sum(rng.randint(0, max_operand), rng.randint(0, max_operand))
        if candidate.pair not in held_out:
            return candidate
