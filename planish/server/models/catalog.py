"""The open models of a server: how they are found, created and unloaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

from planish.errors import UserError
from planish.server.durable.checkpoints import CheckpointCatalog, check_is_not_private
from planish.server.durable.quotas import check_models, row_bytes
from planish.server.durable.records import ModelRow, select, to_json_text, upsert
from planish.server.durable.store import Store, Transaction
from planish.server.engine_client import EngineClient
from planish.server.intake import Intake
from planish.server.models.intake import ModelIntake
from planish.server.models.model import ModelActor
from planish.server.models.request_queue import QueueItem, RequestQueue
from planish.server.request import Request, encoded_request, run_uncancelled
from planish.server.results import (
    Accepted,
    BadRequest,
    Failed,
    Gone,
    NotFound,
    Tenant,
    stopping,
)
from planish.server.sessions import Sessions
from planish.server.settings import TenantSettings
from planish.server.settle import Settlement
from planish.service import CreateModel, Operation, UnloadModel
from planish.types import GetInfoResponse, ModelData
from planish.wire.models import session_id_of

_MAX_CREATION_WAIT_SECONDS = 40.0
"""How long `Models.info` waits for the creation of the model."""

MakeModel = Callable[[ModelRow, RequestQueue[QueueItem], int | None], ModelIntake]
"""Makes the parts of an open model from its row, its queue, and the number of its unload request if
there is one.
"""


@dataclass(eq=False)
class Models:
    """The open models of a server."""

    _store: Store
    _engine: EngineClient
    _sessions: Sessions
    _checkpoints: CheckpointCatalog
    _intake: Intake
    _settlement: Settlement
    _settings: TenantSettings
    _make_model: MakeModel
    _intakes: dict[str, ModelIntake] = field(default_factory=dict[str, ModelIntake])
    """The open models, by id."""
    _run_locks: WeakValueDictionary[str, asyncio.Lock] = field(
        default_factory=WeakValueDictionary[str, asyncio.Lock]
    )

    # Finding.

    def get(self, model_id: str) -> ModelActor | None:
        """Return an open model, or None."""
        intake = self._intakes.get(model_id)
        return None if intake is None else intake.model

    def open_models(self) -> list[ModelActor]:
        """Return the open models."""
        return [intake.model for intake in self._intakes.values()]

    async def open_model(self, tenant: Tenant, model_id: str) -> ModelActor:
        """Return the tenant's model. Raise NotFound if the tenant has no such model, and Gone if
        the model is closed.
        """
        return (await self._open_intake(tenant, model_id)).model

    async def _open_intake(self, tenant: Tenant, model_id: str) -> ModelIntake:
        intake = self._intakes.get(model_id)
        if intake is not None and intake.model.tenant == tenant:
            return intake
        row = await self.row(tenant, model_id)
        raise Gone(
            f"model_id={model_id!r} takes no more requests: {row.closed}; create another model "
            "from one of its checkpoints"
        )

    async def row(self, tenant: Tenant, model_id: str) -> ModelRow:
        """Return the row of a model of the tenant, open or closed. Raise NotFound if there is no
        such model.
        """
        rows = await self._store.read(
            select, ModelRow, "id = ? AND tenant = ?", [model_id, tenant.name]
        )
        if not rows:
            raise NotFound(f"model_id={model_id[:200]!r}: there is no such model")
        return rows[0]

    async def info(self, tenant: Tenant, model_id: str) -> GetInfoResponse:
        """Wait for the creation of a model, and return the model's information. Raise UserError if
        the creation failed.
        """
        row = await self.row(tenant, model_id)
        if row.arch is None:
            outcome = await self._settlement.outcome(
                tenant, f"{model_id}:0", _MAX_CREATION_WAIT_SECONDS
            )
            if isinstance(outcome, Failed):
                raise UserError(f"model_id={model_id!r} could not be created: {outcome.message}")
            row = (await self.open_model(tenant, model_id)).row
        directory = await self._engine.tokenizer_directory(row.base_model)
        data = ModelData(row.arch or "", row.base_model, str(directory))
        return GetInfoResponse(model_id, data, True, row.rank)

    # Requests.

    async def submit(
        self, tenant: Tenant, model_id: str, seq_id: int, operation: Operation[Any]
    ) -> Accepted:
        """Journal and queue an operation of a model (`ModelIntake.submit`). Raise NotFound for an
        unknown model, and Gone if the model or its session has ended.
        """
        if not self._engine.is_healthy:
            raise stopping()
        intake = await self._open_intake(tenant, model_id)
        await self._sessions.touch(tenant, intake.model.adapter.row.session)
        return await intake.submit(seq_id, operation)

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
        self._engine.check_open()
        with suppress(NotFound, Gone):
            await (await self._open_intake(tenant, model_id)).reject(seq_id, error, kind)

    async def expire_missing_requests(self) -> None:
        """Fail the requests that wait for a number that has been missing for too long."""
        for intake in list(self._intakes.values()):
            await intake.expire_missing_request()

    # Creating and unloading.

    async def create(self, tenant: Tenant, operation: CreateModel) -> Accepted:
        """Create a model, either new or from a checkpoint. A repeated request returns the same
        request id. Raise BadRequest if a different request has used this id.
        """
        self._engine.check_open()
        await self._sessions.touch(tenant, session_id_of(operation.model_id))
        request = await encoded_request(tenant, operation.model_id, 0, operation)
        return await run_uncancelled(self._create(tenant, operation, request))

    async def _create(self, tenant: Tenant, operation: CreateModel, request: Request) -> Accepted:
        model_id = operation.model_id
        accepted = Accepted(request.id, model_id)
        async with self.run_lock(model_id):
            if await self._intake.was_accepted(request.row):
                return accepted
            if await self._store.read(select, ModelRow, "id = ?", [model_id]):
                raise BadRequest(
                    f"model_seq_id: {model_id!r} has already been used; continue with the next "
                    "sequence number"
                )
            await self._journal_creation(await self._new_row(tenant, operation), request)
        return accepted

    def run_lock(self, run_id: str) -> asyncio.Lock:
        """Return the lock of a run's id. A caller holds this lock while it creates a model with the
        id, or copies a checkpoint into a run with the id.
        """
        return self._run_locks.setdefault(run_id, asyncio.Lock())

    async def _new_row(self, tenant: Tenant, operation: CreateModel) -> ModelRow:
        base_model, lora = operation.base_model, operation.lora
        if operation.from_path is not None:
            check_is_not_private(operation.from_path)
            info = await self._checkpoints.info(tenant, operation.from_path)
            base_model, lora = base_model or info.base_model, info.lora
        assert base_model is not None
        self._engine.check_base_model(base_model)
        size, now = await self._engine.adapter_bytes(base_model, lora), time.time()
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

    async def _journal_creation(self, row: ModelRow, request: Request) -> None:
        def record(transaction: Transaction) -> None:
            check_models(transaction, row.tenant, self._settings)
            upsert(transaction, row)

        if await self._intake.accept(request, record):
            self.open(replace(row, user_metadata=""), RequestQueue(0)).enqueue(request)
            self._sessions.close_members_if_ended(row.session)

    def open(
        self, row: ModelRow, queue: RequestQueue[QueueItem], unload_seq: int | None = None
    ) -> ModelActor:
        """Open a model. `unload_seq` is the number of its unload request, if there is one."""
        self._intakes[row.id] = intake = self._make_model(row, queue, unload_seq)
        return intake.model

    def forget(self, model_id: str) -> None:
        """Note that a model is closed."""
        self._intakes.pop(model_id, None)

    async def unload(self, tenant: Tenant, model_id: str) -> Accepted:
        """Unload a model after all requests accepted so far have run. The model accepts no further
        requests. Its checkpoints and samplers are kept.
        """
        self._engine.check_open()
        operation, request_id = UnloadModel(model_id), f"{model_id}:unload"
        request = await encoded_request(tenant, model_id, 0, operation, request_id)
        accepted = Accepted(request_id, model_id)
        try:
            intake = await self._open_intake(tenant, model_id)
        except Gone:
            if await self._intake.was_accepted(request.row):
                return accepted
            raise
        await intake.unload(request)
        return accepted

    async def stop(self) -> None:
        """Wait until the engine has finished all running requests, and then take a final snapshot
        of each loaded model. Queued requests stay in the journal.
        """
        models = self.open_models()
        for model in models:
            model.in_flight.notify()
        # A timeout of the caller cancels the workers that still run.
        tasks = [model.worker.task for model in models]
        await asyncio.gather(*(task for task in tasks if task is not None))
        for model in self.open_models():
            await model.stop()
