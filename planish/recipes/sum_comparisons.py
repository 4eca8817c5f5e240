"""Generated comparisons of two answers to a sum, to try preference training without data.

    style       a short answer is preferred to a wordy one; both have the right result, so they
                differ in length only
    result      a right result is preferred to a wrong one; both have the same words and number of
                digits, so only the value differs
    courtesy    an answer with a courteous phrase is preferred to the same answer with a rude one;
                the courteous one is longer in half of the pairs, so the length does not show which
                one is preferred
    sums        the preferred answer belongs to the question, the rejected one to another question
                (planish/recipes/exchanged_answers.py)

No person labelled the pairs; the rules are those that most people would follow. No question of a
test pair occurs in a training pair. With style and result, this includes the question with the
numbers in the other order. Courtesy has other phrases in the test than in training.
"""

import random
from collections.abc import Sequence
from itertools import product
from typing import Literal

import chz

from planish.preference.datasets import ComparisonBuilder
from planish.preference.types import LabeledComparison, preferred_answer
from planish.recipes.exchanged_answers import QuestionWithAnswer, make_exchanges, split_exchanges
from planish.recipes.sums import Sum, all_sums, num_sums, require_training_sums, split_sums

SumPairs = Literal["style", "result", "courtesy", "sums"]
Splits = tuple[list[LabeledComparison], list[LabeledComparison]]
"""Training pairs and test pairs."""

OPENINGS = (
    "That is a good question. Let me think about it step by step.",
    "Sure, I would be happy to help you with this sum.",
    "To find the answer, we begin with the first number and count on.",
    "Thank you for asking. There are several ways to look at this.",
)
CLOSINGS = (
    "Please let me know if there is anything else that I can do for you.",
    "I hope that this explanation was helpful.",
    "It is always a good idea to check such a result once more.",
)
FORMS = (
    "{terms} = {result}",
    "The sum of {first} and {second} is {result}.",
    "{result}",
    "It is {result}, since {first} and {second} make {result}.",
)
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
class SumComparisons(ComparisonBuilder):
    """Comparisons for the sums of two numbers from 0 to `largest`, in a random order that `seed`
    determines.
    """

    kind: SumPairs
    largest: int
    test_size: int
    seed: int

    @chz.validate
    def _leaves_training_sums(self) -> None:
        is_asked_once = self.kind in ("style", "result")
        count = num_sums(self.largest) if is_asked_once else (self.largest + 1) ** 2
        require_training_sums(self.test_size, count)

    def __call__(self) -> Splits:
        """Return (training pairs, test pairs)."""
        if self.kind == "courtesy":
            return self._courteous_answers()
        if self.kind == "sums":
            return self._exchanged_answers()
        rng = random.Random(f"pairs:{self.seed}")
        train, test = split_sums(self.largest, self.test_size, rng)
        rng.shuffle(train)
        make_pair = _style_pair if self.kind == "style" else _result_pair
        return [make_pair(problem, rng) for problem in train], [
            make_pair(problem, rng) for problem in test
        ]

    def _courteous_answers(self) -> Splits:
        rng = random.Random(f"courtesy:{self.seed}")
        sums = all_sums(self.largest, in_both_orders=True)
        rng.shuffle(sums)
        test = _courteous_pairs(sums[: self.test_size], TEST_COURTEOUS, TEST_RUDE, rng)
        return _courteous_pairs(sums[self.test_size :], COURTEOUS, RUDE, rng), test

    def _exchanged_answers(self) -> Splits:
        answered = [
            QuestionWithAnswer(problem.question, f"The answer is {problem.answer}.")
            for problem in all_sums(self.largest, in_both_orders=True)
        ]
        return split_exchanges(make_exchanges(answered, self.seed), self.test_size)


def _style_pair(problem: Sum, rng: random.Random) -> LabeledComparison:
    short = f"{problem.terms} = {problem.answer}"
    wordy = (
        f"{rng.choice(OPENINGS)} The result of {problem.terms} is {problem.answer}. "
        f"{rng.choice(CLOSINGS)}"
    )
    return preferred_answer(problem.question, short, wordy)


def _result_pair(problem: Sum, rng: random.Random) -> LabeledComparison:
    form, right = rng.choice(FORMS), problem.answer
    wrong = rng.choice(
        [near for near in range(max(0, right - 10), right + 11) if _is_plausible(near, right)]
    )
    chosen, rejected = (
        form.format(terms=problem.terms, first=problem.left, second=problem.right, result=result)
        for result in (right, wrong)
    )
    return preferred_answer(problem.question, chosen, rejected)


def _is_plausible(wrong: int, right: int) -> bool:
    """Return whether `wrong` is another number with as many digits as `right`."""
    return wrong != right and len(str(wrong)) == len(str(right))


def _courteous_pairs(
    sums: Sequence[Sum], courteous: Sequence[str], rude: Sequence[str], rng: random.Random
) -> list[LabeledComparison]:
    words = list(product(courteous, rude))
    longer = [(kind, unkind) for kind, unkind in words if len(kind) > len(unkind)]
    shorter = [(kind, unkind) for kind, unkind in words if len(kind) < len(unkind)]
    return [
        _courteous_pair(problem, *rng.choice((longer, shorter)[index % 2]))
        for index, problem in enumerate(sums)
    ]


def _courteous_pair(problem: Sum, courteous: str, rude: str) -> LabeledComparison:
    answer = f"{problem.terms} is {problem.answer}."
    return preferred_answer(problem.question, f"{courteous} {answer}", f"{rude} {answer}")
