"""What an earlier process left: brought back from the database at a start, and the unfinished gone
on with.

Models and samplers are only known again; they come into memory when they are used, or when one of
their requests was not answered.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from planish.server.durable import journal
from planish.server.durable.checkpoints import CheckpointCatalog
from planish.server.durable.journal import RequestRow
from planish.server.durable.names import is_private, loading_seq
from planish.server.durable.records import ModelRow, SamplerRow, SessionRow, select
from planish.server.durable.request_log import RequestLog
from planish.server.durable.store import Store
from planish.server.engine_client import EngineClient
from planish.server.models.model import Item
from planish.server.models.request_queue import RequestQueue
from planish.server.models.training import Training, unloaded
from planish.server.results import Failed
from planish.server.samplers import Sampler, Samplers
from planish.server.sampling import Sampling
from planish.server.sessions import Sessions
from planish.types import CheckpointPath

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovered:
    """How much was brought back."""

    sessions: int
    models: int
    samplers: int
    requests: int


class Recovery:
    def __init__(
        self,
        engine: EngineClient,
        store: Store,
        sessions: Sessions,
        requests: RequestLog,
        training: Training,
        samplers: Samplers,
        sampling: Sampling,
        catalog: CheckpointCatalog,
    ) -> None:
        self._engine = engine
        self._store = store
        self._sessions = sessions
        self._requests = requests
        self._training = training
        self._samplers = samplers
        self._sampling = sampling
        self._catalog = catalog
        self._loads: set[tuple[str, int]] = set()
        """Models and numbers of the loads that would be done again."""

    async def recover(self) -> Recovered:
        """Know again what is open, remove what nobody names, and start what was accepted and not
        answered.
        """
        sessions = await self._store.read(lambda db: select(db, SessionRow, "ended IS NULL"))
        models = await self._store.read(
            lambda db: select(db, ModelRow, "closed IS NULL ORDER BY created")
        )
        samplers = await self._store.read(
            lambda db: select(db, SamplerRow, "closed IS NULL ORDER BY created")
        )
        to_do = await self._store.read(journal.to_do)
        for session in sessions:
            self._sessions.add(session)
        for model in models:
            await self._add_model(model)
        for sampler in samplers:
            await self._add_sampler(sampler)
        await self._engine.clear_leftovers()
        await self._catalog.reconcile()
        await self._remove_unnamed()
        for row in to_do:
            self._resume(row)
        for model in self._training.all():
            self._training.wake(model)
        for session_id in {
            row.session for row in (*models, *samplers) if not self._sessions.is_open(row.session)
        }:
            self._sessions.clear(session_id)
        return Recovered(len(sessions), len(models), len(samplers), len(to_do))

    async def _add_model(self, row: ModelRow) -> None:
        begun = -1 if row.snapshot_seq is None else row.snapshot_seq
        rows = await self._store.read(lambda db: journal.of_model(db, row.id, begun))
        lane: RequestQueue[Item] = RequestQueue(begun + 1, row.passed)
        unload_seq = None
        # An older store may hold an unloading under the number of a request that came in the same
        # moment.
        for found in sorted(rows, key=lambda row: row.kind == "unload_model"):
            if found.kind == "load_weights" and found.state in ("started", "done"):
                self._loads.add((row.id, found.seq))
            if found.kind == "unload_model":
                unload_seq = max(found.seq, lane.end)
                found = replace(found, seq=unload_seq)
            lane.add(found.seq, self._requests.restore(found) if found.is_to_do else found)
        # Those that were answered, up to the first that was not, are replayed when the model is
        # loaded.
        while isinstance(lane.peek(), RequestRow):
            lane.take()
        self._training.add(row, lane).unload_seq = unload_seq

    async def _add_sampler(self, row: SamplerRow) -> None:
        model = self._training.get(row.model) if row.model is not None else None
        sampler = self._samplers.add(row, model.residence if model is not None else None)
        if row.model is None or row.source is not None:
            sampler.ready.set()
        elif model is None:
            await self._samplers.close(
                sampler, "its weights were not saved when its model was unloaded"
            )
        else:
            await self._decide(sampler, f"{row.model}:{row.seq}")

    async def _decide(self, sampler: Sampler, publishing: str) -> None:
        """Whether a published sampler is there depends on the request that publishes it."""
        row = await self._store.read(lambda db: journal.row(db, publishing))
        if row is not None and row.state == "done":
            sampler.ready.set()
        elif row is None or not row.is_to_do:
            await self._samplers.close(sampler, "the request that should have published it failed")

    def _resume(self, row: RequestRow) -> None:
        """Models find theirs in their lanes."""
        if row.kind == "sample":
            sampler, request = self._samplers.get(row.owner), self._requests.restore(row)
            if sampler is not None:
                self._sampling.begin(sampler, request)
            else:
                self._requests.settle(
                    request, Failed(f"sampling_session_id={row.owner!r} is closed", "user")
                )
        elif self._training.get(row.owner) is None:
            request, closed = (
                self._requests.restore(row),
                Failed(f"model_id={row.owner!r} is closed", "user"),
            )
            if row.kind == "unload_model":  # it was, but the kill came before the answer
                self._requests.settle(request, unloaded(row))
            else:
                self._requests.settle(request, closed, state="refused")

    async def _remove_unnamed(self) -> None:
        """Delete private checkpoints that no row names: a kill fell between their making and their
        being recorded.
        """
        sources = {sampler.row.source for sampler in self._samplers.all()}
        for checkpoint in await self._engine.checkpoints():
            path = checkpoint.tinker_path
            if not is_private(path) or path in sources:
                continue
            model = self._training.get(CheckpointPath.parse(path).run_id)
            seq = loading_seq(path)
            is_loaded = model is not None and seq is not None and (model.id, seq) in self._loads
            if model is not None and (is_loaded or path == model.row.snapshot):
                model.private.add(path)
            else:
                await self._engine.delete_checkpoint(path)
