"""How each kind of training request is done.

forward_backward, forward and optim_step go to the engine one behind the other. What reads a
checkpoint works on a private copy of it, made and noted first, so that it can be done again
although the checkpoint may be gone by then. What writes one notes first that its name was free, so
that doing it again does not find its own work and refuse.

An error that is raised here says that the engine has not done the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from planish.errors import EngineClosedError, UserError
from planish.server.durable.checkpoints import CheckpointCatalog
from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.journal import result_of
from planish.server.durable.names import loaded_path
from planish.server.durable.records import ModelRow, change, put_checkpoint
from planish.server.durable.request_log import (
    Also,
    Request,
    RequestLog,
    SettledState,
    failure,
    token_count,
)
from planish.server.durable.store import crash_point
from planish.server.engine_client import DeviceClock, EngineClient
from planish.server.metrics import Counters
from planish.server.models.model import Model
from planish.server.models.publishing import Publishing
from planish.server.models.snapshots import Snapshots
from planish.server.results import Done, Failed
from planish.server.samplers import Samplers
from planish.server.scheduling.fair_queue import FairQueue
from planish.service import (
    CreateModel,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    PublishSampler,
    SaveWeights,
    SaveWeightsForSampler,
)
from planish.types import CheckpointPath, CheckpointType, GetInfoResponse


@dataclass(frozen=True, eq=False)
class _Work:
    """A request that is with the engine."""

    request: Request
    operation: Operation[Any]
    """As it was asked for."""
    future: asyncio.Future[Any]
    submitted: float

    @property
    def changes_weights(self) -> bool:
        operation = self.operation
        return not isinstance(operation, SaveWeights | SaveWeightsForSampler) and not (
            isinstance(operation, ForwardBackward) and operation.forward_only
        )


class TrainingSteps:
    def __init__(
        self,
        engine: EngineClient,
        requests: RequestLog,
        under_way: CrashGuard,
        gate: FairQueue,
        catalog: CheckpointCatalog,
        samplers: Samplers,
        publishing: Publishing,
        snapshots: Snapshots,
        counters: Counters,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._under_way = under_way
        self._gate = gate
        self._catalog = catalog
        self._samplers = samplers
        self._publishing = publishing
        self._snapshots = snapshots
        self._counters = counters
        self._clock = DeviceClock()

    async def start(self, model: Model, request: Request) -> None:
        """Give a request to the engine; its answer comes by itself. Some kinds are done when this
        returns.
        """
        operation = await self._requests.operation(request)
        if not isinstance(operation, ForwardBackward | OptimStep):
            # which wait for their turn first
            await self._under_way.enter(request.id)
        match operation:
            case ForwardBackward() | OptimStep():
                await self._compute(model, request, operation)
            case CreateModel():
                await self._create(model, request, operation)
            case LoadWeights():
                await self._load(model, request, operation)
            case SaveWeights() | SaveWeightsForSampler():
                await self._save(model, request, operation)
            case PublishSampler():
                await self._publish(model, request, operation)

    async def _compute(
        self, model: Model, request: Request, operation: ForwardBackward | OptimStep
    ) -> None:
        ahead = sum(earlier.tokens for earlier in model.running.values())
        turn = await self._gate.turn(model.tenant.name, 1, token_count(operation), ahead)
        try:
            await self._under_way.enter(request.id)
            crash_point("before running")
            submitted = self._clock.now()
            future = await self._engine.submit(operation)
        except BaseException:
            turn.give_back()
            raise
        future.add_done_callback(lambda _: turn.give_back())
        self._requests.release_operation(request)
        if isinstance(operation, OptimStep):
            model.is_dirty = False
        elif not operation.forward_only:
            model.is_dirty = True
        self._await(model, _Work(request, operation, future, submitted))
        if self._snapshots.is_due(model):
            await self._snapshots.begin(model)

    async def _create(self, model: Model, request: Request, operation: CreateModel) -> None:
        submitted, making = self._clock.now(), operation
        if operation.from_path is not None:
            making = replace(
                operation, from_path=await self._pinned(model, request, operation.from_path)
            )
        with _named(making.from_path, operation.from_path):
            info: GetInfoResponse = await self._engine.perform(making)
        arch = info.model_data.arch
        model.row = replace(model.row, arch=arch)
        self._await(
            model,
            _Work(request, operation, _already(info), submitted),
            lambda: _nothing(
                lambda transaction: change(transaction, ModelRow, model.id, arch=arch)
            ),
        )
        await model.settled()

    async def _load(self, model: Model, request: Request, operation: LoadWeights) -> None:
        await model.settled()
        submitted = self._clock.now()
        path = await self._pinned(model, request, operation.path)
        with _named(path, operation.path):
            future = await self._engine.submit(replace(operation, path=path))
        self._await(model, _Work(request, operation, future, submitted))
        await model.settled()
        model.is_dirty = model.is_dirty and future.exception() is not None

    async def _save(
        self, model: Model, request: Request, operation: SaveWeights | SaveWeightsForSampler
    ) -> None:
        await model.settled()
        await self._catalog.check_quota(model.tenant)
        kind: CheckpointType = "training" if isinstance(operation, SaveWeights) else "sampler"
        path = str(CheckpointPath(model.id, kind, operation.name))
        changing = self._catalog.changing(path)
        await changing.acquire()
        try:
            answering = await self._save_at(path, model, request, operation)
        except BaseException:
            changing.release()
            raise
        answering.add_done_callback(lambda _: changing.release())

    async def _save_at(
        self,
        path: str,
        model: Model,
        request: Request,
        operation: SaveWeights | SaveWeightsForSampler,
    ) -> asyncio.Task[None]:
        saving = operation
        if (
            request.row.state == "started"
            or operation.overwrite
            or not await self._engine.exists(path)
        ):
            await self._requests.mark(request, "started")
            crash_point("save marked")
            saving = replace(operation, overwrite=True)
        submitted = self._clock.now()
        future = await self._engine.submit(saving)

        async def noted() -> Also:
            row = await self._catalog.saved(model.tenant, path)
            crash_point("saved before recording")
            return lambda transaction: put_checkpoint(transaction, row)

        return self._await(model, _Work(request, operation, future, submitted), noted)

    async def _publish(self, model: Model, request: Request, operation: PublishSampler) -> None:
        sampler = self._samplers.get(operation.sampler_id)
        if sampler is None:
            raise UserError(
                f"sampling_session_id={operation.sampler_id!r} was closed before it was made"
            )
        submitted = self._clock.now()
        future = await self._publishing.begin(model, request.seq, operation)

        async def told() -> Also:
            await self._samplers.published(sampler)
            return lambda transaction: None

        self._await(model, _Work(request, operation, future, submitted), told)

    async def _pinned(self, model: Model, request: Request, path: str) -> str:
        """A copy of the checkpoint that nobody can change, made once."""
        private = loaded_path(model.id, request.seq, path)
        if request.row.state == "accepted":
            await self._engine.copy_checkpoint(path, private)
            crash_point("pinned before recording")
            await self._requests.mark(request, "started")
        model.private.add(private)
        return private

    def _await(
        self, model: Model, work: _Work, also: Callable[[], Awaitable[Also]] | None = None
    ) -> asyncio.Task[None]:
        """Answer the request when the engine has; `also` says then what is to be written with it."""
        model.applied = work.request.seq
        model.running[work.request.seq] = work.request
        return model.spawn(self._answer(model, work, also))

    async def _answer(
        self, model: Model, work: _Work, also: Callable[[], Awaitable[Also]] | None
    ) -> None:
        request, written_too = work.request, None
        try:
            result = await work.future
            self._counters.trained_tokens[request.row.tenant] += token_count(work.operation)
            answer: Done | Failed = await _encoded(request.row.kind, work.operation, result)
            written_too = await also() if also is not None else None
        except EngineClosedError:
            model.is_lossy = True  # no snapshot may count this request as done
            model.running.pop(request.seq, None)
            model.changed.set()
            return
        except Exception as error:
            answer = failure(error)
        spent = self._clock.spent(work.submitted)
        model.progress.requests += 1
        if work.changes_weights:
            model.progress.changes += 1
            model.progress.seconds += spent
            model.progress.bytes += request.row.body_bytes
        self.settle(model, request, answer, written_too)

    def settle(
        self,
        model: Model,
        request: Request,
        answer: Done | Failed,
        also: Also | None = None,
        state: SettledState | None = None,
    ) -> None:
        """Give the answer out, and remember until it is on disk."""
        if isinstance(answer, Failed):
            self._samplers.not_published(model.id, request.seq, answer.message)
        self._under_way.leave(request.id)
        written = self._requests.settle(request, answer, also, state)
        model.unwritten[request.seq] = written
        written.add_done_callback(lambda _: model.unwritten.pop(request.seq, None))
        model.running.pop(request.seq, None)
        model.changed.set()


@contextmanager
def _named(pinned: str | None, path: str | None) -> Iterator[None]:
    """Errors name a checkpoint as the client did, not its copy."""
    try:
        yield
    except UserError as error:
        if pinned is not None and path is not None:
            error.args = (str(error).replace(pinned, path),)
        raise


async def _encoded(kind: str, operation: Operation[Any], result: Any) -> Done:
    if isinstance(operation, ForwardBackward):
        return await asyncio.to_thread(result_of, kind, operation, result)
    return result_of(kind, operation, result)


async def _nothing(also: Also) -> Also:
    return also


def _already(result: Any) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future
