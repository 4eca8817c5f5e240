"""The server without HTTP: sessions, models, samplers, requests and their results.

Each of these is stored durably and belongs to one tenant. The parts:

    services       creates the parts
    sessions       sessions, and the open models in them
    models/        training models: each is an actor with one ordered request queue
    samplers       samplers: each sample request is a task
    durable/       the journal of requests, their answers, checkpoints, and the crash guard
    scheduling     the fair queues of training and sampling, and the adapter cache
    engine_client  the engine, called from the event loop
    maintenance    recovers the state of an earlier process, and removes expired state

All methods are called in the event loop, and no method blocks it. Every lookup is by (tenant, id).
An id of another tenant raises NotFound. The methods raise UserError and the errors of results.py,
and `status_of` gives the HTTP status of an error. The id of a model is `{session}:train:{n}`, and
the id of a sampler is `{session}:sample:{n}`.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from weakref import WeakValueDictionary

from planish.engine.engine import Engine
from planish.errors import EngineClosedError, UserError
from planish.server.durable import base_weights
from planish.server.durable.checkpoints import check_is_not_private
from planish.server.durable.quotas import check_models, row_bytes
from planish.server.durable.records import (
    PAGE_BYTES,
    ModelRow,
    count,
    item_bytes,
    select,
    select_key_page,
    to_json_text,
    upsert,
    utc_time,
)
from planish.server.durable.request_log import (
    JournalEntry,
    new_request_row,
    run_uncancelled,
)
from planish.server.durable.store import Transaction
from planish.server.maintenance import Cleanup, Recovery
from planish.server.metrics import Metrics, resident_bytes
from planish.server.models.model import ModelActor
from planish.server.models.request_queue import RequestQueue
from planish.server.results import (
    Accepted,
    BadRequest,
    Failed,
    Gone,
    NotFound,
    Page,
    Tenant,
    TrainingRun,
)
from planish.server.services import Services
from planish.server.settings import ServerSettings
from planish.server.stored_runs import StoredRuns
from planish.service import CreateModel, UnloadModel
from planish.types import (
    Checkpoint,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    ModelData,
)
from planish.wire.models import session_id_of

_log = logging.getLogger(__name__)

_MAX_CREATION_WAIT_SECONDS = 40.0
"""How long `model_info` waits for the creation of the model."""


class Server(Services):
    """One server: its parts, and the operations that need several parts."""

    def __init__(
        self,
        engine: Engine,
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
        super().__init__(engine, data_dir, base_models, settings or ServerSettings())
        self.cleanup = Cleanup(self)
        self._recovery = Recovery(self)
        self._run_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.stored_runs = StoredRuns(self, self._run_lock)
        self._background_tasks: list[asyncio.Task[None]] = []

    # Life of the process.

    async def start(self) -> None:
        """Recover the state of an earlier process, and resume its requests in the background. The
        server accepts requests when this returns. Raise UserError if the weights of a base model
        changed while models or samplers of this base model are open.
        """
        started = time.monotonic()
        await base_weights.check(self.store, self.engine, self.base_models)
        await self.crash_guard.begin()
        await self.request_log.failed_requests.load_sizes()
        await self.expiry_clock.begin(self.store)
        recovered = await self._recovery.recover()
        self._background_tasks = [
            asyncio.create_task(self.cleanup.run(), name="cleanup"),
            asyncio.create_task(self._verify_checkpoints(), name="verification of checkpoints"),
        ]
        self.engine.accepts_requests = True
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
        self.engine.accepts_requests = False
        self.request_log.disk_faults.stop()
        for task in self._background_tasks:
            task.cancel()
        await asyncio.gather(*self._background_tasks, return_exceptions=True)
        deadline = time.monotonic() + seconds
        await asyncio.gather(self.samplers.stop(seconds), self._stop_models(seconds))
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
        """Stop all models: wait until the engine has finished their running requests, and then take
        a final snapshot of each loaded model. After `seconds`, give up on the rest. Queued requests
        stay in the journal.
        """
        models = list(self.sessions.models.values())
        for model in models:
            model.in_flight.notify()
        try:
            async with asyncio.timeout(seconds):
                # A timeout cancels the workers that still run.
                await asyncio.gather(
                    *(model.worker for model in models if model.worker is not None)
                )
                for model in list(self.sessions.models.values()):
                    if self.adapter_cache.is_loaded(model):
                        await model.save_snapshot()
        except TimeoutError:
            _log.warning(
                "some work was not finished within %g seconds; it stays in the journal", seconds
            )

    async def _verify_checkpoints(self) -> None:
        try:
            await self.checkpoints.correct_expiry()
            await self.checkpoints.verify()
        except EngineClosedError:
            return
        except Exception:
            _log.exception("the checkpoints could not be verified; the next start tries again")

    async def metrics(self) -> Metrics:
        """Return the counters since the start, and the current values of the gauges."""
        cache, request_log = self.adapter_cache, self.request_log
        snapshots = await self.store.read(count, ModelRow, "snapshot IS NOT NULL")
        return Metrics(
            counters=deepcopy(self.counters),
            queued_requests=request_log.queued_counts(),
            running_sequences=self.sampling_queue.used_slots,
            waiting_sequences=self.sampling_queue.num_waiting,
            running_training_operations=self.training_queue.used_slots,
            waiting_training_operations=self.training_queue.num_waiting,
            open_sessions=self.sessions.open_count,
            open_models=len(self.sessions.models),
            open_samplers=len(self.samplers.open_samplers()),
            adapters_in_memory=sum(adapter.memory_bytes > 0 for adapter in cache.loaded_adapters()),
            adapter_bytes=cache.used_bytes,
            request_bytes=request_log.operation_bytes,
            result_bytes=request_log.recent_answer_bytes,
            resident_bytes=resident_bytes(),
            models_with_snapshot=snapshots,
            checkpoint_bytes=await self.checkpoints.bytes_by_tenant(),
            unnamed_sampler_bytes=sum(
                s.row.bytes for s in self.samplers.open_samplers() if s.row.model
            ),
            disk=await asyncio.to_thread(self.store.disk_usage),
            disk_is_full=request_log.disk_is_full(),
        )

    def capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the base models that are served."""
        models = self.engine.capabilities().supported_models
        return GetServerCapabilitiesResponse(
            [model for model in models if model.model_name in self.base_models]
        )

    # Models.

    async def create_model(self, tenant: Tenant, operation: CreateModel) -> Accepted:
        """Create a model, either new or from a checkpoint. A repeated request returns the same
        request id. Raise BadRequest if a different request has used this id.
        """
        self.engine.check_open()
        model_id = operation.model_id
        await self.sessions.touch(tenant, session_id_of(model_id))
        entry = await self.request_log.encode(operation, 0)
        return await run_uncancelled(self._create_model(tenant, operation, entry))

    async def _create_model(
        self, tenant: Tenant, operation: CreateModel, entry: JournalEntry
    ) -> Accepted:
        model_id = operation.model_id
        accepted = Accepted(f"{model_id}:0", model_id)
        async with self._run_lock(model_id):
            if await self.request_log.was_accepted(accepted.request_id, entry.digest):
                return accepted
            if await self.store.read(select, ModelRow, "id = ?", [model_id]):
                raise BadRequest(
                    f"model_seq_id: {model_id!r} has already been used; continue with the next "
                    "sequence number"
                )
            await self._journal_creation(await self._new_model_row(tenant, operation), entry)
        return accepted

    def _run_lock(self, run_id: str) -> asyncio.Lock:
        """Return the lock of a run's id. A caller holds this lock while it creates a model with the
        id, or copies a checkpoint into a run with the id.
        """
        return self._run_locks.setdefault(run_id, asyncio.Lock())

    async def reject(
        self,
        tenant: Tenant,
        model_id: str,
        seq_id: int,
        error: Exception,
        kind: str = "forward_backward",
    ) -> None:
        """Use up the sequence number of a request whose body could not be read. Later requests then
        do not wait for this number. Do nothing if the model does not exist or is closed.
        """
        with suppress(NotFound, Gone):
            model = await self.sessions.open_model(tenant, model_id)
            await model.intake.reject(seq_id, error, kind)

    async def unload_model(self, tenant: Tenant, model_id: str) -> Accepted:
        """Unload a model after all requests accepted so far have run. The model accepts no further
        requests. Its checkpoints and samplers are kept.
        """
        self.engine.check_open()
        accepted = Accepted(f"{model_id}:unload", model_id)
        entry = await self.request_log.encode(UnloadModel(model_id), 0)
        try:
            model = await self.sessions.open_model(tenant, model_id)
        except Gone:
            if await self.request_log.was_accepted(accepted.request_id, entry.digest):
                return accepted
            raise
        await model.intake.unload(accepted.request_id, entry)
        return accepted

    async def model_info(self, tenant: Tenant, model_id: str) -> GetInfoResponse:
        """Wait for the creation of a model, and return the model's information. Raise UserError if
        the creation failed.
        """
        row = await self.sessions.model_row(tenant, model_id)
        if row.arch is None:
            outcome = await self.request_log.outcome(
                tenant, f"{model_id}:0", _MAX_CREATION_WAIT_SECONDS
            )
            if isinstance(outcome, Failed):
                raise UserError(f"model_id={model_id!r} could not be created: {outcome.message}")
            row = (await self.sessions.open_model(tenant, model_id)).row
        directory = await self.engine.tokenizer_directory(row.base_model)
        data = ModelData(row.arch or "", row.base_model, str(directory))
        return GetInfoResponse(model_id, data, True, row.rank)

    async def _new_model_row(self, tenant: Tenant, operation: CreateModel) -> ModelRow:
        base_model, lora = operation.base_model, operation.lora
        if operation.from_path is not None:
            check_is_not_private(operation.from_path)
            info = await self.checkpoints.info(tenant, operation.from_path)
            base_model, lora = base_model or info.base_model, info.lora
        assert base_model is not None
        self.check_base_model(base_model)
        size, now = await self.engine.adapter_bytes(base_model, lora), time.time()
        metadata = to_json_text(operation.user_metadata)
        return ModelRow(
            id=operation.model_id,
            tenant=tenant.name,
            session=session_id_of(operation.model_id),
            base_model=base_model,
            lora=to_json_text(lora),
            user_metadata=metadata,
            training_bytes=size.training,
            sampling_bytes=size.sampling,
            created=now,
            used=now,
            bytes=row_bytes(metadata, metadata),
        )

    async def _journal_creation(self, row: ModelRow, entry: JournalEntry) -> None:
        creation = new_request_row(Tenant(row.tenant), row.id, 0, entry)

        def record(transaction: Transaction) -> None:
            check_models(transaction, row.tenant, self.settings)
            upsert(transaction, row)

        request = await self.request_log.accept(creation, entry, record)
        if request is not None:
            model = replace(row, user_metadata="")
            ModelActor(self, model, RequestQueue(0)).enqueue(request)
            self.sessions.close_members_if_ended(row.session)

    # Training runs. Every model that a tenant made is a run, whether it is open or closed.

    async def training_runs(self, tenant: Tenant, limit: int, offset: int) -> Page[TrainingRun]:
        """Return a page of the tenant's runs, newest first. A page ends early when the metadata of
        its runs exceed PAGE_BYTES. `Page.limit` is then the number of runs on the page.
        """
        run_ids, total = await self.store.read(
            select_key_page, ModelRow, tenant.name, limit, offset
        )
        runs, size = list[TrainingRun](), 0
        for run_id in run_ids:
            with suppress(NotFound):  # the run was removed meanwhile
                run = await self.training_run(tenant, run_id)
                newest = (run.last_checkpoint, run.last_sampler_checkpoint)
                metadata = [
                    run.user_metadata,
                    *(checkpoint.user_metadata or {} for checkpoint in newest if checkpoint),
                ]
                size += item_bytes(
                    *(text for mapping in metadata for text in chain(*mapping.items()))
                )
                if runs and size > PAGE_BYTES:
                    return Page(runs, offset, len(runs), total)
                runs.append(run)
        return Page(runs, offset, limit, total)

    async def training_run(self, tenant: Tenant, run_id: str) -> TrainingRun:
        """Return one run. Raise NotFound if the tenant has no run with this id."""
        row = await self.sessions.model_row(tenant, run_id)
        last_request = await self.store.read(_last_request_time, run_id)
        newest = await self.checkpoints.newest_by_type(run_id)
        return TrainingRun(
            training_run_id=row.id,
            base_model=row.base_model,
            model_owner=row.tenant,
            lora_rank=row.rank,
            last_request_time=utc_time(max(row.used, last_request)),
            user_metadata=row.metadata,
            last_checkpoint=newest.get("training"),
            last_sampler_checkpoint=newest.get("sampler"),
        )

    async def base_models_of_runs(self, tenant: Tenant) -> dict[str, str]:
        """Return the base models of the tenant's runs, by the id of the run."""
        query = "SELECT id, base_model FROM models WHERE tenant = ?"
        return await self.store.read(lambda db: dict(db.execute(query, [tenant.name]).fetchall()))

    async def list_checkpoints(
        self, tenant: Tenant, run_id: str | None = None, limit: int | None = None, offset: int = 0
    ) -> Page[Checkpoint]:
        """Return a page of the tenant's checkpoints, newest first. `run_id` selects the checkpoints
        of one run. Raise NotFound if the tenant has no run with this id.
        """
        if run_id is not None:
            await self.sessions.model_row(tenant, run_id)
        return await self.checkpoints.page(tenant, run_id, limit, offset)


def _last_request_time(db: sqlite3.Connection, owner: str) -> float:
    query = "SELECT COALESCE(MAX(accepted), 0) FROM requests WHERE owner = ?"
    return db.execute(query, [owner]).fetchone()[0]
