"""Samplers. A sampler serves a base model, a checkpoint, or the weights that a training model had at
one moment.

A sampler of a checkpoint has a private copy of the files. So the sampler does not change when the
checkpoint is deleted or replaced, and it can be loaded again after a restart.

A training model publishes its current weights as a sampler without a name (PublishSampler). The
server saves the weights of this sampler in the background. Until these weights are on disk, the
sampler stays in memory. After a crash before that, a replay of the model publishes the sampler
again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from planish.errors import CheckpointError, DamagedFileError, StorageError, UserError
from planish.server.durable.checkpoints import (
    CheckpointCatalog,
    check_is_not_private,
    sampler_copy_path,
)
from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.crash_points import crash_point
from planish.server.durable.quotas import ROW_BYTES, check_samplers
from planish.server.durable.records import SamplerRow, select, update_row, upsert
from planish.server.durable.store import Store, Transaction
from planish.server.engine_client import EngineClient
from planish.server.intake import Intake
from planish.server.results import BadRequest, Gone, NotFound, ServerError, Tenant
from planish.server.scheduling import AdapterCache, CachedAdapter
from planish.server.sessions import Sessions
from planish.server.settings import TenantSettings
from planish.service import CreateSampler, ReleaseSampler, SamplerInfo
from planish.wire.models import session_id_of

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Sampler:
    """One sampler, in memory or not. The adapter cache calls `load` and `unload`."""

    row: SamplerRow
    _engine: EngineClient
    _crash_guard: CrashGuard
    model: CachedAdapter | None
    """The training model that publishes the sampler; None for other samplers."""
    failure: str | None = None
    """Why the sampler cannot be used: its creation failed, or it is closed."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the sampler is created or published, or when its creation fails."""
    last_used: float = field(default_factory=time.time)

    @property
    def id(self) -> str:
        """The id of the sampling session."""
        return self.row.id

    @property
    def memory_bytes(self) -> int:
        """The sampler's size in memory; 0 for a sampler of a base model."""
        return self.row.memory_bytes

    @property
    def is_evictable(self) -> bool:
        """Whether the sampler's weights are on disk, so that it can be loaded again."""
        return self.row.source is not None

    def check(self) -> None:
        """Raise UserError if the sampler cannot be used."""
        if self.failure is not None:
            raise UserError(f"sampling_session_id={self.id!r}: {self.failure}")

    async def load(self) -> None:
        """Create the sampler in the engine. Raise UserError if it is closed during the creation,
        and DamagedFileError or CheckpointError if its weights cannot be read.
        """
        async with self._crash_guard.running(self.id):
            try:
                await self._engine.perform(await self._creation_operation())
            except (DamagedFileError, CheckpointError) as error:
                _log.error("%s cannot be loaded: %s", self.id, error)
                raise
        if self.failure is not None:
            await self._engine.perform(ReleaseSampler(self.id))
            self.check()

    async def unload(self) -> None:
        """Remove the sampler from the engine."""
        with suppress(UserError):  # a simultaneous `close` may have removed it
            await self._engine.perform(ReleaseSampler(self.id))

    async def _creation_operation(self) -> CreateSampler:
        row = self.row
        if row.source is None:
            assert row.model is None, (
                f"{row.id} has no weights of its own: only its model can create it again"
            )
            return CreateSampler(row.id, row.base_model)
        trained_on = (await self._engine.checkpoints.info(row.source)).base_model
        # The engine rejects a checkpoint that was trained on other base weights, unless the
        # operation names the base model. A row does not store whether the client named one. If the
        # row's base model differs from the checkpoint's, the client must have named it.
        return CreateSampler(
            row.id, row.base_model if row.base_model != trained_on else None, row.source
        )


class Samplers:
    """The open samplers of a server."""

    def __init__(
        self,
        store: Store,
        engine: EngineClient,
        sessions: Sessions,
        checkpoints: CheckpointCatalog,
        intake: Intake,
        cache: AdapterCache,
        crash_guard: CrashGuard,
        settings: TenantSettings,
    ) -> None:
        """`intake` checks the tenants' limits, and `checkpoints` their storage quotas."""
        self._store, self._engine = store, engine
        self._sessions, self._checkpoints = sessions, checkpoints
        self._intake, self._settings = intake, settings
        self._cache, self._crash_guard = cache, crash_guard
        self._samplers: dict[str, Sampler] = {}
        self._published: dict[tuple[str, int], Sampler] = {}
        """The published samplers. The key is the model's id and the sequence number of the request
        that publishes the sampler.
        """
        self._creation_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by sampler id. A caller holds the lock while it creates the sampler."""

    # Finding.

    def get(self, sampler_id: str) -> Sampler | None:
        """Return an open sampler, or None."""
        return self._samplers.get(sampler_id)

    def open_samplers(self) -> list[Sampler]:
        """Return the open samplers."""
        return list(self._samplers.values())

    async def row(self, tenant: Tenant, sampler_id: str) -> SamplerRow:
        """Return the row of a sampler of the tenant, open or closed. Raise NotFound if there is no
        such sampler.
        """
        rows = await self._store.read(
            select, SamplerRow, "id = ? AND tenant = ?", [sampler_id, tenant.name]
        )
        if not rows:
            raise NotFound(
                f"sampling_session_id={sampler_id[:200]!r}: there is no such sampling session"
            )
        return rows[0]

    async def touch(self, tenant: Tenant, sampler_id: str) -> Sampler:
        """Return an open sampler of the tenant, and note that its client sent a request. Raise
        NotFound if the tenant has no such sampler, and Gone if the sampler or its session ended.
        """
        sampler = self.get(sampler_id)
        if sampler is None or sampler.row.tenant != tenant.name:
            row = await self.row(tenant, sampler_id)
            raise Gone(f"sampling_session_id={row.id!r} is closed: {row.closed}")
        await self._sessions.touch(tenant, sampler.row.session)
        return sampler

    async def info(self, tenant: Tenant, sampler_id: str) -> SamplerInfo:
        """Return a sampler's base model and checkpoint. Raise NotFound for an unknown sampler."""
        row = await self.row(tenant, sampler_id)
        return SamplerInfo(sampler_id, row.base_model, row.model_path)

    # Creating and closing.

    async def create(
        self, tenant: Tenant, operation: CreateSampler, checks_storage: bool = True
    ) -> str:
        """Create a sampler, and return its id when it can sample. A repeated request waits for the
        same sampler. Raise BadRequest if a different request has used this id, and, if
        `checks_storage` is true, if the tenant has used up its storage quota.
        """
        await self._sessions.touch(tenant, session_id_of(operation.sampler_id))
        lock = self._creation_locks.setdefault(operation.sampler_id, asyncio.Lock())
        async with lock:
            if not await self._was_created(tenant, operation):
                if checks_storage:
                    await self._checkpoints.check_quota(tenant)
                await self._create(tenant, operation)
        return operation.sampler_id

    async def _was_created(self, tenant: Tenant, operation: CreateSampler) -> bool:
        rows = await self._store.read(select, SamplerRow, "id = ?", [operation.sampler_id])
        if not rows:
            return False
        row = rows[0]
        has_same_base = operation.base_model in (None, row.base_model)
        if row.tenant != tenant.name or row.model_path != operation.model_path or not has_same_base:
            raise BadRequest(
                f"sampling_session_id={row.id!r} is already used by another sampler; continue with "
                "the next sequence number"
            )
        if row.closed is not None:
            raise Gone(f"sampling_session_id={row.id!r} is closed: {row.closed}")
        return True

    async def _create(self, tenant: Tenant, operation: CreateSampler) -> None:
        self._intake.check_capacity(tenant.name, 0)
        await self._store.read(check_samplers, tenant.name, self._settings)
        row = await self._new_sampler_row(tenant, operation)
        crash_point("pinned before recording")

        def record(transaction: Transaction) -> None:
            check_samplers(transaction, tenant.name, self._settings)
            upsert(transaction, row)

        try:
            await self._store.write(record)
        except (ServerError, StorageError):
            if row.source is not None:
                await self._engine.checkpoints.delete(row.source)
            raise
        sampler = self.add(row)
        sampler.ready.set()
        self._sessions.close_members_if_ended(row.session)
        try:
            async with self.pinned(sampler):
                pass
        except Exception as error:
            await self.close(sampler, f"the sampler could not be created ({error})")
            raise

    async def _new_sampler_row(self, tenant: Tenant, operation: CreateSampler) -> SamplerRow:
        base_model, source, memory_bytes, size_on_disk = operation.base_model, None, 0, 0
        if operation.model_path is not None:
            check_is_not_private(operation.model_path)
            info = await self._checkpoints.info(tenant, operation.model_path)
            base_model = base_model or info.base_model
            # Check first, because adapter_bytes reads the files of the base model.
            self._engine.check_base_model(base_model)
            memory_bytes = (await self._engine.adapter_bytes(base_model, info.lora)).sampling
            source = sampler_copy_path(operation.sampler_id)
            await self._engine.checkpoints.copy_without_metadata(
                info.checkpoint.tinker_path, source
            )
            size_on_disk = info.checkpoint.size_bytes or 0
        assert base_model is not None
        self._engine.check_base_model(base_model)
        now = time.time()
        return SamplerRow(
            id=operation.sampler_id,
            tenant=tenant.name,
            session=session_id_of(operation.sampler_id),
            base_model=base_model,
            model_path=operation.model_path,
            model=None,
            seq=None,
            source=source,
            memory_bytes=memory_bytes,
            created=now,
            used=now,
            bytes=size_on_disk + ROW_BYTES,
        )

    def add(self, row: SamplerRow, model: CachedAdapter | None = None) -> Sampler:
        """Open a sampler. `model` is the model that publishes it."""
        sampler = Sampler(row, self._engine, self._crash_guard, model)
        self._samplers[row.id] = sampler
        if row.model is not None and row.seq is not None:
            self._published[row.model, row.seq] = sampler
        return sampler

    async def note_published(self, sampler: Sampler) -> None:
        """Note that the engine has published a sampler. If the sampler was closed before, release
        it.
        """
        if sampler.failure is not None:
            await self._engine.perform(ReleaseSampler(sampler.id))
            return
        self._cache.insert_loaded(sampler)
        sampler.ready.set()

    def note_failed_request(self, model_id: str, seq: int, message: str) -> None:
        """Note that request `seq` of a model failed. If the request should have published a
        sampler, the sampler fails with `message`.
        """
        sampler = self._published.get((model_id, seq))
        if sampler is not None:
            self._fail(sampler, message)

    async def record_save(self, sampler: Sampler, source: str, size: int) -> None:
        """Record the private checkpoint that holds a published sampler's weights."""
        sampler.row = replace(sampler.row, source=source, bytes=size)
        await self._store.write_with_retries(
            update_row, SamplerRow, sampler.id, source=source, bytes=size
        )

    def is_loaded(self, sampler: Sampler) -> bool:
        """Return whether a sampler is in memory."""
        return self._cache.is_loaded(sampler)

    async def release(self, sampler: Sampler) -> None:
        """Remove a sampler from memory, if it is loaded."""
        if self.is_loaded(sampler):
            self._cache.discard(sampler)
            await sampler.unload()

    async def close(self, sampler: Sampler, reason: str) -> None:
        """Close a sampler and delete its files. The engine still finishes the samples that it is
        running on this sampler.
        """
        if self._samplers.pop(sampler.id, None) is None:
            return
        if sampler.row.model is not None and sampler.row.seq is not None:
            self._published.pop((sampler.row.model, sampler.row.seq), None)
        self._fail(sampler, reason)
        await self._store.write_with_retries(update_row, SamplerRow, sampler.id, closed=reason)
        crash_point("sampler closed before cleaning")
        await self.release(sampler)
        if sampler.row.source is not None:
            await self._engine.checkpoints.delete(sampler.row.source)

    def _fail(self, sampler: Sampler, message: str) -> None:
        sampler.failure = message
        sampler.ready.set()

    @asynccontextmanager
    async def pinned(self, sampler: Sampler) -> AsyncGenerator[None]:
        """Load a sampler, and keep it in memory during the `async with` block. Raise UserError if
        the sampler is closed or could not be created. If `Sampler.load` fails, raise its error.
        """
        await sampler.ready.wait()
        sampler.check()
        sampler.last_used = time.time()
        is_unsaved = sampler.row.source is None
        if is_unsaved and sampler.model is not None and not self.is_loaded(sampler):
            await self._cache.load(sampler.model)  # this publishes the sampler again
        try:
            async with self._cache.pinned(sampler):
                yield
        finally:
            if sampler.failure is not None:  # it was closed while it was loaded or used
                await self.release(sampler)
