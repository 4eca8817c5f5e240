"""The directory of one training run, and how it survives being killed.

    config.json         the options of the run, written whole
    metrics.jsonl       one object a training step, "step" first, flushed as each is made
    checkpoints.jsonl   one object a checkpoint; the last one with "state_path" is where a run
                        resumes
    code.diff           the commit of the code and what differed from it
    timing_spans.jsonl  one object a training step: when each part of it ran
    trace_events.jsonl  the same as Chrome trace events, if asked for (planish/runlog/spans.py)
    metric_logs.json    how far W&B, Trackio and TensorBoard have been told, where they are
                        (planish/runlog/metrics_log.py)
    reference.json      the policy that preference training measures against
                        (planish/preference/dpo.py)
    preference_model.json
                        how to make the preference model that was trained (planish/preference/model_files.py)
    *.png               curves

Invariants: a file is whole or absent (`write_whole`), an appended row is whole or cut off at the
next start. Everything up to a checkpoint's row is on disk before that row is, so dropping the rows
of later steps (`resume_at`) and doing those steps again leaves each step in metrics.jsonl exactly
once. One process holds a run at a time, and only with the options that the run began with.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from planish.errors import CheckpointError, UserError
from planish.files import (
    Row,
    RowFile,
    hold_directory,
    plain_values,
    read_object,
    read_rows,
    write_whole,
)
from planish.moved_modules import current_name
from planish.types import CheckpointPath

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints.jsonl"
CONFIG = "config.json"
SPANS = "timing_spans.jsonl"
CODE_DIFF = "code.diff"
TRACE = "trace_events.jsonl"
METRIC_LOGS = "metric_logs.json"
REFERENCE = "reference.json"
PREFERENCE_MODEL = "preference_model.json"


@dataclass(frozen=True)
class CheckpointRecord:
    """A row of checkpoints.jsonl. Fields that are None are left out of the file."""

    name: str
    batch: int
    """Batches that were trained before this checkpoint: the index of the one to go on with."""
    state_path: str | None = None
    """Weights and optimizer state."""
    sampler_path: str | None = None
    """Weights only."""
    final: bool | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def row(self) -> Row:
        known = {name: getattr(self, name) for name in _RECORD_FIELDS}
        return {name: value for name, value in {**known, **self.extra}.items() if value is not None}

    @classmethod
    def from_row(cls, row: Row) -> Self:
        known = {
            "name": "",
            "batch": 0,
            **{name: row[name] for name in _RECORD_FIELDS if name in row},
        }
        return cls(
            **known,
            extra={name: value for name, value in row.items() if name not in _RECORD_FIELDS},
        )


_RECORD_FIELDS = ("name", "batch", "state_path", "sampler_path", "final")


class RunDirectory:
    """One run's files, held by this process until `close` (or the end of the `with` block)."""

    def __init__(
        self, path: str | Path, config: Mapping[str, Any], *, may_change: Collection[str] = ()
    ) -> None:
        """Make the directory, or go on with the run that is in it.

        Raises UserError when another process holds it, or when the run in it had other options than
        `config` (those in `may_change` aside).
        """
        if not str(path):
            raise UserError("log_path is empty; give the run a directory")
        # Absolute: an environment may change the working directory.
        self.path = Path(path).expanduser().absolute()
        self._lock = hold_directory(self.path, "log_path", "this run")
        try:
            self._check_config(plain_values(config), may_change)
            self._metrics = RowFile(self.path / METRICS)
            self._checkpoints = RowFile(self.path / CHECKPOINTS)
            self._spans = RowFile(self.path / SPANS)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._metrics.close()
        self._checkpoints.close()
        self._spans.close()
        self._lock.release()

    def resume_points(self) -> list[CheckpointRecord]:
        """The checkpoints that have optimizer state, newest first."""
        return resume_points(self.path)

    def resume_at(self, batch: int) -> None:
        """Drop the rows of steps from `batch` on, and of checkpoints behind it: those steps will be
        done again.
        """
        for file in (self._metrics, self._spans):
            file.keep(lambda row: row["step"] < batch)
        self._checkpoints.keep(lambda row: row.get("batch", 0) <= batch)

    def metrics(self) -> list[Row]:
        return read_rows(self.path / METRICS)

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Append one row and flush it. Numbers only, all finite."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise ValueError(
                    f"metric {name!r} of step {step} is {value}: log finite numbers only"
                )
        self._metrics.append({"step": step, **plain_values(metrics)})

    def log_spans(self, step: int, spans: Sequence[Mapping[str, float | str]]) -> None:
        """Append when each part of a step ran."""
        self._spans.append({"step": step, "spans": list(spans)})

    def log_checkpoint(self, record: CheckpointRecord) -> None:
        """Append a checkpoint that is already on disk; all metrics so far are made durable before
        it.
        """
        self._metrics.sync()
        self._checkpoints.append(record.row())
        self._checkpoints.sync()

    def _check_config(self, config: Row, may_change: Collection[str]) -> None:
        path = self.path / CONFIG
        has_rows = any(_has_bytes(self.path / name) for name in (METRICS, CHECKPOINTS))
        if has_rows and not path.exists():
            raise UserError(
                f"log_path={self.path} holds files of a run but no {CONFIG}; give another log_path"
            )
        if has_rows:  # without any, options may still be corrected
            found, given = (
                _options(values, {"log_path", *may_change})
                for values in (read_object(path), config)
            )
            changed = [
                name
                for name in sorted(found.keys() | given.keys())
                if found.get(name) != given.get(name)
            ]
            if changed:
                listed = ", ".join(
                    f"{name} was {found.get(name)!r}, is {given.get(name)!r}" for name in changed
                )
                raise UserError(
                    f"log_path={self.path} holds a run with other options: {listed}; "
                    "give the same options to go on with it, or another log_path"
                )
        write_whole(path, json.dumps(config, indent=2) + "\n")


def _has_bytes(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _options(config: Row, ignored: Collection[str]) -> Row:
    """The options by dotted names, without those that are `ignored`. Classes and functions have
    the names that they have today, so that a run of an older planish can be resumed.
    """
    kept = {name: value for name, value in config.items() if name not in ignored}
    return {
        name: current_name(value) if isinstance(value, str) else value
        for name, value in _dotted(kept)
    }


def _dotted(values: Row, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, list) and any(isinstance(part, dict) for part in value):
            value = {str(index): part for index, part in enumerate(value)}
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def checkpoint_records(path: str | Path) -> list[CheckpointRecord]:
    """The checkpoints that the run directory `path` records, newest first."""
    return [CheckpointRecord.from_row(row) for row in reversed(read_rows(Path(path) / CHECKPOINTS))]


def resume_points(path: str | Path) -> list[CheckpointRecord]:
    """Those with optimizer state."""
    return [record for record in checkpoint_records(path) if record.state_path]


def checkpoint_of(path: str) -> str:
    """`path` itself, or the newest state of the run directory that it names. UserError if it is
    neither, CheckpointError if the run has none.
    """
    found = _newest(path, "state", lambda record: record.state_path)
    if found == path:
        try:
            CheckpointPath.parse(path)
        except ValueError as error:
            raise UserError(
                f"{path!r} is neither the path of a checkpoint (tinker://RUN/weights/NAME) nor the directory of a run, which holds a "
                f"{CHECKPOINTS}"
            ) from error
    return found


def weights_of(path: str) -> str:
    """`path` itself, or what the run directory that it names saved last that can be sampled from.
    CheckpointError if the run has none.
    """
    return _newest(path, "weights", lambda record: record.sampler_path or record.state_path)


def _newest(path: str, what: str, path_in: Callable[[CheckpointRecord], str | None]) -> str:
    run = Path(path).expanduser()
    if not (run / CHECKPOINTS).is_file():
        return path
    found = next(filter(None, map(path_in, checkpoint_records(run))), None)
    if found is None:
        raise CheckpointError(
            f"{path}: the run in it saved no {what}; let it reach a checkpoint first"
        )
    return found


def remove_run(path: str | Path) -> None:
    """Remove the files of a run, and nothing else that may be in its directory."""
    for name in (
        METRICS,
        CHECKPOINTS,
        SPANS,
        TRACE,
        METRIC_LOGS,
        REFERENCE,
        PREFERENCE_MODEL,
        CONFIG,
        CODE_DIFF,
    ):
        (Path(path).expanduser() / name).unlink(missing_ok=True)
