"""The training runs of a server, as the console's views read them.

A server knows the metrics of each optimizer step (server/models/step_metrics.py), the checkpoints,
and what the client said when it created the model. Rewards and rollouts are in the run directory of
the client, which `planish console` shows.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from planish.console.metric_table import MetricTable
from planish.console.row_tail import Row, parse_object
from planish.console.run_reader import RunReader
from planish.console.run_state import FINISHED, IDLE, RUNNING
from planish.server.durable.records import CheckpointRow, ModelRow, select

T = TypeVar("T")
ReadDatabase = Callable[[Callable[[sqlite3.Connection], T]], T]
"""Runs a function with a connection to the server's database, and returns its result."""

_MAX_RUNS = 2000
NEWEST_REQUEST = "SELECT accepted FROM requests WHERE owner = ? ORDER BY seq DESC LIMIT 1"
"""The time of a model's newest request. MAX(accepted) would read all its requests."""
_RUNNING_SECONDS = 120.0
"""A run counts as running for this long after its last request."""


@dataclass(frozen=True)
class _RunRow:
    """A training run, and when its last request arrived."""

    model: ModelRow
    last_request: float


class _StepRow(NamedTuple):
    """A row of the table `steps`."""

    id: int
    step: int
    metrics: bytes
    """The metrics as JSON."""


class ServerRun(RunReader):
    """One training run."""

    def __init__(self, row: ModelRow, read: ReadDatabase) -> None:
        super().__init__(Path(row.id), row.id)
        self.row = row
        self.last_request = row.created
        self._read = read
        self.last_step_id = -1
        """The id of the newest row of `steps` that was read; -1 before the first."""
        self.config = _config(row)

    def refresh_metrics(self) -> None:
        """Read the rows of new steps."""
        with self.lock:
            self.add_steps(self._read_steps(self.last_step_id))

    def add_steps(self, found: Sequence[_StepRow]) -> None:
        """Add the rows that are newer than `last_step_id`. If a step is repeated, read all rows
        again.
        """
        with self.lock:
            rows = [row for row in found if row.id > self.last_step_id]
            last = self.metrics.last_step
            if rows and last is not None and min(row.step for row in rows) <= last:
                self.metrics = MetricTable()
                rows = self._read_steps(-1)
            if rows:
                self.last_step_id = rows[-1].id
                self.metrics.add(
                    [{"step": row.step, **(parse_object(row.metrics) or {})} for row in rows]
                )

    def _read_steps(self, after: int) -> list[_StepRow]:
        return self._read(lambda db: _steps(db, self.row.id, after))

    def refresh_rollouts(self) -> None:
        """Do nothing: the server has no rollouts."""

    def update(self, found: _RunRow) -> None:
        """Take over a newer row."""
        if found.model != self.row:
            self.row, self.config = found.model, _config(found.model)
        self.last_request = found.last_request

    def state(self) -> str:
        """Return the state: finished if the run takes no more requests, else running or idle."""
        if self.row.closed is not None:
            return FINISHED
        is_recent = time.time() - self.last_request < _RUNNING_SECONDS
        return RUNNING if is_recent else IDLE

    def updated(self) -> float | None:
        """Return when the last request arrived."""
        return self.last_request

    def problems(self) -> list[str]:
        """Return []: a server's rows are never damaged."""
        return []

    def code_diff(self) -> str:
        """Return "": the code is the client's."""
        return ""

    def checkpoint_rows(self) -> list[Row]:
        """Return the checkpoints, newest first, as the view of checkpoints shows them."""
        query = "run = ? AND (expires IS NULL OR expires > ?) ORDER BY created DESC"
        rows = self._read(lambda db: select(db, CheckpointRow, query, [self.id, time.time()]))
        return [_checkpoint(row) for row in rows]


class ServerCatalog:
    """The runs of one tenant, or of all tenants. It is a `RunCatalog`."""

    roots: Sequence[Path] = ()

    def __init__(self, read: ReadDatabase, tenant: str | None) -> None:
        """`tenant` None: all tenants."""
        self.is_cut = False
        self._read = read
        self._tenant = tenant
        self._runs: dict[str, ServerRun] = {}
        self._lock = threading.Lock()

    def refreshed_runs(self) -> list[ServerRun]:
        """Return the newest runs, after reading their new steps. The database is asked once."""
        found, steps = self._read(self._rows_and_new_steps)
        self.is_cut = len(found) > _MAX_RUNS
        runs = [self._take(row) for row in found[:_MAX_RUNS]]
        for run in runs:
            run.add_steps(steps[run.id])
        return runs

    def _rows_and_new_steps(
        self, db: sqlite3.Connection
    ) -> tuple[list[_RunRow], dict[str, list[_StepRow]]]:
        found = _run_rows(db, self._tenant)
        with self._lock:
            last_ids = {run_id: run.last_step_id for run_id, run in self._runs.items()}
        ids = [row.model.id for row in found]
        return found, {run_id: _steps(db, run_id, last_ids.get(run_id, -1)) for run_id in ids}

    def run(self, run_id: str) -> ServerRun:
        """Return one run. Raises LookupError if the tenant has no such run."""
        found = self._read(lambda db: _run_rows(db, self._tenant, run_id))
        if not found:
            raise LookupError(f"there is no run {run_id[:200]!r}")
        return self._take(found[0])

    def _take(self, found: _RunRow) -> ServerRun:
        with self._lock:
            run = self._runs.get(found.model.id)
            if run is None:
                run = self._runs[found.model.id] = ServerRun(found.model, self._read)
            run.update(found)
            return run


def _run_rows(
    db: sqlite3.Connection, tenant: str | None, run_id: str | None = None
) -> list[_RunRow]:
    conditions = {"tenant": tenant, "id": run_id}
    given = {name: value for name, value in conditions.items() if value is not None}
    where = " AND ".join(f"{name} = ?" for name in given) or "1"
    rows = select(
        db,
        ModelRow,
        f"{where} ORDER BY created DESC LIMIT ?",
        [*given.values(), _MAX_RUNS + 1],
    )
    newest = [db.execute(NEWEST_REQUEST, [row.id]).fetchone() for row in rows]
    return [
        _RunRow(row, max(row.used, found[0] if found else 0.0))
        for row, found in zip(rows, newest, strict=True)
    ]


def _steps(db: sqlite3.Connection, run_id: str, after: int) -> list[_StepRow]:
    """Return the rows of a run's steps whose ids are above `after`, in order."""
    query = "SELECT id, step, metrics FROM steps WHERE model = ? AND id > ? ORDER BY id"
    rows = db.execute(query, [run_id, after])
    return [_StepRow(row[0], row[1], row[2].encode()) for row in rows]


def _config(row: ModelRow) -> dict[str, Any]:
    """Return what is known of the options of a run."""
    metadata: Mapping[str, str] = row.metadata
    return {
        "model_name": row.base_model,
        "recipe_name": metadata.get("recipe_name", ""),
        "lora": asdict(row.lora_config),
        "user_metadata": dict(metadata),
        "session": row.session,
        "tenant": row.tenant,
        "closed": row.closed,
    }


def _checkpoint(row: CheckpointRow) -> Row:
    checkpoint = row.checkpoint
    is_sampler = checkpoint.checkpoint_type != "training"
    expires = None if checkpoint.expires_at is None else checkpoint.expires_at.isoformat()
    return {
        "name": checkpoint.checkpoint_id,
        "batch": None,
        "sampler_path" if is_sampler else "state_path": row.path,
        "size_bytes": row.bytes,
        "expires": expires,
        "score": None,
        "commands": [
            ("write it as a PEFT adapter", f"planish export {row.path} DIRECTORY --base-url URL"),
            ("talk with it", f"planish chat --model {row.path} --base-url URL"),
        ],
    }
