"""The samplers that a training model publishes: their publication, and the save of their weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from planish.errors import EngineClosedError, UserError
from planish.fleet.link import ReplicaLostError
from planish.server.durable.checkpoints import sampler_name
from planish.server.durable.crash_points import crash_point
from planish.server.engine_client import EngineClient
from planish.server.models.request_queue import InFlight
from planish.server.samplers import Sampler, Samplers
from planish.service import PublishSampler, ReleaseSampler, SaveWeightsForSampler
from planish.types import SaveWeightsForSamplerResponse

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Publications:
    """The published samplers of one training model."""

    _model_id: str
    _engine: EngineClient
    _samplers: Samplers
    _in_flight: InFlight
    _spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    """Runs work in a task of the model."""
    _note_lost_work: Callable[[], None]
    """Called when a sampler's weights could not be saved."""

    async def publish(
        self, seq: int, operation: PublishSampler
    ) -> tuple[asyncio.Future[str], Sampler]:
        """Queue the publication of a sampler, directly followed by a save of its weights. Return
        the future of the publication, and the sampler. Raise UserError if the sampler was closed.
        """
        sampler = self._samplers.get(operation.sampler_id)
        if sampler is None:
            raise UserError(
                f"sampling_session_id={operation.sampler_id!r} was closed before it was created; "
                "create another one"
            )
        if self._samplers.is_loaded(sampler):
            # The request runs again, and has published the sampler before.
            await self._save_published(seq, operation)
            published: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            published.set_result(sampler.id)
            return published, sampler
        return await self._publish(seq, operation), sampler

    async def note_published(self, sampler: Sampler) -> None:
        """Note that the engine has published a sampler."""
        await self._samplers.note_published(sampler)

    def note_failed(self, seq: int, message: str) -> None:
        """Note that a request failed. A sampler that it should have published fails too."""
        self._samplers.note_failed_request(self._model_id, seq, message)

    async def _publish(self, seq: int, operation: PublishSampler) -> asyncio.Future[str]:
        publication = await self._engine.submit(operation)
        try:
            await self._save_published(seq, operation)
        except ReplicaLostError:
            with suppress(UserError, EngineClosedError):
                await publication
                await self._engine.perform(ReleaseSampler(operation.sampler_id))
            raise
        return publication

    async def _save_published(self, seq: int, operation: PublishSampler) -> None:
        """Queue a save of the model's present weights as those of a published sampler, and record
        in the background where they were saved.
        """
        save = await self._engine.submit(
            SaveWeightsForSampler(operation.model_id, sampler_name(seq), overwrite=True)
        )
        sampler = self._samplers.get(operation.sampler_id)

        async def record() -> None:
            try:
                if not await self._record_save(sampler, save):
                    self._note_lost_work()
            finally:
                # If the model was restored meanwhile, a newer save has replaced this one.
                if self._in_flight.unsaved_samplers[seq] is task:
                    del self._in_flight.unsaved_samplers[seq]
                self._in_flight.notify()

        self._in_flight.unsaved_samplers[seq] = task = self._spawn(record())

    async def _record_save(
        self, sampler: Sampler | None, save: asyncio.Future[SaveWeightsForSamplerResponse]
    ) -> bool:
        """Record where a published sampler's weights were saved, or delete them if it was closed.
        Return False if the weights are not on disk.
        """
        try:
            path = (await save).path
            info = await self._engine.checkpoints.info(path)
            crash_point("sampler saved before recording")
            if sampler is None or self._samplers.get(sampler.id) is not sampler:
                await self._engine.checkpoints.delete(path)
            else:
                await self._samplers.record_save(sampler, path, info.checkpoint.size_bytes or 0)
        except Exception as error:
            if not isinstance(error, EngineClosedError):
                sampler_id = "that was closed" if sampler is None else sampler.id
                _log.exception("the published sampler %s could not be saved yet", sampler_id)
            return False
        return True

    async def publish_again(self, seq: int, operation: PublishSampler) -> None:
        """Publish a sampler again, unless its weights are on disk or it was closed. A sampler that
        is in memory has these weights and may have running samples, so only its save is repeated.
        """
        sampler = self._samplers.get(operation.sampler_id)
        if sampler is None or sampler.row.source is not None:
            return
        if self._samplers.is_loaded(sampler):
            await self._save_published(seq, operation)
        else:
            await (await self._publish(seq, operation))
            await self._samplers.note_published(sampler)
