"""Synthetic pairs of answers to sums, to try preference training without data.

    style    a short answer is preferred to a wordy one; both have the right result, so they differ
             in length only
    result   a right result is preferred to a wrong one; both have the same words and number of
             digits, so only the value differs

The sums of test pairs occur in no training pair, in either order of the two numbers.
"""

import random

from planish.preference.types import LabeledComparison, preferred_answer
from planish.recipes.sums import Sum, split_sums

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
    "{first} + {second} = {result}",
    "The sum of {first} and {second} is {result}.",
    "{result}",
    "It is {result}, since {first} and {second} make {result}.",
)
KINDS = ("style", "result")


def generated_pairs(
    largest: int, test_size: int, seed: int, kind: str = "style"
) -> tuple[list[LabeledComparison], list[LabeledComparison]]:
    """Return (training pairs, test pairs) for the sums of two numbers from 0 to `largest`, in a
    random order that `seed` determines.

    A test sum occurs in one order of its numbers only. Neither order occurs in training.
    """
    rng = random.Random(f"pairs:{seed}")
    train, test = split_sums(largest, test_size, rng)
    rng.shuffle(train)
    make_pair = {"style": _style_pair, "result": _result_pair}[kind]
    return [make_pair(problem, rng) for problem in train], [
        make_pair(problem, rng) for problem in test
    ]


def _style_pair(problem: Sum, rng: random.Random) -> LabeledComparison:
    equation = f"{problem.left} + {problem.right}"
    short = f"{equation} = {problem.answer}"
    wordy = (
        f"{rng.choice(OPENINGS)} The result of {equation} is {problem.answer}. "
        f"{rng.choice(CLOSINGS)}"
    )
    return preferred_answer(problem.question, short, wordy)


def _result_pair(problem: Sum, rng: random.Random) -> LabeledComparison:
    form, right = rng.choice(FORMS), problem.answer
    wrong = rng.choice(
        [near for near in range(max(0, right - 10), right + 11) if _is_plausible(near, right)]
    )
    chosen, rejected = (
        form.format(first=problem.left, second=problem.right, result=result)
        for result in (right, wrong)
    )
    return preferred_answer(problem.question, chosen, rejected)


def _is_plausible(wrong: int, right: int) -> bool:
    """Return whether `wrong` is another number with as many digits as `right`."""
    return wrong != right and len(str(wrong)) == len(str(right))
