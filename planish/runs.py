"""The directory of one training run, and how it survives being killed.

    config.json         the options of the run, written whole
    metrics.jsonl       one object a training step, "step" first, flushed as each is made
    checkpoints.jsonl   one object a checkpoint; the last one with "state_path" is where a run
                        resumes
    code.diff           the commit of the code and what differed from it
    timing_spans.jsonl  one object a training step: when each part of it ran
    trace_events.jsonl  the same as Chrome trace events, if asked for (planish/timing.py)
    metric_logs.json    how far W&B, Trackio and TensorBoard have been told, where they are
                        (planish/metric_logs.py)
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

import errno
import io
import json
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Self

from filelock import FileLock, Timeout

from planish.errors import CheckpointError, DamagedFileError, StorageError, UserError
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

Row = dict[str, Any]


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


def hold_directory(path: Path, option: str, what: str) -> FileLock:
    """The lock of a directory, made if it is not there. `option` named it, `what` is written there;
    both are for the errors' words.
    """
    lock = FileLock(path / ".lock")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"{option}={path}: another process is writing {what}; wait for it or give another {option}"
        ) from error
    except OSError as error:
        raise StorageError(
            f"{option}={path}: {error}; give a directory that can be written to"
        ) from error
    return lock


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
            self._check_config(_plain(config), may_change)
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
        self._metrics.append({"step": step, **_plain(metrics)})

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
                for values in (_read_object(path), config)
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
    """The options by dotted names, those aside that are `ignored`."""
    return dict(_dotted({name: value for name, value in config.items() if name not in ignored}))


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


def read_rows(path: str | Path) -> list[Row]:
    """The objects of a JSONL file; [] if there is no file. A torn last line, as a kill leaves it,
    is left out.

    Raises DamagedFileError when any other line is not an object.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif line.strip() and number < len(lines):
            raise DamagedFileError(
                f"{path}, line {number} is not a JSON object; repair or remove that line"
            )
    return rows


def write_whole(path: str | Path, data: bytes | str) -> None:
    """Put `data` at `path` such that a reader, now or after a power cut, sees the old file or the
    whole new one.
    """
    path = Path(path)
    payload = data.encode() if isinstance(data, str) else data
    aside: str | None = None
    try:
        handle, aside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o644)  # mkstemp makes it private
        os.replace(aside, path)
        sync_directory(path.parent)
    except OSError as error:
        raise StorageError(f"cannot write {path} ({error}); free space or rights there") from error
    finally:
        if aside is not None:
            with suppress(FileNotFoundError):
                os.unlink(aside)


class RowFile:
    """A JSONL file that is open for appending; the torn last line of an earlier process is repaired
    at the start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _repair(path)
        self._file = self._open()

    def append(self, *rows: Row) -> None:
        """All of the rows by one write."""
        line = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        whole = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(whole)  # or the next row would begin in the middle of a line
            raise StorageError(
                f"cannot append to {self.path} ({error}); free space and start again"
            ) from error

    def sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageError(
                f"cannot write {self.path} to disk ({error}); free space and start again"
            ) from error

    def keep(self, is_kept: Callable[[Row], bool]) -> None:
        """Drop all rows but those. DamagedFileError: a row has not what `is_kept` looks at."""
        rows = read_rows(self.path)
        kept = []
        for row in rows:
            try:
                kept += [row] if is_kept(row) else []
            except (KeyError, TypeError) as error:
                raise DamagedFileError(
                    f"{self.path}: the row {json.dumps(row)[:200]} is none of a run's ({error}); repair or remove that line"
                ) from error
        if len(kept) < len(rows):
            write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))
            self._file.close()
            self._file = self._open()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> io.FileIO:
        try:
            return open(self.path, "ab", buffering=0)
        except OSError as error:
            raise StorageError(
                f"cannot write {self.path} ({error}); give another log_path"
            ) from error


def _repair(path: Path) -> None:
    """End the file with a whole line: the newline that a kill cut off is put back, half a row is
    removed.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    whole, _, tail = content.rpartition(b"\n")
    if not tail:
        return
    if _parse(tail) is not None:
        write_whole(path, content + b"\n")
    else:
        write_whole(path, whole + b"\n" if whole else b"")


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:  # also when the cut fell inside a character
        return None
    return row if isinstance(row, dict) else None


def _read_object(path: Path) -> Row:
    found = _parse(path.read_bytes())
    if found is None:
        raise DamagedFileError(f"{path} is not a JSON object; repair it or give another log_path")
    return found


def _plain(values: Mapping[str, Any]) -> Row:
    """What JSON can hold: numbers of other libraries become Python's, paths their text, functions
    and other objects their name.

    No name holds an address, so the same options give the same text in every process.
    """
    return json.loads(json.dumps(dict(values), default=_to_json))


def _to_json(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, partial):
        return {"function": _to_json(value.func), "arguments": [*value.args], **value.keywords}
    named = value if callable(value) and hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
