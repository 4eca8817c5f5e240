"""The request queue of one training model on a server.

Operations are sent in the order of their submission, each after the server has accepted the one
before. Their results are awaited concurrently. A rejected operation has used its sequence number,
so the next operation takes the next number.

A training step is applied completely or not at all: the server rejects an optim_step that follows a
rejected forward_backward. A forward_backward may also fail on the client, because it was cancelled,
is invalid, or its data could not be computed. Then the client sends an empty forward_backward in
its place, which the server rejects.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from planish.client.remote_connection import ServerConnection
from planish.client.remote_errors import error_from_response
from planish.client.remote_thread import LoopThread, run_in_pool
from planish.errors import EngineClosedError, PlanishError, UserError, rejected_step
from planish.service import (
    CreateModel,
    DeferredForwardBackward,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    UnloadModel,
)
from planish.types import GetInfoResponse
from planish.wire.fields import Fields
from planish.wire.models import model_info_from_json
from planish.wire.operations import (
    PostRequest,
    post_request_for,
    result_from_bytes,
)

if TYPE_CHECKING:
    from httpx2 import Response

_MAX_INLINE_TOKENS = 4096
"""Larger batches are serialized in another thread, so that they do not block the event loop."""
_SEQ_USED_STATUSES = (400, 404)
"""Statuses of a rejected operation whose sequence number counts as used."""


@dataclass(frozen=True, eq=False)
class QueuedOperation:
    """A submitted operation and the future of its result."""

    operation: Operation[Any]
    future: Future[Any]

    def fail(self, error: BaseException) -> None:
        """Set `error` as the result, unless there is a result or the future was cancelled."""
        if not self.future.done() and (
            self.future.running() or self.future.set_running_or_notify_cancel()
        ):
            self.future.set_exception(error)


@dataclass(eq=False)
class ModelQueue:
    """The request queue of one training model. Its first operation is a CreateModel.

    All fields except `model_id` are used only in the connection's thread.
    """

    model_id: str
    connection: ServerConnection
    thread: LoopThread
    info: GetInfoResponse | None = None
    _operations: asyncio.Queue[QueuedOperation] = field(
        default_factory=asyncio.Queue[QueuedOperation]
    )
    _next_seq_id: int = 1
    _failure: PlanishError | None = None
    """If set, every further operation fails with this error."""
    _gradient_error: BaseException | None = None
    """The error of a forward_backward that failed on the client. The server then rejects the next
    optim_step, whose error names this one.
    """

    def put(self, queued: QueuedOperation) -> None:
        """Append an operation to the queue."""
        self._operations.put_nowait(queued)

    async def run(self) -> None:
        """Send queued operations until the model is unloaded."""
        queued = None
        while queued is None or not isinstance(queued.operation, UnloadModel):
            queued = await self._operations.get()
            try:
                await self._send(queued)
            except Exception as error:
                queued.fail(error)

    async def _send(self, queued: QueuedOperation) -> None:
        if self._failure is not None:
            raise self._failure
        match queued.operation:
            case CreateModel() as operation:
                await self._create(operation, queued)
            case ForwardBackward() as operation if not operation.forward_only:
                await self._add_gradient(operation, queued)
            case DeferredForwardBackward() as operation:
                await self._add_gradient_later(operation, queued)
            case operation if queued.future.set_running_or_notify_cancel():
                await self._post(operation, queued)
                if isinstance(operation, LoadWeights):  # loading clears the gradient
                    self._gradient_error = None
            case _:
                pass  # The operation was cancelled before it was sent.

    async def _create(self, operation: CreateModel, queued: QueuedOperation) -> None:
        if not queued.future.set_running_or_notify_cancel():
            self._failure = UserError(
                f"model_id={self.model_id!r}: its creation was cancelled; create another one"
            )
            return
        try:
            accepted = await self.connection.post(post_request_for(operation))
            await self.connection.result(_request_id(accepted), takes_protobuf=False)
            info_response = await self.connection.post(
                PostRequest.json("/get_info", {"model_id": self.model_id, "type": "get_info"})
            )
        except PlanishError as error:
            self._failure = UserError(
                f"model_id={self.model_id!r}: the model could not be created ({error}); create "
                "another model"
            )
            raise
        self.info = model_info_from_json(Fields.of(info_response.content))
        queued.future.set_result(self.info)

    async def _add_gradient(self, operation: ForwardBackward, queued: QueuedOperation) -> None:
        if not queued.future.set_running_or_notify_cancel():
            await self._skip_gradient(UserError("the forward_backward was cancelled"))
            return
        seq_id_before = self._next_seq_id
        try:
            await self._post(operation, queued)
        except Exception as error:
            if seq_id_before == self._next_seq_id:
                await self._skip_gradient(error)
            raise

    async def _add_gradient_later(
        self, operation: DeferredForwardBackward, queued: QueuedOperation
    ) -> None:
        data_done = asyncio.Event()
        operation.data.add_done_callback(lambda _: self.thread.post(data_done.set))
        await data_done.wait()
        try:
            data, config = operation.data.result(), operation.loss_fn_config
            forward_backward = ForwardBackward(operation.model_id, data, operation.loss_fn, config)
        except BaseException as error:
            queued.fail(error)
            await self._skip_gradient(error)
        else:
            await self._add_gradient(forward_backward, queued)

    async def _skip_gradient(self, error: BaseException) -> None:
        """Make the server reject the next optim_step, because a forward_backward failed here."""
        self._gradient_error = self._gradient_error or error
        if self._failure is None:
            await self._send_numbered(ForwardBackward(self.model_id, [], "cross_entropy"))

    async def _post(self, operation: Operation[Any], queued: QueuedOperation) -> None:
        """Send `operation`, and await its result in a task of its own."""
        request_id, gradient_error = await self._send_numbered(operation), None
        if isinstance(operation, OptimStep):
            gradient_error, self._gradient_error = self._gradient_error, None
        self.thread.spawn(self._await_result, operation, request_id, queued, gradient_error)

    async def _send_numbered(self, operation: Operation[Any]) -> str:
        """Send an operation with the next sequence number, and return the id of the request."""
        if _num_tokens(operation) > _MAX_INLINE_TOKENS:
            posted = await run_in_pool(post_request_for, operation, self._next_seq_id)
        else:
            posted = post_request_for(operation, self._next_seq_id)
        try:
            response = await self.connection.post(posted, returned_statuses=_SEQ_USED_STATUSES)
        except UserError:
            raise  # rejected before the server read the sequence number
        except Exception as error:
            # The server may or may not have used the sequence number, so stop this queue.
            self._failure = EngineClosedError(
                f"model_id={self.model_id!r}: the connection to the server was lost ({error})"
            )
            raise
        self._next_seq_id += 1
        if not response.is_success:
            raise error_from_response(response)
        return _request_id(response)

    async def _await_result(
        self,
        operation: Operation[Any],
        request_id: str,
        queued: QueuedOperation,
        gradient_error: BaseException | None,
    ) -> None:
        takes_protobuf = isinstance(operation, ForwardBackward)
        try:
            content = await self.connection.result(request_id, takes_protobuf=takes_protobuf)
            result = result_from_bytes(operation, content)
        except Exception as error:
            queued.fail(
                rejected_step(gradient_error)
                if gradient_error is not None and isinstance(error, UserError)
                else error
            )
        else:
            queued.future.set_result(result)


def _request_id(accepted: Response) -> str:
    return Fields.of(accepted.content).identifier("request_id")


def _num_tokens(operation: Operation[Any]) -> int:
    is_data = isinstance(operation, ForwardBackward)
    return sum(datum.model_input.max_length for datum in operation.data) if is_data else 0
