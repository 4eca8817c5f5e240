r"""Collections of mathematical questions with known answers, each read in its published format.

    name       fields of a row                     hub dataset
    gsm8k      question, answer ("... #### 72")    openai/gsm8k
    math       problem, solution                   EleutherAI/hendrycks_math for training, without
               ("... \boxed{72} ..."), and         the 500 problems of HuggingFaceH4/MATH-500,
               perhaps answer                      which are the test split
    polaris    problem, answer,                    POLARIS-Project/Polaris-Dataset-53K, which has
               difficulty ("3/8")                  no test split
    deepmath   question, final_answer,             zwhe99/DeepMath-103K, which has no test split
               difficulty

`dataset=` selects another source of rows in the same format: a hub name, a directory with train and
test files, or one file. If there is no test split, `eval_problems` problems are held out of
training.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planish.datasets.grading import extract_boxed
from planish.datasets.gsm8k import QUESTION_SUFFIX, Problem, read_problem
from planish.datasets.layouts import PROBLEM_REFUSALS, check_refused
from planish.datasets.row_files import Row
from planish.datasets.rows import has_split, hold_out, load_rows
from planish.datasets.unused_columns import UnusedColumns
from planish.errors import UserError

BOX_SUFFIX = r" Write the final answer inside \boxed{}."
HENDRYCKS_MATH = "EleutherAI/hendrycks_math"
SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
MATH_500 = "HuggingFaceH4/MATH-500"
BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+([^\s{$]+?)[.$]*(?:\s|$)")
r"""Matches \boxed 5, without braces, as a few published solutions write it."""

Columns = Mapping[str, Any]


@dataclass(frozen=True)
class ProblemCollection:
    """A published dataset, its format and its prompts."""

    name: str
    hub_name: str
    read: Callable[[Columns, str], Problem | None]
    """Reads a row as a problem; None if it has no usable answer.

    Raises UserError, which names the row by the second argument, for other formats.
    """
    columns: tuple[str, ...]
    """The columns that are used. Other columns are named in a warning."""
    suffix: str
    """The instruction after each question."""
    has_test_split: bool = True
    """Whether the dataset at `hub_name` has a test split."""


@dataclass(frozen=True)
class ProblemSplits:
    """Problems for training and for evaluation."""

    train: Sequence[Problem]
    test: Sequence[Problem]
    notes: Sequence[str] = ()
    """Sentences for the user, for example about rows that were left out."""


def load_splits(
    collection: ProblemCollection,
    dataset: str | None,
    *,
    eval_problems: int | None,
    seed: int = 0,
    train_split: str | None = None,
    test_split: str | None = None,
) -> ProblemSplits:
    """Load the problems for training, and the first `eval_problems` of the test split (None: all).
    `planish.datasets.split_names` describes the names of the splits.

    If there is no test split, `eval_problems` random problems, chosen by `seed`, are held out of
    training. With None, no problem is held out then.
    """
    location = dataset or collection.hub_name
    is_hendrycks = location == HENDRYCKS_MATH and train_split is None
    train_name, test_name = train_split or "train", test_split or "test"
    rows = hendrycks_train_rows() if is_hendrycks else load_rows(location, train_name)
    train, notes = read_problems(collection, rows, f"dataset={location}, {train_name}")
    if test_split is not None or has_test_split(collection, dataset):
        if eval_problems == 0:
            return ProblemSplits(train, [], notes)
        test_location = MATH_500 if location == HENDRYCKS_MATH and test_split is None else location
        test_rows = load_rows(test_location, test_name)[:eval_problems]
        test, more_notes = read_problems(collection, test_rows, f"dataset={location}, {test_name}")
        return ProblemSplits(train, test, [*notes, *more_notes])
    if eval_problems is None:
        note = (
            f"dataset={location} has no test split: nothing is tested; eval_problems=N holds N "
            "problems out of training"
        )
        return ProblemSplits(train, [], [*notes, note])
    source = f"dataset={location} has no test split"
    train_positions, test_positions = hold_out(len(train), eval_problems, seed, source)
    return ProblemSplits(
        [train[i] for i in train_positions], [train[i] for i in test_positions], notes
    )


def has_test_split(collection: ProblemCollection, dataset: str | None) -> bool:
    """Return whether a dataset has a test split.

    For the collection's own hub name this is known. Files and directories are inspected. Any other
    hub name is assumed to have one.
    """
    if dataset is None or dataset == collection.hub_name:
        return collection.has_test_split
    path = Path(dataset).expanduser()
    return has_split(dataset, "test") if path.is_dir() else not path.is_file()


def hendrycks_train_rows() -> list[Row]:
    """Return the 12,000 problems in both splits of MATH that are not in MATH-500."""
    test_problems = {row["problem"] for row in load_rows(MATH_500, "test")}
    rows = [
        row
        for subject in SUBJECTS
        for split in ("train", "test")
        for row in load_rows(f"{HENDRYCKS_MATH}:{subject}", split)
    ]
    return [row for row in rows if row.get("problem") not in test_problems]


def load_problems(dataset: str, split: str) -> list[Problem]:
    """Return the problems of one split, in the dataset's order, from rows in the form of GSM8K.
    Raise UserError if there are none, or if a row has another form.
    """
    rows = load_rows(dataset, split)
    return read_problems(COLLECTIONS["gsm8k"], rows, f"dataset={dataset}, {split}")[0]


def read_problems(
    collection: ProblemCollection, rows: Sequence[Row], where: str
) -> tuple[list[Problem], list[str]]:
    """Read rows as problems, and return a note if some have no usable answer. Raises UserError if
    none has.
    """
    unused = UnusedColumns(where.removeprefix("dataset="))
    results: list[Problem | None] = []
    for row in rows:
        results.append(collection.read(row, row.location))
        check_refused(row, PROBLEM_REFUSALS, row.location)
        unused.add(row, collection.columns, row.location)
    unused.warn()
    problems = [
        replace(problem, location=row.location)
        for row, problem in zip(rows, results, strict=True)
        if problem is not None
    ]
    num_left_out = len(results) - len(problems)
    if not problems:
        raise UserError(
            f"{where}: none of its {len(rows)} rows has an answer; give {collection.name} data "
            "with answers"
        )
    return problems, [
        f"{where}: {num_left_out} of {len(results)} rows have no usable answer and are left out"
    ] * (num_left_out > 0)


def read_math(row: Columns, where: str) -> Problem | None:
    """Read a row of MATH."""
    question, solution = text_field(row, "problem", where), text_field(row, "solution", where)
    if not question:
        raise UserError(f"{where}: the problem is empty; write it, or remove the row")
    answer = math_answer(row, where)
    return Problem(question, answer, solution) if answer else None


def math_answer(row: Columns, where: str) -> str | None:
    """Return the field "answer", unboxed if necessary, or else the content of the last box of
    "solution".
    """
    answer = text_field(row, "answer", where) if row.get("answer") is not None else ""
    return boxed_answer(answer) or answer or boxed_answer(text_field(row, "solution", where))


def read_polaris(row: Columns, where: str) -> Problem | None:
    """Read a row of Polaris."""
    return problem_with_answer(text_field(row, "problem", where), text_field(row, "answer", where))


def read_deepmath(row: Columns, where: str) -> Problem | None:
    """Read a row of DeepMath."""
    return problem_with_answer(
        text_field(row, "question", where), text_field(row, "final_answer", where)
    )


def problem_with_answer(question: str, answer: str) -> Problem | None:
    """Return a problem whose solution states only the answer; None if question or answer is
    empty.
    """
    return (
        Problem(question, answer, rf"The answer is \boxed{{{answer}}}")
        if question and answer
        else None
    )


def text_field(row: Columns, name: str, where: str) -> str:
    """Return a field as text, stripped; numbers keep their notation. Raise UserError for other
    types.
    """
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f'{where}: needs a text in "{name}"; the row has {sorted(row)}')
    return str(value).strip()


def boxed_answer(solution: str) -> str | None:
    r"""Return the content of the last \boxed{...}, \fbox{...} or \boxed 5 of a solution; None
    without one.
    """
    boxed = extract_boxed(solution.replace(r"\fbox{", r"\boxed{"))
    if boxed is not None:
        return boxed
    bare_boxes = BARE_BOX.findall(solution)
    return bare_boxes[-1] if bare_boxes else None


COLLECTIONS = {
    collection.name: collection
    for collection in (
        ProblemCollection(
            "gsm8k", "openai/gsm8k", read_problem, ("question", "answer"), QUESTION_SUFFIX
        ),
        ProblemCollection(
            "math", HENDRYCKS_MATH, read_math, ("problem", "solution", "answer"), BOX_SUFFIX
        ),
        ProblemCollection(
            "polaris",
            "POLARIS-Project/Polaris-Dataset-53K",
            read_polaris,
            ("problem", "answer"),
            BOX_SUFFIX,
            has_test_split=False,
        ),
        ProblemCollection(
            "deepmath",
            "zwhe99/DeepMath-103K",
            read_deepmath,
            ("question", "final_answer"),
            BOX_SUFFIX,
            has_test_split=False,
        ),
    )
}
"""The known collections by name."""
