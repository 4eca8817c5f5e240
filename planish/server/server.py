"""The server without HTTP: sessions, models, samplers, requests and their results.

Each of these is stored durably and belongs to one tenant. A request passes three stages:

    intake         checks the tenant's limits and the disk, and writes the request to the journal
    turn           waits until the request may run: for a slot, the adapter and the crash guard
    settle         writes the answer to the journal, and then sends it

Between these stages, models and samplers say only what differs between them:

    models/        training models: each runs its requests in the order of their numbers, and is
                   restored from snapshots and by replay
    samplers       samplers, which are loaded from checkpoints or published by models
    sampling       samples: each request is a task, and the order does not matter

They use these parts:

    sessions       sessions
    request        one request: its row in the journal, its operation and its answer
    durable/       the journal, the unanswered requests, checkpoints, and the crash guard
    scheduling     fair queues (of training and sampling; HTTP has more), and the adapter cache
    engine_client  the engine, called from the event loop
    runs           training runs, and the checkpoints in them
    session_timeline   the requests of a session with their times
    stored_runs    runs that only hold a copied or imported checkpoint
    maintenance    recovers the state of an earlier process, and removes expired state

All methods are called in the event loop, and no method blocks it. Every lookup is by (tenant, id).
An id of another tenant raises NotFound. The methods raise UserError and the errors of results.py,
and `status_of` gives the HTTP status of an error. The id of a model is `{session}:train:{n}`, and
the id of a sampler is `{session}:sample:{n}`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path

from planish.engine.engine import HostedEngine
from planish.errors import EngineClosedError
from planish.processes.memory import resident_bytes
from planish.server.durable import base_weights
from planish.server.durable.checkpoint_maintenance import CheckpointMaintenance
from planish.server.durable.checkpoints import CheckpointCatalog, CheckpointDownloads
from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.expiry_clock import ExpiryClock
from planish.server.durable.failed_requests import FailedRequests
from planish.server.durable.links import LinkSigner
from planish.server.durable.records import ModelRow, count
from planish.server.durable.request_log import RequestLog
from planish.server.durable.store import Store
from planish.server.engine_client import DeviceClock, EngineClient
from planish.server.intake import Intake
from planish.server.maintenance import Cleanup, Recovery
from planish.server.metrics import Counters, Metrics
from planish.server.models.adapter import ModelAdapter
from planish.server.models.catalog import Models
from planish.server.models.intake import ModelIntake, OperationCheck
from planish.server.models.model import ModelActor
from planish.server.models.replay import Replay
from planish.server.models.request_queue import QueueItem, RequestQueue
from planish.server.models.submission import RequestSubmitter
from planish.server.runs import TrainingRuns
from planish.server.samplers import Samplers
from planish.server.sampling import Sampling
from planish.server.scheduling import AdapterCache, FairQueue
from planish.server.session_timeline import Timelines
from planish.server.sessions import SESSION_ENDED, SessionMembers, Sessions
from planish.server.settings import ServerSettings
from planish.server.settle import Settlement
from planish.server.stored_runs import StoredRuns
from planish.server.tenant_limits import TenantLimits
from planish.server.turn import Turns

_log = logging.getLogger(__name__)

_LONG_REQUEST_TOKENS = 4096
"""A training request with more tokens than this counts as long. If there are several training
slots, one of them is reserved for short requests.
"""


class Server:
    """One server: its parts, and the operations that need several parts."""

    def __init__(
        self,
        engine: HostedEngine,
        data_dir: Path,
        base_models: Sequence[str],
        settings: ServerSettings | None = None,
    ) -> None:
        """`stop` closes the engine. Clients can use only `base_models`. Another
        base model is rejected before the engine sees its name. `data_dir` is the directory of the
        database and the checkpoints.

        Raise UserError if another process uses `data_dir`, and DamagedFileError or StorageError if
        `Store` cannot open it.
        """
        self.settings = settings = settings or ServerSettings()
        self.engine = EngineClient(engine, data_dir, base_models)
        self.store = Store(data_dir)
        self.counters = Counters()
        self.stopping = asyncio.Event()
        """Set when the server begins to stop."""
        self.tenant_limits = TenantLimits(settings)
        self.failed_requests = FailedRequests(self.store, settings)
        self.crash_guard = CrashGuard(self.store, self.engine.load_base_models)
        self.adapter_cache = AdapterCache(settings.adapter_memory_bytes, self.counters)
        self.expiry_clock = ExpiryClock()
        self.checkpoints = CheckpointCatalog(self.engine, self.store, settings)
        links = LinkSigner(data_dir)
        self.downloads = CheckpointDownloads(self.checkpoints, self.engine, links)
        self.checkpoint_maintenance = CheckpointMaintenance(
            self.checkpoints, self.engine, self.store, settings, self.expiry_clock
        )
        self.training_queue = FairQueue(
            settings.training_slots,
            settings.max_training_slots_per_tenant,
            long_capacity=max(1, settings.training_slots - 1),
            long_tokens=_LONG_REQUEST_TOKENS,
        )
        self.sampling_queue = FairQueue(
            settings.sampling_slots, settings.max_sampling_slots_per_tenant
        )
        # The stages of a request.
        self.request_log = RequestLog(self.store, settings, self.tenant_limits, self.crash_guard)
        self.intake = Intake(
            self.store,
            self.request_log,
            self.tenant_limits,
            self.counters,
            self.failed_requests,
            settings.min_free_disk_bytes,
        )
        self._training_turns = self._turns(self.training_queue)
        self.settlement = Settlement(
            self.store,
            self.request_log,
            self.counters,
            self.failed_requests,
            settings.result_memory_bytes,
        )
        # What the requests use.
        self.sessions = Sessions(
            self.store, settings, self.intake.check_disk, SessionMembers(self._close_functions)
        )
        self.samplers = Samplers(
            self.store,
            self.engine,
            self.sessions,
            self.checkpoints,
            self.intake,
            self.adapter_cache,
            self.crash_guard,
            settings,
        )
        self.sampling = Sampling(
            self.samplers,
            self.engine,
            self.intake,
            self._turns(self.sampling_queue),
            self.settlement,
            self.request_log,
            self.tenant_limits,
            self.counters,
        )
        self._replay = Replay(
            self.store, self.engine, self.request_log, self.crash_guard, settings, self.counters
        )
        self._submitter = RequestSubmitter(
            self.engine, self.checkpoints, self.request_log, DeviceClock()
        )
        self._operation_check = OperationCheck(self.store, self.checkpoints, settings)
        self.models = Models(
            self.store,
            self.engine,
            self.sessions,
            self.checkpoints,
            self.intake,
            self.settlement,
            settings,
            self._make_model,
        )
        self.runs = TrainingRuns(self.store, self.models, self.checkpoints)
        self.stored_runs = StoredRuns(
            self.store,
            self.engine,
            self.sessions,
            self.checkpoints,
            self.intake,
            self.models.run_lock,
        )
        self.timelines = Timelines(self.store, self.sessions, self.request_log, links)
        self.cleanup = Cleanup(
            self.store,
            self.sessions,
            self.checkpoint_maintenance,
            self.models,
            self.samplers,
            self.adapter_cache,
            self.failed_requests,
            self.expiry_clock,
            settings,
        )
        self._recovery = Recovery(
            self.store,
            self.engine,
            self.sessions,
            self.checkpoint_maintenance,
            self.models,
            self.samplers,
            self.sampling,
            self.request_log,
            self.settlement,
        )
        self._background_tasks: list[asyncio.Task[None]] = []

    def _turns(self, queue: FairQueue) -> Turns:
        return Turns(queue, self.crash_guard, self.stopping)

    def _make_model(
        self, row: ModelRow, queue: RequestQueue[QueueItem], unload_seq: int | None
    ) -> ModelIntake:
        adapter = ModelAdapter(row, queue, self.engine, self._replay, self.samplers)
        model = ModelActor(
            adapter,
            self.request_log,
            self.adapter_cache,
            self._training_turns,
            self._submitter,
            self.settlement,
            self.models.forget,
        )
        return ModelIntake(
            model,
            self.intake,
            self._operation_check,
            self.sessions,
            self.samplers,
            self.store,
            self.settings.missing_request_timeout,
            unload_seq,
        )

    def _close_functions(self, session_id: str) -> list[Callable[[], Awaitable[None]]]:
        """Return the functions that close the open models and samplers of a session, one each."""
        models = [m for m in self.models.open_models() if m.row.session == session_id]
        samplers = [s for s in self.samplers.open_samplers() if s.row.session == session_id]
        return [
            *(partial(model.close_when_idle, SESSION_ENDED) for model in models),
            *(partial(self.samplers.close, sampler, SESSION_ENDED) for sampler in samplers),
        ]

    # Life of the process.

    async def start(self) -> None:
        """Recover the state of an earlier process, and resume its requests in the background. The
        server accepts requests when this returns. Raise UserError if the weights of a base model
        changed while models or samplers of this base model are open.
        """
        started = time.monotonic()
        await base_weights.check(self.store, self.engine, self.engine.base_models)
        await self.crash_guard.begin()
        await self.failed_requests.load_sizes()
        await self.expiry_clock.begin(self.store)
        recovered = await self._recovery.recover()
        self._background_tasks = [
            asyncio.create_task(self.cleanup.run(), name="cleanup"),
            asyncio.create_task(self._verify_checkpoints(), name="verification of checkpoints"),
        ]
        self.engine.accept_requests(True)
        _log.info(
            "ready in %.1f s with %d sessions, %d models, %d samplers and %d unanswered requests "
            "from before",
            time.monotonic() - started,
            recovered.sessions,
            recovered.models,
            recovered.samplers,
            recovered.requests,
        )

    async def drain(self, seconds: float) -> None:
        """Reject new requests, and wait up to `seconds` for the requests in the engine. Then take
        snapshots of the models. All other requests stay in the journal, and unfinished samples of
        clients that wait on a connection end with Unavailable.
        """
        if self.stopping.is_set():
            return
        self.stopping.set()
        self.engine.accept_requests(False)
        self.request_log.disk_faults.stop()
        for task in self._background_tasks:
            task.cancel()
        deadline = time.monotonic() + seconds
        # No sample may start while the background tasks end.
        await asyncio.gather(self.sampling.stop(seconds), self._stop_models(seconds))
        await asyncio.gather(*self._background_tasks, return_exceptions=True)
        _log.info(
            "finished running requests, %.1f s before the deadline", deadline - time.monotonic()
        )

    async def stop(self, seconds: float) -> None:
        """Drain the server, unless that was done before, and close it."""
        await self.drain(seconds)
        await asyncio.gather(self.sessions.stop(), self._recovery.stop())
        await self.engine.close()
        if self.engine.fault is None:
            await self.crash_guard.end()
        _log.info("stopped")
        await asyncio.to_thread(self.store.close)

    async def _stop_models(self, seconds: float) -> None:
        """Stop the models. After `seconds`, give up on those that are not finished."""
        try:
            async with asyncio.timeout(seconds):
                await self.models.stop()
        except TimeoutError:
            _log.warning(
                "some work was not finished within %g seconds; it stays in the journal", seconds
            )

    async def _verify_checkpoints(self) -> None:
        try:
            await self.checkpoint_maintenance.verify()
        except EngineClosedError:
            return
        except Exception:
            _log.exception("the checkpoints could not be verified; the next start tries again")

    async def metrics(self) -> Metrics:
        """Return the counters since the start, and the current values of the gauges."""
        cache, request_log = self.adapter_cache, self.request_log
        snapshots = await self.store.read(count, ModelRow, "snapshot IS NOT NULL")
        counters = deepcopy(self.counters)
        counters.num_preemptions, num_preempted = self.engine.preemptions()
        return Metrics(
            counters=counters,
            queued_requests=request_log.queued_counts(),
            running_sequences=self.sampling_queue.used_slots,
            waiting_sequences=self.sampling_queue.num_waiting,
            preempted_sequences=num_preempted,
            running_training_operations=self.training_queue.used_slots,
            waiting_training_operations=self.training_queue.num_waiting,
            open_sessions=self.sessions.open_count,
            open_models=len(self.models.open_models()),
            open_samplers=len(self.samplers.open_samplers()),
            adapters_in_memory=sum(adapter.memory_bytes > 0 for adapter in cache.loaded_adapters()),
            adapter_bytes=cache.used_bytes,
            request_bytes=request_log.operation_bytes,
            result_bytes=self.settlement.recent_answer_bytes,
            resident_bytes=resident_bytes(),
            models_with_snapshot=snapshots,
            checkpoint_bytes=await self.checkpoints.bytes_by_tenant(),
            unnamed_sampler_bytes=sum(
                s.row.bytes for s in self.samplers.open_samplers() if s.row.model
            ),
            disk=await asyncio.to_thread(self.store.disk_usage),
            disk_is_full=self.intake.disk_is_full(),
        )
