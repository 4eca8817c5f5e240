r"""Questions with known answers, in the form of GSM8K, and how they are put to a model.

A dataset is named in one of three ways: a hub name ("openai/gsm8k", or "NAME:CONFIG"), a local directory with train and
test files (train.jsonl, test.jsonl, or parquet), or one JSONL or parquet file, which is its own train split. A row has a
"question" and an "answer"; the final answer is what follows "####" if that mark is there, and the whole answer if not.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish.errors import UserError

QUESTION_SUFFIX = r" Give the final answer as a number without units, inside \boxed{}."
SHOWN_EXAMPLE = (
    {"role": "user", "content": "How many times does the letter r occur in strawberry?" + QUESTION_SUFFIX},
    {
        "role": "assistant",
        "content": (
            "The letters one by one are s, t, r, a, w, b, e, r, r, y. "
            r"The third, the eighth and the ninth of them are an r, so it occurs 3 times. \boxed{3}"
        ),
    },
)
"""One worked question in front of every prompt: a model that was never told about the box sees what is wanted."""

HUB_CONFIGS = {"openai/gsm8k": "main"}
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
FILE_SUFFIXES = (".jsonl", ".json", ".parquet")

Conversation = list[dict[str, Any]]


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str
    """The final answer alone, such as "72"."""
    solution: str
    r"""The worked solution, ending in \boxed{answer}."""


def load_problems(dataset: str, split: str) -> list[Problem]:
    """The problems of one split in the dataset's order; UserError when there are none or a row has another form."""
    rows = load_rows(dataset, split)
    return [read_problem(row, f"dataset={dataset}, {split} row {number}") for number, row in enumerate(rows, start=1)]


def problem_prompt(problem: Problem) -> Conversation:
    """The messages that ask for a problem's answer."""
    return [*SHOWN_EXAMPLE, {"role": "user", "content": problem.question + QUESTION_SUFFIX}]


def load_rows(dataset: str, split: str) -> list[dict[str, Any]]:
    """The rows of one split ("train" or "test") of a hub name, a directory or a file."""
    path = Path(dataset).expanduser()
    if path.is_dir():
        rows = [row for file in _split_files(path, split) for row in _read_file(file)]
    elif path.is_file():
        if split != "train":
            raise UserError(
                f"dataset={dataset} is one file and has no {split} split; give a directory with train.jsonl and "
                f"{split}.jsonl, or turn evaluation off (eval_problems=0)"
            )
        rows = _read_file(path)
    elif path.suffix in FILE_SUFFIXES or dataset.startswith((".", "/", "~")):
        raise UserError(f"dataset={dataset}: no such file or directory; check the path")
    else:
        rows = _load_from_hub(dataset, split)
    if not rows:
        raise UserError(f"dataset={dataset} has no rows in its {split} split; give one that has")
    return rows


def read_problem(row: Mapping[str, Any], where: str) -> Problem:
    """A row as a problem; `where` names it in errors."""
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise UserError(f'{where}: needs a "question" and an "answer" that are strings; its keys are {sorted(row)}')
    work, mark, final = answer.rpartition("####")
    final = final.strip()
    work = CALCULATOR_MARK.sub("", work).strip()
    if not final:
        raise UserError(f"{where}: the answer is empty; remove the row or give its answer")
    boxed = rf"The answer is \boxed{{{final}}}"
    return Problem(question.strip(), final, f"{work}\n{boxed}" if mark and work else boxed)


def _split_files(directory: Path, split: str) -> Sequence[Path]:
    for suffix in FILE_SUFFIXES:
        found = sorted({*directory.glob(f"{split}{suffix}"), *directory.glob(f"{split}-*{suffix}")})
        if found:
            return found
    raise UserError(f"dataset={directory}: there is no {split}.jsonl (or {split}*.parquet) in it; add that file")


def _read_file(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return _read_parquet(path)
    rows = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
            if line.strip():
                rows.append(_parse(line, path, number))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); give JSON lines or a .parquet file") from error
    return rows


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}, line {number} is not JSON ({error}); write one object a line") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number} is not a JSON object; write one object a line")
    return row


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    from pyarrow import ArrowException  # only where it is needed: the import takes most of a second
    from pyarrow.parquet import read_table

    try:
        return read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet ({error}); get the file again") from error


def _load_from_hub(dataset: str, split: str) -> list[dict[str, Any]]:
    from datasets import load_dataset  # seconds; not needed for local data

    name, _, config = dataset.partition(":")
    try:
        return [dict(row) for row in load_dataset(name, config or HUB_CONFIGS.get(name), split=split)]
    except Exception as error:  # no network, no such dataset, no right to it: many types, which differ between releases
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"dataset={dataset}: the hub did not give its {split} split ({first_line}); check the name, or give a local "
            "directory with train.jsonl and test.jsonl"
        ) from error
