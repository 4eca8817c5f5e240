"""Rubrics that a program draws, for trying a judge without data: sums, whose right result the
rubric tells the judge.

A program can check such an answer as well, so the metrics say how good the judge is
(`judge/agreement`).
"""

import random

from planish.errors import UserError
from planish.recipes.sums import SHOWN, Sum, exchange
from planish.renderers import Message
from planish.rubric.env import RubricRows
from planish.rubric.rubrics import Criterion, Example, RubricRow

WORDS = {"Yes": 1.0, "No": 0.0}
SHOWN_VERDICTS = 5
"""Most that a judge is shown."""


def drawn_rubrics(
    largest: int, test_size: int, seed: int, shown_verdicts: int = SHOWN_VERDICTS
) -> RubricRows:
    """All sums of two numbers from 0 to `largest`. Of the two orders of a sum the test has one, and
    training neither.
    """
    generator = random.Random(f"rubrics:{seed}")
    sums = [Sum(left, right) for left in range(largest + 1) for right in range(left, largest + 1)]
    generator.shuffle(sums)
    if not 0 <= test_size < len(sums):
        raise UserError(
            f"test_size={test_size}: there are {len(sums)} sums; give fewer, or a larger largest"
        )
    held_out = [generator.choice((drawn, turned(drawn))) for drawn in sums[:test_size]]
    shown = list(
        dict.fromkeys(order for drawn in sums[test_size:] for order in (drawn, turned(drawn)))
    )
    return RubricRows(
        [rubric_of(drawn, shown_verdicts) for drawn in shown],
        [rubric_of(drawn, shown_verdicts) for drawn in held_out],
    )


def turned(drawn: Sum) -> Sum:
    return Sum(drawn.right, drawn.left)


def rubric_of(drawn: Sum, shown_verdicts: int) -> RubricRow:
    """`shown_verdicts`: how many the judge is shown before its own."""
    messages: list[Message] = [*exchange(SHOWN[0]), {"role": "user", "content": drawn.question}]
    criterion = Criterion(
        f"Does the answer say that the result is {drawn.answer}?",
        name="result",
        word_scores=WORDS,
        examples=verdicts(drawn)[:shown_verdicts],
        truth_regex=rf"(?<!\d){drawn.answer}\D*\Z",
    )
    return RubricRow(tuple(messages), (criterion,))


def verdicts(drawn: Sum) -> tuple[Example, ...]:
    """Answers to the same sum: without them the embedded model writes anything but a verdict."""
    equation = f"{drawn.left} + {drawn.right} ="
    results = (
        drawn.answer,
        drawn.answer + 1,
        drawn.answer + 10,
        drawn.answer,
        abs(drawn.answer - 2),
    )
    return tuple(
        Example(
            f"{equation} {result}" if number % 2 == 0 else f"{result}",
            verdict(result == drawn.answer),
        )
        for number, result in enumerate(results)
    )


def verdict(is_right: bool) -> str:
    return f"<score>{'Yes' if is_right else 'No'}</score>"
