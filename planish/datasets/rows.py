"""Read the rows of a dataset from the hub or from files.

A dataset is named in one of three ways:

    hub name     "openai/gsm8k", or "NAME:CONFIG"
    directory    with train and test files: train.jsonl, test.jsonl, or parquet
    file         one JSONL or parquet file, which is the train split

A directory may also have the layout of a hub dataset: its files are in `data`, or each
configuration has a folder. "DIRECTORY:CONFIG" chooses a configuration. Rows of a hub dataset are
read from disk on access; rows of files are held in memory.
"""

import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planish.errors import UserError

HUB_CONFIGS = {"openai/gsm8k": "main"}
"""The default configurations of hub datasets that need one."""
FILE_SUFFIXES = (".jsonl", ".json", ".parquet")

Row = dict[str, Any]
_log = logging.getLogger(__name__)
_DEFAULT_CONFIGS = ("data", "main", "default", "plain_text")
"""Folders that are read if no configuration is named, in this order."""
_warned_datasets: set[str] = set()
"""Datasets for which the warning about a directory with a hub name was logged."""


def open_rows(dataset: str, split: str) -> Sequence[Row]:
    """Return the rows of one split ("train" or "test"). Raise UserError if there are none."""
    files = _local_files(dataset, split)
    if files is not None:
        rows = [row for file in files for _, row in _rows_with_locations(file)]
    elif _is_path(dataset):
        raise UserError(f"the dataset {dataset}: no such file or directory; check the path")
    else:
        rows = _open_on_hub(dataset, split)
    if not len(rows):
        raise UserError(
            f"the dataset {dataset} has no rows in its {split} split; give a dataset with rows"
        )
    return rows


def rows_with_locations(dataset: str, split: str) -> list[tuple[str, Row]]:
    """Return the rows of one split, each with its place for error messages.

    The place is file and line where there are lines, otherwise the number of the row.
    """
    files = _local_files(dataset, split)
    if files is None:
        rows = open_rows(dataset, split)
        return [
            (f"the dataset {dataset}, {split} row {number}", dict(row))
            for number, row in enumerate(rows, start=1)
        ]
    return [row for file in files for row in _rows_with_locations(file)]


def load_rows(dataset: str, split: str) -> list[Row]:
    """Return the rows of one split as a list in memory."""
    return [dict(row) for row in open_rows(dataset, split)]


def has_split(dataset: str, split: str) -> bool:
    """Return whether a dataset has a split.

    A single file has only "train". For a hub name this asks the hub.
    """
    path, config = _local_path(dataset)
    if path.is_dir():
        return bool(_find_split_files(path, split, config))
    if path.is_file() or _is_path(dataset):
        return split == "train"
    from datasets import get_dataset_split_names  # takes seconds; local data do not need it

    name, config = _hub_name(dataset)
    try:
        return split in get_dataset_split_names(name, config)
    except Exception as error:  # as in _open_on_hub
        raise _hub_error(dataset, "the names of its splits", error) from error


def _is_path(dataset: str) -> bool:
    """Return whether `dataset` must be a path, even if nothing exists there."""
    return Path(dataset).suffix in FILE_SUFFIXES or dataset.startswith((".", "/", "~"))


def _local_path(dataset: str) -> tuple[Path, str | None]:
    """Return `dataset` as a path, and the configuration after its colon."""
    path = Path(dataset).expanduser()
    before, colon, config = dataset.rpartition(":")
    if colon and not path.exists() and Path(before).expanduser().is_dir():
        return Path(before).expanduser(), config
    return path, None


def _local_files(dataset: str, split: str) -> Sequence[Path] | None:
    """Return the files of a split; None if the dataset is not a file or directory."""
    path, config = _local_path(dataset)
    if path.is_dir():
        hides_hub = not _is_path(dataset) and "/" in dataset
        if hides_hub and dataset not in _warned_datasets:
            _warned_datasets.add(dataset)
            _log.warning("dataset %s: the directory of this name is read, not the hub", dataset)
        return _require_split_files(path, split, config, hides_hub=hides_hub)
    if path.is_file() and split != "train":
        raise UserError(
            f"the dataset {path} is one file and has no {split} split; give a directory with "
            f"train.jsonl and {split}.jsonl, or turn evaluation off (eval_problems=0)"
        )
    return [path] if path.is_file() else None


def _require_split_files(
    directory: Path, split: str, config: str | None, *, hides_hub: bool
) -> Sequence[Path]:
    files = _find_split_files(directory, split, config)
    if not files:
        data_files = sorted(
            entry.relative_to(directory).as_posix()
            for entry in directory.rglob("*")
            if entry.suffix in FILE_SUFFIXES
        )
        file_list = (
            ", ".join(data_files[:8]) + (", ..." if len(data_files) > 8 else "") or "no data files"
        )
        raise UserError(
            f"the dataset {directory} has no {split}.jsonl (or {split}*.parquet), neither in the "
            f"directory itself nor in {'its folder ' + config if config else 'a folder of it'}; "
            f"found {file_list}. Add that file, or name a configuration: DIRECTORY:CONFIG"
            + ("; rename the directory to read the hub's dataset of its name" if hides_hub else "")
        )
    return files


def _find_split_files(directory: Path, split: str, config: str | None = None) -> Sequence[Path]:
    """Return the files of a split, in the directory itself or in the folder of a configuration."""
    if config is not None:
        return _files_in_folder(directory / config, split)
    if files := _files_in_folder(directory, split):
        return files
    folders = {
        folder.name: files
        for folder in sorted(directory.iterdir())
        if folder.is_dir() and (files := _files_in_folder(folder, split))
    }
    default_config = next((name for name in _DEFAULT_CONFIGS if name in folders), None)
    if default_config is not None:
        return folders[default_config]
    if len(folders) > 1:
        raise UserError(
            f"the dataset {directory} has several configurations: {', '.join(folders)}; name one, "
            f"such as {directory}:{next(iter(folders))}"
        )
    return next(iter(folders.values()), [])


def _files_in_folder(folder: Path, split: str) -> Sequence[Path]:
    """Return files such as train.jsonl or train-00000-of-00002.parquet, or train/0000.parquet, the
    layout of the hub's own conversions.
    """
    for suffix in FILE_SUFFIXES:
        patterns = (f"{split}{suffix}", f"{split}-*{suffix}", f"{split}/*{suffix}")
        files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
        if files:
            return files
    return []


def _rows_with_locations(path: Path) -> list[tuple[str, Row]]:
    if path.suffix == ".parquet":
        return [
            (f"{path}, row {number}", row)
            for number, row in enumerate(_read_parquet(path), start=1)
        ]
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text ({error}); give JSON lines or a .parquet file"
        ) from error
    numbered_lines = [
        (f"{path}, line {number}", line)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    return [(where, _parse(line, where)) for where, line in numbered_lines]


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}); write one object per line") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object; write one object per line")
    return row


def _read_parquet(path: Path) -> list[Row]:
    from pyarrow import ArrowException  # imported here, because this takes most of a second
    from pyarrow.parquet import read_table

    try:
        return read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise UserError(
            f"{path} cannot be read as parquet ({error}); download the file again"
        ) from error


def _open_on_hub(dataset: str, split: str) -> Sequence[Row]:
    from datasets import load_dataset  # takes seconds; local data do not need it

    name, config = _hub_name(dataset)
    try:
        return load_dataset(name, config, split=split)  # type: ignore[return-value]
    except Exception as error:
        # No network, no such dataset or no permission: their many error types differ between
        # releases.
        raise _hub_error(dataset, f"its {split} split", error) from error


def _hub_name(dataset: str) -> tuple[str, str | None]:
    name, _, config = dataset.partition(":")
    return name, config or HUB_CONFIGS.get(name)


def _hub_error(dataset: str, requested: str, error: Exception) -> UserError:
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return UserError(
        f"the dataset {dataset}: the hub did not give {requested} ({first_line}); check the name, "
        "or give a local directory with train.jsonl and test.jsonl"
    )


def hold_out(
    num_problems: int, eval_problems: int, seed: int, source: str, unit: str = "problems"
) -> tuple[list[int], list[int]]:
    """Return the positions of the problems for training and of those for evaluation, in order.

    `eval_problems` random ones of `num_problems` problems are held out of training. Raise UserError
    if no training problem would be left. `source` is the part of the message that says why problems
    are held out.
    """
    if eval_problems >= num_problems:
        raise UserError(
            f"eval_problems={eval_problems}: {source}, and of its {num_problems} {unit} at least "
            "one must be left to train on; give fewer"
        )
    held_out = set(random.Random(seed).sample(range(num_problems), eval_problems))
    train = [position for position in range(num_problems) if position not in held_out]
    return train, sorted(held_out)


def check_shuffle_seed(shuffle_seed: int | None) -> None:
    """Raise UserError for a negative seed, which numpy's generators reject."""
    if shuffle_seed is not None and shuffle_seed < 0:
        raise UserError(
            f"shuffle_seed={shuffle_seed}: give a whole number of at least 0, or None for no "
            "shuffling"
        )
