"""Tasks by name. All rows of a task are read and checked before anything is sampled. Errors name
the file and line of the row.
"""

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish.datasets.rows import rows_with_locations
from planish.errors import UserError
from planish.evaluation.boxed import grade_boxed, gsm8k_question, math_question
from planish.evaluation.multiple_choice import grade_letter, lettered_question, unlisted_question
from planish.evaluation.types import ChoiceTask, Question, SampledTask, Task, Verdict


@dataclass(frozen=True)
class TaskKind:
    """How the rows of a task are read and its answers graded."""

    row_fields: str
    """The fields of a row, for error messages."""
    hub_name: str | None
    """The hub name of the data; None if the user has to name the data."""
    read_question: Callable[[Mapping[str, Any], str, int], Question]
    """Converts a row to a question. The other arguments are the row's location, for error messages,
    and the question's number.
    """
    grade: Callable[[Question, str], Verdict | Awaitable[Verdict]] | None
    """Grades an answer; None for tasks that compare the logprobs of choices."""


TASKS: dict[str, TaskKind] = {
    "gsm8k": TaskKind(
        '"question", "answer" (after ####)', "openai/gsm8k", gsm8k_question, grade_boxed
    ),
    "math500": TaskKind(
        '"problem", "answer" or "solution"', "HuggingFaceH4/MATH-500", math_question, grade_boxed
    ),
    "multiple_choice": TaskKind(
        '"question", "choices", "answer"', None, lettered_question, grade_letter
    ),
    "multiple_choice_logprobs": TaskKind(
        '"question", "choices", "answer"', None, unlisted_question, None
    ),
}
"""Add a task of your own here: `TASKS["mine"] = TaskKind(...)`."""


def load_task(
    name: str, data: str | Path | None = None, *, limit: int | None = None, title: str | None = None
) -> Task:
    """Load the questions of a task: all of `data`, or the first `limit`.

    `data` is a JSONL or parquet file, a directory with a test split, or a hub name; None is the
    published test set. `title` replaces `name` as the task's name in metrics and files.
    """
    kind = TASKS.get(name)
    if kind is None:
        raise UserError(f"task {name!r}: there is no such task; the tasks are {', '.join(TASKS)}")
    dataset = str(data) if data is not None else kind.hub_name
    if dataset is None:
        raise UserError(
            f"task {name}: it has no data of its own; give data=..., whose rows have "
            f"{kind.row_fields}"
        )
    if limit is not None and limit < 1:
        raise UserError(
            f"limit={limit}: give a whole number of at least 1, or leave it out for all questions"
        )
    rows = rows_with_locations(dataset, "train" if Path(dataset).expanduser().is_file() else "test")
    questions = [
        kind.read_question(row, where, number) for number, (where, row) in enumerate(rows, start=1)
    ]
    if not questions:
        raise UserError(f"task {name}: {dataset} has no rows; give data with {kind.row_fields}")
    task_fields = (title or name, dataset, _digest(questions), questions[:limit])
    return ChoiceTask(*task_fields) if kind.grade is None else SampledTask(*task_fields, kind.grade)


def _digest(questions: list[Question]) -> str:
    contents = [(question.messages, question.reference, question.choices) for question in questions]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()
