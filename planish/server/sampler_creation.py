"""Samplers of base models and of checkpoints, made on demand."""

from __future__ import annotations

import asyncio
import time
from weakref import WeakValueDictionary

from planish.server.durable.checkpoints import CheckpointCatalog, check_source
from planish.server.durable.names import source_path
from planish.server.durable.records import SamplerRow, put, select
from planish.server.durable.request_log import RequestLog
from planish.server.durable.store import Store, crash_point
from planish.server.engine_client import EngineClient
from planish.server.results import BadRequest, Gone, Tenant
from planish.server.samplers import Samplers
from planish.server.sessions import Sessions
from planish.server.submission import Submission
from planish.service import CreateSampler
from planish.wire.models import session_of


class SamplerCreation:
    def __init__(
        self,
        engine: EngineClient,
        store: Store,
        sessions: Sessions,
        requests: RequestLog,
        samplers: Samplers,
        catalog: CheckpointCatalog,
        submission: Submission,
    ) -> None:
        self._engine = engine
        self._store = store
        self._sessions = sessions
        self._requests = requests
        self._samplers = samplers
        self._catalog = catalog
        self._submission = submission
        self._making: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held by those who make a sampler, or wait to find it made."""

    async def create(self, tenant: Tenant, operation: CreateSampler) -> str:
        """Answers when it is ready. A repetition waits for the same sampler; another request of its
        id is a BadRequest.
        """
        await self._sessions.touch(tenant, session_of(operation.sampler_id))
        lock = self._making.setdefault(operation.sampler_id, asyncio.Lock())
        async with lock:
            if not await self._is_there(tenant, operation):
                await self._make(tenant, operation)
        return operation.sampler_id

    async def _is_there(self, tenant: Tenant, operation: CreateSampler) -> bool:
        rows = await self._store.read(
            lambda db: select(db, SamplerRow, "id = ?", [operation.sampler_id])
        )
        if not rows:
            return False
        row = rows[0]
        same_base = operation.base_model in (None, row.base_model)
        if row.tenant != tenant.name or row.model_path != operation.model_path or not same_base:
            raise BadRequest(
                f"sampling_session_id={row.id!r} is in use for something else; count on"
            )
        if row.closed is not None:
            raise Gone(f"sampling_session_id={row.id!r} is closed: {row.closed}")
        return True

    async def _make(self, tenant: Tenant, operation: CreateSampler) -> None:
        self._requests.check_room(tenant.name, 0)
        row = await self._row(tenant, operation)
        crash_point("pinned before recording")
        await self._store.write(lambda transaction: put(transaction, row))
        sampler = self._samplers.add(row)
        sampler.ready.set()
        self._sessions.clear_if_ended(row.session)
        try:
            async with self._samplers.held(sampler):
                pass
        except Exception as error:
            await self._samplers.close(sampler, f"it could not be made ({error})")
            raise

    async def _row(self, tenant: Tenant, operation: CreateSampler) -> SamplerRow:
        base_model, source, memory_bytes = operation.base_model, None, 0
        if operation.model_path is not None:
            check_source(operation.model_path)
            info = await self._catalog.info(tenant, operation.model_path)
            base_model = base_model or info.base_model
            self._submission.check_base_model(base_model)
            memory_bytes = (await self._engine.adapter_bytes(base_model, info.lora)).sampling
            source = source_path(operation.sampler_id)
            await self._engine.copy_checkpoint(info.checkpoint.tinker_path, source)
        if base_model is None:
            raise BadRequest("base_model and model_path are both missing; give one of them")
        self._submission.check_base_model(base_model)
        now = time.time()
        return SamplerRow(
            id=operation.sampler_id,
            tenant=tenant.name,
            session=session_of(operation.sampler_id),
            base_model=base_model,
            model_path=operation.model_path,
            model=None,
            seq=None,
            source=source,
            memory_bytes=memory_bytes,
            created=now,
            used=now,
        )
