"""The middle stage of every request: its turn to run.

A training request takes its turn when its adapter is in memory: it waits for a slot of the fair
queue. A sample waits for its slots first, and then for its sampler. Then both wait for the crash
guard.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.crash_points import crash_point
from planish.server.request import Request
from planish.server.scheduling import FairQueue, SlotLease


@dataclass(frozen=True)
class Turns:
    """Gives turns to the training requests of all models, or to the samples of all samplers."""

    _queue: FairQueue
    _crash_guard: CrashGuard
    stopping: asyncio.Event
    """Set when the server begins to stop. Models then take no more requests from their queues."""

    async def take(self, request: Request, num_slots: int, num_tokens_ahead: int = 0) -> SlotLease:
        """Wait until a request of a loaded adapter may run, and return its slots. A request without
        slots waits for the crash guard only. Call `end` when the request is answered.

        `num_tokens_ahead` is the number of tokens of the model's earlier requests that still run.
        """
        lease = SlotLease()
        if num_slots:
            lease = await self._queue.acquire_slots(
                request.row.tenant, num_slots, request.num_input_tokens, num_tokens_ahead
            )
        try:
            if self._crash_guard.is_active:
                await self._crash_guard.enter(request.id)
        except BaseException:
            lease.release()
            raise
        crash_point("before running")
        request.begun = time.time()
        return lease

    def end(self, request: Request) -> None:
        """Note that a request was answered."""
        self._crash_guard.leave(request.id)

    def pause(self, request: Request) -> None:
        """Note that a request is not running at the moment, but will run again."""
        self._crash_guard.pause(request.id)

    @asynccontextmanager
    async def turn(
        self,
        key: str,
        tenant: str,
        num_slots: int,
        num_tokens: int,
        loaded: AbstractAsyncContextManager[None],
    ) -> AsyncGenerator[None]:
        """Wait for slots, then for the adapter, which is in memory within `loaded`, and then for
        the crash guard. The turn ends with the block. `key` is the crash guard's key.
        """
        lease = await self._queue.acquire_slots(tenant, num_slots, num_tokens)
        try:
            async with loaded, self._crash_guard.running(key):
                crash_point("before running")
                yield
        finally:
            lease.release()

    @property
    def needs_key(self) -> bool:
        """Whether the crash guard asks for the keys of requests."""
        return self._crash_guard.is_active

    @property
    def num_used_slots(self) -> int:
        """The number of slots in use."""
        return self._queue.used_slots

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Charge tokens that were not known when the turn was given."""
        self._queue.charge(tenant, num_tokens)
