"""Questions with known answers in the format of GSM8K, and their prompts.

planish/datasets/rows.py describes where a dataset may be and how it is named. A row has a
"question" and an "answer". The final answer is the text after "####", or the whole answer if it has
no such mark.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planish.errors import UserError

QUESTION_SUFFIX = r" Give the final answer as a number without units, inside \boxed{}."
WORKED_EXAMPLE = (
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
"""A worked example that precedes every prompt, so that an untrained model sees how to use
the box.
"""

WORKED_ANSWER = re.compile(r"(?:^|\n)####[ \t]*\$?[-+]?[\d.,/]*\d%?\s*\Z")
"""Matches the end of a worked solution: #### and a number on the last line."""
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")

Conversation = list[dict[str, Any]]


@dataclass(frozen=True)
class Problem:
    """A question with its answer."""

    question: str
    answer: str
    """The final answer alone, such as "72"."""
    solution: str
    r"""The worked solution, ending in \boxed{answer}."""
    location: str = field(default="", compare=False, repr=False)
    """The place of its row, such as file and line, for messages; "" if it is not from a row."""


def problem_prompt(problem: Problem) -> Conversation:
    """Return the messages that ask for a problem's answer."""
    return [*WORKED_EXAMPLE, {"role": "user", "content": problem.question + QUESTION_SUFFIX}]


def worked_example(suffix: str) -> Conversation:
    """Return the worked example with `suffix` as the instruction after its question."""
    question, answer = WORKED_EXAMPLE
    question_text = question["content"].removesuffix(QUESTION_SUFFIX) + suffix
    return [
        {"role": "user", "content": question_text},
        {"role": "assistant", "content": answer["content"]},
    ]


def is_gsm8k(row: Mapping[str, Any]) -> bool:
    """Return whether a row is a question with a worked solution in the form of GSM8K: the last line
    of "answer" is #### and a number. Any other answer is a text that stays as it is.
    """
    answer = row.get("answer")
    return isinstance(answer, str) and WORKED_ANSWER.search(answer) is not None


def read_problem(row: Mapping[str, Any], where: str) -> Problem:
    """Read a row as a problem. Raise UserError, which names the row by `where`, for other
    formats.
    """
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise UserError(
            f'{where}: needs a "question" and an "answer" that are strings; its keys are '
            f"{sorted(row)}"
        )
    solution, marker, final_answer = answer.rpartition("####")
    final_answer = final_answer.strip()
    solution = CALCULATOR_MARK.sub("", solution).strip()
    if not final_answer:
        raise UserError(f"{where}: the answer is empty; remove the row or give its answer")
    if not question.strip():
        raise UserError(f"{where}: the question is empty; write it, or remove the row")
    conclusion = rf"The answer is \boxed{{{final_answer}}}"
    return Problem(
        question.strip(),
        final_answer,
        f"{solution}\n{conclusion}" if marker and solution else conclusion,
    )
