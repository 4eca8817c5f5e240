"""Samplers: of base models, of checkpoints, and published ones, in memory or not.

A sampler of a checkpoint has a private copy of its files, so that it stays as it is when the
checkpoint is deleted or replaced, and after a restart. A published one is saved in the background.
Until that is done it cannot leave memory, and after a crash it comes back by replaying what its
model did.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from planish.errors import CheckpointError, DamagedFileError, UserError
from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.records import SamplerRow, change, select
from planish.server.durable.store import Store, crash_point
from planish.server.engine_client import EngineClient
from planish.server.results import NotFound, Tenant
from planish.server.scheduling.adapter_cache import AdapterCache, CachedAdapter
from planish.service import CreateSampler, ReleaseSampler

_log = logging.getLogger(__name__)


class _Residence:
    """How a sampler comes into memory and leaves it."""

    def __init__(self, row: SamplerRow, engine: EngineClient, under_way: CrashGuard) -> None:
        self.row = row
        self.failure: str | None = None
        self._engine = engine
        self._under_way = under_way

    @property
    def key(self) -> str:
        return self.row.id

    @property
    def memory_bytes(self) -> int:
        return self.row.memory_bytes

    @property
    def is_evictable(self) -> bool:
        return self.row.source is not None

    async def load(self) -> None:
        async with self._under_way.doing(self.row.id):
            try:
                await self._engine.perform(await self._creation())
            except (DamagedFileError, CheckpointError) as error:
                _log.error("%s cannot come into memory: %s", self.row.id, error)
                raise
        if self.failure is not None:  # it was closed meanwhile
            await self._engine.perform(ReleaseSampler(self.row.id))
            raise UserError(f"sampling_session_id={self.row.id!r}: {self.failure}")

    async def unload(self) -> None:
        with suppress(UserError):  # it was closed in this moment, and let go of by that
            await self._engine.perform(ReleaseSampler(self.row.id))

    async def _creation(self) -> CreateSampler:
        row = self.row
        if row.source is None:
            assert row.model is None, f"{row.id} can come back by its model only"
            return CreateSampler(row.id, row.base_model)
        made_for = (await self._engine.checkpoint_info(row.source)).base_model
        # Naming the base model allows one with other weights than the checkpoint's, as it was asked
        # for.
        return CreateSampler(
            row.id, row.base_model if row.base_model != made_for else None, row.source
        )


@dataclass(eq=False)
class Sampler:
    row: SamplerRow
    residence: _Residence
    origin: CachedAdapter | None = None
    """The model that published it."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Its weights are decided: it was made, or published, or that failed."""
    used: float = field(default_factory=time.time)

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def failure(self) -> str | None:
        """Why it cannot be used: it could not be made, or is closed."""
        return self.residence.failure


class Samplers:
    def __init__(
        self, engine: EngineClient, store: Store, residency: AdapterCache, under_way: CrashGuard
    ) -> None:
        self._engine = engine
        self._under_way = under_way
        self._store = store
        self._residency = residency
        self._samplers: dict[str, Sampler] = {}
        self._published: dict[tuple[str, int], Sampler] = {}
        """By the request that publishes it."""

    def add(self, row: SamplerRow, origin: CachedAdapter | None = None) -> Sampler:
        """`origin`: the model that publishes it."""
        sampler = Sampler(row, _Residence(row, self._engine, self._under_way), origin)
        self._samplers[row.id] = sampler
        if row.model is not None and row.seq is not None:
            self._published[row.model, row.seq] = sampler
        return sampler

    def get(self, sampler_id: str) -> Sampler | None:
        """One that is open."""
        return self._samplers.get(sampler_id)

    async def row(self, tenant: Tenant, sampler_id: str) -> SamplerRow:
        """Of any sampler that the tenant ever made. NotFound if there is none."""
        rows = await self._store.read(
            lambda db: select(db, SamplerRow, "id = ? AND tenant = ?", [sampler_id, tenant.name])
        )
        if not rows:
            raise NotFound(
                f"sampling_session_id={sampler_id[:200]!r}: there is no such sampling session"
            )
        return rows[0]

    def all(self) -> list[Sampler]:
        return list(self._samplers.values())

    @asynccontextmanager
    async def held(self, sampler: Sampler) -> AsyncIterator[None]:
        """Have it in memory for the block. Raises what keeps it from being there."""
        await sampler.ready.wait()
        if sampler.failure is not None:
            raise UserError(f"sampling_session_id={sampler.id!r}: {sampler.failure}")
        sampler.used = time.time()
        if (
            sampler.row.source is None
            and sampler.origin is not None
            and not self._residency.is_loaded(sampler.residence)
        ):
            async with self._residency.held(sampler.origin):
                pass  # loading the model again publishes it again
        try:
            async with self._residency.held(sampler.residence):
                yield
        finally:
            if sampler.failure is not None:  # it was closed while it was loaded, or used
                await self.release(sampler)

    async def published(self, sampler: Sampler) -> None:
        """It is in memory now. If it was closed meanwhile, it goes again."""
        if sampler.failure is not None:
            await self._engine.perform(ReleaseSampler(sampler.id))
            return
        self._residency.adopt(sampler.residence)
        sampler.ready.set()

    def not_published(self, model_id: str, seq: int, message: str) -> None:
        """The request that should have published a sampler, if it is one, failed."""
        sampler = self._published.get((model_id, seq))
        if sampler is not None:
            self._fail(sampler, message)

    async def saved(self, sampler: Sampler, source: str, size: int) -> None:
        """Its weights are in a private checkpoint."""
        sampler.row = replace(sampler.row, source=source, bytes=size)
        sampler.residence.row = sampler.row
        await self._store.keep(
            lambda transaction: change(
                transaction, SamplerRow, sampler.id, source=source, bytes=size
            )
        )

    async def release(self, sampler: Sampler) -> None:
        """Let the engine forget it, for good or before it is published again."""
        if self._residency.is_loaded(sampler.residence):
            self._residency.forget(sampler.residence)
            with suppress(UserError):  # it is leaving memory at this moment
                await self._engine.perform(ReleaseSampler(sampler.id))

    async def close(self, sampler: Sampler, reason: str) -> None:
        """Let it go, with its files; what runs on it is finished."""
        if self._samplers.pop(sampler.id, None) is None:
            return
        if sampler.row.model is not None and sampler.row.seq is not None:
            self._published.pop((sampler.row.model, sampler.row.seq), None)
        self._fail(sampler, reason)
        await self._store.keep(
            lambda transaction: change(transaction, SamplerRow, sampler.id, closed=reason)
        )
        crash_point("sampler closed before cleaning")
        await self.release(sampler)
        if sampler.row.source is not None:
            await self._engine.delete_checkpoint(sampler.row.source)

    def _fail(self, sampler: Sampler, message: str) -> None:
        """It is not to be used, or not any more."""
        sampler.residence.failure = message
        sampler.ready.set()
