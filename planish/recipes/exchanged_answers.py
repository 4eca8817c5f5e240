"""Synthetic comparisons: the preferred answer belongs to the question, the rejected one to another
question.

No person labelled the pairs. The rule is one that a person would follow: an answer must be about
the question, or be right. Two questions with answers of nearly the same length exchange their
answers, so each answer is preferred once and rejected once. Neither the length nor anything else in
an answer alone shows which one is preferred; it has to be read with its question. Both pairs of an
exchange are in the same split, so no prompt or answer of the test is in training. The questions are
those of GSM8K with the solutions that people wrote, or generated sums
(planish/recipes/sum_comparisons.py).
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import chz

from planish.datasets.math_problems import load_problems
from planish.datasets.rows import has_split
from planish.errors import UserError
from planish.preference.datasets import ComparisonBuilder
from planish.preference.types import LabeledComparison, preferred_answer


@dataclass(frozen=True)
class QuestionWithAnswer:
    """A question with its own answer."""

    question: str
    answer: str


Exchange = tuple[LabeledComparison, LabeledComparison]


def make_exchanges(questions: Sequence[QuestionWithAnswer], seed: int) -> list[Exchange]:
    """Return the exchanges of pairs of questions, in a random order that `seed` determines. Pairs
    of questions with the same answer are left out.
    """
    rng = random.Random(f"exchange:{seed}")
    shuffled = rng.sample(list(questions), len(questions))
    by_length = sorted(shuffled, key=lambda each: len(each.answer))
    partners = zip(by_length[::2], by_length[1::2], strict=False)
    exchanges = [exchange(one, other) for one, other in partners if one.answer != other.answer]
    return rng.sample(exchanges, len(exchanges))


def exchange(one: QuestionWithAnswer, other: QuestionWithAnswer) -> Exchange:
    """Return the comparisons of both questions, each with its own answer preferred."""
    return (
        preferred_answer(one.question, one.answer, other.answer),
        preferred_answer(other.question, other.answer, one.answer),
    )


@chz.chz
class ExchangedSolutionsBuilder(ComparisonBuilder):
    """Questions with worked solutions in the format of GSM8K: a hub name, a directory, or one file.
    Without a test split, test pairs are held out of training.
    """

    questions: str
    test_size: int
    seed: int

    def __call__(self) -> tuple[list[LabeledComparison], list[LabeledComparison]]:
        """Return (training pairs, test pairs)."""
        train = make_exchanges(self._read("train"), self.seed)
        if self.test_size and has_split(self.questions, "test"):
            _, test = split_exchanges(make_exchanges(self._read("test"), self.seed), self.test_size)
            return _joined(train), test
        return split_exchanges(train, self.test_size)

    def _read(self, split: str) -> list[QuestionWithAnswer]:
        return [
            QuestionWithAnswer(problem.question, problem.solution)
            for problem in load_problems(self.questions, split)
        ]


def split_exchanges(
    exchanges: Sequence[Exchange], test_size: int
) -> tuple[list[LabeledComparison], list[LabeledComparison]]:
    """Return (training pairs, test pairs). The test has `test_size` pairs, rounded up to an even
    number. Raises UserError if there are fewer.
    """
    held_out = math.ceil(test_size / 2)
    if held_out > len(exchanges):
        raise UserError(f"test_size={test_size}: there are {2 * len(exchanges)} pairs; give fewer")
    return _joined(exchanges[held_out:]), _joined(exchanges[:held_out])


def _joined(exchanges: Sequence[Exchange]) -> list[LabeledComparison]:
    return [labeled for both in exchanges for labeled in both]
