"""Read the rows of a dataset from the hub or from files.

A dataset is named in one of three ways:

    hub name     "openai/gsm8k", or "NAME:CONFIG"
    directory    with one or more files for each split: train.jsonl, test-00000-of-00002.parquet;
                 or as `save_to_disk` of the library `datasets` writes it
    file         one file, which is the train split

planish/datasets/row_files.py lists the formats of files. A directory may also have the layout of a
hub dataset: its files are in `data`, or each configuration has a folder. "DIRECTORY:CONFIG" chooses
a configuration. Rows of a hub dataset and of `save_to_disk` are read from disk on access; rows of
files are held in memory. Every row knows where it is (`Row.location`).
"""

import logging
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from planish.datasets.arrow_rows import ArrowRows
from planish.datasets.row_digests import record_rows
from planish.datasets.row_files import FILE_SUFFIXES, Row, is_data_file, read_file
from planish.errors import UserError

HUB_CONFIGS = {"openai/gsm8k": "main"}
"""The default configurations of hub datasets that need one."""

_log = logging.getLogger(__name__)
_DEFAULT_CONFIGS = ("data", "main", "default", "plain_text")
"""Folders that are read if no configuration is named, in this order."""
_SAVED_SPLITS, _SAVED_TABLE = "dataset_dict.json", "state.json"
"""Files of a directory that `save_to_disk` has written, with several splits or without splits."""
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.")
_NUMBERED = re.compile(r"(?:^|-)\d+\.")
_logged_warnings: set[str] = set()


class TableRows(Sequence[Row]):
    """The rows of a `datasets.Dataset`, read from disk on access."""

    def __init__(self, dataset: Any, name: str, directory: Path | None = None) -> None:
        """`directory`: that of paths in the rows; None for a dataset of the hub."""
        self._rows = ArrowRows(dataset)
        self._name, self._directory = name, directory

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return [self[index] for index in range(len(self))[position]]
        index = range(len(self))[position]
        return self._row(index, self._rows[index])

    def __iter__(self) -> Iterator[Row]:
        return (self._row(index, columns) for index, columns in enumerate(self._rows))

    def _row(self, index: int, columns: dict[str, Any]) -> Row:
        return Row(columns, f"{self._name}, row {index + 1}", self._directory)


def open_rows(dataset: str, split: str) -> Sequence[Row]:
    """Return the rows of one split, such as "train". Raise UserError if there are none."""
    path, config = _local_path(dataset)
    rows: Sequence[Row]
    if _is_saved(path):
        rows = _open_saved(path, split)
    elif (files := _local_files(path, config, dataset, split)) is not None:
        rows = [row for file in files for row in read_file(file)]
    elif _is_path(dataset):
        raise UserError(_unreadable_path(dataset))
    else:
        rows = _open_on_hub(dataset, split)
    if not len(rows):
        raise UserError(
            f"the dataset {dataset} has no rows in its {split} split; give a dataset with rows"
        )
    record_rows(f"{dataset}, {split}", rows)
    return rows


def load_rows(dataset: str, split: str) -> list[Row]:
    """Return the rows of one split as a list in memory."""
    return list(open_rows(dataset, split))


def has_split(dataset: str, split: str) -> bool:
    """Return whether a dataset has a split.

    A single file has only "train". For a hub name this asks the hub.
    """
    path, config = _local_path(dataset)
    if _is_saved(path):
        return split in _saved_splits(path)
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
    return is_data_file(dataset) or dataset.startswith((".", "/", "~"))


def _unreadable_path(dataset: str) -> str:
    return f"the dataset {dataset}: no such file or directory; check the path"


def _local_path(dataset: str) -> tuple[Path, str | None]:
    """Return `dataset` as a path, and the configuration after its colon."""
    path = Path(dataset).expanduser()
    before, colon, config = dataset.rpartition(":")
    if colon and not path.exists() and Path(before).expanduser().is_dir():
        return Path(before).expanduser(), config
    return path, None


def _local_files(path: Path, config: str | None, dataset: str, split: str) -> Sequence[Path] | None:
    """Return the files of a split; None if the dataset is not a file or directory."""
    if path.is_dir():
        hides_hub = not _is_path(dataset) and "/" in dataset
        if hides_hub:
            _warn_once(f"dataset {dataset}: the directory of this name is read, not the hub")
        return _require_split_files(path, split, config, hides_hub=hides_hub)
    if not path.is_file():
        return None
    if split != "train":
        raise UserError(
            f"the dataset {path} is one file, which is the train split, and has no {split} split; "
            f"give a directory with train.jsonl and {split}.jsonl, or turn evaluation off "
            "(eval_problems=0)"
        )
    if not is_data_file(path.name):
        raise UserError(
            f"the dataset {path}: its format is not known by its name; give a file that ends in "
            f"{', '.join(FILE_SUFFIXES)}"
        )
    return [path]


def _require_split_files(
    directory: Path, split: str, config: str | None, *, hides_hub: bool
) -> Sequence[Path]:
    files = _find_split_files(directory, split, config)
    if not files:
        data_files = sorted(
            entry.relative_to(directory).as_posix()
            for entry in directory.rglob("*")
            if is_data_file(entry.name)
        )
        file_list = (
            ", ".join(data_files[:8]) + (", ..." if len(data_files) > 8 else "") or "no data files"
        )
        raise UserError(
            f"the dataset {directory} has no {split}.jsonl (or {split}*.parquet), neither in the "
            f"directory itself nor in {'its folder ' + config if config else 'a folder of it'}; "
            f"found {file_list}. Add that file, name the split (train_split=..., test_split=...), or "
            "name a configuration: DIRECTORY:CONFIG"
            + ("; rename the directory to read the hub's dataset of its name" if hides_hub else "")
        )
    return files


def _find_split_files(directory: Path, split: str, config: str | None = None) -> Sequence[Path]:
    """Return the files of a split, in the directory itself or in the folder of a configuration. A
    warning names the other folders that have files of the split.
    """
    if config is not None:
        return _files_in_folder(directory / config, split)
    folders = {
        folder.name: files
        for folder in sorted(directory.iterdir())
        if folder.name != split and folder.is_dir() and (files := _files_in_folder(folder, split))
    }
    files = _files_in_folder(directory, split)
    if not files:
        default_config = next((name for name in _DEFAULT_CONFIGS if name in folders), None)
        if default_config is None and len(folders) > 1:
            raise UserError(
                f"the dataset {directory} has several configurations: {', '.join(folders)}; name "
                f"one, such as {directory}:{next(iter(folders))}"
            )
        files = folders.pop(default_config or next(iter(folders), ""), [])
    if folders:
        _warn_once(
            f"dataset {directory}: {files[0].relative_to(directory)} is read, and not the {split} "
            f"split in {', '.join(folders)}; to read that, name the folder: {directory}:"
            f"{next(iter(folders))}"
        )
    return files


def _files_in_folder(folder: Path, split: str) -> Sequence[Path]:
    """Return files such as train.jsonl or train-00000-of-00002.parquet, or train/0000.parquet, the
    layout of the hub's own conversions. Raise UserError for a split in several formats.
    """
    by_suffix: dict[str, list[Path]] = {}
    for suffix in FILE_SUFFIXES:
        patterns = (f"{split}{suffix}", f"{split}-*{suffix}", f"{split}/*{suffix}")
        files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
        if files:
            by_suffix[suffix] = files
    if len(by_suffix) > 1:
        names = ", ".join(files[0].name for files in by_suffix.values())
        raise UserError(
            f"{folder} has its {split} split in several formats: {names}; keep one of them"
        )
    files = next(iter(by_suffix.values()), [])
    _check_shards(files, split)
    whole = [file for file in files if file.stem.partition(".")[0] == split]
    if whole and len(files) > 1:
        other = next(file for file in files if file not in whole)
        raise UserError(
            f"{folder} has its {split} split in {whole[0].name}, and also in "
            f"{other.relative_to(folder)}; if one is a copy, its rows would be read twice. Keep one "
            f"of them, or number all of them, such as {split}-0.jsonl"
        )
    if len(files) > 1 and not all(_NUMBERED.search(file.name) for file in files):
        _warn_once(
            f"dataset {folder}: the {split} split is read from {len(files)} files, "
            f"{', '.join(file.name for file in files[:4])}{', ...' if len(files) > 4 else ''}"
        )
    return files


def _check_shards(files: Sequence[Path], split: str) -> None:
    """Raise UserError for files such as train-00001-of-00003.parquet of which some are missing, or
    which belong to two divisions of a dataset.
    """
    matches = [match for file in files if (match := _SHARD.search(file.name))]
    totals = {int(match[2]) for match in matches}
    if len(totals) > 1:
        raise UserError(
            f"{files[0].parent} has its {split} split in {' and in '.join(map(str, sorted(totals)))} "
            "files (-of-...); remove those of one of the two"
        )
    numbers = {int(match[1]) for match in matches}
    for total in totals:
        expected = set(range(total)) if 0 in numbers else set(range(1, total + 1))
        if missing := sorted(expected - numbers):
            raise UserError(
                f"{files[0].parent} has {len(numbers)} of the {total} files of its {split} split; "
                f"number {missing[0]} is missing. Download the dataset again"
            )


def _warn_once(text: str) -> None:
    """Log a warning, unless this process has logged it before. A dataset is opened several times."""
    if text not in _logged_warnings:
        _logged_warnings.add(text)
        _log.warning("%s", text)


def _is_saved(path: Path) -> bool:
    """Return whether `save_to_disk` of the library `datasets` has written a directory."""
    return (path / _SAVED_SPLITS).is_file() or (path / _SAVED_TABLE).is_file()


def _saved_splits(path: Path) -> Sequence[str]:
    """Return the splits of a directory that `save_to_disk` has written; one table is "train"."""
    if not (path / _SAVED_SPLITS).is_file():
        return ["train"]
    return sorted(entry.parent.name for entry in path.glob(f"*/{_SAVED_TABLE}"))


def _open_saved(path: Path, split: str) -> Sequence[Row]:
    from datasets import load_from_disk  # takes seconds; other files do not need it

    splits = _saved_splits(path)
    if split not in splits:
        raise UserError(
            f"the dataset {path} has no {split} split; it has {', '.join(splits)} (train_split=... "
            "and test_split=... name others)"
        )
    is_table = (path / _SAVED_TABLE).is_file()
    try:
        table = load_from_disk(str(path if is_table else path / split))
    except Exception as error:  # damaged files: of json, of pyarrow, of datasets
        raise UserError(
            f"the dataset {path} cannot be read ({_first_line(error)}); save it again"
        ) from error
    return TableRows(table, str(path) if is_table else f"{path}, {split}", path)


def _open_on_hub(dataset: str, split: str) -> Sequence[Row]:
    from datasets import load_dataset  # takes seconds; local data do not need it

    name, config = _hub_name(dataset)
    try:
        return TableRows(load_dataset(name, config, split=split), f"dataset {dataset}, {split}")
    except Exception as error:
        # No network, no such dataset or no permission: their many error types differ between
        # releases.
        raise _hub_error(dataset, f"its {split} split", error) from error


def _hub_name(dataset: str) -> tuple[str, str | None]:
    name, _, config = dataset.partition(":")
    return name, config or HUB_CONFIGS.get(name)


def _hub_error(dataset: str, requested: str, error: Exception) -> UserError:
    return UserError(
        f"the dataset {dataset}: the hub did not give {requested} ({_first_line(error)}); check "
        "the name and the names of its splits (train_split=..., test_split=...), or give a local "
        "directory with train.jsonl and test.jsonl"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def hold_out(
    num_problems: int, eval_problems: int, seed: int, source: str, unit: str = "problems"
) -> tuple[list[int], list[int]]:
    """Return the positions of the training problems and of the evaluation problems, both in order.

    `eval_problems` random ones of `num_problems` problems are held out of training. Raise UserError
    if no training problem would be left. `source` is the part of the message that says why problems
    are held out. `unit` is the word for problems in it, and `seed` chooses them.
    """
    if eval_problems >= num_problems:
        raise UserError(
            f"eval_problems={eval_problems}: {source}, and of its {num_problems} {unit} at least "
            "one must be left to train on; give fewer"
        )
    held_out = set(random.Random(seed).sample(range(num_problems), eval_problems))
    train = [position for position in range(num_problems) if position not in held_out]
    return train, sorted(held_out)


def warn_of_partial_batch(num_rows: int, batch_size: int, unit: str = "rows") -> None:
    """Log how many rows an epoch leaves out because they do not fill a batch. `unit` is the word
    for rows.
    """
    if num_left := num_rows % batch_size:
        _log.warning(
            "batch_size=%d: %d of %d %s do not fill a batch and are left out of each epoch",
            batch_size,
            num_left,
            num_rows,
            unit,
        )


def check_shuffle_seed(shuffle_seed: int | None) -> None:
    """Raise UserError for a negative seed, which numpy's generators reject."""
    if shuffle_seed is not None and shuffle_seed < 0:
        raise UserError(
            f"shuffle_seed={shuffle_seed}: give a whole number of at least 0, or None for no "
            "shuffling"
        )
