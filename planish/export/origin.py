"""Where an exported checkpoint comes from: the files to read, and what its run says of it.

A checkpoint is named by its path (tinker://RUN/KIND/NAME), by the directory of the run that saved
it, or by a directory with its files, as `planish checkpoints download` leaves it and as PEFT writes
one. Only a run directory knows the options and the metrics of the run.
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
from planish.engine.checkpoints.files import ADAPTER_CONFIG
from planish.errors import CheckpointError, DamagedFileError, UserError
from planish.files import read_rows
from planish.runlog.run_directory import (
    CONFIG,
    METRICS,
    CheckpointRecord,
    checkpoint_records,
    weights_of,
)

_PRIVATE = ("log_path", "base_url", "wandb_project", "wandb_name", "loggers")
"""Options that say where a run was watched and kept, not what it did."""
_ADDRESS = re.compile(r"(?!tinker:|planish:)\b[A-Za-z][\w+.-]*://\S+")
_PATH = re.compile(r"(?<![^\s=,:;\"'(\[])(?:~|\.{1,2})?(?:/[^\s/,;\"')\]]+){2,}/?")
"""Among other words, at least two parts; a slash and one word is more likely something else."""


@dataclass(frozen=True)
class RunFacts:
    """What a run directory says."""

    config: Mapping[str, Any]
    """For anybody to read: of paths the last part, and no addresses."""
    step: int | None
    """The last step before the checkpoint; None if it was saved before the first."""
    metrics: Mapping[str, float]
    """Of that step."""


@dataclass(frozen=True)
class Origin:
    """An adapter that is to be exported."""

    directory: Path
    """With its files."""
    name: str | None = None
    """tinker://..., where the files are those of a checkpoint that was named so."""
    run: RunFacts | None = None


@contextmanager
def found_checkpoint(source: str, records: Records, run: Path | None = None) -> Iterator[Origin]:
    """The files of `source`, for the time of the block; downloaded from `records` where it is a
    path of a checkpoint.

    `run`: the directory of its run. CheckpointError if there is none; UserError for what names no
    checkpoint.
    """
    path, directory = weights_of(source), Path(source).expanduser()
    if path != source:
        run = directory
    facts = None if run is None else run_facts(run, _recorded(run, path))
    if not path.startswith("tinker://"):
        if not (directory / ADAPTER_CONFIG).is_file():
            raise UserError(
                f"{source!r} is neither the path of a checkpoint (tinker://...), nor a run directory, nor a directory with an adapter"
            )
        yield Origin(directory, run=facts)
        return
    with tempfile.TemporaryDirectory(prefix="planish-export-") as downloads:
        records.download(path, Path(downloads))
        yield Origin(Path(downloads), path, facts)


def _recorded(run: Path, path: str) -> CheckpointRecord:
    for record in checkpoint_records(run):
        if path in (record.state_path, record.sampler_path):
            return record
    raise CheckpointError(
        f"{run} records no checkpoint {path}; name the run that saved it, or leave it out"
    )


def run_facts(run: Path, record: CheckpointRecord) -> RunFacts:
    try:
        config = json.loads((run / CONFIG).read_text()) if (run / CONFIG).is_file() else {}
    except ValueError as error:
        raise DamagedFileError(
            f"{run / CONFIG} is not JSON ({error}); give the checkpoint by its path"
        ) from error
    step = record.batch - 1
    metrics: dict[str, float] = {}
    for row in read_rows(run / METRICS):
        if row.get("step") == step:
            metrics |= {name: value for name, value in row.items() if name != "step"}
    return RunFacts(_public(config), step if metrics else None, metrics)


def _public(value: Any) -> Any:
    match value:
        case dict():
            return {
                _public(name): _public(part) for name, part in value.items() if name not in _PRIVATE
            }
        case list():
            return [_public(part) for part in value]
        # a name of a file may have blanks
        case str() if value.startswith(("/", "~/")) and "\n" not in value:
            return PurePath(value).name or value
        case str():
            return _PATH.sub(
                lambda found: PurePath(found[0]).name, _ADDRESS.sub("(an address)", value)
            )
    return value
