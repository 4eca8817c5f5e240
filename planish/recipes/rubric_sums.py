"""Generated rubrics to try a judge without data: sums, with the right result in the rubric.

A program can check such an answer as well, so the metric `judge/agreement` shows how good the judge
is.
"""

import random

from planish.errors import UserError
from planish.recipes.sums import EXAMPLE_SUMS, Sum, num_sums, split_sums, worked_example
from planish.renderers import Message
from planish.rubric.rubrics import Criterion, Example, RubricRow, RubricRows

WORDS = {"Yes": 1.0, "No": 0.0}
NUM_EXAMPLE_VERDICTS = 5
"""Maximum number of example verdicts in a judge's prompt."""


def generated_rubrics(
    largest: int, test_size: int, seed: int, shown_verdicts: int = NUM_EXAMPLE_VERDICTS
) -> RubricRows:
    """Return rubrics for all sums of two numbers from 0 to `largest`. A test sum occurs in one
    order of its numbers only. Neither order occurs in training.
    """
    count = num_sums(largest)
    if not 0 <= test_size < count:
        raise UserError(
            f"test_size={test_size}: there are {count} sums; give fewer, or a larger largest"
        )
    train, test = split_sums(largest, test_size, random.Random(f"rubrics:{seed}"))
    return RubricRows(
        [rubric_of(problem, shown_verdicts) for problem in train],
        [rubric_of(problem, shown_verdicts) for problem in test],
    )


def rubric_of(problem: Sum, shown_verdicts: int) -> RubricRow:
    """Return the rubric of a sum, with `shown_verdicts` example verdicts."""
    messages: list[Message] = [
        *worked_example(EXAMPLE_SUMS[0]),
        {"role": "user", "content": problem.question},
    ]
    criterion = Criterion(
        f"Does the answer say that the result is {problem.answer}?",
        name="result",
        word_scores=WORDS,
        examples=verdicts(problem)[:shown_verdicts],
        truth_regex=rf"(?<!\d){problem.answer}\D*\Z",
    )
    return RubricRow(tuple(messages), (criterion,))


def verdicts(problem: Sum) -> tuple[Example, ...]:
    """Return answers to the same sum with their verdicts. Without these examples the embedded model
    writes no verdict at all.
    """
    equation = f"{problem.left} + {problem.right} ="
    results = (
        problem.answer,
        problem.answer + 1,
        problem.answer + 10,
        problem.answer,
        abs(problem.answer - 2),
    )
    return tuple(
        Example(
            f"{equation} {result}" if number % 2 == 0 else f"{result}",
            verdict(result == problem.answer),
        )
        for number, result in enumerate(results)
    )


def verdict(is_right: bool) -> str:
    """Return a verdict in the format that the judge must use."""
    return f"<score>{'Yes' if is_right else 'No'}</score>"
