"""How a model comes back into memory: its last snapshot, and then, in their order, the requests
that were answered since.

What was done is done again, and changes the weights to the same bits. What failed, or was refused,
has the effect that it had: a part of a gradient that is missing makes the optimizer step behind it
fail, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import orjson

from planish.errors import CheckpointError, DamagedFileError, EngineClosedError, UserError
from planish.server.durable import journal
from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.journal import RequestRow
from planish.server.durable.names import loaded_path
from planish.server.durable.request_log import RequestLog
from planish.server.durable.store import Store, crash_point
from planish.server.engine_client import EngineClient
from planish.server.metrics import Counters
from planish.server.models.model import Model
from planish.server.models.publishing import Publishing
from planish.server.results import Failed
from planish.service import (
    CreateModel,
    ForwardBackward,
    ForwardBackwardLater,
    LoadWeights,
    OptimStep,
    PublishSampler,
    UnloadModel,
)
from planish.types import AdamParams, Datum, OptimStepResponse
from planish.wire.client_errors import named_error

_log = logging.getLogger(__name__)


class Replay:
    def __init__(
        self,
        engine: EngineClient,
        store: Store,
        requests: RequestLog,
        under_way: CrashGuard,
        publishing: Publishing,
        counters: Counters,
    ) -> None:
        self._engine = engine
        self._store = store
        self._requests = requests
        self._under_way = under_way
        self._publishing = publishing
        self._counters = counters
        self._told: set[str] = set()
        """Models whose sums were not those of before."""

    async def load(self, model: Model) -> None:
        """Bring the model to where it is after every request that left its lane.

        DamagedFileError: a file that it needs was altered or removed. Nothing was changed, so it
        can come back once the file is put back.
        """
        await asyncio.gather(*model.unwritten.values())  # rows tell what was answered
        model.forget_adapter()
        begun = model.snapshot_seq
        try:
            if model.row.snapshot is not None:
                async with self._under_way.doing(model.id):
                    await self._create(model, model.row.snapshot)
                model.applied = begun
            crash_point("loaded before replay")
            rows = await self._store.read(
                lambda connection: journal.of_model(connection, model.id, begun)
            )
            for row in rows:
                if row.seq < model.lane.next_seq:
                    await self.repeat(model, row)
                    crash_point("between replayed operations")
        except BaseException as error:
            await self.unload(model)
            if isinstance(error, (DamagedFileError, CheckpointError)):
                _log.error(
                    "%s cannot come back into memory until the file is put back: %s",
                    model.id,
                    error,
                )
                raise DamagedFileError(
                    f"model_id={model.id!r} cannot come back into memory ({error}). Create a new client from your last checkpoint; whoever "
                    "runs the server may have the file in a backup"
                ) from error
            raise

    async def unload(self, model: Model) -> None:
        """Free what the engine has of it, if it has anything."""
        model.forget_adapter()
        with suppress(UserError, EngineClosedError):
            await self._engine.perform(UnloadModel(model.id))
            crash_point("unloaded")

    async def repeat(self, model: Model, row: RequestRow) -> None:
        """Have the effect of a request that was answered."""
        assert not row.is_to_do, row
        model.applied = row.seq
        model.progress.requests += 1
        if row.is_replayed:
            async with self._under_way.doing(row.id):
                await self._do_again(model, row)
        elif row.state != "done":
            await self.refuse(
                model, row.kind, Failed(row.message or "", row.category or "user", row.error_class)
            )

    async def refuse(self, model: Model, kind: str, why: Failed) -> None:
        """Have the effect of a request that could not be done."""
        if kind not in ("forward_backward", "optim_step"):
            return
        model.is_dirty = kind == "forward_backward"
        missing: Future[Sequence[Datum]] = Future()
        missing.set_exception(named_error(why.message, why.error_class))
        with suppress(ValueError):
            await self._engine.perform(ForwardBackwardLater(model.id, missing, "cross_entropy"))
        if kind == "optim_step":
            with suppress(ValueError):
                await self._engine.perform(OptimStep(model.id, AdamParams()))

    async def _do_again(self, model: Model, row: RequestRow) -> None:
        operation = await self._requests.journaled_operation(row)
        match operation:
            case CreateModel(from_path=None):
                await self._engine.perform(operation)
            case CreateModel(from_path=str(path)):
                await self._engine.perform(
                    replace(operation, from_path=loaded_path(model.id, row.seq, path))
                )
            case LoadWeights(path=path):
                model.is_dirty = False
                await self._engine.perform(
                    replace(operation, path=loaded_path(model.id, row.seq, path))
                )
            case PublishSampler():
                await self._publishing.publish_again(model, row.seq, operation)
            case ForwardBackward():
                model.is_dirty = True
                await self._engine.perform(operation)
            case OptimStep():
                model.is_dirty = False
                await self._compare(model, row, await self._engine.perform(operation))
        self._counters.replayed += 1
        model.progress.changes += 1
        model.progress.bytes += row.body_bytes

    async def _create(self, model: Model, path: str) -> None:
        await self._engine.perform(
            CreateModel(
                model.id, from_path=path, with_optimizer=True, user_metadata=model.row.metadata
            )
        )

    async def _compare(self, model: Model, row: RequestRow, again: OptimStepResponse) -> None:
        """Metrics of a step tell its gradient's norm; if that differs from the first time, so may
        the weights. Told once for each model.
        """
        stored = await self._store.read(lambda connection: journal.result(connection, row.id))
        if stored is None or model.id in self._told:
            return
        # The answer may have aged meanwhile, or be altered: it is needed for nothing else.
        with suppress(ValueError, FileNotFoundError):
            norm = (again.metrics or {}).get("grad_norm")
            before = orjson.loads(self._store.body(stored))["metrics"].get("grad_norm")
            if norm != before:
                self._told.add(model.id)
                _log.warning(
                    "%s has a gradient of norm %s when it is done again, and had %s: the model goes on from weights that may differ as "
                    "much. Another version of planish, --dtype, number of threads or kind of machine than before does that, and a stop in "
                    "order before the change prevents it; if all is as it was, this machine does not repeat its sums",
                    row.id,
                    norm,
                    before,
                )
