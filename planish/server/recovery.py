"""Recovery at a start: what an earlier process left in the database is opened again, and unanswered
requests resume.

Models and samplers are loaded when they are used, or when one of their requests is unanswered.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from planish.server.durable import journal
from planish.server.durable.journal import RequestRow
from planish.server.durable.names import is_private, loading_seq
from planish.server.durable.records import ModelRow, SamplerRow, SessionRow, select
from planish.server.models.model import ModelRegistry, unloaded
from planish.server.models.request_queue import QueueItem, RequestQueue
from planish.server.results import Failed
from planish.server.samplers import Sampler, Samplers
from planish.server.services import Services
from planish.types import CheckpointPath

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovered:
    """How many things were recovered."""

    sessions: int
    models: int
    samplers: int
    requests: int


class Recovery:
    """Opens what an earlier process left."""

    def __init__(self, services: Services, models: ModelRegistry, samplers: Samplers) -> None:
        self._services = services
        self._models = models
        self._samplers = samplers
        self._loads: set[tuple[str, int]] = set()
        """Models and numbers of the loads that a replay would repeat."""

    async def recover(self) -> Recovered:
        """Open sessions, models and samplers, delete what no row names, and resume the unanswered
        requests.
        """
        store, sessions = self._services.store, self._services.sessions
        session_rows = await store.read(lambda db: select(db, SessionRow, "ended IS NULL"))
        still_open = "closed IS NULL ORDER BY created"
        models = await store.read(lambda db: select(db, ModelRow, still_open))
        samplers = await store.read(lambda db: select(db, SamplerRow, still_open))
        to_do = await store.read(journal.to_do)
        for session in session_rows:
            sessions.add(session)
        for model in models:
            await self._add_model(model)
        for sampler in samplers:
            await self._add_sampler(sampler)
        await self._services.engine.clear_leftovers()
        await self._services.checkpoints.reconcile()
        await self._delete_unnamed()
        for row in to_do:
            self._resume(row)
        for model in list(self._models.open.values()):
            model.wake()
        owners = {row.session for row in (*models, *samplers)}
        for session_id in owners:
            sessions.clear_if_ended(session_id)
        return Recovered(len(session_rows), len(models), len(samplers), len(to_do))

    async def _add_model(self, row: ModelRow) -> None:
        snapshot_seq = -1 if row.snapshot_seq is None else row.snapshot_seq
        rows = await self._services.store.read(
            lambda db: journal.of_model(db, row.id, snapshot_seq)
        )
        queue: RequestQueue[QueueItem] = RequestQueue(snapshot_seq + 1, row.passed)
        unload_seq = None
        # Older versions may have stored an unload request under the number of another request that
        # arrived at the same moment.
        for found in sorted(rows, key=lambda row: row.kind == "unload_model"):
            if found.kind == "load_weights" and found.state in ("started", "done"):
                self._loads.add((row.id, found.seq))
            if found.kind == "unload_model":
                unload_seq = max(found.seq, queue.end)
                found = replace(found, seq=unload_seq)
            is_open = found.is_to_do
            queue.add(found.seq, self._services.request_log.restore(found) if is_open else found)
        # Answered requests before the first unanswered one are replayed when the model is loaded.
        while isinstance(queue.peek(), RequestRow):
            queue.take()
        self._models.add(row, queue, unload_seq)

    async def _add_sampler(self, row: SamplerRow) -> None:
        model = self._models.open.get(row.model) if row.model is not None else None
        sampler = self._samplers.add(row, model)
        if row.model is None or row.source is not None:
            sampler.ready.set()
        elif model is None:
            await self._samplers.close(
                sampler, "its weights were not saved when its model was unloaded"
            )
        else:
            await self._decide_published(sampler, f"{row.model}:{row.seq}")

    async def _decide_published(self, sampler: Sampler, request_id: str) -> None:
        """Open or close a published sampler, depending on the request that publishes it."""
        row = await self._services.store.read(lambda db: journal.row(db, request_id))
        if row is not None and row.state == "done":
            sampler.ready.set()
        elif row is None or not row.is_to_do:
            await self._samplers.close(sampler, "the request that should have published it failed")

    def _resume(self, row: RequestRow) -> None:
        """Resume an unanswered request. Those of open models are in the models' queues already."""
        request_log = self._services.request_log
        if row.kind == "sample":
            sampler, request = self._samplers.get(row.owner), request_log.restore(row)
            if sampler is not None:
                self._samplers.start(sampler, request)
            else:
                why = Failed(f"sampling_session_id={row.owner!r} is closed", "user")
                request_log.settle(request, why)
        elif row.owner not in self._models.open:
            request = request_log.restore(row)
            if row.kind == "unload_model":  # it was unloaded, and the crash came before the answer
                request_log.settle(request, unloaded(row))
            else:
                why = Failed(f"model_id={row.owner!r} is closed", "user")
                request_log.settle(request, why, state="refused")

    async def _delete_unnamed(self) -> None:
        """Delete private checkpoints that no row names. A crash between making and recording a
        private checkpoint leaves one.
        """
        sources = {sampler.row.source for sampler in self._samplers.all()}
        for checkpoint in await self._services.engine.checkpoints():
            path = checkpoint.tinker_path
            if not is_private(path) or path in sources:
                continue
            model = self._models.open.get(CheckpointPath.parse(path).run_id)
            seq = loading_seq(path)
            is_loaded = model is not None and seq is not None and (model.id, seq) in self._loads
            if model is not None and (is_loaded or path == model.row.snapshot):
                model.keep_private(path)
            else:
                await self._services.engine.delete_checkpoint(path)
