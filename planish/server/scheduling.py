"""Scheduling: which tenant's request runs next, and which adapters are in memory.

Turns. `FairQueue` gives the next turn to the tenant that has used the fewest tokens. Requests of
one tenant wait in the order in which they were sent. Only requests with a slot are in the engine,
and there are enough slots to keep the engine busy. All other requests wait in the queue, where
a new tenant's request can overtake them. While other tenants are active, one tenant cannot take all
slots, so some are free for a new tenant. Some slots are kept for short requests of any tenant.

Memory. `AdapterCache` is an LRU cache. An adapter is loaded before its first use, stays in memory
while it is pinned, and may be evicted afterwards. A caller that needs memory waits until enough
adapters can be evicted; an adapter with a size of 0 never waits. An adapter larger than the budget
is loaded alone. A load or an unload, once started, always completes even if the caller is
cancelled, because the engine thread doing the work cannot be interrupted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from planish.server.durable.retries import retry_briefly
from planish.server.metrics import Counters

_log = logging.getLogger(__name__)


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
    """The slots of one request in the engine. The request holds them until `release`."""

    def __init__(self, release: Callable[[], None]) -> None:
        """`release` returns the slots to the queue. It is called once."""
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Give the slots back. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()


class FairQueue:
    """Gives the next turn to the tenant that has used the fewest tokens."""

    def __init__(
        self,
        capacity: int,
        max_per_tenant: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        long_capacity: int | None = None,
        long_tokens: int = 0,
    ) -> None:
        """`capacity` is the number of slots: the sizes of all granted turns add up to at most this.
        A request larger than `capacity` takes all slots.

        `max_per_tenant` limits the slots of one tenant while other tenants are active. A tenant
        without any slots may exceed this limit with its next turn. `long_capacity` limits the slots
        of long requests, those with more than `long_tokens` tokens. By default both limits equal
        `capacity`.
        """
        self._capacity = capacity
        self._max_per_tenant = capacity if max_per_tenant is None else max_per_tenant
        self._long_capacity = capacity if long_capacity is None else long_capacity
        self._long_tokens = long_tokens
        self._clock = clock
        self._slots: Counter[str] = Counter()
        self._long_slots = 0
        self._last_requests: dict[str, float] = {}
        """When each tenant sent its last request."""
        self._queues: dict[str, deque[_Waiting]] = {}
        self._virtual_times: dict[str, int] = {}
        """The virtual time of each tenant: the `_virtual_now` at which the tenant became active,
        plus the tokens that it has used since. A tenant without an entry starts at `_virtual_now`.
        If it started at 0, a tenant that was absent would come before all others for a long time.
        """
        self._virtual_now = 0
        """The lowest virtual time that a tenant can have. Each granted turn sets it to the virtual
        time of the turn's tenant, before the tokens of the turn are added.
        """

    @property
    def waiting(self) -> int:
        """The number of requests that wait for their turn."""
        return sum(
            not request.granted.done() for queue in self._queues.values() for request in queue
        )

    @property
    def used(self) -> int:
        """The sum of the sizes of all granted turns."""
        return self._slots.total()

    async def turn(self, tenant: str, size: int, tokens: int, ahead: int = 0) -> Turn:
        """Wait for the tenant's turn.

        `tokens` is the known cost of the request. `ahead` is the cost of earlier requests of the
        same model that are still running. The request counts as long if `tokens + ahead` exceeds
        `long_tokens`, because it holds its slots until the earlier requests have run, too.
        """
        size, is_long = min(size, self._capacity), tokens + ahead > self._long_tokens
        request = _Waiting(size, tokens, is_long, asyncio.get_running_loop().create_future())
        self._queues.setdefault(tenant, deque()).append(request)
        self._last_requests[tenant] = self._clock()
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
        self._virtual_times[tenant] = self._virtual_time(tenant) + tokens

    def _free(self, tenant: str, request: _Waiting) -> None:
        self._slots[tenant] -= request.size
        if not self._slots[tenant]:
            del self._slots[tenant]
        if request.is_long:
            self._long_slots -= request.size
        self._grant()

    def _grant(self) -> None:
        while (tenant := self._next()) is not None:
            request = self._queues[tenant].popleft()
            self._slots[tenant] += request.size
            if request.is_long:
                self._long_slots += request.size
            self._virtual_now = self._virtual_time(tenant)
            self._virtual_times = {
                name: passed
                for name, passed in self._virtual_times.items()
                if passed > self._virtual_now
            }
            self.charge(tenant, request.tokens)
            request.granted.set_result(None)

    def _next(self) -> str | None:
        """Return the tenant that gets the next turn. Return None if no tenant may have more slots
        now, or if the first request of the next tenant needs more slots than are free.
        """
        limit = self._capacity if self._is_alone() else self._max_per_tenant
        for tenant in sorted(self._tenants_waiting(), key=self._virtual_time):
            request, slots = self._queues[tenant][0], self._slots[tenant]
            if (
                request.is_long
                and self._long_slots
                and self._long_slots + request.size > self._long_capacity
            ):
                continue
            if not slots or slots + request.size <= limit:
                return tenant if self.used + request.size <= self._capacity else None
        return None

    def _is_alone(self) -> bool:
        latest = self._clock() - _ACTIVE_SECONDS
        self._last_requests = {
            tenant: asked for tenant, asked in self._last_requests.items() if asked > latest
        }
        return len(self._last_requests) < 2

    def _virtual_time(self, tenant: str) -> int:
        return max(self._virtual_times.get(tenant, 0), self._virtual_now)

    def _tenants_waiting(self) -> list[str]:
        """Return the tenants with a request that was not cancelled."""
        for tenant, queue in list(self._queues.items()):
            while queue and queue[0].granted.done():
                queue.popleft()
            if not queue:
                del self._queues[tenant]
        return list(self._queues)


R = TypeVar("R")


class CachedAdapter(Protocol):
    """A training model or a sampler, as the cache sees it."""

    @property
    def id(self) -> str:
        """The id, unique among all models and samplers of the server."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Memory that the adapter takes while it is loaded."""
        ...

    @property
    def is_evictable(self) -> bool:
        """Whether the adapter can be loaded again after it was unloaded. The cache asks only about
        unpinned adapters.
        """
        ...

    async def load(self) -> None:
        """Load the adapter into memory. If this raises, the adapter is not loaded."""
        ...

    async def unload(self) -> None:
        """Remove the adapter from memory. If this raises, the adapter must still be loaded."""
        ...


@dataclass(eq=False)
class _CacheEntry:
    adapter: CachedAdapter
    is_loaded: bool = False
    reserved: int = 0
    pins: int = 0
    last_used: float = 0.0
    changing: asyncio.Task[Any] | None = None
    """The task that loads or unloads the adapter; None if there is none."""

    @property
    def is_ready(self) -> bool:
        return self.is_loaded and self.changing is None

    @property
    def is_idle(self) -> bool:
        return self.is_ready and not self.pins and self.adapter.is_evictable


class AdapterCache:
    """An LRU cache of adapters with a limit on their memory. Pinned adapters are never evicted."""

    def __init__(self, budget: int, counters: Counters) -> None:
        """`budget` is the limit in bytes. `counters` counts loads and unloads."""
        self._counters = counters
        self._budget = budget
        self._entries: dict[str, _CacheEntry] = {}
        self._changed = asyncio.Event()
        self._memory_lock = asyncio.Lock()
        """Held by the one caller that waits for memory to be freed. Later callers wait for the
        lock, so callers get memory in the order in which they asked.
        """

    @property
    def used_bytes(self) -> int:
        """Memory of the adapters that are loaded or being loaded."""
        return sum(entry.reserved for entry in self._entries.values())

    @property
    def is_waiting(self) -> bool:
        """Whether a caller waits for memory."""
        return self._memory_lock.locked()

    def loaded(self) -> list[CachedAdapter]:
        """Return the adapters in memory."""
        return [entry.adapter for entry in self._entries.values() if entry.is_loaded]

    def is_loaded(self, adapter: CachedAdapter) -> bool:
        """Return whether an adapter is in memory."""
        entry = self._entries.get(adapter.id)
        return entry is not None and entry.is_loaded

    def is_ready(self, adapter: CachedAdapter) -> bool:
        """Return whether an adapter is in memory and is not being unloaded."""
        entry = self._entries.get(adapter.id)
        return entry is not None and entry.is_ready

    @asynccontextmanager
    async def pinned(self, adapter: CachedAdapter) -> AsyncIterator[None]:
        """Keep an adapter in memory for the block. If `load` raises, its error is raised here, and
        the adapter is not loaded.
        """
        entry = self._entry(adapter)
        entry.pins += 1
        try:
            while not entry.is_ready:
                await asyncio.shield(entry.changing or self._change(entry, self._load(entry)))
            yield
        finally:
            entry.pins -= 1
            entry.last_used = time.monotonic()
            self._notify(entry)

    def insert_loaded(self, adapter: CachedAdapter) -> None:
        """Insert an adapter that is in memory already. The cache may exceed its budget until
        another adapter is loaded or `unload_idle` runs.
        """
        entry = self._entry(adapter)
        entry.is_loaded, entry.reserved, entry.last_used = (
            True,
            adapter.memory_bytes,
            time.monotonic(),
        )

    def discard(self, adapter: CachedAdapter) -> None:
        """Remove the entry of an adapter without unloading it. The caller unloads the adapter."""
        self._entries.pop(adapter.id, None)
        self._changed.set()

    async def unload_idle(self, seconds: float) -> None:
        """Unload adapters that were idle for `seconds`. Then unload the least recently used
        adapters until the others fit the budget.
        """
        latest = time.monotonic() - seconds
        used = self.used_bytes
        for entry in self._idle():
            if entry.last_used <= latest or used > self._budget:
                await self._unload(entry)
                used = self.used_bytes

    def _entry(self, adapter: CachedAdapter) -> _CacheEntry:
        return self._entries.setdefault(adapter.id, _CacheEntry(adapter))

    def _change(self, entry: _CacheEntry, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        async def run() -> R:
            try:
                return await work
            finally:
                entry.changing = None
                self._notify(entry)

        entry.changing = task = asyncio.create_task(run())
        # asyncio logs the exception of a task if nobody has retrieved it. Retrieve it here, because
        # all callers that wait for the task may have been cancelled.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def _notify(self, entry: _CacheEntry) -> None:
        """Wake the callers that wait for memory, and drop the entry if nothing uses it."""
        if (
            not (entry.is_loaded or entry.pins or entry.changing)
            and self._entries.get(entry.adapter.id) is entry
        ):
            del self._entries[entry.adapter.id]
        self._changed.set()

    async def _load(self, entry: _CacheEntry) -> None:
        if entry.adapter.memory_bytes:
            await self._reserve(entry)
            if not entry.pins:  # all callers were cancelled while they waited for memory
                return
        try:
            await retry_briefly(entry.adapter.load, entry.adapter.id)
        except BaseException:
            entry.reserved = 0
            raise
        entry.is_loaded = True
        self._counters.loads += 1

    async def _reserve(self, entry: _CacheEntry) -> None:
        """Evict adapters until there is memory for the entry, and reserve it. Callers get memory
        in the order in which they asked. The wait ends early if the entry is no longer pinned.
        """
        needed = entry.adapter.memory_bytes
        async with self._memory_lock:
            while entry.pins and (used := self.used_bytes) and used + needed > self._budget:
                self._changed.clear()
                if not any([await self._unload(idle) for idle in self._idle()[:1]]):
                    await self._changed.wait()
            if entry.pins:
                entry.reserved = needed

    def _idle(self) -> list[_CacheEntry]:
        """Return the entries that may be evicted and take memory, the least recently used one
        first.
        """
        idle = [entry for entry in self._entries.values() if entry.is_idle and entry.reserved]
        return sorted(idle, key=lambda entry: entry.last_used)

    async def _unload(self, entry: _CacheEntry) -> bool:
        return entry.is_idle and await asyncio.shield(self._change(entry, self._evict(entry)))

    async def _evict(self, entry: _CacheEntry) -> bool:
        try:
            await entry.adapter.unload()
        except Exception:
            _log.exception("%s could not be unloaded", entry.adapter.id)
            entry.last_used = time.monotonic()
            return False
        entry.is_loaded, entry.reserved = False, 0
        self._counters.unloads += 1
        return True
