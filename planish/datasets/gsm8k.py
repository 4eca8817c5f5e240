r"""Questions with known answers, in the form of GSM8K, and how they are put to a model.

Where a dataset is and how it is named: planish/datasets/rows.py. A row has a "question" and an
"answer"; the final answer is what follows "####" if that mark is there, and the whole answer if
not.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planish.datasets.rows import load_rows
from planish.errors import UserError

QUESTION_SUFFIX = r" Give the final answer as a number without units, inside \boxed{}."
SHOWN_EXAMPLE = (
    {
        "role": "user",
        "content": "How many times does the letter r occur in strawberry?" + QUESTION_SUFFIX,
    },
    {
        "role": "assistant",
        "content": (
            "The letters one by one are s, t, r, a, w, b, e, r, r, y. "
            r"The third, the eighth and the ninth of them are an r, so it occurs 3 times. \boxed{3}"
        ),
    },
)
"""One worked question in front of every prompt: a model that was never told about the box sees what
is wanted.
"""

CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")

Conversation = list[dict[str, Any]]


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str
    """The final answer alone, such as "72"."""
    solution: str
    r"""The worked solution, ending in \boxed{answer}."""


def load_problems(dataset: str, split: str) -> list[Problem]:
    """The problems of one split in the dataset's order; UserError when there are none or a row has
    another form.
    """
    rows = load_rows(dataset, split)
    return [
        read_problem(row, f"the data set {dataset}, {split} row {number}")
        for number, row in enumerate(rows, start=1)
    ]


def problem_prompt(problem: Problem) -> Conversation:
    """The messages that ask for a problem's answer."""
    return [*SHOWN_EXAMPLE, {"role": "user", "content": problem.question + QUESTION_SUFFIX}]


def shown_example(suffix: str) -> Conversation:
    """The worked question in front of every prompt, put in the words of `suffix`."""
    question, answer = SHOWN_EXAMPLE
    asked = question["content"].removesuffix(QUESTION_SUFFIX) + suffix
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer["content"]}]


def read_problem(row: Mapping[str, Any], where: str) -> Problem:
    """A row as a problem; `where` names it in errors."""
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise UserError(
            f'{where}: needs a "question" and an "answer" that are strings; its keys are {sorted(row)}'
        )
    work, mark, final = answer.rpartition("####")
    final = final.strip()
    work = CALCULATOR_MARK.sub("", work).strip()
    if not final:
        raise UserError(f"{where}: the answer is empty; remove the row or give its answer")
    boxed = rf"The answer is \boxed{{{final}}}"
    return Problem(question.strip(), final, f"{work}\n{boxed}" if mark and work else boxed)
