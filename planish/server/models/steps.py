"""How the engine runs the training requests that read or write a checkpoint.

A request that reads a checkpoint works on a private copy. The copy is made and recorded first, so
that a replay finds it even if the checkpoint is gone by then. A save first records that its name
was free, so that repeating the save after a crash does not take its own files for somebody else's.

These functions return what they did; the model writes its own state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from planish.errors import UserError
from planish.server.durable.checkpoints import loaded_path, sampler_name
from planish.server.durable.journal import result_of
from planish.server.durable.records import put_checkpoint
from planish.server.durable.request_log import AlsoWrite, QueuedRequest
from planish.server.durable.store import crash_point
from planish.server.engine_client import EngineClient
from planish.server.results import Done, Tenant
from planish.server.samplers import Sampler, Samplers
from planish.server.services import Services
from planish.service import (
    ForwardBackward,
    Operation,
    PublishSampler,
    SaveWeights,
    SaveWeightsForSampler,
)
from planish.types import CheckpointPath, CheckpointType, SaveWeightsForSamplerResponse


@dataclass(frozen=True, eq=False)
class Step:
    """One request that the engine has."""

    request: QueuedRequest
    operation: Operation[Any]
    """The operation as the client sent it."""
    future: asyncio.Future[Any]
    """The engine's result."""
    submitted: float
    """When the engine got it, by the device clock."""
    also_write: Callable[[], Awaitable[AlsoWrite]] | None = None
    """Called with the result there; returns what to write in the transaction of the answer."""


async def private_copy(services: Services, model_id: str, request: QueuedRequest, path: str) -> str:
    """Copy the checkpoint that a request reads to where nobody else can change it, once, and return
    the path of the copy.
    """
    copy = loaded_path(model_id, request.seq, path)
    if request.row.state == "accepted":
        await services.engine.copy_checkpoint(path, copy)
        crash_point("pinned before recording")
        await services.request_log.mark(request, "started")
    return copy


@contextmanager
def errors_naming(path: str | None, copy: str | None) -> Iterator[None]:
    """Replace the name of the private copy in errors with the path that the client knows."""
    try:
        yield
    except UserError as error:
        if copy is not None and path is not None:
            error.args = (str(error).replace(copy, path),)
        raise


async def begin_save(
    services: Services,
    tenant: Tenant,
    model_id: str,
    request: QueuedRequest,
    operation: SaveWeights | SaveWeightsForSampler,
) -> tuple[Step, asyncio.Lock]:
    """Give a save to the engine. The caller releases the lock when the answer is being written."""
    await services.checkpoints.check_quota(tenant)
    kind: CheckpointType = "training" if isinstance(operation, SaveWeights) else "sampler"
    path = str(CheckpointPath(model_id, kind, operation.name))
    lock = services.checkpoints.changing(path)
    await lock.acquire()
    try:
        step = await _save_at(services, tenant, path, request, operation)
    except BaseException:
        lock.release()
        raise
    return step, lock


async def _save_at(
    services: Services,
    tenant: Tenant,
    path: str,
    request: QueuedRequest,
    operation: SaveWeights | SaveWeightsForSampler,
) -> Step:
    saving = operation
    if (
        request.row.state == "started"
        or operation.overwrite
        or not await services.engine.exists(path)
    ):
        await services.request_log.mark(request, "started")
        crash_point("save marked")
        saving = replace(operation, overwrite=True)
    submitted = services.clock.now()
    future = await services.engine.submit(saving)

    async def record() -> AlsoWrite:
        row = await services.checkpoints.saved(tenant, path)
        crash_point("saved before recording")
        return lambda transaction: put_checkpoint(transaction, row)

    return Step(request, operation, future, submitted, record)


async def publish(
    engine: EngineClient, seq: int, operation: PublishSampler
) -> tuple[asyncio.Future[str], asyncio.Future[SaveWeightsForSamplerResponse]]:
    """Queue the publication of a sampler and, right behind it, the saving of its weights."""
    published = await engine.submit(operation)
    saved = await engine.submit(
        SaveWeightsForSampler(operation.model_id, sampler_name(seq), overwrite=True)
    )
    return published, saved


async def keep_published(
    engine: EngineClient,
    samplers: Samplers,
    sampler: Sampler | None,
    saved: asyncio.Future[SaveWeightsForSamplerResponse],
) -> None:
    """Record where a published sampler's weights were saved, or delete them if it was closed."""
    path = (await saved).path
    info = await engine.checkpoint_info(path)
    crash_point("sampler saved before recording")
    if sampler is None or samplers.get(sampler.id) is not sampler:
        await engine.delete_checkpoint(path)
    else:
        await samplers.saved(sampler, path, info.checkpoint.size_bytes or 0)


async def encode_result(kind: str, operation: Operation[Any], result: Any) -> Done:
    """Encode a result for the journal and the client. Large ones are encoded in a thread."""
    if isinstance(operation, ForwardBackward):
        return await asyncio.to_thread(result_of, kind, operation, result)
    return result_of(kind, operation, result)
