"""Tasks by name. All rows of a task are read and checked before anything is sampled. Errors name
the file and line of the row.
"""

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish.datasets.layouts import PROBLEM_REFUSALS, check_refused
from planish.datasets.rows import load_rows
from planish.datasets.unused_columns import UnusedColumns
from planish.errors import UserError
from planish.evaluation.boxed import grade_boxed, gsm8k_question, math_question
from planish.evaluation.multiple_choice import grade_letter, lettered_question, unlisted_question
from planish.evaluation.types import ChoiceTask, Question, SampledTask, Task, Verdict


@dataclass(frozen=True)
class TaskKind:
    """How the rows of a task are read and its answers graded."""

    row_fields: str
    """The fields of a row, for error messages."""
    columns: tuple[str, ...]
    """The columns that are used. Other columns are named in a warning."""
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
        '"question", "answer" (after ####)',
        ("question", "answer"),
        "openai/gsm8k",
        gsm8k_question,
        grade_boxed,
    ),
    "math500": TaskKind(
        '"problem", "answer" or "solution"',
        ("problem", "answer", "solution"),
        "HuggingFaceH4/MATH-500",
        math_question,
        grade_boxed,
    ),
    "multiple_choice": TaskKind(
        '"question", "choices", "answer"',
        ("question", "choices", "answer"),
        None,
        lettered_question,
        grade_letter,
    ),
    "multiple_choice_logprobs": TaskKind(
        '"question", "choices", "answer"',
        ("question", "choices", "answer"),
        None,
        unlisted_question,
        None,
    ),
}
"""Add a task of your own here: `TASKS["mine"] = TaskKind(...)`."""


def load_task(
    name: str,
    data: str | Path | None = None,
    *,
    limit: int | None = None,
    title: str | None = None,
    split: str | None = None,
) -> Task:
    """Load the questions of a task: all of `data`, or the first `limit`.

    `data` is a file, a directory with a test split, or a hub name (docs/reference/data.md); None is
    the published test set. `split` names another split than test. `title` replaces `name` as the
    task's name in metrics and files. Raises UserError for an unknown task, and for data without its
    rows.
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
    is_file = Path(dataset).expanduser().is_file()
    rows = load_rows(dataset, split or ("train" if is_file else "test"))
    questions = [
        kind.read_question(row, row.location, number) for number, row in enumerate(rows, start=1)
    ]
    unused = UnusedColumns(dataset)
    for row in rows:
        check_refused(row, PROBLEM_REFUSALS, row.location)
        unused.add(row, kind.columns, row.location)
    unused.warn()
    if not questions:
        raise UserError(f"task {name}: {dataset} has no rows; give data with {kind.row_fields}")
    task_fields = (title or name, dataset, _digest(questions), questions[:limit])
    return ChoiceTask(*task_fields) if kind.grade is None else SampledTask(*task_fields, kind.grade)


def _digest(questions: list[Question]) -> str:
    contents = [(question.messages, question.reference, question.choices) for question in questions]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()
