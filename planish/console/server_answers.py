"""The data of the views of a server, as plain values for JSON: what it does now, its sessions, and its
training runs. A tenant gets its own, and the operator those of all tenants.

The methods run in a thread of the server. `ServerReads` asks the event loop for them.
"""

import json
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio.from_thread

from planish.console.answers import Answers, Parameters
from planish.console.row_tail import Row
from planish.console.server_runs import ServerCatalog
from planish.processes.memory import resident_bytes
from planish.server.durable.records import SessionRow, select
from planish.server.results import NotFound, Tenant
from planish.server.server import Server
from planish.server.session_timeline import MAX_REQUESTS, SessionTimeline

T = TypeVar("T")

_MAX_SESSIONS = 500
_MAX_SHOWN_REQUESTS = 2000
_RATE_SECONDS = 60.0
_RATE_COUNTERS = ("sampled_tokens", "prompt_tokens", "trained_tokens")


@dataclass
class TokenRates:
    """Tokens per second over the last minute, from the server's counters. A reading is taken when a
    page asks, at most once per second.
    """

    _readings: deque[tuple[float, dict[str, Counter[str]]]] = field(default_factory=deque)

    def read(self, server: Server, now: float) -> dict[str, dict[str, float]]:
        """Return tokens per second by tenant and counter; empty at the first reading."""
        if not self._readings or now - self._readings[-1][0] >= 1.0:
            counters = {name: Counter(getattr(server.counters, name)) for name in _RATE_COUNTERS}
            self._readings.append((now, counters))
        while len(self._readings) > 2 and now - self._readings[1][0] > _RATE_SECONDS:
            self._readings.popleft()
        (start, before), (end, after) = self._readings[0], self._readings[-1]
        if end <= start:
            return {}
        tenants = {tenant for counts in after.values() for tenant in counts}
        return {
            tenant: {
                name: (after[name][tenant] - before[name][tenant]) / (end - start)
                for name in _RATE_COUNTERS
            }
            for tenant in sorted(tenants)
        }


class ServerAnswers(Answers):
    """Answers the requests of the pages of one tenant. `tenant` None: the operator's, who sees all
    tenants.
    """

    def __init__(self, server: Server, tenant: Tenant | None, rates: TokenRates) -> None:
        super().__init__(ServerCatalog(self._read_database, tenant.name if tenant else None))
        self._server = server
        self._tenant = tenant
        self._rates = rates

    def _read_database(self, query: Callable[[sqlite3.Connection], T]) -> T:
        return anyio.from_thread.run(self._server.store.read, query)

    def _in_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return anyio.from_thread.run(work)

    def _sees(self, tenant: str) -> bool:
        return self._tenant is None or self._tenant.name == tenant

    # The server.

    def server(self, parameters: Parameters) -> Row:
        """Return what the server does now."""
        return self._in_loop(self._server_now)

    async def _server_now(self) -> Row:
        server, now = self._server, time.time()
        rates = self._rates.read(server, time.monotonic())
        answer: Row = {
            "tenant": None if self._tenant is None else self._tenant.name,
            "base_models": list(server.engine.base_models),
            "queue": self._queue(now),
            "models": self._open_models(),
            "rates": {tenant: rate for tenant, rate in rates.items() if self._sees(tenant)},
            "storage": {
                tenant: size
                for tenant, size in (await server.checkpoints.bytes_by_tenant()).items()
                if self._sees(tenant)
            },
            "storage_limit": server.settings.max_storage_bytes,
            "disk_is_full": server.intake.disk_is_full(),
        }
        if self._tenant is None:
            answer["machine"] = await self._machine()
        return answer

    def _queue(self, now: float) -> list[Row]:
        """Return the unanswered requests by tenant and kind."""
        found: dict[tuple[str, str], Row] = {}
        for request in self._server.request_log.active.values():
            row = request.row
            if request.answer_written is not None or not self._sees(row.tenant):
                continue
            entry = found.setdefault(
                (row.tenant, row.kind),
                {"tenant": row.tenant, "kind": row.kind, "waiting": 0, "running": 0, "oldest": 0.0},
            )
            entry["waiting" if request.begun is None else "running"] += 1
            entry["oldest"] = max(entry["oldest"], round(now - row.accepted, 1))
        return [found[key] for key in sorted(found)]

    def _open_models(self) -> list[Row]:
        """Return the open models and the samplers in memory, those in memory first."""
        server = self._server
        rows = [
            (model.row.tenant, model.id, "model", model.row.base_model, model.adapter)
            for model in server.models.open_models()
        ]
        rows += [
            (sampler.row.tenant, sampler.id, "sampler", sampler.row.base_model, sampler)
            for sampler in server.samplers.open_samplers()
        ]
        found = [
            {
                "tenant": tenant,
                "id": owner,
                "kind": kind,
                "base_model": base_model,
                "bytes": adapter.memory_bytes,
                "is_resident": server.adapter_cache.is_loaded(adapter),
            }
            for tenant, owner, kind, base_model, adapter in rows
            if self._sees(tenant)
        ]
        found.sort(key=lambda row: (not row["is_resident"], row["kind"], row["id"]))
        return found[:_MAX_SESSIONS]

    async def _machine(self) -> Row:
        """Return what only the operator sees."""
        metrics = await self._server.metrics()
        settings = self._server.settings
        return {
            "free_disk_bytes": metrics.disk.free_bytes,
            "min_free_disk_bytes": settings.min_free_disk_bytes,
            "database_bytes": metrics.disk.database_bytes,
            "body_bytes": metrics.disk.body_bytes,
            "unnamed_sampler_bytes": metrics.unnamed_sampler_bytes,
            "adapter_bytes": metrics.adapter_bytes,
            "adapter_limit": settings.adapter_memory_bytes,
            "request_bytes": metrics.request_bytes,
            "request_limit": settings.request_memory_bytes,
            "result_bytes": metrics.result_bytes,
            "result_limit": settings.result_memory_bytes,
            "resident_bytes": resident_bytes(),
            "sampling": [metrics.running_sequences, settings.sampling_slots],
            "waiting_sequences": metrics.waiting_sequences,
            "training": [metrics.running_training_operations, settings.training_slots],
            "waiting_training": metrics.waiting_training_operations,
            "open_sessions": metrics.open_sessions,
        }

    # Sessions.

    def sessions(self, parameters: Parameters) -> Row:
        """Return the newest sessions that contain all words of `text` in their ids, names, tags or
        metadata.
        """
        words = parameters.text("text").lower().split()

        def matches(row: Row) -> bool:
            text = _searched_text(row)
            return all(word in text for word in words)

        rows = [row for row in self._read_database(self._select_sessions) if matches(row)]
        return {"sessions": rows[:_MAX_SESSIONS], "is_cut": len(rows) > _MAX_SESSIONS}

    def _select_sessions(self, db: sqlite3.Connection) -> list[Row]:
        where, values = ("1", []) if self._tenant is None else ("tenant = ?", [self._tenant.name])
        rows = select(db, SessionRow, f"{where} ORDER BY created DESC LIMIT 5000", values)
        counts = {
            table: Counter(
                dict(db.execute(f"SELECT session, COUNT(*) FROM {table} GROUP BY session"))
            )
            for table in ("models", "samplers")
        }
        return [
            {**_session(row), **{table: counted[row.id] for table, counted in counts.items()}}
            for row in rows
        ]

    def session(self, parameters: Parameters) -> Row:
        """Return one session with its timeline. Raises NotFound if the tenant has none."""
        session_id = parameters.text("session")
        row, timeline = self._in_loop(
            partial(self._session_and_timeline, session_id, _MAX_SHOWN_REQUESTS)
        )
        return {
            **_session(row),
            "now": time.time(),
            "owners": timeline.owners,
            "requests": [asdict(request) for request in timeline.requests],
            "num_left_out": timeline.num_left_out,
        }

    async def timeline(self, session_id: str) -> SessionTimeline:
        """Return the whole timeline of a session. Raises NotFound if the tenant has none. Call this
        in the event loop.
        """
        return (await self._session_and_timeline(session_id, MAX_REQUESTS))[1]

    async def _session_and_timeline(
        self, session_id: str, limit: int
    ) -> tuple[SessionRow, SessionTimeline]:
        rows: Sequence[SessionRow] = await self._server.store.read(
            select, SessionRow, "id = ?", [session_id]
        )
        if not rows or not self._sees(rows[0].tenant):
            raise NotFound(f"there is no session {session_id[:200]!r}")
        return rows[0], await self._server.timelines.read(session_id, limit)

    # Runs.

    def checkpoints(self, parameters: Parameters) -> Row:
        """Return the checkpoints of a run."""
        assert isinstance(self.catalog, ServerCatalog)
        run = self.catalog.run(parameters.text("run"))
        return {
            "checkpoints": run.checkpoint_rows(),
            "note": None,
            "lineage": None,
            "state": run.state(),
            "command": None,
        }


def _session(row: SessionRow) -> Row:
    spec: Mapping[str, Any] = json.loads(row.spec)
    return {
        "id": row.id,
        "tenant": row.tenant,
        "name": spec.get("display_name"),
        "tags": spec.get("tags") or [],
        "metadata": spec.get("user_metadata") or {},
        "sdk_version": spec.get("sdk_version"),
        "created": row.created,
        "used": row.used,
        "ended": row.ended,
        "reason": row.reason,
    }


def _searched_text(session: Row) -> str:
    parts = [
        session["id"],
        session["tenant"],
        session["name"] or "",
        *session["tags"],
        *session["metadata"],
        *session["metadata"].values(),
        "open" if session["ended"] is None else "ended",
    ]
    return " ".join(parts).lower()
