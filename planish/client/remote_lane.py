"""One model on a server: its operations are posted in the order in which they were given, each when
the one before is accepted.

Results are waited for side by side. What the server refuses has used up its number, and so the next
operation has the next one.

A step is applied as a whole or not at all. The server refuses an optim_step behind a
forward_backward that it refused. In the place of one that cannot be sent, because it was cancelled,
refused on this side, or its data could not be made, it gets an empty one to refuse.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from planish.client.remote_errors import refusal
from planish.client.remote_link import Link
from planish.client.remote_thread import LoopThread, in_pool
from planish.errors import EngineClosedError, PlanishError, UserError, refused_step
from planish.service import (
    CreateModel,
    ForwardBackward,
    ForwardBackwardLater,
    LoadWeights,
    Operation,
    OptimStep,
    UnloadModel,
)
from planish.types import GetInfoResponse
from planish.wire.client_operations import (
    Posted,
    create_model_request,
    training_request,
    training_result,
)
from planish.wire.fields import Fields
from planish.wire.models import info_from_json

if TYPE_CHECKING:
    from httpx2 import Response

_INLINE_TOKENS = 4096
# The server has read the number of what it refuses so.
_NUMBER_USED = (400, 404)


@dataclass(frozen=True, eq=False)
class Entry:
    """An operation that was given, and its answer."""

    operation: Operation[Any]
    answer: Future[Any]

    def fail(self, error: BaseException) -> None:
        if not self.answer.done() and (
            self.answer.running() or self.answer.set_running_or_notify_cancel()
        ):
            self.answer.set_exception(error)


@dataclass(eq=False)
class Lane:
    """Begins with a CreateModel. All but `model_id` belongs to the thread of the connection."""

    model_id: str
    link: Link
    thread: LoopThread
    info: GetInfoResponse | None = None
    _entries: asyncio.Queue[Entry] = field(default_factory=asyncio.Queue)
    _next_seq: int = 1
    _failure: PlanishError | None = None
    """Why nothing can be done any more."""
    _torn: BaseException | None = None
    """Why the server is going to refuse the next step, if it was an operation of this side that
    failed.
    """

    def put(self, entry: Entry) -> None:
        self._entries.put_nowait(entry)

    async def work(self) -> None:
        """Post what is put, until the model is unloaded."""
        entry = None
        while entry is None or not isinstance(entry.operation, UnloadModel):
            entry = await self._entries.get()
            try:
                await self._send(entry)
            except Exception as error:
                entry.fail(error)

    async def _send(self, entry: Entry) -> None:
        if self._failure is not None:
            raise self._failure
        match entry.operation:
            case CreateModel() as operation:
                await self._create(operation, entry)
            case ForwardBackward() as operation if not operation.forward_only:
                await self._add_gradient(operation, entry)
            case ForwardBackwardLater() as operation:
                await self._add_gradient_later(operation, entry)
            case operation if entry.answer.set_running_or_notify_cancel():
                await self._post(operation, entry)
                if isinstance(operation, LoadWeights):  # which drops the gradient
                    self._torn = None

    async def _create(self, operation: CreateModel, entry: Entry) -> None:
        if not entry.answer.set_running_or_notify_cancel():
            self._failure = UserError(
                f"model_id={self.model_id!r}: its making was cancelled; create another one"
            )
            return
        try:
            accepted = await self.link.post(create_model_request(operation))
            await self.link.result(_request_id(accepted), takes_protobuf=False)
            found = await self.link.post(
                Posted.json("/get_info", {"model_id": self.model_id, "type": "get_info"})
            )
        except PlanishError as error:
            self._failure = UserError(
                f"model_id={self.model_id!r}: it could not be created ({error}); create another one"
            )
            raise
        self.info = info_from_json(Fields.of(found.content))
        entry.answer.set_result(self.info)

    async def _add_gradient(self, operation: ForwardBackward, entry: Entry) -> None:
        if not entry.answer.set_running_or_notify_cancel():
            await self._leave_out(UserError("it was cancelled"))
            return
        number = self._next_seq
        try:
            await self._post(operation, entry)
        except Exception as error:
            if number == self._next_seq:
                await self._leave_out(error)
            raise

    async def _add_gradient_later(self, operation: ForwardBackwardLater, entry: Entry) -> None:
        made = asyncio.Event()
        operation.data.add_done_callback(lambda _: self.thread.post(made.set))
        await made.wait()
        error = CancelledError() if operation.data.cancelled() else operation.data.exception()
        if error is None:
            config = operation.loss_fn_config
            now = ForwardBackward(
                operation.model_id, operation.data.result(), operation.loss_fn, config
            )
            await self._add_gradient(now, entry)
        else:
            entry.fail(error)
            await self._leave_out(error)

    async def _leave_out(self, error: BaseException) -> None:
        """A part of the gradient is not coming."""
        self._torn = self._torn or error
        if self._failure is None:
            await self._accepted(ForwardBackward(self.model_id, [], "cross_entropy"))

    async def _post(self, operation: Operation[Any], entry: Entry) -> None:
        """Post it, and wait for its result beside what comes next."""
        request_id, torn = await self._accepted(operation), None
        if isinstance(operation, OptimStep):
            torn, self._torn = self._torn, None
        self.thread.spawn(self._await_result, operation, request_id, entry, torn)

    async def _accepted(self, operation: Operation[Any]) -> str:
        """Post an operation under the next number; answers the id of the request."""
        if _tokens(operation) > _INLINE_TOKENS:
            posted = await in_pool(training_request, operation, self._next_seq)
        else:
            posted = training_request(operation, self._next_seq)
        try:
            response = await self.link.post(posted, returned=_NUMBER_USED)
        except UserError:
            raise  # the number was not read
        except Exception as error:
            # Whether the number is used up, nobody knows.
            self._failure = EngineClosedError(
                f"model_id={self.model_id!r}: the server was lost ({error})"
            )
            raise
        self._next_seq += 1
        if not response.is_success:
            raise refusal(response)
        return _request_id(response)

    async def _await_result(
        self, operation: Operation[Any], request_id: str, entry: Entry, torn: BaseException | None
    ) -> None:
        takes_protobuf = isinstance(operation, ForwardBackward)
        try:
            content = await self.link.result(request_id, takes_protobuf=takes_protobuf)
            result = training_result(operation, content)
        except Exception as error:
            entry.fail(
                refused_step(torn) if torn is not None and isinstance(error, UserError) else error
            )
        else:
            entry.answer.set_result(result)


def _request_id(accepted: Response) -> str:
    return Fields.of(accepted.content).identifier("request_id")


def _tokens(operation: Operation[Any]) -> int:
    is_data = isinstance(operation, ForwardBackward)
    return sum(datum.model_input.length for datum in operation.data) if is_data else 0
