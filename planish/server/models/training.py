"""Training: one worker for each model that has something to do. It brings the model into memory,
and gives the engine its requests in order.

A few requests of one model are with the engine at once, so that the device does not wait for the
event loop; what reads or writes a checkpoint of a name waits until all before it is done. How each
kind is done is in training_steps.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from planish.errors import EngineClosedError, UserError
from planish.server.durable import journal
from planish.server.durable.journal import RequestRow, result_of
from planish.server.durable.records import ModelRow, change
from planish.server.durable.request_log import Request, failure
from planish.server.durable.store import Store, Transaction, crash_point
from planish.server.models.model import Item, Model
from planish.server.models.replay import Replay
from planish.server.models.request_queue import RequestQueue
from planish.server.models.snapshots import Snapshots
from planish.server.models.steps import TrainingSteps
from planish.server.results import Abandoned, Done, Failed
from planish.server.scheduling.adapter_cache import AdapterCache
from planish.server.settings import ServerSettings
from planish.service import UnloadModel

_log = logging.getLogger(__name__)

_DEPTH = 3
"""RequestLog of one model that are with the engine."""
_TURN_SECONDS = 10.0
"""A model gives its place in memory up after so long, if others wait for one."""


class ModelResidence:
    """How a model comes into memory and leaves it."""

    def __init__(self, row: ModelRow, training: Training) -> None:
        self.key = row.id
        self.memory_bytes = row.training_bytes
        self._training = training

    @property
    def is_evictable(self) -> bool:
        return True

    async def load(self) -> None:
        await self._training.load(self.key)

    async def unload(self) -> None:
        await self._training.unload(self.key)


class Training:
    def __init__(
        self,
        store: Store,
        residency: AdapterCache,
        replay: Replay,
        snapshots: Snapshots,
        steps: TrainingSteps,
        settings: ServerSettings,
    ) -> None:
        self._store = store
        self._residency = residency
        self._replay = replay
        self._snapshots = snapshots
        self._steps = steps
        self._settings = settings
        self._models: dict[str, Model] = {}
        self.is_stopping = False

    def add(self, row: ModelRow, lane: RequestQueue[Item]) -> Model:
        model = Model(row, lane, ModelResidence(row, self))
        self._models[row.id] = model
        return model

    def get(self, model_id: str) -> Model | None:
        """One that takes requests."""
        return self._models.get(model_id)

    def all(self) -> list[Model]:
        return list(self._models.values())

    def wake(self, model: Model) -> None:
        """Something may be ready in the model's lane."""
        model.changed.set()
        if (
            model.worker is None
            and model.row.closed is None
            and model.lane.is_ready
            and not self.is_stopping
        ):
            model.worker = asyncio.create_task(self._work(model), name=f"model {model.id}")

    async def load(self, model_id: str) -> None:
        model = self._models.get(model_id)
        if model is None:
            raise UserError(
                f"model_id={model_id!r} is closed, and what it published without a name is lost with it"
            )
        await self._replay.load(model)
        if model.row.closed is not None:  # meanwhile
            await self._replay.unload(model)
            raise UserError(f"model_id={model_id!r} is closed: {model.row.closed}")

    async def unload(self, model_id: str) -> None:
        model = self._models.get(model_id)
        if model is not None:
            await self._snapshots.take(model)
            await self._replay.unload(model)

    async def close(self, model: Model, reason: str) -> None:
        """The model takes no more requests, and what was kept to bring it back goes. Not while it
        has others with the engine.
        """
        while model.unsaved or model.is_snapshotting:
            await model.change()
        row = model.row
        model.row = replace(row, closed=reason, snapshot=None, snapshot_seq=None)
        self._models.pop(model.id, None)
        refused = [item for item in model.lane.give_up() if isinstance(item, Request)]

        def record(transaction: Transaction) -> None:
            change(transaction, ModelRow, model.id, closed=reason, snapshot=None, snapshot_seq=None)
            journal.drop_bodies(transaction, "owner = ?", [model.id])

        for request in refused:
            self._steps.settle(
                model,
                request,
                Failed(f"model_id={model.id!r} is closed: {reason}", "user"),
                state="refused",
            )
        await self._store.keep(record)
        crash_point("model closed before cleaning")
        await self._replay.unload(model)
        self._residency.forget(model.residence)
        await self._snapshots.remove_all(model)

    async def expire_gaps(self) -> None:
        """Refuse what waits for a number that has not come for too long."""
        now = time.monotonic()
        for model in self.all():
            if not model.lane.is_blocked:
                model.blocked = None
            elif model.blocked is None or model.blocked[0] != model.lane.next_seq:
                model.blocked = (model.lane.next_seq, now)
            elif now - model.blocked[1] >= self._settings.gap_seconds:
                await self._pass_over(model)

    async def stop(self, seconds: float) -> None:
        """Take nothing more, let the engine finish what it has, and take last snapshots, for up to
        so long.
        """
        self.is_stopping = True
        for model in self.all():
            model.changed.set()
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(
                    *(model.worker for model in self.all() if model.worker is not None)
                )
                for model in self.all():
                    if self._residency.is_loaded(model.residence):
                        await self._snapshots.take(model)
        except TimeoutError:
            _log.warning(
                "not everything could be finished in %g seconds; the journal has it", seconds
            )

    async def _work(self, model: Model) -> None:
        try:
            async with self._residency.held(model.residence):
                await self._empty(model)
        except EngineClosedError:
            return
        except Exception as error:
            if not isinstance(error, (UserError, Abandoned)):
                _log.exception("%s cannot go on", model.id)
            await self._start_over(model, error)
        finally:
            model.worker = None
        self.wake(model)

    async def _empty(self, model: Model) -> None:
        """Do what is in the lane until it is empty, or the model should leave memory."""
        begun = time.monotonic()
        while not self.is_stopping and model.row.closed is None:
            is_asked_to_leave = self._residency.waiting and time.monotonic() - begun > _TURN_SECONDS
            item = None if is_asked_to_leave else model.lane.take()
            if item is not None:
                await model.settled(below=_DEPTH)
                await self._answered(model, item)
            elif is_asked_to_leave or not (model.running or model.unsaved or model.is_snapshotting):
                break
            else:
                await model.change()
        await model.settled()
        if model.is_lossy and not self._store.is_refused:
            await self._replay.unload(model)
            await self._replay.load(model)

    async def _answered(self, model: Model, item: Request | RequestRow) -> None:
        """`_do`, after which nothing that was taken from the lane is without an answer."""
        try:
            await self._do(model, item)
        except EngineClosedError:
            raise
        except Exception as error:
            if isinstance(item, Request):
                self._steps.settle(model, item, failure(error), state="refused")
            raise

    async def _do(self, model: Model, item: Request | RequestRow) -> None:
        match item:
            case RequestRow():
                await model.settled()
                await self._replay.repeat(model, item)
            case Request(row=RequestRow(state="refused") as row):
                await model.settled()
                self._steps.settle(model, item, _refusal(row), state="refused")
                await self._replay.repeat(model, row)
            case Request(row=RequestRow(kind="unload_model") as row):
                await model.settled()
                await self.close(model, "it was unloaded")
                self._steps.settle(model, item, unloaded(row))
            case Request():
                await self._try(model, item)

    async def _try(self, model: Model, request: Request) -> None:
        try:
            await self._steps.start(model, request)
        except EngineClosedError:
            raise
        except Exception as error:
            why = failure(error)
            await self._replay.refuse(model, request.row.kind, why)
            model.applied = request.seq
            if request.seq == 0:
                await self.close(model, f"it could not be created ({error})")
            self._steps.settle(model, request, why)

    async def _pass_over(self, model: Model) -> None:
        missing, model.blocked = model.lane.next_seq, None
        message = (
            f"seq_id={missing} of {model.id!r} did not come within {self._settings.gap_seconds:g} seconds, so what waited "
            "behind it was not done; count on from here, or create a new client"
        )
        waiting = [
            item for item in model.lane.give_up() if isinstance(item, Request) and item.row.is_to_do
        ]
        await self._refuse(model, waiting, Failed(message, "user"))
        self.wake(model)

    async def _refuse(self, model: Model, requests: Sequence[Request], why: Failed) -> None:
        """Decide, for good, that requests in the lane will not be done. Their turn still comes."""

        def refuse(transaction: Transaction) -> None:
            change(transaction, ModelRow, model.id, passed=model.lane.passed)
            for request in requests:
                journal.finish(transaction, request.row, why, time.time())

        for request in requests:
            request.row = replace(
                request.row,
                state="refused",
                message=why.message,
                category=why.category,
                error_class=why.error_class,
            )
        model.row = replace(model.row, passed=model.lane.passed)
        await self._store.keep(refuse)

    async def _start_over(self, model: Model, error: Exception) -> None:
        """The model cannot be had as it should be: fail what was taken and what is ready, and begin
        with the journal next time.
        """
        await self._replay.unload(model)
        self._residency.forget(model.residence)
        taken = list(model.running.values())
        model.running.clear()
        why = failure(error)
        for request in taken:
            self._steps.settle(model, request, why, state="refused")
        for item in iter(model.lane.take, None):
            if isinstance(item, Request):
                self._steps.settle(model, item, why, state="refused")


def unloaded(row: RequestRow) -> Done:
    """The answer of a request to unload a model."""
    return result_of(row.kind, UnloadModel(row.owner), None)


def _refusal(row: RequestRow) -> Failed:
    return Failed(row.message or "it was refused", row.category or "user", row.error_class)
