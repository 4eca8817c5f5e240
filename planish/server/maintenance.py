"""Recovery at a start, and cleanup in the background.

At a start, the sessions, models and samplers in the database are opened again, and unanswered
requests resume. Models and samplers are loaded when they are used, or when one of their requests
is unanswered.

Later, idle adapters leave memory, expired results and checkpoints are deleted, and stale sessions
end. If results or unnamed samplers exceed their limits on disk, the oldest are deleted. A replay
needs the requests after its model's last snapshot. So the rows of these requests stay, even if
their results are deleted. Other rows stay until `result_retention` has passed, except those of
failed requests, which may be deleted earlier (failed_requests.py).

A week after a session's end, the server deletes the session, its samplers, and its runs without
checkpoints. A run with checkpoints is kept, because the paths of the checkpoints contain its id.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from planish.errors import EngineClosedError, StorageError
from planish.server.durable import journal
from planish.server.durable.checkpoint_maintenance import CheckpointMaintenance
from planish.server.durable.checkpoints import is_private, private_copy_seq
from planish.server.durable.expiry_clock import ExpiryClock
from planish.server.durable.failed_requests import FailedRequests
from planish.server.durable.journal import RequestRow
from planish.server.durable.records import ModelRow, SamplerRow, SessionRow, select
from planish.server.durable.request_log import RequestLog
from planish.server.durable.store import Store, Transaction
from planish.server.engine_client import EngineClient
from planish.server.models.catalog import Models
from planish.server.models.request_queue import QueueItem, RequestQueue
from planish.server.request import done_from_result
from planish.server.results import Failed
from planish.server.samplers import Sampler, Samplers
from planish.server.sampling import Sampling
from planish.server.scheduling import AdapterCache
from planish.server.sessions import AHEAD_SECONDS, Sessions, delete_sessions
from planish.server.settings import ServerSettings
from planish.server.settle import Settlement
from planish.service import UnloadModel
from planish.types import CheckpointPath

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecoveredCounts:
    """The numbers of open sessions, models, samplers and unanswered requests at a start."""

    sessions: int
    models: int
    samplers: int
    requests: int


@dataclass(frozen=True)
class Recovery:
    """Opens the sessions, models and samplers of an earlier process, and resumes their requests."""

    _store: Store
    _engine: EngineClient
    _sessions: Sessions
    _checkpoint_maintenance: CheckpointMaintenance
    _models: Models
    _samplers: Samplers
    _sampling: Sampling
    _request_log: RequestLog
    _settlement: Settlement
    _repeatable_loads: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """(model id, sequence number) of each load_weights that a replay would repeat."""
    _closing: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    async def recover(self) -> RecoveredCounts:
        """Open sessions, models and samplers, delete private checkpoints that no row names, and
        resume the unanswered requests.
        """
        store, sessions = self._store, self._sessions
        # Leave out the clients' texts, because all of them together may exceed the memory.
        session_rows = await store.read(select, SessionRow, "ended IS NULL", omit="spec")
        is_open = "closed IS NULL ORDER BY created"
        models = await store.read(select, ModelRow, is_open, omit="user_metadata")
        samplers = await store.read(select, SamplerRow, is_open)
        unanswered = await store.read(journal.unanswered_requests)
        for session in session_rows:
            sessions.add(session)
        for model in models:
            await self._add_model(model)
        for sampler in samplers:
            await self._add_sampler(sampler)
        await self._engine.checkpoints.clear_leftovers()
        await self._checkpoint_maintenance.reconcile()
        await self._delete_unreferenced()
        for row in unanswered:
            self._resume(row)
        for model in self._models.open_models():
            model.worker.wake()
        session_ids = {row.session for row in (*models, *samplers)}
        for session_id in session_ids:
            sessions.close_members_if_ended(session_id)
        return RecoveredCounts(len(session_rows), len(models), len(samplers), len(unanswered))

    async def _add_model(self, row: ModelRow) -> None:
        rows = await self._store.read(journal.requests_of_model, row.id, row.last_snapshot)
        queue: RequestQueue[QueueItem] = RequestQueue(row.last_snapshot + 1, row.skipped_below)
        unload_seq = None
        for request_row in rows:
            if request_row.kind == "load_weights" and request_row.state in ("started", "done"):
                self._repeatable_loads.add((row.id, request_row.seq))
            if request_row.kind == "unload_model":
                unload_seq = request_row.seq
            is_unanswered = request_row.is_unanswered
            queue.add(
                request_row.seq,
                self._request_log.restore(request_row) if is_unanswered else request_row,
            )
        # Answered requests before the first unanswered one are replayed when the model is loaded.
        while isinstance(queue.peek(), RequestRow):
            queue.take()
        self._models.open(row, queue, unload_seq)

    async def _add_sampler(self, row: SamplerRow) -> None:
        model = self._models.get(row.model) if row.model is not None else None
        sampler = self._samplers.add(row, None if model is None else model.adapter)
        if row.model is None or row.source is not None:
            sampler.ready.set()
        elif model is None:
            self._close(sampler, "its weights were not saved when its model was unloaded")
        else:
            await self._open_or_close_published(sampler, f"{row.model}:{row.seq}")

    async def _open_or_close_published(self, sampler: Sampler, request_id: str) -> None:
        """Open a published sampler if the request that publishes it succeeded, and close the
        sampler if the request failed. If the request has no answer yet, the sampler stays as it is.
        """
        row = await self._store.read(journal.request_row, request_id)
        if row is not None and row.state == "done":
            sampler.ready.set()
        elif row is None or not row.is_unanswered:
            self._close(sampler, "the request that should have published it failed")

    def _close(self, sampler: Sampler, reason: str) -> None:
        """Close a sampler in the background, because on a full disk the write waits for space."""
        task = asyncio.create_task(self._samplers.close(sampler, reason))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def stop(self) -> None:
        """Stop closing samplers; the next start closes them."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _resume(self, row: RequestRow) -> None:
        """Resume an unanswered request. Requests of open models are in their queues already."""
        if row.kind == "sample":
            sampler, request = self._samplers.get(row.owner), self._request_log.restore(row)
            if sampler is not None:
                self._sampling.start(sampler, request)
            else:
                failure = Failed(f"sampling_session_id={row.owner!r} is closed", "user")
                self._settlement.settle(request, failure)
        elif self._models.get(row.owner) is None:
            request = self._request_log.restore(row)
            if row.kind == "unload_model":  # it was unloaded, and the crash came before the answer
                self._settlement.settle(request, done_from_result(UnloadModel(row.owner), None))
            else:
                failure = Failed(f"model_id={row.owner!r} is closed", "user")
                self._settlement.settle(request, failure, state="refused")

    async def _delete_unreferenced(self) -> None:
        """Delete private checkpoints that no row names. Such a checkpoint exists if the server
        crashed after it made the checkpoint and before it wrote the row.
        """
        sources = {sampler.row.source for sampler in self._samplers.open_samplers()}
        for path in await self._engine.checkpoints.paths():
            if not is_private(path) or path in sources:
                continue
            model = self._models.get(CheckpointPath.parse(path).run_id)
            seq = private_copy_seq(path)
            is_loaded = (
                model is not None and seq is not None and (model.id, seq) in self._repeatable_loads
            )
            if model is not None and (is_loaded or path == model.row.snapshot):
                model.adapter.private_checkpoints.paths.add(path)
            else:
                try:
                    await self._engine.checkpoints.delete(path)
                except StorageError as error:
                    _log.error("%s is not needed, and stays on disk: %s", path, error)


_SHORT_INTERVAL_SECONDS = 1.0
_CLEANUP_INTERVAL_SECONDS = 30.0
_MIN_RESULT_AGE_SECONDS = 600.0
"""A result younger than this is not deleted, even if all results exceed `max_result_bytes`."""
_SESSION_RETENTION_SECONDS = 7 * 86400.0
"""How long ended sessions and their samplers stay in the database, in seconds."""
_MAX_DELETED_ROWS = 5000
"""The maximum number of rows that one transaction deletes."""
_MAX_FREED_PAGES = 1000
"""The maximum number of database pages that one transaction returns to the file system."""


@dataclass(frozen=True)
class Cleanup:
    """Removes expired and excess data in a background task."""

    _store: Store
    _sessions: Sessions
    _checkpoint_maintenance: CheckpointMaintenance
    _models: Models
    _samplers: Samplers
    _adapter_cache: AdapterCache
    _failed_requests: FailedRequests
    _expiry_clock: ExpiryClock
    _settings: ServerSettings

    async def run(self) -> None:
        """Clean up until the task is cancelled."""
        last_cleanup = time.monotonic()
        while True:
            await asyncio.sleep(
                min(_SHORT_INTERVAL_SECONDS, self._settings.missing_request_timeout / 4)
            )
            await self._run_logging_errors(self._models.expire_missing_requests)
            await self._run_logging_errors(
                lambda: self._adapter_cache.unload_idle(self._settings.adapter_idle_timeout)
            )
            self._expiry_clock.read()
            if time.monotonic() - last_cleanup >= _CLEANUP_INTERVAL_SECONDS:
                last_cleanup = time.monotonic()
                await self.clean()

    async def clean(self) -> None:
        """Run the parts of the cleanup that run every 30 seconds. Delete files first, because on a
        full disk every write to the database waits for space.
        """
        await self._run_logging_errors(self._checkpoint_maintenance.remove_expired)
        await self._run_logging_errors(self._checkpoint_maintenance.remove_excess)
        await self._run_logging_errors(self._sessions.write_last_seen)
        await self._run_logging_errors(self._end_stale_sessions)
        await self._run_logging_errors(self._close_excess_samplers)
        await self._run_logging_errors(self._delete_results)

    async def _run_logging_errors(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run one part of the cleanup. Its failure must not prevent the other parts."""
        try:
            await work()
        except EngineClosedError:
            return
        except Exception:
            _log.exception("cleaning up failed; it is tried again")

    async def _end_stale_sessions(self) -> None:
        oldest = self._expiry_clock.before(self._settings.session_timeout)
        for session_id in self._sessions.stale_session_ids(oldest):
            await self._sessions.end(session_id, "its client has sent nothing for too long")

    async def _close_excess_samplers(self) -> None:
        """Close the least recently used unnamed samplers of a tenant that has more than
        `max_samplers`. Then, while all unnamed samplers together exceed
        `max_unnamed_sampler_bytes`, close the least recently used sampler of the tenant that stores
        the most.
        """
        settings = self._settings
        samplers_by_tenant = defaultdict[str, list[Sampler]](list)
        for sampler in sorted(
            self._samplers.open_samplers(), key=lambda sampler: sampler.last_used
        ):
            if sampler.row.model and sampler.row.source:
                samplers_by_tenant[sampler.row.tenant].append(sampler)
        for published in samplers_by_tenant.values():
            while len(published) > settings.max_samplers:
                await self._samplers.close(
                    published.pop(0),
                    "it was the least recently used one when this tenant had more than "
                    f"{settings.max_samplers:,} unnamed samplers (max_samplers); save weights "
                    "under a name to keep them",
                )
        sizes = {
            tenant: sum(sampler.row.bytes for sampler in published)
            for tenant, published in samplers_by_tenant.items()
        }
        while sum(sizes.values()) > settings.max_unnamed_sampler_bytes:
            largest_tenant = max(sizes, key=lambda tenant: sizes[tenant])
            sampler = samplers_by_tenant[largest_tenant].pop(0)
            sizes[largest_tenant] -= sampler.row.bytes
            await self._samplers.close(
                sampler,
                "it was the least recently used one when unnamed samplers took more than "
                f"{settings.max_unnamed_sampler_bytes:,} bytes; save weights under a name to keep "
                "them",
            )

    async def _delete_results(self) -> None:
        store, clock = self._store, self._expiry_clock
        await store.write_with_retries(_correct_times, time.time())
        await store.write_with_retries(clock.record)
        oldest = clock.before(self._settings.result_retention)
        while (
            await store.write_with_retries(self._delete_expired_results, oldest)
            == _MAX_DELETED_ROWS
        ):
            pass
        await store.write_with_retries(
            delete_sessions, "ended < ?", [clock.before(_SESSION_RETENTION_SECONDS)]
        )
        await store.write_with_retries(
            self._delete_excess_results, clock.before(_MIN_RESULT_AGE_SECONDS)
        )
        await self._failed_requests.trim()
        await store.write_with_retries(lambda transaction: transaction.free_pages(_MAX_FREED_PAGES))

    def _delete_expired_results(self, transaction: Transaction, expired_before: float) -> int:
        has_expired_result = "finished < ? AND result_bytes > 0"
        journal.drop_results(transaction, has_expired_result, [expired_before])
        return journal.delete_requests(
            transaction,
            f"id IN (SELECT id FROM requests WHERE finished < ? AND {journal.IS_REDUNDANT} "
            f"ORDER BY finished LIMIT {_MAX_DELETED_ROWS})",
            [expired_before],
        )

    def _delete_excess_results(self, transaction: Transaction, before: float) -> None:
        """Delete the oldest results that were finished before `before`, until all results together
        take at most `max_result_bytes`.
        """
        query = "SELECT SUM(result_bytes) FROM requests WHERE finished IS NOT NULL"
        total_bytes = transaction.execute(query).fetchone()[0] or 0
        if total_bytes <= self._settings.max_result_bytes:
            return
        rows = transaction.execute(
            "SELECT id, result_bytes FROM requests WHERE finished < ? AND result_bytes > 0 ORDER "
            "BY finished",
            [before],
        )
        for request_id, size in rows.fetchall():
            if total_bytes <= self._settings.max_result_bytes:
                return
            total_bytes -= size
            journal.drop_results(transaction, "id = ?", [request_id])


def _correct_times(transaction: Transaction, now: float) -> None:
    """Replace times in the future, which come from a clock that was ahead. Otherwise the data would
    be kept for too long.
    """
    latest = now + AHEAD_SECONDS
    for table, column in (("requests", "finished"), ("sessions", "ended")):
        transaction.execute(f"UPDATE {table} SET {column} = ? WHERE {column} > ?", [now, latest])
