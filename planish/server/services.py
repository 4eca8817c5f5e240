"""The shared parts of a server (`Services`), and the registry of its open models."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from planish.server.durable.checkpoints import CheckpointCatalog
from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.request_log import RequestLog, TenantLimits
from planish.server.durable.store import Store
from planish.server.engine_client import DeviceClock, EngineClient
from planish.server.metrics import Counters
from planish.server.scheduling import AdapterCache, FairQueue
from planish.server.sessions import Sessions
from planish.server.settings import ServerSettings

if TYPE_CHECKING:
    from planish.server.models.model import Model
    from planish.server.samplers import Samplers

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Services:
    """Everything that all models and samplers of one server share."""

    settings: ServerSettings
    engine: EngineClient
    store: Store
    request_log: RequestLog
    crash_guard: CrashGuard
    limits: TenantLimits
    adapter_cache: AdapterCache
    training_queue: FairQueue
    sampling_queue: FairQueue
    checkpoints: CheckpointCatalog
    sessions: Sessions
    counters: Counters
    clock: DeviceClock = field(default_factory=DeviceClock)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server begins to stop. Models then take no more requests from their queues."""


@dataclass(frozen=True)
class ModelRegistry:
    """The open models of one server by id, and the services that they share."""

    services: Services
    samplers: Samplers
    open: dict[str, Model] = field(default_factory=dict)

    async def stop(self, seconds: float) -> None:
        """Stop all models: wait until the engine has finished their running requests, and then take
        a final snapshot of each loaded model. After `seconds`, give up on the rest. Queued requests
        stay in the journal.
        """
        self.services.stopping.set()
        models = list(self.open.values())
        for model in models:
            model.in_flight.notify()
        try:
            async with asyncio.timeout(seconds):
                # A timeout cancels the workers that still run.
                await asyncio.gather(
                    *(model.worker for model in models if model.worker is not None)
                )
                for model in list(self.open.values()):
                    if self.services.adapter_cache.is_loaded(model):
                        await model.save_snapshot()
        except TimeoutError:
            _log.warning(
                "some work was not finished within %g seconds; it stays in the journal", seconds
            )
