"""Samplers of a model's weights as they are, without a name: in memory at once, on disk behind
that.
"""

from __future__ import annotations

import asyncio
import logging

from planish.errors import EngineClosedError
from planish.server.durable.names import sampler_name
from planish.server.durable.store import crash_point
from planish.server.engine_client import EngineClient
from planish.server.models.model import Model
from planish.server.samplers import Sampler, Samplers
from planish.service import PublishSampler, SaveWeightsForSampler
from planish.types import SaveWeightsForSamplerResponse

_log = logging.getLogger(__name__)


class Publishing:
    def __init__(self, engine: EngineClient, samplers: Samplers) -> None:
        self._engine = engine
        self._samplers = samplers

    async def begin(self, model: Model, seq: int, operation: PublishSampler) -> asyncio.Future[str]:
        """Queue it, and the writing of its weights right behind; `model.unsaved` knows until that
        is done.
        """
        published = await self._engine.submit(operation)
        written = await self._engine.submit(
            SaveWeightsForSampler(model.id, sampler_name(seq), overwrite=True)
        )
        sampler = self._samplers.get(operation.sampler_id)
        model.unsaved[seq] = model.spawn(self._save(model, seq, sampler, written))
        return published

    async def publish_again(self, model: Model, seq: int, operation: PublishSampler) -> None:
        """After a crash, unless it is on disk or nobody can ask for it any more."""
        sampler = self._samplers.get(operation.sampler_id)
        if sampler is None or sampler.row.source is not None:
            return
        await self._samplers.release(sampler)
        await (await self.begin(model, seq, operation))
        await self._samplers.published(sampler)

    async def _save(
        self,
        model: Model,
        seq: int,
        sampler: Sampler | None,
        written: asyncio.Future[SaveWeightsForSamplerResponse],
    ) -> None:
        try:
            path = (await written).path
            info = await self._engine.checkpoint_info(path)
            crash_point("sampler saved before recording")
            if sampler is None or self._samplers.get(sampler.id) is not sampler:
                await self._engine.delete_checkpoint(path)
            else:
                await self._samplers.saved(sampler, path, info.checkpoint.size_bytes or 0)
        except EngineClosedError:
            model.is_lossy = True
        except Exception:
            model.is_lossy = True
            _log.exception(
                "the sampler that request %d of %s published could not be saved yet", seq, model.id
            )
        finally:
            del model.unsaved[seq]
            model.changed.set()
