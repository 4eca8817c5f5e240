"""The requests of one model: those that wait, in the order of their numbers, and those in flight.

A request may be taken from the queue when all lower numbers were taken. A missing number blocks
the requests after it until the model stops waiting for it. From then on the number is skipped, and
a request that arrives with it is too late.

Clients that restart their numbers. logits-sdk makes a training client from a checkpoint in two
steps: its SDK creates a model and loads the weights as request 1; then it wraps the model into a
new client, whose first request is number 1 again. The server accepts this in that one case: if the
only request of a model so far is a load_weights with number 1, a different request with number 1
restarts the numbers. `RESTART` is added to the numbers of the second client, so that they stay
unique. The model skips all numbers in between, and the database remembers that.
"""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

from planish.server.durable.journal import RequestRow
from planish.server.durable.request_log import QueuedRequest

T = TypeVar("T")

RESTART = 1 << 61
"""Added to the sequence numbers of a client that restarted them."""

QueueItem = QueuedRequest | RequestRow
"""A request to run, or the row of an answered request whose effect must be repeated."""


class RequestQueue(Generic[T]):
    """Items in the order of their sequence numbers, whatever the order of arrival."""

    def __init__(self, next_seq: int, skipped_below: int = 0) -> None:
        """`next_seq` is the first number that was not taken yet. Missing numbers below
        `skipped_below` are skipped.
        """
        self.next_seq = next_seq
        self.skipped_below = skipped_below
        self._waiting: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, seq: int, item: T) -> None:
        """Add an item whose number is neither taken nor in the queue."""
        assert seq >= self.next_seq, seq
        assert seq not in self._waiting, seq
        self._waiting[seq] = item

    def is_used(self, seq: int) -> bool:
        """Return whether a request with this number arrived, or the number was skipped."""
        return seq < max(self.next_seq, self.skipped_below) or seq in self._waiting

    @property
    def is_ready(self) -> bool:
        """Whether the next item can be taken."""
        self._skip()
        return self.next_seq in self._waiting

    @property
    def is_blocked(self) -> bool:
        """Whether items wait behind a missing number."""
        return bool(self._waiting) and not self.is_ready

    @property
    def end(self) -> int:
        """A number above every number that was used."""
        return max([self.next_seq, self.skipped_below, *(seq + 1 for seq in self._waiting)])

    def take(self) -> T | None:
        """Remove and return the next item; None if its number is missing."""
        if not self.is_ready:
            return None
        item = self._waiting.pop(self.next_seq)
        self.next_seq += 1
        return item

    def peek(self) -> T | None:
        """Return the item that `take` would return."""
        return self._waiting[self.next_seq] if self.is_ready else None

    def skip_missing(self) -> list[T]:
        """Skip every missing number, and return the waiting items in order. All of them are ready
        afterwards.
        """
        self.skipped_below = self.end
        return [self._waiting[seq] for seq in sorted(self._waiting)]

    def _skip(self) -> None:
        if self.next_seq < self.skipped_below and self.next_seq not in self._waiting:
            self.next_seq = min(
                [self.skipped_below, *(seq for seq in self._waiting if seq >= self.next_seq)]
            )


class InFlight:
    """What one model has in flight: requests in the engine, answers and samplers on their way to
    disk, each by sequence number.
    """

    def __init__(self) -> None:
        self.running: dict[int, QueuedRequest] = {}
        """Requests that left the queue and have no answer yet."""
        self.unwritten: dict[int, asyncio.Future[None]] = {}
        """Answers that are not on disk yet."""
        self.unsaved: dict[int, asyncio.Task[Any]] = {}
        """Published samplers whose weights are not on disk yet."""
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake everyone who waits for a change."""
        self._changed.set()

    async def change(self) -> None:
        """Wait for the next `notify`."""
        self._changed.clear()
        await self._changed.wait()

    async def wait_below(self, limit: int) -> None:
        """Wait until fewer than `limit` requests run in the engine."""
        while len(self.running) >= limit:
            await self.change()

    async def drained(self) -> None:
        """Wait until no request runs in the engine."""
        await self.wait_below(1)

    async def durable(self, seq: int) -> None:
        """Wait until the answers and samplers of all requests up to `seq` are on disk."""
        while any(number <= seq for number in (*self.running, *self.unsaved)):
            await self.change()
        await asyncio.gather(
            *(written for number, written in self.unwritten.items() if number <= seq)
        )
