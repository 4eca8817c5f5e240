"""Calls between the training process and its rollout workers, over a socket pair.

Each end of the socket pair is a `Peer`. Both peers can make calls, answer calls, and cancel the
calls that they made. Any number of calls can be in progress at once. While a call is in progress,
the callee can call back: a worker that rolls out a group calls the policy in the training process.
Such a call back is a nested call, and the call in progress is its scope. When the scope ends, its
nested calls are cancelled.

A message is a pickled dataclass, preceded by its length. Only the two processes, and processes that
they fork, hold the ends of the socket pair. No other program can write to it, so unpickling is
safe.

An error is sent with its type, message and notes, and the text of its traceback becomes its cause.
An error that cannot be pickled arrives as a RolloutProcessError with its type and message.
"""

import asyncio
import pickle
import socket
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

from planish.errors import PlanishError
from planish.processes.interruption import first_error

GRACE_SECONDS = 10.0
"""Seconds that a worker may take to end after its socket is closed. It is killed afterwards."""
LENGTH_BYTES = 8
BUFFER_BYTES = 1 << 20


class RolloutProcessError(PlanishError, RuntimeError):
    """A rollout worker died, or raised an error that cannot be pickled."""


class ProcessTraceback(Exception):
    """The traceback of an error in the process where it was raised."""

    def __init__(self, text: str) -> None:
        super().__init__(f'in a rollout process\n"""\n{text}"""')


@dataclass(frozen=True)
class PackedError:
    """An exception in a form that can be sent."""

    pickled: bytes
    """The pickled exception; empty if the exception cannot be pickled."""
    summary: str
    traceback: str

    @classmethod
    def from_error(cls, error: BaseException) -> Self:
        """Pack `error`; never raises."""
        trail = "".join(traceback.format_exception(error))
        summary = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
        try:
            return cls(pickle.dumps(error), summary, trail)
        except Exception:  # pickling the arguments of an exception may raise any error
            return cls(b"", summary, trail)

    def to_exception(self) -> Exception:
        """Return the exception, or a RolloutProcessError in its place."""
        error: Any = None
        with suppress(Exception):
            # An exception that pickles can still fail to unpickle, since its class may need other
            # arguments than those in `args`.
            error = pickle.loads(self.pickled)
        if not isinstance(error, Exception):
            error = RolloutProcessError(self.summary)
        error.__cause__ = ProcessTraceback(self.traceback)
        return error


@dataclass(frozen=True)
class Ready:
    """Message: the sender has started."""


@dataclass(frozen=True)
class Call:
    """Message: the sender asks for an answer to `request`."""

    scope: int | None
    """For a nested call, the number of its scope, which is a call that the receiver made. For other
    calls, None.
    """
    number: int
    """Number of this call, unique among the calls of the sender."""
    request: Any


@dataclass(frozen=True)
class Cancel:
    """Message: the sender no longer waits for its call `number`. The receiver cancels the work."""

    scope: int | None
    number: int


@dataclass(frozen=True)
class Reply:
    """Message: the result or the error of call number `scope`, which the receiver made."""

    scope: int
    result: Any = None
    error: PackedError | None = None


@dataclass(frozen=True)
class Ended:
    """Marks the end of an inbox: no more messages will come. It is never sent."""

    reason: Exception | None = None


Answer = Callable[[Call], Awaitable[Any]]


async def reject(call: Call) -> Any:
    """Raise AssertionError. This is the `answer` of a peer that expects no calls."""
    raise AssertionError(f"unexpected call: {call}")


class Peer:
    """One end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._has_ended = False
        self._numbers = count(1)
        self._inboxes: dict[int | None, asyncio.Queue[Any]] = {}
        """The inbox of each call of this peer that is in progress. The key is the number of the
        call. The key None has the calls of the other end that are not nested; `serve` answers them.
        """
        self.is_other_ready = False

    @classmethod
    async def from_socket(cls, end: socket.socket) -> Self:
        """Return the peer that uses this socket."""
        return cls(*await asyncio.open_connection(sock=end, limit=BUFFER_BYTES))

    @property
    def calls(self) -> int:
        """Number of own calls that are in progress."""
        return len(self._inboxes.keys() - {None})

    async def call(self, request: Any, scope: int | None = None, answer: Answer = reject) -> Any:
        """Return the other end's result for `request`, or raise its error.

        For a nested call, `scope` is the number of the other end's call. `answer` answers the
        nested calls that the other end makes while it serves this call. These nested calls are
        cancelled when this call ends.
        """
        number = next(self._numbers)
        inbox = self._inboxes[number] = asyncio.Queue()
        last: Reply | Ended | None = None
        try:
            await self._send(Call(scope, number, request))
            last = await self._answer_all(inbox, answer)
        finally:
            del self._inboxes[number]
            if last is None:
                self.post(Cancel(scope, number))
        match last:
            case Ended(Exception() as reason):
                raise reason
            case Reply(_, _, PackedError() as error):
                raise error.to_exception()
            case Reply():
                return last.result
            case _:
                raise AssertionError(f"a call ended with {last!r}")

    async def serve(self, answer: Answer) -> None:
        """Answer the calls of the other end that are not nested, until the other end sends no more
        messages. Then cancel unfinished answers and close the socket.
        """
        inbox = self._inboxes[None] = asyncio.Queue()
        listening = asyncio.create_task(self.listen())
        self.post(Ready())
        await self._answer_all(inbox, answer)
        await listening
        await self.close()

    async def listen(self) -> None:
        """Put each message into the inbox of the call that it belongs to, until the other end is
        gone. Messages for calls that have ended are dropped.
        """
        while (message := await self._receive()) is not None:
            if isinstance(message, Ready):
                self.is_other_ready = True
            elif message.scope in self._inboxes:
                self._inboxes[message.scope].put_nowait(message)
        if None in self._inboxes:
            self._inboxes[None].put_nowait(Ended())

    def fail_calls(self, reason: Exception) -> None:
        """Raise `reason` in all own calls that are in progress."""
        for inbox in self._inboxes.values():
            inbox.put_nowait(Ended(reason))

    async def _answer_all(self, inbox: asyncio.Queue[Any], answer: Answer) -> Reply | Ended:
        """Answer the calls in `inbox` concurrently until a Reply or an Ended arrives. Cancel the
        unfinished answers and return that message.
        """
        tasks: dict[int, asyncio.Task[None]] = {}
        with first_error():
            async with asyncio.TaskGroup() as group:
                while True:
                    match await inbox.get():
                        case Call(_, number) as call:
                            tasks[number] = group.create_task(self._answer(call, answer))
                            tasks[number].add_done_callback(lambda _, n=number: tasks.pop(n))
                        case Cancel(_, number) if number in tasks:
                            tasks[number].cancel()
                        case Reply() | Ended() as last:
                            for task in tasks.values():
                                task.cancel()
                            return last
                        case _:
                            pass  # a Cancel of a call that has been answered

    async def _answer(self, call: Call, answer: Answer) -> None:
        try:
            reply = Reply(call.number, await answer(call))
        except asyncio.CancelledError as error:
            # If the caller cancelled the call, it ignores this reply. Otherwise `answer` raised
            # CancelledError by mistake, and the caller still waits for a reply.
            self.post(Reply(call.number, error=PackedError.from_error(error)))
            raise
        except Exception as error:
            reply = Reply(call.number, error=PackedError.from_error(error))
        await self._send(reply)

    def post(self, message: Any) -> None:
        """Send without waiting. After `end`, or if the other end is gone, the message is lost."""
        payload = pickle.dumps(message)
        if not self._has_ended and not self._writer.is_closing():
            self._writer.write(len(payload).to_bytes(LENGTH_BYTES, "big") + payload)

    async def _send(self, message: Any) -> None:
        """Send, and wait while the other end is slow to read."""
        self.post(message)
        # If the other end is gone, `listen` notices it and the pending calls fail. So ignore the
        # error here.
        with suppress(ConnectionError):
            await self._writer.drain()

    async def _receive(self) -> Any | None:
        """Return the next message; None if the other end is gone."""
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            payload = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return pickle.loads(payload)

    def end(self) -> None:
        """Tell the other end that no more messages will come. Its messages are still received."""
        self._has_ended = True
        if not self._writer.is_closing():
            with suppress(OSError):  # the other end is gone
                self._writer.write_eof()

    async def close(self) -> None:
        """Close the socket."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
