"""How the engine runs a model's training requests, and those that read or write a checkpoint.

A request that reads a checkpoint works on a private copy. The copy is made and recorded first, so
that a replay finds it even if the checkpoint was deleted. A save first records that its name was
free. If the save is repeated after a crash, files under this name come from its own first run, and
it overwrites them.

The methods here do not change `ModelAdapter.state`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from planish.errors import UserError
from planish.server.durable.checkpoints import CheckpointCatalog, private_copy_path
from planish.server.durable.crash_points import crash_point
from planish.server.durable.records import ModelRow, update_row, upsert_checkpoint
from planish.server.durable.request_log import RequestLog
from planish.server.engine_client import DeviceClock, EngineClient
from planish.server.request import Request, TransactionHook, done_from_result
from planish.server.results import Done, Tenant
from planish.service import (
    CreateModel,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    SaveWeights,
    SaveWeightsForSampler,
)
from planish.types import CheckpointPath, CheckpointType


@dataclass(frozen=True, eq=False)
class SubmittedRequest:
    """One request that was submitted to the engine."""

    request: Request
    operation: Operation[Any]
    """The operation as the client sent it."""
    future: asyncio.Future[Any]
    """The engine's result."""
    submitted_at: float
    """The time of the submission, as `DeviceClock.now` returns it."""
    make_transaction_hook: Callable[[], Awaitable[TransactionHook | None]] | None = None
    """A function to call once the future has its result. Its result may be another function, which
    adds rows to the transaction that writes the answer.
    """


def loaded_checkpoint(operation: CreateModel | LoadWeights) -> str | None:
    """Return the checkpoint that an operation reads."""
    return operation.path if isinstance(operation, LoadWeights) else operation.from_path


@dataclass(frozen=True)
class RequestSubmitter:
    """Gives the requests of models to the engine."""

    _engine: EngineClient
    _checkpoints: CheckpointCatalog
    _request_log: RequestLog
    clock: DeviceClock

    async def submit_training(
        self, request: Request, operation: ForwardBackward | OptimStep
    ) -> SubmittedRequest:
        """Give a training operation to the engine."""
        submitted_at = self.clock.now()
        future = await self._engine.submit(operation)
        # The operation stays in memory until its answer, but `request_memory_bytes` limits only the
        # operations of waiting requests.
        self._request_log.release_operation(request)
        return SubmittedRequest(request, operation, future, submitted_at)

    async def submit_load(
        self, request: Request, operation: CreateModel | LoadWeights
    ) -> SubmittedRequest:
        """Give a load, or the creation of a model, to the engine. A creation has completed when
        this returns. Raise UserError if the creation failed.
        """
        submitted_at, source = self.clock.now(), loaded_checkpoint(operation)
        copy_path = None if source is None else await self._create_private_copy(request, source)
        with _client_path_in_errors(source, copy_path):
            if isinstance(operation, LoadWeights):
                assert copy_path is not None
                future = await self._engine.submit(replace(operation, path=copy_path))
                return SubmittedRequest(request, operation, future, submitted_at)
            info = await self._engine.perform(replace(operation, from_path=copy_path))
        creation: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        creation.set_result(info)

        async def record() -> TransactionHook:
            arch = info.model_data.arch
            return lambda transaction: update_row(
                transaction, ModelRow, operation.model_id, arch=arch
            )

        return SubmittedRequest(request, operation, creation, submitted_at, record)

    async def _create_private_copy(self, request: Request, path: str) -> str:
        """Return the path of a private copy of the checkpoint that a request reads. The copy is
        made only once, so a replay reads the same files.
        """
        copy_path = private_copy_path(request.row.owner, request.seq, path)
        if request.row.state == "accepted":
            await self._engine.checkpoints.copy_without_metadata(path, copy_path)
            crash_point("pinned before recording")
            await self._request_log.set_state(request, "started")
        return copy_path

    async def submit_save(
        self, request: Request, operation: SaveWeights | SaveWeightsForSampler
    ) -> tuple[SubmittedRequest, asyncio.Lock]:
        """Submit a save to the engine. Return the submitted save and the acquired lock of the
        checkpoint's path. The caller releases the lock once the answer is being written.
        """
        tenant = Tenant(request.row.tenant)
        await self._checkpoints.check_quota(tenant)
        kind: CheckpointType = "training" if isinstance(operation, SaveWeights) else "sampler"
        path = str(CheckpointPath(operation.model_id, kind, operation.name))
        lock = self._checkpoints.lock(path)
        await lock.acquire()
        try:
            submitted = await self._submit_save(tenant, path, request, operation)
        except BaseException:
            lock.release()
            raise
        return submitted, lock

    async def _submit_save(
        self,
        tenant: Tenant,
        path: str,
        request: Request,
        operation: SaveWeights | SaveWeightsForSampler,
    ) -> SubmittedRequest:
        saving = operation
        if (
            request.row.state == "started"
            or operation.overwrite
            or await self._checkpoints.is_name_free(path)
        ):
            await self._request_log.set_state(request, "started")
            crash_point("save marked")
            saving = replace(saving, overwrite=True)
        submitted_at = self.clock.now()
        future = await self._engine.submit(saving)

        async def record() -> TransactionHook:
            row = await self._checkpoints.row_from_files(tenant, path)
            crash_point("saved before recording")
            return lambda transaction: upsert_checkpoint(transaction, row)

        return SubmittedRequest(request, operation, future, submitted_at, record)


@contextmanager
def _client_path_in_errors(path: str | None, copy_path: str | None) -> Generator[None]:
    """Replace the name of the private copy in errors with the path that the client knows."""
    try:
        yield
    except UserError as error:
        if copy_path is not None and path is not None:
            error.args = (str(error).replace(copy_path, path),)
        raise


async def encode_result(operation: Operation[Any], result: Any) -> Done:
    """Encode a result for the journal and the client. Large ones are encoded in a thread."""
    if isinstance(operation, ForwardBackward):
        return await asyncio.to_thread(done_from_result, operation, result)
    return done_from_result(operation, result)
