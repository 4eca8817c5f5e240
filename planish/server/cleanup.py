"""Cleanup in the background: idle adapters leave memory, expired results and checkpoints are
deleted, stale sessions end, and what exceeds its share of the disk goes.

Nothing that a restart needs is removed: a request after the last snapshot of its model keeps its
row, but not its result. Training runs are kept for good, because checkpoints name them. Sessions
and samplers are deleted a week after their end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from planish.errors import EngineClosedError
from planish.server.durable import journal
from planish.server.durable.store import Transaction
from planish.server.models.model import ModelRegistry
from planish.server.samplers import Samplers
from planish.server.services import Services

_log = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_ROUND_SECONDS = 30.0
_FRESH_SECONDS = 600.0
"""No result younger than this is deleted to make room."""
_ENDED_SECONDS = 7 * 86400.0
"""How long ended sessions and their samplers stay in the database."""
_BATCH = 5000
"""Rows that one transaction deletes."""
_PAGES = 1000
"""Database pages that one transaction returns to the file system."""

_NOT_NEEDED = (
    "(kind = 'sample' OR NOT EXISTS (SELECT 1 FROM models WHERE models.id = owner AND closed IS "
    "NULL"
    " AND requests.seq > COALESCE(snapshot_seq, -1)))"
)
"""Requests that no replay needs."""


class Cleanup:
    """Removes what has expired, in a background task."""

    def __init__(self, services: Services, models: ModelRegistry, samplers: Samplers) -> None:
        self._services = services
        self._store = services.store
        self._settings = services.settings
        self._models = models
        self._samplers = samplers

    async def run(self) -> None:
        """Clean up until the task is cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(min(_TICK_SECONDS, self._settings.missing_request_timeout / 4))
            await self._guarded(self._expire_missing_requests)
            await self._guarded(
                lambda: self._services.adapter_cache.unload_idle(self._settings.idle_seconds)
            )
            if time.monotonic() - last >= _ROUND_SECONDS:
                last = time.monotonic()
                await self.clean()

    async def clean(self) -> None:
        """Do what need not be done every second. Files are deleted first: on a full disk, every
        write waits for space.
        """
        await self._guarded(self._services.checkpoints.remove_expired)
        await self._guarded(self._services.sessions.write_seen)
        await self._guarded(self._end_stale_sessions)
        await self._guarded(self._close_samplers)
        await self._guarded(self._drop_results)

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run one part of the cleanup. Its failure must not prevent the other parts."""
        try:
            await work()
        except EngineClosedError:
            return
        except Exception:
            _log.exception("cleaning up failed; it is tried again")

    async def _expire_missing_requests(self) -> None:
        for model in list(self._models.open.values()):
            await model.expire_missing_request()

    async def _end_stale_sessions(self) -> None:
        sessions = self._services.sessions
        for session_id in sessions.stale(self._settings.session_timeout):
            await sessions.end(session_id, "its client was not heard of for too long")

    async def _close_samplers(self) -> None:
        """Close the least recently used published samplers while all together exceed their limit on
        disk.
        """
        published = [
            sampler for sampler in self._samplers.all() if sampler.row.model and sampler.row.source
        ]
        total = sum(sampler.row.bytes for sampler in published)
        for sampler in sorted(published, key=lambda sampler: sampler.used):
            if total <= self._settings.unnamed_sampler_bytes:
                return
            total -= sampler.row.bytes
            await self._samplers.close(
                sampler,
                "it was the least recently used one when unnamed samplers took more than "
                f"{self._settings.unnamed_sampler_bytes:,} bytes; save weights under a name to "
                "keep them",
            )

    async def _drop_results(self) -> None:
        now = time.time()
        while (
            await self._store.keep(lambda transaction: self._drop_before(transaction, now))
            == _BATCH
        ):
            pass
        await self._store.keep(lambda transaction: self._drop_large(transaction, now))
        await self._store.keep(
            lambda transaction: _drop_sessions(transaction, now - _ENDED_SECONDS)
        )
        await self._store.keep(lambda transaction: transaction.reclaim(_PAGES))

    def _drop_before(self, transaction: Transaction, now: float) -> int:
        oldest = now - self._settings.result_retention
        aged = "finished < ? AND result_bytes > 0"
        journal.drop_results(transaction, aged, [oldest])
        return journal.delete(
            transaction,
            f"id IN (SELECT id FROM requests WHERE finished < ? AND {_NOT_NEEDED} ORDER BY "
            f"finished LIMIT {_BATCH})",
            [oldest],
        )

    def _drop_large(self, transaction: Transaction, now: float) -> None:
        """Delete the oldest results while all together exceed their limit."""
        query = "SELECT SUM(result_bytes) FROM requests WHERE finished IS NOT NULL"
        total = transaction.execute(query).fetchone()[0] or 0
        if total <= self._settings.result_bytes:
            return
        rows = transaction.execute(
            "SELECT id, result_bytes FROM requests WHERE finished < ? AND result_bytes > 0 ORDER "
            "BY finished",
            [now - _FRESH_SECONDS],
        )
        for request_id, size in rows.fetchall():
            if total <= self._settings.result_bytes:
                return
            total -= size
            journal.drop_results(transaction, "id = ?", [request_id])


def _drop_sessions(transaction: Transaction, oldest: float) -> None:
    ended = "SELECT id FROM sessions WHERE ended < ?"
    transaction.execute(
        f"DELETE FROM samplers WHERE closed IS NOT NULL AND session IN ({ended})", [oldest]
    )
    open_parts = " AND ".join(
        f"NOT EXISTS (SELECT 1 FROM {table} WHERE session = sessions.id AND closed IS NULL)"
        for table in ("models", "samplers")
    )
    transaction.execute(f"DELETE FROM sessions WHERE ended < ? AND {open_parts}", [oldest])
