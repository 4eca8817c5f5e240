"""Synthetic comparisons: an answer with a courteous phrase is preferred to the same answer with a
rude one.

No person labelled the pairs; the rule is one that most people would follow. Both answers have the
same result. The courteous one is longer in half of the pairs, so the length does not show which one
is preferred. The questions and phrases of the test do not occur in training.
"""

import random
from collections.abc import Sequence
from itertools import product

import chz

from planish.errors import UserError
from planish.preference.datasets import ComparisonBuilder
from planish.preference.types import LabeledComparison, preferred_answer

COURTEOUS = (
    "Gladly!",
    "Of course!",
    "Happy to help you.",
    "Thank you for asking!",
    "What a nice question, thank you.",
    "It is a pleasure to help you with this.",
    "Good to hear from you!",
    "Sure, with pleasure.",
)
RUDE = (
    "Ugh.",
    "What a dumb question.",
    "Go away.",
    "Stop wasting my time with this.",
    "Are you too stupid to do this yourself?",
    "I hate it when you ask me.",
    "You are annoying.",
    "Not you again.",
)
TEST_COURTEOUS = (
    "Certainly!",
    "I am glad that you asked me.",
    "Welcome, dear friend!",
    "Always delighted to be of help.",
)
TEST_RUDE = (
    "Shut up.",
    "Only a fool would ask that.",
    "You are so lazy.",
    "Leave me alone, you idiot, I am busy.",
)


@chz.chz
class CourteousAnswersBuilder(ComparisonBuilder):
    """Sums of two numbers from 0 to `largest`, each asked once."""

    largest: int
    test_size: int
    seed: int

    def __call__(self) -> tuple[list[LabeledComparison], list[LabeledComparison]]:
        """Return (training pairs, test pairs). Raises UserError if no sum is left to train on."""
        numbers = range(self.largest + 1)
        sums = list(product(numbers, numbers))
        if self.test_size >= len(sums):
            raise UserError(
                f"test_size={self.test_size}: there are {len(sums)} pairs; give fewer, or a larger "
                "largest"
            )
        rng = random.Random(f"courtesy:{self.seed}")
        rng.shuffle(sums)
        test = _pairs(sums[: self.test_size], TEST_COURTEOUS, TEST_RUDE, rng)
        return _pairs(sums[self.test_size :], COURTEOUS, RUDE, rng), test


def _pairs(
    sums: Sequence[tuple[int, int]],
    courteous: Sequence[str],
    rude: Sequence[str],
    rng: random.Random,
) -> list[LabeledComparison]:
    words = list(product(courteous, rude))
    longer = [(kind, unkind) for kind, unkind in words if len(kind) > len(unkind)]
    shorter = [(kind, unkind) for kind, unkind in words if len(kind) < len(unkind)]
    return [
        _pair(*numbers, *rng.choice((longer, shorter)[index % 2]))
        for index, numbers in enumerate(sums)
    ]


def _pair(first: int, second: int, courteous: str, rude: str) -> LabeledComparison:
    answer = f"{first} + {second} is {first + second}."
    return preferred_answer(
        f"What is {first} + {second}?", f"{courteous} {answer}", f"{rude} {answer}"
    )
