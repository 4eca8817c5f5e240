"""The directory of one training run, which stays consistent if the process is killed.

    config.json         the options of the run
    metrics.jsonl       one object per training step, "step" first, flushed after each step
    checkpoints.jsonl   one object per checkpoint; a run resumes at the last one with "state_path"
    code.diff           the commit of the code and the uncommitted changes
    timing_spans.jsonl  one object per training step: when each part of it ran
    trace_events.jsonl  the same as Chrome trace events, if enabled (planish/runlog/spans.py)
    command.json        the command that started the run, and its working directory
    stop_after_step     a request to stop the run after its step (`request_stop`)
    metric_logs.json    which steps W&B, Trackio and TensorBoard have
                        (planish/runlog/metrics_log.py)
    rows.json           how many rows the run reads, and their digests (`require_rows`)
    reference.json      the reference policy of preference training (planish/preference/dpo.py)
    preference_model.json
                        how to load the trained preference model (planish/preference/model_files.py)
    rollouts/index.jsonl
                        one object per rollout (planish/reports/rollout_index.py)
    *.png               curves

Invariants: `write_atomically` replaces a file atomically. If a crash leaves a partial row at the
end of a JSONL file, the next start removes it. The rows of all steps before a checkpoint are on
disk before the checkpoint's row. On resume, `resume_at` drops the rows of later steps, and those
steps are trained again. So metrics.jsonl contains each step exactly once. Only one process can use
a run at a time. A run can be resumed only with the options and the rows that it began with.
"""

import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import chz

from planish.datasets.row_digests import RowDigest
from planish.errors import CheckpointError, UserError
from planish.files import (
    Row,
    RowFile,
    differences,
    lock_directory,
    plain_values,
    read_object,
    read_rows,
    write_atomically,
)
from planish.types import CheckpointPath

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints.jsonl"
CONFIG = "config.json"
SPANS = "timing_spans.jsonl"
CODE_DIFF = "code.diff"
COMMAND = "command.json"
STOP_REQUEST = "stop_after_step"
TRACE = "trace_events.jsonl"
METRIC_LOGS = "metric_logs.json"
ROWS = "rows.json"
REFERENCE = "reference.json"
PREFERENCE_MODEL = "preference_model.json"


@dataclass(frozen=True)
class CheckpointRecord:
    """A row of checkpoints.jsonl. Fields that are None are left out of the file."""

    name: str
    batch: int
    """The number of batches trained before this checkpoint. It is the index of the next batch."""
    state_path: str | None = None
    """The path of weights and optimizer state, from which training can resume."""
    sampler_path: str | None = None
    """The path of weights for sampling."""
    final: bool | None = None
    """True for the checkpoint at the end of a run."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the row, such as the training loop's counters."""

    def row(self) -> Row:
        """Return the record as a JSON object."""
        known = {name: getattr(self, name) for name in _RECORD_FIELDS}
        return {name: value for name, value in {**known, **self.extra}.items() if value is not None}

    @classmethod
    def from_row(cls, row: Row) -> Self:
        """Return the record of a JSON object. Unknown fields become `extra`."""
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
    """The files of one run. This process has a lock on them until `close` or the end of the `with`
    block.
    """

    def __init__(
        self,
        path: str | Path,
        config: Mapping[str, Any],
        *,
        may_change: Collection[str] = (),
        at_default: Collection[str] = (),
    ) -> None:
        """Create the directory, or open it to resume the run in it. Raises UserError if another
        process uses it, or if the run in it has options that differ from `config` and are not in
        `may_change`. An option of `at_default` may be missing in the run: an earlier planish did
        not have it.
        """
        if not str(path):
            raise UserError("log_path is empty; give the run a directory")
        # Absolute: an environment may change the working directory.
        self.path = Path(path).expanduser().absolute()
        self._lock = lock_directory(self.path, "log_path", "this run")
        try:
            # An older request was for an earlier process. From now on, requests are for this one.
            self.take_stop_request()
            self._check_config(plain_values(config), may_change, at_default)
            self._metrics = RowFile(self.path / METRICS)
            self._checkpoints = RowFile(self.path / CHECKPOINTS)
            self._spans = RowFile(self.path / SPANS)
        except BaseException:
            self._lock.release()
            raise

    @classmethod
    def of_options(cls, options: Any, may_change: Collection[str]) -> Self:
        """Create or open the directory `options.log_path` of a chz object. See `RunDirectory`."""
        return cls(
            options.log_path,
            chz.asdict(options),
            may_change=may_change,
            at_default=names_at_default(options),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, and release the lock."""
        self._metrics.close()
        self._checkpoints.close()
        self._spans.close()
        self._lock.release()

    def require_rows(self, digests: Mapping[str, RowDigest]) -> None:
        """Record the rows that a run reads, by dataset and split. Raises UserError if the run in the
        directory has begun with other rows of the same name.
        """
        path = self.path / ROWS
        found = read_object(path) if self.resume_points() and path.exists() else {}
        rows = {name: asdict(digest) for name, digest in digests.items()}
        for name, digest in rows.items():
            begun = found.get(name, digest)
            if begun != digest:
                raise UserError(
                    f"log_path={self.path} has a run that began with other rows of {name}: "
                    f"{begun['rows']} rows then, {digest['rows']} rows now, and their contents "
                    "differ. Restore these rows to continue the run, or start a new run from its "
                    f"weights: load_checkpoint_path={self.path} with another log_path"
                )
        if rows:
            write_atomically(path, json.dumps({**found, **rows}, indent=2) + "\n")

    def resume_points(self) -> list[CheckpointRecord]:
        """Return the checkpoints that have optimizer state, newest first."""
        return resume_points(self.path)

    def resume_at(self, batch: int) -> None:
        """Drop the rows of steps from `batch` on, which will be trained again, and the rows of
        checkpoints after `batch`.
        """
        for file in (self._metrics, self._spans):
            file.keep(lambda row: row["step"] < batch)
        self._checkpoints.keep(lambda row: row.get("batch", 0) <= batch)

    def record_command(self) -> None:
        """Write which command started this process, and where, so that the run can be resumed by
        the same command.
        """
        command = {"command": sys.orig_argv, "directory": os.getcwd()}
        write_atomically(self.path / COMMAND, json.dumps(command) + "\n")

    def take_stop_request(self) -> bool:
        """Return whether `request_stop` was called since the last call."""
        try:
            (self.path / STOP_REQUEST).unlink()
        except FileNotFoundError:
            return False
        return True

    def metrics(self) -> list[Row]:
        """Return the rows of metrics.jsonl."""
        return read_rows(self.path / METRICS)

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Append one row of metrics and flush it. Raises ValueError unless all values are
        finite.
        """
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise ValueError(
                    f"metric {name!r} of step {step} is {value}: log finite numbers only"
                )
        self._metrics.append({"step": step, **plain_values(metrics)})

    def log_spans(self, step: int, spans: Sequence[Mapping[str, float | str]]) -> None:
        """Append one row to timing_spans.jsonl, with the times at which each part of a step ran."""
        self._spans.append({"step": step, "spans": list(spans)})

    def log_checkpoint(self, record: CheckpointRecord) -> None:
        """Append the row of a checkpoint that is already on disk. All metrics so far are synced to
        disk before the row is written.
        """
        self._metrics.sync()
        self._checkpoints.append(record.row())
        self._checkpoints.sync()

    def remove_checkpoints(self, records: Collection[CheckpointRecord]) -> None:
        """Remove the rows of checkpoints that are about to be deleted."""
        rows = [record.row() for record in records]
        self._checkpoints.keep(lambda row: row not in rows)

    def _check_config(
        self, config: Row, may_change: Collection[str], at_default: Collection[str]
    ) -> None:
        path = self.path / CONFIG
        has_rows = any(_has_bytes(self.path / name) for name in (METRICS, CHECKPOINTS))
        if has_rows and not path.exists():
            raise UserError(
                f"log_path={self.path} has files of a run but no {CONFIG}; give another log_path"
            )
        if has_rows:  # before the first row, the user may still correct options
            found, new_options = (
                _options(values, {"log_path", *may_change})
                for values in (read_object(path), config)
            )
            for name in at_default:
                if name not in found:
                    new_options.pop(name, None)
            if changed := differences(found, new_options):
                raise UserError(
                    f"log_path={self.path} has a run with other options: {changed}; give that "
                    "run's options to continue it, or another log_path"
                )
        write_atomically(path, json.dumps(config, indent=2) + "\n")


def names_at_default(options: Any, prefix: str = "") -> set[str]:
    """Return the dotted names of the options of a chz object that have their default values."""
    names: set[str] = set()
    for name, parameter in inspect.signature(type(options)).parameters.items():
        value = getattr(options, name, None)
        if chz.is_chz(value):
            names |= names_at_default(value, f"{prefix}{name}.")
        elif type(value) is type(parameter.default) and value == parameter.default:
            names.add(f"{prefix}{name}")
    return names


def _has_bytes(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _options(config: Row, ignored: Collection[str]) -> Row:
    """Return the options by dotted names, without those in `ignored`."""
    return dict(_flatten({name: value for name, value in config.items() if name not in ignored}))


def _flatten(values: Row, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, list) and any(isinstance(part, dict) for part in value):
            value = {str(index): part for index, part in enumerate(value)}
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def checkpoint_records(path: str | Path) -> list[CheckpointRecord]:
    """Return the checkpoints that the run directory `path` records, newest first."""
    return [CheckpointRecord.from_row(row) for row in reversed(read_rows(Path(path) / CHECKPOINTS))]


def resume_points(path: str | Path) -> list[CheckpointRecord]:
    """Return the checkpoints of the run directory `path` with optimizer state, newest first."""
    return [record for record in checkpoint_records(path) if record.state_path]


def checkpoint_of(path: str) -> str:
    """Return the newest state if `path` is a run directory, or `path` itself if it is a checkpoint.
    Raises UserError if `path` is neither. Raises CheckpointError if the run has no state.
    """
    found = _newest(path, "state", lambda record: record.state_path)
    if found == path:
        try:
            CheckpointPath.parse(path)
        except ValueError as error:
            raise UserError(
                f"{path!r} is neither the path of a checkpoint (tinker://RUN/weights/NAME) nor the "
                f"directory of a run, which has a file {CHECKPOINTS}; give one of the two"
            ) from error
    return found


def model_argument(base_model: str, checkpoint: str | None) -> dict[str, Any]:
    """Return the argument of `create_sampling_client` for a checkpoint or the newest state of a run
    directory, or for the base model if `checkpoint` is None.
    """
    return (
        {"base_model": base_model}
        if checkpoint is None
        else {"model_path": checkpoint_of(checkpoint)}
    )


def weights_of(path: str) -> str:
    """Return the newest weights or state if `path` is a run directory, otherwise `path` itself.
    Raises CheckpointError if the run has none.
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


def request_stop(path: str | Path) -> None:
    """Ask the process that works on the run directory `path` to stop after its step. The run saves
    a checkpoint, and its process exits with status 0.
    """
    write_atomically(Path(path) / STOP_REQUEST, b"")


def remove_run(path: str | Path) -> None:
    """Remove the files of a run, and no other files of its directory."""
    for name in (
        METRICS,
        CHECKPOINTS,
        SPANS,
        TRACE,
        METRIC_LOGS,
        ROWS,
        REFERENCE,
        PREFERENCE_MODEL,
        CONFIG,
        CODE_DIFF,
        COMMAND,
        STOP_REQUEST,
    ):
        (Path(path).expanduser() / name).unlink(missing_ok=True)
