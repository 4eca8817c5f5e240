"""How many requests are with the engine at once, and whose turn it is to send one: that of the
tenant that has had the fewest tokens.

What waits here waits in the order in which each tenant sent it. The engine has enough to be busy,
and little enough that a tenant who comes later is not behind all the work of one who came first.
While others are about, one tenant does not take all places, however long it keeps them: who comes
finds some. Nor do long requests, whosesoever: those that are done in a moment have places that
these do not get.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

_ABOUT_SECONDS = 600.0
"""A tenant is about for so long after it asked."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    size: int
    tokens: int
    is_long: bool
    granted: asyncio.Future[None]


class Turn:
    """A place with the engine, until it is given back."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def give_back(self) -> None:
        """Again: nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class FairQueue:
    def __init__(
        self,
        capacity: int,
        share: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        long_capacity: int | None = None,
        long_tokens: int = 0,
    ) -> None:
        """Turns whose sizes add up to at most `capacity` are given at once; one that is larger is
        given alone.

        `share`: as much, but for its first turn, has one tenant while others are about. By default
        all. `long_capacity`: as much have long requests together, those that keep their places for
        more than `long_tokens`. By default all.
        """
        self._capacity = capacity
        self._share = capacity if share is None else share
        self._long_capacity = capacity if long_capacity is None else long_capacity
        self._long_tokens = long_tokens
        self._clock_now = clock
        self._held: Counter[str] = Counter()
        self._held_long = 0
        self._asked: dict[str, float] = {}
        """When each tenant asked last."""
        self._queues: dict[str, deque[_Waiting]] = {}
        self._clocks: dict[str, int] = {}
        """Tokens that each tenant has had; whoever was absent begins with as many as those who are
        served now.
        """
        self._now = 0

    @property
    def waiting(self) -> int:
        return sum(
            not request.granted.done() for queue in self._queues.values() for request in queue
        )

    @property
    def used(self) -> int:
        """The sum of the sizes of turns that were given and not given back."""
        return self._held.total()

    async def turn(self, tenant: str, size: int, tokens: int, ahead: int = 0) -> Turn:
        """Wait for the tenant's turn. `tokens` is what it is known to cost, `ahead` what is done
        before it while it has its place.
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
                # it was granted in the moment in which nobody wanted it any more
                self._free(tenant, request)
            else:
                self._grant()
            raise
        return Turn(lambda: self._free(tenant, request))

    def charge(self, tenant: str, tokens: int) -> None:
        """What a turn cost more than was known before."""
        self._clocks[tenant] = self._clock(tenant) + tokens

    def _free(self, tenant: str, request: _Waiting) -> None:
        self._held[tenant] -= request.size
        if not self._held[tenant]:
            del self._held[tenant]
        self._held_long -= request.size * request.is_long
        self._grant()

    def _grant(self) -> None:
        while (tenant := self._next()) is not None:
            request = self._queues[tenant].popleft()
            self._held[tenant] += request.size
            self._held_long += request.size * request.is_long
            self._now = self._clock(tenant)
            self._clocks = {
                name: clock for name, clock in self._clocks.items() if clock > self._now
            }
            self.charge(tenant, request.tokens)
            request.granted.set_result(None)

    def _next(self) -> str | None:
        """Whose turn it is, if there is room for what it asks."""
        most = self._capacity if self._is_alone() else self._share
        for tenant in sorted(self._tenants_waiting(), key=self._clock):
            request, held = self._queues[tenant][0], self._held[tenant]
            if (
                request.is_long
                and self._held_long
                and self._held_long + request.size > self._long_capacity
            ):
                continue
            if not held or held + request.size <= most:
                return tenant if self.used + request.size <= self._capacity else None
        return None

    def _is_alone(self) -> bool:
        latest = self._clock_now() - _ABOUT_SECONDS
        self._asked = {tenant: asked for tenant, asked in self._asked.items() if asked > latest}
        return len(self._asked) < 2

    def _clock(self, tenant: str) -> int:
        return max(self._clocks.get(tenant, 0), self._now)

    def _tenants_waiting(self) -> list[str]:
        """Those with a request whose sender still waits."""
        for tenant, queue in list(self._queues.items()):
            while queue and queue[0].granted.done():
                queue.popleft()
            if not queue:
                del self._queues[tenant]
        return list(self._queues)
