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
from typing import Any, TypeVar

from planish.console.metric_table import MetricTable
from planish.console.row_tail import Row, parse_object
from planish.console.run_reader import RunReader
from planish.console.run_state import FINISHED, IDLE, RUNNING
from planish.server.durable.records import CheckpointRow, ModelRow, select

T = TypeVar("T")
ReadDatabase = Callable[[Callable[[sqlite3.Connection], T]], T]
"""Runs a function with a connection to the server's database, and returns its result."""

_MAX_RUNS = 2000
_RUNNING_SECONDS = 120.0
"""A run counts as running for this long after its last request."""


@dataclass(frozen=True)
class _RunRow:
    """A training run, and when its last request arrived."""

    model: ModelRow
    last_request: float


class ServerRun(RunReader):
    """One training run."""

    def __init__(self, row: ModelRow, read: ReadDatabase) -> None:
        super().__init__(Path(row.id), row.id)
        self.row = row
        self.last_request = row.created
        self._read = read
        self._last_id = -1
        self.config = _config(row)

    def refresh_metrics(self) -> None:
        """Read the rows of new steps. If a step is repeated, read all rows again."""
        with self.lock:
            rows = self._read(self._new_rows)
            steps = [step for _, step, _ in rows]
            last = self.metrics.last_step
            if steps and last is not None and min(steps) <= last:
                self.metrics, self._last_id = MetricTable(), -1
                rows = self._read(self._new_rows)
            if rows:
                self._last_id = rows[-1][0]
                self.metrics.add(
                    [{"step": step, **(parse_object(text) or {})} for _, step, text in rows]
                )

    def _new_rows(self, db: sqlite3.Connection) -> list[tuple[int, int, bytes]]:
        query = "SELECT id, step, metrics FROM steps WHERE model = ? AND id > ? ORDER BY id"
        rows = db.execute(query, [self.row.id, self._last_id])
        return [(row[0], row[1], row[2].encode()) for row in rows]

    def refresh_rollouts(self) -> None:
        """Do nothing: the server has no rollouts."""

    def update(self, found: _RunRow) -> None:
        """Take over a newer row."""
        self.row, self.last_request = found.model, found.last_request

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

    def runs(self) -> list[ServerRun]:
        """Return the newest runs."""
        found = self._read(lambda db: _run_rows(db, self._tenant))
        self.is_cut = len(found) > _MAX_RUNS
        return [self._take(row) for row in found[:_MAX_RUNS]]

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
    query = "SELECT MAX(accepted) FROM requests WHERE owner = ?"
    return [
        _RunRow(row, max(row.used, db.execute(query, [row.id]).fetchone()[0] or 0.0))
        for row in rows
    ]


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
