"""Find the checkpoint to export: its files, and what its run directory says about it.

A checkpoint is named in one of three ways: by its path (tinker://RUN/KIND/NAME), by the directory
of the run that saved it, or by a directory with its files. Such a directory may come from `planish
checkpoints download` or from PEFT. Only a run directory knows the options and the metrics of the
run.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from planish.client.checkpoint_records import Records
from planish.engine.checkpoints.files import ADAPTER_CONFIG_FILE
from planish.errors import CheckpointError, DamagedFileError, UserError
from planish.files import read_rows
from planish.runlog.run_directory import (
    CONFIG,
    METRICS,
    CheckpointRecord,
    checkpoint_records,
    weights_of,
)

_PRIVATE_OPTIONS = ("log_path", "base_url", "ray", "wandb_project", "wandb_name", "loggers")
"""Options about where a run was logged. They are left out of model cards."""
_URL = re.compile(r"(?!tinker:|planish:)\b[A-Za-z][\w+.-]*://\S+")
_PATH_IN_TEXT = re.compile(r"(?<![^\s=,:;\"'(\[])(?:~|\.{1,2})?(?:/[^\s/,;\"')\]]+){2,}/?")
"""Matches paths of at least two parts inside a text; a slash before one word is rarely a path."""


@dataclass(frozen=True)
class RunSummary:
    """What a run directory says about a checkpoint."""

    config: Mapping[str, Any]
    """The options of the run, made fit to publish: paths are cut to their last part, addresses
    removed.
    """
    step: int | None
    """The last step before the checkpoint; None if the metrics have no row for it."""
    metrics: Mapping[str, float]
    """The metrics of that step."""


@dataclass(frozen=True)
class Origin:
    """An adapter to export."""

    directory: Path
    """The directory that holds the adapter's files."""
    name: str | None = None
    """The path tinker://... if the files are those of a named checkpoint; else None."""
    run: RunSummary | None = None


@contextmanager
def open_checkpoint(source: str, records: Records, run: Path | None = None) -> Iterator[Origin]:
    """Yield the adapter that `source` names.

    A checkpoint path is downloaded from `records`, and its files exist only within the block. `run`
    is the directory of its run.

    Raise CheckpointError if the run does not record the checkpoint. Raise UserError if `source`
    names no checkpoint.
    """
    path, directory = weights_of(source), Path(source).expanduser()
    if path != source:
        run = directory
    summary = None if run is None else read_run_summary(run, _find_record(run, path))
    if not path.startswith("tinker://"):
        if not (directory / ADAPTER_CONFIG_FILE).is_file():
            raise UserError(
                f"{source!r} is neither the path of a checkpoint (tinker://...), nor a run "
                "directory, nor a directory with an adapter"
            )
        yield Origin(directory, run=summary)
        return
    with tempfile.TemporaryDirectory(prefix="planish-export-") as download_directory:
        records.download(path, Path(download_directory))
        yield Origin(Path(download_directory), path, summary)


def _find_record(run_directory: Path, path: str) -> CheckpointRecord:
    for record in checkpoint_records(run_directory):
        if path in (record.state_path, record.sampler_path):
            return record
    raise CheckpointError(
        f"{run_directory} records no checkpoint {path}; name the run that saved it, or leave it out"
    )


def read_run_summary(run_directory: Path, record: CheckpointRecord) -> RunSummary:
    """Read the options of a run, and the metrics of the last step before the checkpoint."""
    try:
        config = (
            json.loads((run_directory / CONFIG).read_text())
            if (run_directory / CONFIG).is_file()
            else {}
        )
    except ValueError as error:
        raise DamagedFileError(
            f"{run_directory / CONFIG} is not JSON ({error}); give the checkpoint by its path"
        ) from error
    step = record.batch - 1
    metrics: dict[str, float] = {}
    for row in read_rows(run_directory / METRICS):
        if row.get("step") == step:
            metrics |= {name: value for name, value in row.items() if name != "step"}
    return RunSummary(_redact(config), step if metrics else None, metrics)


def _redact(value: Any) -> Any:
    match value:
        case dict():
            return {
                _redact(name): _redact(part)
                for name, part in value.items()
                if name not in _PRIVATE_OPTIONS
            }
        case list():
            return [_redact(part) for part in value]
        # The text is one path, whose file name may contain spaces.
        case str() if value.startswith(("/", "~/")) and "\n" not in value:
            return PurePath(value).name or value
        case str():
            return _PATH_IN_TEXT.sub(
                lambda match: PurePath(match[0]).name, _URL.sub("(an address)", value)
            )
    return value
