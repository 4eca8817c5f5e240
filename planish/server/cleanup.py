"""What goes by itself: idle adapters from memory, aged results, sessions nobody hears of, and what
takes more room than it may.

Nothing that a restart needs is removed: a request behind the last snapshot of its model stays as a
row, without its result. Training runs are kept for good, as checkpoints name them; sessions and
samplers go a while after their end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from planish.errors import EngineClosedError
from planish.server.durable import journal
from planish.server.durable.checkpoints import CheckpointCatalog
from planish.server.durable.store import Store, Transaction
from planish.server.models.training import Training
from planish.server.samplers import Samplers
from planish.server.scheduling.adapter_cache import AdapterCache
from planish.server.sessions import Sessions
from planish.server.settings import ServerSettings

_log = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_ROUND_SECONDS = 30.0
_FRESH_SECONDS = 600.0
_ENDED_SECONDS = 7 * 86400.0
"""A session that ended is known for so long, with its samplers."""
_BATCH = 5000
_PAGES = 1000

_NOT_NEEDED = (
    "(kind = 'sample' OR NOT EXISTS (SELECT 1 FROM models WHERE models.id = owner AND closed IS NULL"
    " AND requests.seq > COALESCE(snapshot_seq, -1)))"
)


class Cleanup:
    def __init__(
        self,
        store: Store,
        sessions: Sessions,
        training: Training,
        samplers: Samplers,
        residency: AdapterCache,
        catalog: CheckpointCatalog,
        settings: ServerSettings,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._training = training
        self._samplers = samplers
        self._residency = residency
        self._catalog = catalog
        self._settings = settings

    async def run(self) -> None:
        """Until it is cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(min(_TICK_SECONDS, self._settings.gap_seconds / 4))
            await self._guarded(self._training.expire_gaps)
            await self._guarded(lambda: self._residency.unload_idle(self._settings.idle_seconds))
            if time.monotonic() - last >= _ROUND_SECONDS:
                last = time.monotonic()
                await self.round()

    async def round(self) -> None:
        """What need not be done every second. Files go first: on a full disk, whatever writes waits
        for space.
        """
        await self._guarded(self._catalog.remove_expired)
        await self._guarded(self._sessions.write_seen)
        await self._guarded(self._end_stale_sessions)
        await self._guarded(self._close_samplers)
        await self._guarded(self._drop_results)

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """One thing that cannot be removed must not keep the others."""
        try:
            await work()
        except EngineClosedError:
            return
        except Exception:
            _log.exception("something could not be cleaned up; it is tried again")

    async def _end_stale_sessions(self) -> None:
        for session_id in self._sessions.stale(self._settings.session_seconds):
            await self._sessions.end(session_id, "nothing was heard of it")

    async def _close_samplers(self) -> None:
        """Of published samplers, those that were used least recently, while all take more room than
        they may.
        """
        published = [
            sampler for sampler in self._samplers.all() if sampler.row.model and sampler.row.source
        ]
        total = sum(sampler.row.bytes for sampler in published)
        for sampler in sorted(published, key=lambda sampler: sampler.used):
            if total <= self._settings.ephemeral_bytes:
                return
            total -= sampler.row.bytes
            await self._samplers.close(
                sampler,
                "it was unused for the longest time when samplers without a name took more than "
                f"{self._settings.ephemeral_bytes:,} bytes; save weights under a name to keep them",
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
        oldest = now - self._settings.result_seconds
        aged = "finished < ? AND result_bytes > 0"
        journal.drop_results(transaction, aged, [oldest])
        return journal.delete(
            transaction,
            f"id IN (SELECT id FROM requests WHERE finished < ? AND {_NOT_NEEDED} ORDER BY finished LIMIT {_BATCH})",
            [oldest],
        )

    def _drop_large(self, transaction: Transaction, now: float) -> None:
        """The oldest results, while all take more room than they may."""
        query = "SELECT SUM(result_bytes) FROM requests WHERE finished IS NOT NULL"
        total = transaction.execute(query).fetchone()[0] or 0
        if total <= self._settings.result_bytes:
            return
        rows = transaction.execute(
            "SELECT id, result_bytes FROM requests WHERE finished < ? AND result_bytes > 0 ORDER BY finished",
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
