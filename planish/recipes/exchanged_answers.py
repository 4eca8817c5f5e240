"""Pairs whose preferred answer is the question's own, and whose other answer belongs to another
question.

Nobody was asked: the rule is one that a person would follow, that an answer be about the question,
or be right. Two questions with answers of nearly the same length exchange them, so each answer is
preferred once and rejected once. Neither its length nor anything else about an answer alone says
which is preferred; it has to be read with its question. Both pairs of an exchange are in one split,
so neither prompts nor answers of tests are in training.

    sums          What is 17 + 8? The results of sums up to a largest number; a program draws them
    solutions     questions of GSM8K with the solutions that people wrote for them
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import chz

from planish.datasets.gsm8k import load_problems
from planish.datasets.rows import has_split
from planish.errors import UserError
from planish.preference.datasets import ComparisonBuilder
from planish.preference.types import Comparison, LabeledComparison


@dataclass(frozen=True)
class Answered:
    question: str
    answer: str


Exchange = tuple[LabeledComparison, LabeledComparison]


def exchanges(answered: Sequence[Answered], seed: int) -> list[Exchange]:
    """Pairs of pairs, in an order drawn by `seed`. Questions whose neighbour by length has the same
    answer are left out.
    """
    generator = random.Random(f"exchange:{seed}")
    drawn = generator.sample(list(answered), len(answered))
    by_length = sorted(drawn, key=lambda each: len(each.answer))
    partners = zip(by_length[::2], by_length[1::2], strict=False)
    found = [exchange(one, other) for one, other in partners if one.answer != other.answer]
    return generator.sample(found, len(found))


def exchange(one: Answered, other: Answered) -> Exchange:
    return preferred(one.question, one.answer, other.answer), preferred(
        other.question, other.answer, one.answer
    )


def preferred(question: str, chosen: str, rejected: str) -> LabeledComparison:
    prompt = [{"role": "user", "content": question}]
    answers = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
    return LabeledComparison(Comparison(prompt, *answers), "A")


@chz.chz
class ExchangedSumsBuilder(ComparisonBuilder):
    """Sums of two numbers from 0 to `largest`."""

    largest: int
    test_size: int
    seed: int

    def __call__(self) -> tuple[list[LabeledComparison], list[LabeledComparison]]:
        numbers = range(self.largest + 1)
        sums = [
            Answered(f"What is {a} + {b}?", f"The answer is {a + b}.")
            for a in numbers
            for b in numbers
        ]
        return _split(exchanges(sums, self.seed), self.test_size)


@chz.chz
class ExchangedSolutionsBuilder(ComparisonBuilder):
    """Questions with worked solutions, in the form of GSM8K: a hub name, a directory, or one file,
    of which tests are held out.
    """

    questions: str
    test_size: int
    seed: int

    def __call__(self) -> tuple[list[LabeledComparison], list[LabeledComparison]]:
        train = exchanges(self._read("train"), self.seed)
        if self.test_size and has_split(self.questions, "test"):
            _, test = _split(exchanges(self._read("test"), self.seed), self.test_size)
            return _joined(train), test
        return _split(train, self.test_size)

    def _read(self, split: str) -> list[Answered]:
        return [
            Answered(problem.question, problem.solution)
            for problem in load_problems(self.questions, split)
        ]


def _split(
    found: Sequence[Exchange], test_size: int
) -> tuple[list[LabeledComparison], list[LabeledComparison]]:
    """(for training, `test_size` or one more for tests); UserError if there are fewer."""
    held_out = -(-test_size // 2)
    if held_out > len(found):
        raise UserError(f"test_size={test_size}: there are {2 * len(found)} pairs; give fewer")
    return _joined(found[held_out:]), _joined(found[:held_out])


def _joined(found: Sequence[Exchange]) -> list[LabeledComparison]:
    return [labeled for both in found for labeled in both]
