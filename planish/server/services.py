"""The parts of a server that all of its models and samplers share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from planish.server.durable.checkpoints import CheckpointCatalog
from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.request_log import RequestLog, TenantLimits
from planish.server.durable.store import Store
from planish.server.engine_client import DeviceClock, EngineClient
from planish.server.metrics import Counters
from planish.server.scheduling import AdapterCache, FairQueue
from planish.server.sessions import Sessions
from planish.server.settings import ServerSettings


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
