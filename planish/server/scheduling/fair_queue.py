"""Which requests the engine has at once, and whose turn comes next: the turn of the tenant that has
had the fewest tokens.

Requests of one tenant wait in the order in which they were sent. The engine gets enough requests to
be busy, and few enough that a newcomer does not wait behind all the work of an earlier tenant.
While others are active, one tenant cannot take all slots, so some are free for newcomers. Some
slots are kept for short requests of any tenant.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

_ACTIVE_SECONDS = 600.0
"""A tenant counts as active for this long after its last request."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A request that waits for its turn."""

    size: int
    tokens: int
    is_long: bool
    granted: asyncio.Future[None]


class Turn:
    """A request's slots in the engine, until they are given back."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def give_back(self) -> None:
        """Give the slots back. Idempotent."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class FairQueue:
    """Gives turns to the tenants by the number of tokens that each has had."""

    def __init__(
        self,
        capacity: int,
        max_per_tenant: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        long_capacity: int | None = None,
        long_tokens: int = 0,
    ) -> None:
        """Turns whose sizes add up to at most `capacity` are granted at once; a larger one is
        granted alone.

        `max_per_tenant` limits the slots of one tenant while others are active, except for its
        first turn. `long_capacity` limits the slots of long requests, those of more than
        `long_tokens` tokens. By default both limits equal `capacity`.
        """
        self._capacity = capacity
        self._max_per_tenant = capacity if max_per_tenant is None else max_per_tenant
        self._long_capacity = capacity if long_capacity is None else long_capacity
        self._long_tokens = long_tokens
        self._clock_now = clock
        self._held: Counter[str] = Counter()
        self._held_long = 0
        self._asked: dict[str, float] = {}
        """When each tenant sent its last request."""
        self._queues: dict[str, deque[_Waiting]] = {}
        self._clocks: dict[str, int] = {}
        """Tokens that each tenant has had. A tenant that was absent starts with the count of those
        being served.
        """
        self._now = 0

    @property
    def waiting(self) -> int:
        """The number of requests that wait for their turn."""
        return sum(
            not request.granted.done() for queue in self._queues.values() for request in queue
        )

    @property
    def used(self) -> int:
        """The sum of the sizes of all granted turns."""
        return self._held.total()

    async def turn(self, tenant: str, size: int, tokens: int, ahead: int = 0) -> Turn:
        """Wait for the tenant's turn. `tokens` is the known cost of the request, `ahead` the cost
        of what runs before it while it holds its slots.
        """
        size, is_long = min(size, self._capacity), tokens + ahead > self._long_tokens
        request = _Waiting(size, tokens, is_long, asyncio.get_running_loop().create_future())
        self._queues.setdefault(tenant, deque()).append(request)
        self._asked[tenant] = self._clock_now()
        self._grant()
        try:
            await request.granted
        except asyncio.CancelledError:
            if not request.granted.cancelled():
                # the turn was granted at the moment of the cancellation
                self._free(tenant, request)
            else:
                self._grant()
            raise
        return Turn(lambda: self._free(tenant, request))

    def charge(self, tenant: str, tokens: int) -> None:
        """Charge tokens that were not known when the turn was granted."""
        self._clocks[tenant] = self._clock(tenant) + tokens

    def _free(self, tenant: str, request: _Waiting) -> None:
        self._held[tenant] -= request.size
        if not self._held[tenant]:
            del self._held[tenant]
        if request.is_long:
            self._held_long -= request.size
        self._grant()

    def _grant(self) -> None:
        while (tenant := self._next()) is not None:
            request = self._queues[tenant].popleft()
            self._held[tenant] += request.size
            if request.is_long:
                self._held_long += request.size
            self._now = self._clock(tenant)
            self._clocks = {
                name: clock for name, clock in self._clocks.items() if clock > self._now
            }
            self.charge(tenant, request.tokens)
            request.granted.set_result(None)

    def _next(self) -> str | None:
        """Return the tenant whose turn it is, if its request fits."""
        limit = self._capacity if self._is_alone() else self._max_per_tenant
        for tenant in sorted(self._tenants_waiting(), key=self._clock):
            request, held = self._queues[tenant][0], self._held[tenant]
            if (
                request.is_long
                and self._held_long
                and self._held_long + request.size > self._long_capacity
            ):
                continue
            if not held or held + request.size <= limit:
                return tenant if self.used + request.size <= self._capacity else None
        return None

    def _is_alone(self) -> bool:
        latest = self._clock_now() - _ACTIVE_SECONDS
        self._asked = {tenant: asked for tenant, asked in self._asked.items() if asked > latest}
        return len(self._asked) < 2

    def _clock(self, tenant: str) -> int:
        return max(self._clocks.get(tenant, 0), self._now)

    def _tenants_waiting(self) -> list[str]:
        """Return the tenants with a request that was not cancelled."""
        for tenant, queue in list(self._queues.items()):
            while queue and queue[0].granted.done():
                queue.popleft()
            if not queue:
                del self._queues[tenant]
        return list(self._queues)
