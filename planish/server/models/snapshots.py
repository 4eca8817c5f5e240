"""Snapshots of models: weights and optimizer state after a request, from which the model can come
back without what was before.

A snapshot is taken where no gradient is pending. It counts when the answers of all requests up to
it, and the weights of all samplers that were published up to it, are on disk. Then the bodies of
those requests go, and older snapshots.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from planish.errors import EngineClosedError
from planish.server.durable import journal
from planish.server.durable.names import is_superseded, snapshot_name
from planish.server.durable.records import ModelRow, change
from planish.server.durable.store import Store, Transaction, crash_point
from planish.server.engine_client import EngineClient
from planish.server.metrics import Counters
from planish.server.models.model import Model, Progress
from planish.server.settings import ServerSettings
from planish.service import SaveWeights
from planish.types import CheckpointPath, SaveWeightsResponse

_log = logging.getLogger(__name__)


class Snapshots:
    def __init__(
        self, engine: EngineClient, store: Store, settings: ServerSettings, counters: Counters
    ) -> None:
        self._engine = engine
        self._store = store
        self._settings = settings
        self._counters = counters

    def is_due(self, model: Model) -> bool:
        """Whether as much would be done again after a crash as is allowed, and a snapshot can be
        taken.
        """
        progress, settings = model.progress, self._settings
        much = (
            progress.seconds >= settings.replay_seconds
            or progress.bytes >= settings.replay_bytes
            or progress.requests >= settings.replay_requests
        )
        return much and self._can_take(model) and not model.is_snapshotting

    async def begin(self, model: Model) -> asyncio.Task[bool]:
        """Queue a snapshot of the model behind what it was given last. If it cannot be taken, that
        is logged, and nothing is lost.
        """
        crash_point("before snapshot")
        model.is_snapshotting, model.progress = True, Progress()
        saved: asyncio.Future[SaveWeightsResponse]
        try:
            saved = await self._engine.submit(
                SaveWeights(model.id, snapshot_name(model.applied), overwrite=True)
            )
        except Exception as error:
            saved = asyncio.get_running_loop().create_future()
            saved.set_exception(error)
        return model.spawn(self._finish(model, model.applied, saved))

    async def take(self, model: Model) -> bool:
        """Take one now, if there is something to take and it can be; whether the last one is of the
        model as it is.
        """
        while model.is_snapshotting:
            await model.change()
        is_behind = model.progress.changes > 0 and model.applied > model.snapshot_seq
        if is_behind and self._can_take(model):
            return await (await self.begin(model))
        return not is_behind

    async def remove_all(self, model: Model) -> None:
        """What was kept to bring the model back."""
        for path in list(model.private):
            await self._engine.delete_checkpoint(path)
            model.private.discard(path)

    def _can_take(self, model: Model) -> bool:
        return (
            model.row.closed is None
            and model.applied >= 0
            and not model.is_dirty
            and not model.is_lossy
        )

    async def _finish(
        self, model: Model, seq: int, saved: asyncio.Future[SaveWeightsResponse]
    ) -> bool:
        path = str(CheckpointPath(model.id, "training", snapshot_name(seq)))
        try:
            await saved
            model.private.add(path)
            if await self._is_covered(model, seq):
                crash_point("snapshot saved before recording")
                await self._record(model, seq, path)
                self._counters.snapshots += 1
                crash_point("snapshot recorded before cleaning")
                await self._clean(model, seq)
                return True
        except EngineClosedError:
            return False
        except Exception:
            _log.exception(
                "no snapshot of %s could be taken; what it did since the last one stays in the journal",
                model.id,
            )
        finally:
            model.is_snapshotting = False
            model.changed.set()
        return False

    async def _is_covered(self, model: Model, seq: int) -> bool:
        """Wait until nothing up to `seq` is only in memory; False if a sampler could not be saved."""
        while any(number <= seq for number in (*model.running, *model.unsaved)):
            await model.change()
        await asyncio.gather(
            *(written for number, written in model.unwritten.items() if number <= seq)
        )
        return not model.is_lossy

    async def _record(self, model: Model, seq: int, path: str) -> None:
        assert seq > model.snapshot_seq, (model.id, seq, model.snapshot_seq)

        def record(transaction: Transaction) -> None:
            change(
                transaction, ModelRow, model.id, snapshot=path, snapshot_seq=seq, used=time.time()
            )
            journal.drop_bodies(transaction, "owner = ? AND seq <= ?", (model.id, seq))

        await self._store.keep(record)
        model.row = replace(model.row, snapshot=path, snapshot_seq=seq)

    async def _clean(self, model: Model, seq: int) -> None:
        for path in [path for path in model.private if is_superseded(path, seq)]:
            await self._engine.delete_checkpoint(path)
            model.private.discard(path)
