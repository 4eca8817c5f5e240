"""The requests of one model: the order in which they run, which are unfinished, and the task that
runs them.

A request may be taken from the queue when all lower numbers were taken. A missing number blocks
the later requests until the model stops waiting for it. From then on the number is skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from planish.errors import EngineClosedError
from planish.server.durable.journal import RequestRow
from planish.server.request import Request

T = TypeVar("T")

QueueItem = Request | RequestRow
"""A request to run, or the row of an answered request whose effect must be replayed."""


class RequestQueue(Generic[T]):
    """Items in the order of their sequence numbers, whatever the order of arrival."""

    def __init__(self, next_seq: int, skipped_below: int = 0) -> None:
        """`next_seq` is the first number that was not taken yet. Missing numbers below
        `skipped_below` are skipped.
        """
        self.next_seq = next_seq
        self.skipped_below = skipped_below
        self._items: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, seq: int, item: T) -> None:
        """Add an item whose number is neither taken nor in the queue."""
        assert seq >= self.next_seq, seq
        assert seq not in self._items, seq
        self._items[seq] = item

    def is_used(self, seq: int) -> bool:
        """Return whether a request with this number arrived, or the number was skipped."""
        return seq < max(self.next_seq, self.skipped_below) or seq in self._items

    @property
    def is_ready(self) -> bool:
        """Whether the next item can be taken."""
        self._skip_missing_seqs()
        return self.next_seq in self._items

    @property
    def is_blocked(self) -> bool:
        """Whether items wait for a missing lower number."""
        return bool(self._items) and not self.is_ready

    @property
    def unused_seq(self) -> int:
        """A number above every number that was used."""
        return max([self.next_seq, self.skipped_below, *(seq + 1 for seq in self._items)])

    def take(self) -> T | None:
        """Remove and return the next item; None if its number is missing."""
        if not self.is_ready:
            return None
        item = self._items.pop(self.next_seq)
        self.next_seq += 1
        return item

    def put_back(self, items: Mapping[int, T]) -> None:
        """Return items to the queue, by number: all that were taken since the first of them."""
        self._items.update(items)
        self.next_seq = min(items)

    def peek(self) -> T | None:
        """Return the item that `take` would return."""
        return self._items[self.next_seq] if self.is_ready else None

    def skip_missing(self) -> list[T]:
        """Skip every missing number, and return the waiting items in order. All of them are ready
        afterwards.
        """
        self.skipped_below = self.unused_seq
        return [self._items[seq] for seq in sorted(self._items)]

    def _skip_missing_seqs(self) -> None:
        if self.next_seq < self.skipped_below and self.next_seq not in self._items:
            self.next_seq = min(
                [self.skipped_below, *(seq for seq in self._items if seq >= self.next_seq)]
            )


@dataclass(eq=False)
class InFlight:
    """The unfinished work of one model: requests in the engine, and answers and samplers that are
    being written to disk. Each is listed by its sequence number.
    """

    running: dict[int, Request] = field(default_factory=dict[int, Request])
    """Requests that left the queue and have no answer yet."""
    unwritten_answers: dict[int, asyncio.Future[None]] = field(
        default_factory=dict[int, asyncio.Future[None]]
    )
    """Answers that are not on disk yet."""
    unsaved_samplers: dict[int, asyncio.Task[Any]] = field(
        default_factory=dict[int, asyncio.Task[Any]]
    )
    """Published samplers whose weights are not on disk yet."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def notify(self) -> None:
        """Wake everyone who waits for a change."""
        self._changed.set()

    async def wait_for_change(self) -> None:
        """Wait for the next `notify`."""
        self._changed.clear()
        await self._changed.wait()

    async def wait_below(self, limit: int) -> None:
        """Wait until fewer than `limit` requests run in the engine."""
        while len(self.running) >= limit:
            await self.wait_for_change()

    async def wait_until_idle(self) -> None:
        """Wait until no request runs in the engine."""
        await self.wait_below(1)

    async def wait_for_earlier(self, seq: int) -> None:
        """Wait until no request below `seq` runs in the engine.

        Answers must reach the disk in the order of the requests. Otherwise a crash could keep the
        answer of an optim_step and lose the answer of the forward_backward before it. The
        forward_backward would then run again, and could fail.
        """
        while any(number < seq for number in self.running):
            await self.wait_for_change()

    async def wait_until_durable(self, seq: int) -> None:
        """Wait until the answers and samplers of all requests up to `seq` are on disk."""
        while any(number <= seq for number in (*self.running, *self.unsaved_samplers)):
            await self.wait_for_change()
        await asyncio.gather(
            *(written for number, written in self.unwritten_answers.items() if number <= seq)
        )


class Worker:
    """Runs the requests of one model in a task. The task begins when the next request can be taken
    from the queue, and ends when there is nothing to do.
    """

    def __init__(
        self,
        name: str,
        queue: RequestQueue[QueueItem],
        in_flight: InFlight,
        stopping: asyncio.Event,
        run: Callable[[], Awaitable[None]],
    ) -> None:
        """The task calls `run`, which takes requests from `queue`. No task begins once `stopping`
        is set.
        """
        self.task: asyncio.Task[None] | None = None
        """The task; None while there is nothing to do."""
        self.is_closed = False
        """Whether the model is closed. No task begins then."""
        self._name, self._run, self._stopping = name, run, stopping
        self._queue, self._in_flight = queue, in_flight

    def wake(self) -> None:
        """Let the task look at the queue. Begin a task if there is none and a request is ready."""
        self._in_flight.notify()
        may_begin = self.task is None and not (self.is_closed or self._stopping.is_set())
        if may_begin and self._queue.is_ready:
            self.task = asyncio.create_task(self._work(), name=self._name)

    async def wait(self) -> None:
        """Wait until there is nothing to do."""
        while self.task is not None:
            await asyncio.wait([self.task])

    async def _work(self) -> None:
        try:
            await self._run()
        except EngineClosedError:
            return
        finally:
            self.task = None
        self.wake()
