"""The parts of a server that its models and samplers use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from planish.engine.engine import Engine
from planish.errors import UnknownModelError
from planish.server.durable.checkpoints import CheckpointCatalog
from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.expiry_clock import ExpiryClock
from planish.server.durable.failed_requests import FailedRequests
from planish.server.durable.request_log import RequestLog, TenantLimits
from planish.server.durable.store import Store
from planish.server.engine_client import WARMUP_SAMPLE, DeviceClock, EngineClient
from planish.server.metrics import Counters
from planish.server.samplers import Samplers
from planish.server.scheduling import AdapterCache, FairQueue
from planish.server.sessions import SESSION_ENDED, Sessions
from planish.server.settings import ServerSettings

_LONG_REQUEST_TOKENS = 4096
"""A training request with more tokens than this counts as long. If there are several training
slots, one of them is reserved for short requests.
"""


class Services:
    """The parts of one server that its models and samplers use. `Server` is the only subclass."""

    def __init__(
        self,
        engine: Engine,
        data_dir: Path,
        base_models: Sequence[str],
        settings: ServerSettings,
    ) -> None:
        """Create the parts. `Server` describes the arguments and the errors."""
        self.settings = settings
        self.base_models = tuple(base_models)
        self.engine = EngineClient(engine, data_dir)
        self.store = Store(data_dir)
        self.counters = Counters()
        self.limits = TenantLimits(settings)
        self.crash_guard = CrashGuard(self.store, self._load_base_models)
        self.request_log = RequestLog(
            self.store,
            settings,
            self.limits,
            self.counters,
            self.crash_guard,
            FailedRequests(self.store, settings),
        )
        self.adapter_cache = AdapterCache(settings.adapter_memory_bytes, self.counters)
        # While the clock was wrong, results and sessions may have got wrong times. So the delay is
        # at least as long as results and sessions are kept.
        self.expiry_clock = ExpiryClock(
            max(settings.expiry_delay, settings.result_retention, settings.session_timeout)
        )
        self.checkpoints = CheckpointCatalog(self.engine, self.store, settings, self.expiry_clock)
        self.training_queue = FairQueue(
            settings.training_slots,
            settings.max_training_slots_per_tenant,
            long_capacity=max(1, settings.training_slots - 1),
            long_tokens=_LONG_REQUEST_TOKENS,
        )
        self.sampling_queue = FairQueue(
            settings.sampling_slots, settings.max_sampling_slots_per_tenant
        )
        self.sessions = Sessions(
            self.store, settings, self.request_log.check_disk, self._close_functions
        )
        self.samplers = Samplers(self)
        self.clock = DeviceClock()
        self.stopping = asyncio.Event()
        """Set when the server begins to stop. Models then take no more requests from their
        queues.
        """

    def check_base_model(self, name: str) -> None:
        """Raise UnknownModelError for a base model that is not served. This check keeps a client
        from starting a download with an arbitrary name.
        """
        if name not in self.base_models:
            raise UnknownModelError(
                f"base_model={name[:200]!r} is not served here; this server has "
                f"{', '.join(self.base_models)}"
            )

    async def _load_base_models(self) -> None:
        for name in self.base_models:
            with suppress(Exception):  # only requests of this base model will fail
                await self.engine.check_sample(name, WARMUP_SAMPLE)

    def _close_functions(self, session_id: str) -> list[Callable[[], Awaitable[None]]]:
        """Return the functions that close the open models and samplers of a session, one each."""
        models = [m for m in self.sessions.models.values() if m.row.session == session_id]
        samplers = [s for s in self.samplers.open_samplers() if s.row.session == session_id]
        return [
            *(partial(model.close_when_idle, SESSION_ENDED) for model in models),
            *(partial(self.samplers.close, sampler, SESSION_ENDED) for sampler in samplers),
        ]
