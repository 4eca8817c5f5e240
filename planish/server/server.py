"""The server without HTTP: sessions, models, samplers, requests and their results, durable and
apart by tenant.

    submission -> journal -> training (a lane and a worker for each model) -> engine
                          -> sampling (a task for each request)
    replay, snapshots, recovery     what makes a kill a pause
    under_way                       which request killed, if it was one
    residency, fair_gate, limits    who may use the device and its memory
    retention                       what goes by itself

All methods are called in the event loop and none blocks it. Every lookup is by (tenant, id):
another tenant's id raises NotFound. Errors are those of errors.py and UserError; `status_of` has
their HTTP status. Operations are planish.service's, with ids that name session and number: model
`{session}:train:{n}`, sampler `{session}:sample:{n}`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

from planish.server.cleanup import Cleanup
from planish.server.durable.checkpoints import CheckpointCatalog, CheckpointFiles
from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.records import ModelRow, count
from planish.server.durable.request_log import RequestLog, TenantLimits
from planish.server.durable.store import Store
from planish.server.engine_client import NOBODYS_SAMPLE, EngineClient
from planish.server.metrics import Counters, Metrics, resident_bytes
from planish.server.models.publishing import Publishing
from planish.server.models.replay import Replay
from planish.server.models.snapshots import Snapshots
from planish.server.models.steps import TrainingSteps
from planish.server.models.training import Training
from planish.server.recovery import Recovery
from planish.server.results import (
    Accepted,
    Gone,
    Outcome,
    Page,
    SessionRecord,
    SessionSpec,
    Tenant,
    TrainingRun,
    stopping,
)
from planish.server.sampler_creation import SamplerCreation
from planish.server.samplers import Samplers
from planish.server.sampling import Sampling
from planish.server.scheduling.adapter_cache import AdapterCache
from planish.server.scheduling.fair_queue import FairQueue
from planish.server.sessions import Sessions
from planish.server.settings import ServerSettings
from planish.server.submission import Submission
from planish.server.training_runs import TrainingRuns
from planish.service import (
    CheckpointInfo,
    CreateModel,
    CreateSampler,
    HostedService,
    Operation,
    Sample,
    SamplerInfo,
)
from planish.types import Checkpoint, GetInfoResponse, GetServerCapabilitiesResponse, SampleResponse
from planish.wire.models import SessionPlace

_log = logging.getLogger(__name__)

_LONG_TOKENS = 4096
"""Data of a training request that take the engine more than a turn or two, which others would wait
for.
"""


class Server:
    def __init__(
        self,
        service: HostedService,
        data_dir: Path,
        base_models: Sequence[str],
        settings: ServerSettings | None = None,
    ) -> None:
        """`service` is an Engine as it is; names outside of `base_models` are refused here, with
        the list, before it hears of them.

        `data_dir`: for database, journal and bodies; UserError if another process holds it. `keys`
        maps each key to its tenant's name (tenancy.read_keys reads a file of them); None: no key is
        asked for. The service is closed by `stop`.
        """
        settings = settings or ServerSettings()
        self._base_models = tuple(base_models)
        self._engine = engine = EngineClient(service, data_dir)
        self._store = store = Store(data_dir)
        self._counters = counters = Counters()
        self.limits = TenantLimits(settings)
        self._under_way = under_way = CrashGuard(store, self._load_base_models)
        self.requests = requests = RequestLog(store, settings, self.limits, counters, under_way)
        self.residency = AdapterCache(settings.adapter_memory_bytes, counters)
        self._catalog = catalog = CheckpointCatalog(engine, store, settings)
        self.samplers = samplers = Samplers(engine, store, self.residency, under_way)
        self.training_gate = FairQueue(
            settings.training_slots,
            settings.training_share,
            long_capacity=max(1, settings.training_slots - 1),
            long_tokens=_LONG_TOKENS,
        )
        self.sampling_gate = FairQueue(settings.sampling_slots, settings.sampling_share)
        publishing, snapshots = (
            Publishing(engine, samplers),
            Snapshots(engine, store, settings, counters),
        )
        steps = TrainingSteps(
            engine,
            requests,
            under_way,
            self.training_gate,
            catalog,
            samplers,
            publishing,
            snapshots,
            counters,
        )
        replay = Replay(engine, store, requests, under_way, publishing, counters)
        self.training = training = Training(
            store, self.residency, replay, snapshots, steps, settings
        )
        self._sampling = sampling = Sampling(
            engine, requests, under_way, samplers, self.sampling_gate, self.limits, counters
        )
        self._sessions = sessions = Sessions(store, training, samplers)
        self._submission = Submission(
            base_models,
            engine,
            store,
            sessions,
            requests,
            training,
            sampling,
            samplers,
            catalog,
            settings,
        )
        self._sampler_creation = SamplerCreation(
            engine, store, sessions, requests, samplers, catalog, self._submission
        )
        self._runs = TrainingRuns(engine, store, requests, catalog, self._submission)
        self._recovery = Recovery(
            engine, store, sessions, requests, training, samplers, sampling, catalog
        )
        self.retention = Cleanup(
            store, sessions, training, samplers, self.residency, catalog, settings
        )
        self._cleaning: asyncio.Task[None] | None = None
        self._is_open = False

    # Life of the process.

    async def start(self) -> None:
        """Know again what an earlier process left, and go on with it in the background. RequestLog
        are taken when this returns.
        """
        begun = time.monotonic()
        await self._under_way.begin()
        recovered = await self._recovery.recover()
        self._cleaning = asyncio.create_task(self.retention.run(), name="retention")
        self._is_open = True
        _log.info(
            "ready in %.1f s, with %d sessions, %d models, %d samplers and %d unanswered requests of before",
            time.monotonic() - begun,
            recovered.sessions,
            recovered.models,
            recovered.samplers,
            recovered.requests,
        )

    async def stop(self, seconds: float) -> None:
        """Refuse new requests, finish for up to `seconds` what the engine has, take snapshots,
        close. The journal keeps the rest.
        """
        self._is_open = False
        if self._cleaning is not None:
            self._cleaning.cancel()
            await asyncio.wait([self._cleaning])
        until = time.monotonic() + seconds
        await asyncio.gather(self._sampling.stop(seconds), self.training.stop(seconds))
        await self._sessions.stop()
        await self._engine.close()
        if self._engine.fault is None:
            await self._under_way.end()
        _log.info("stopped, %.1f s before it had to", until - time.monotonic())
        await asyncio.to_thread(self._store.close)

    async def _load_base_models(self) -> None:
        for name in self._base_models:
            with suppress(Exception):  # one that cannot be loaded refuses its own requests
                await self._engine.check_sample(name, NOBODYS_SAMPLE)

    def healthy(self) -> bool:
        """Whether requests are accepted."""
        return self._is_open and self._engine.fault is None

    def disk_is_full(self) -> bool:
        """Whether new work is refused for want of space, or because the disk refuses what is
        written. Reads the disk: for a thread.
        """
        return self.requests.disk_is_full()

    async def metrics(self) -> Metrics:
        """What was done since the start, and how much of everything there is now."""
        residency, requests = self.residency, self.requests
        snapshots = await self._store.read(lambda db: count(db, ModelRow, "snapshot IS NOT NULL"))
        return Metrics(
            counters=deepcopy(self._counters),
            queued=requests.queued(),
            sequences=self.sampling_gate.used,
            waiting_sequences=self.sampling_gate.waiting,
            training_operations=self.training_gate.used,
            waiting_training=self.training_gate.waiting,
            open_sessions=self._sessions.open_count,
            open_models=len(self.training.all()),
            open_samplers=len(self.samplers.all()),
            adapters_in_memory=sum(resident.memory_bytes > 0 for resident in residency.loaded()),
            adapter_bytes=residency.used_bytes,
            request_bytes=requests.operation_bytes,
            result_bytes=requests.recent_bytes,
            resident_bytes=resident_bytes(),
            models_with_snapshot=snapshots,
            checkpoint_bytes=await self._catalog.bytes_by_tenant(),
            ephemeral_bytes=sum(sampler.row.bytes for sampler in self.samplers.all()),
            disk=await asyncio.to_thread(self._store.disk),
            disk_is_full=requests.disk_is_full(),
        )

    # Sessions.

    async def create_session(self, tenant: Tenant, spec: SessionSpec) -> str:
        """A new session's id."""
        self._check_open()
        return await self._sessions.create(tenant, spec)

    async def heartbeat(self, tenant: Tenant, session_id: str) -> None:
        """Gone when the session has ended."""
        await self._sessions.touch(tenant, session_id)

    async def finish_session(
        self, tenant: Tenant, session_id: str, reason: str, detail: str | None
    ) -> None:
        """`reason`: success, errored or interrupted. Finishing twice is fine."""
        try:
            await self._sessions.touch(tenant, session_id)
        except Gone:
            return
        await self._sessions.end(session_id, f"{reason}: {detail}" if detail else reason)

    async def sessions(self, tenant: Tenant, limit: int, offset: int) -> Page[str]:
        """Newest first."""
        return await self._sessions.page(tenant, limit, offset)

    async def session(self, tenant: Tenant, session_id: str) -> SessionRecord:
        return await self._sessions.record(tenant, session_id)

    # RequestLog.

    async def create_model(self, tenant: Tenant, operation: CreateModel) -> Accepted:
        """Fresh or from a checkpoint. The model id names session and number; a repetition gets the
        same request id.
        """
        self._check_open()
        return await self._submission.create_model(tenant, operation)

    async def submit_training(
        self, tenant: Tenant, seq_id: int, operation: Operation[object]
    ) -> Accepted:
        """An operation of a model that exists, which runs once all lower numbers have.

        The same number with the same operation gets the same request id, with another one
        BadRequest. An operation that is refused (BadRequest, NotFound) has used up its number.
        """
        self._check_open()
        return await self._submission.submit_training(tenant, seq_id, operation)

    async def reject(
        self,
        tenant: Tenant,
        model_id: str,
        seq_id: int,
        error: Exception,
        kind: str = "forward_backward",
    ) -> None:
        """The body of this number could not be read: it is used up, and an optimizer step behind a
        missing forward_backward fails.

        `kind` as in `Done`. The caller raises `error` after it.
        """
        self._check_open()
        await self._submission.reject(tenant, model_id, seq_id, error, kind)

    async def unload_model(self, tenant: Tenant, model_id: str) -> Accepted:
        """After what was accepted before; the model takes no more operations. Its checkpoints and
        samplers stay.
        """
        self._check_open()
        return await self._submission.unload_model(tenant, model_id)

    async def create_sampler(self, tenant: Tenant, operation: CreateSampler) -> str:
        """Answers the sampler's id when it is ready to sample; a repetition finds it there."""
        self._check_open()
        return await self._sampler_creation.create(tenant, operation)

    async def submit_sample(self, tenant: Tenant, seq_id: int, operation: Sample) -> Accepted:
        """As submit_training, without an order. `operation.sampler_id` is the sampling session."""
        self._check_open()
        return await self._submission.submit_sample(tenant, seq_id, operation)

    async def cancel(self, tenant: Tenant, request_id: str) -> None:
        """Gives up a sample that is not done; other requests, and what is done, stay as they are."""
        request = self.requests.active(request_id)
        if request is not None and request.row.tenant == tenant.name:
            self._sampling.cancel(request_id)

    async def result(self, tenant: Tenant, request_id: str, wait_seconds: float) -> Outcome:
        """Wait for at most `wait_seconds`. NotFound, or Gone when the result has aged. Results can
        be read many times.
        """
        return await self.requests.outcome(tenant.name, request_id, wait_seconds)

    # What there is.

    def capabilities(self) -> GetServerCapabilitiesResponse:
        models = self._engine.capabilities().supported_models
        return GetServerCapabilitiesResponse(
            [model for model in models if model.model_name in self._base_models]
        )

    async def model_info(self, tenant: Tenant, model_id: str) -> GetInfoResponse:
        """Waits for the model's creation if that is under way."""
        return await self._runs.info(tenant, model_id)

    async def check_sample(self, base_model: str, operation: Sample) -> None:
        """ValueError if no sampler of the base model could ever serve it."""
        await self._sampling.check(base_model, operation)

    async def draw(self, tenant: Tenant, operation: Sample) -> SampleResponse:
        """A sample that is not journaled, for whoever holds a connection. Gone if its sampler was
        let go.
        """
        self._check_open()
        sampler = self.samplers.get(operation.sampler_id)
        if sampler is None:
            raise Gone("the model was let go in this moment; ask again")
        return await self._sampling.draw(tenant.name, sampler, operation)

    async def sampler_info(self, tenant: Tenant, sampler_id: str) -> SamplerInfo:
        row = await self.samplers.row(tenant, sampler_id)
        return SamplerInfo(sampler_id, row.base_model, row.model_path)

    async def training_runs(self, tenant: Tenant, limit: int, offset: int) -> Page[TrainingRun]:
        """Newest first."""
        return await self._runs.page(tenant, limit, offset)

    async def training_run(self, tenant: Tenant, run_id: str) -> TrainingRun:
        return await self._runs.run(tenant, run_id)

    # Checkpoints: one's own, and for reading those that their owner published. `path` is
    # tinker://RUN/KIND/NAME.

    async def checkpoints(
        self, tenant: Tenant, run_id: str | None = None, limit: int | None = None, offset: int = 0
    ) -> Page[Checkpoint]:
        """Newest first. NotFound for a run that is not the tenant's."""
        if run_id is not None:
            await self._submission.model_row(tenant, run_id)
        return await self._catalog.page(tenant, run_id, limit, offset)

    async def checkpoint_info(self, tenant: Tenant, path: str) -> CheckpointInfo:
        return await self._catalog.info(tenant, path)

    async def delete_checkpoint(self, tenant: Tenant, path: str) -> None:
        await self._catalog.delete(tenant, path)

    async def set_public(self, tenant: Tenant, path: str, public: bool) -> None:
        """Conflict if it is so already."""
        await self._catalog.set_public(tenant, path, public)

    async def set_ttl(self, tenant: Tenant, path: str, ttl_seconds: int | None) -> None:
        """From now on; None: keep it."""
        await self._catalog.set_ttl(tenant, path, ttl_seconds)

    async def copy_checkpoint(
        self,
        tenant: Tenant,
        source: str,
        session_id: str,
        model_seq_id: int,
        ttl_seconds: int | None,
    ) -> str:
        """A copy that belongs to the run `{session}:train:{n}`; answers its path. A repetition
        finds the copy there.
        """
        self._check_open()
        await self._sessions.touch(tenant, session_id)
        return await self._runs.copy_checkpoint(
            tenant, source, SessionPlace(session_id, model_seq_id), ttl_seconds
        )

    async def checkpoint_files(self, tenant: Tenant, path: str) -> CheckpointFiles:
        """The files of a checkpoint, for a download."""
        return await self._catalog.files(tenant, path)

    def download_token(self, tenant: Tenant, path: str, seconds: int) -> str:
        """Lets whoever holds it read one checkpoint's files for a while, as `tenant` may, without a
        key.
        """
        return self._catalog.token(tenant, path, seconds)

    async def files_of_token(self, token: str) -> CheckpointFiles:
        """NotFound for a token that is false or old."""
        return await self._catalog.files_of_token(token)

    def _check_open(self) -> None:
        if not self.healthy():
            raise stopping()
