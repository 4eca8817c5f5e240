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
import math
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from planish.server.durable.retries import retry_briefly
from planish.server.metrics import Counters

_log = logging.getLogger(__name__)


_ACTIVE_SECONDS = 600.0
"""A tenant counts as active in a `FairQueue` for this long after its last request."""
_LastRequest: TypeAlias = tuple[str, float]
"""A tenant, and when it sent its last request."""


@dataclass(frozen=True, eq=False)
class _WaitingRequest:
    """A request that waits for its turn."""

    num_slots: int
    num_tokens: int
    is_long: bool
    granted: asyncio.Future[None]


class SlotLease:
    """The slots of one request in the engine. The request holds them until `release`."""

    def __init__(self, release: Callable[[], None] | None = None) -> None:
        """`release` returns the slots to the queue. It is called once. None: there are no slots."""
        self._release = release

    def release(self) -> None:
        """Give the slots back. Further calls have no effect."""
        release, self._release = self._release, None
        if release is not None:
            release()


class ActiveTenants:
    """Tracks whether several tenants have sent requests recently."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """A tenant is active for `seconds` after its last request."""
        self._seconds, self._clock = seconds, clock
        self._latest: tuple[_LastRequest, _LastRequest] = (("", -math.inf), ("", -math.inf))
        """The last request, and the last one of any other tenant."""

    def touch(self, tenant: str) -> None:
        """Record that the tenant has sent a request."""
        latest, other = self._latest
        self._latest = (tenant, self._clock()), other if tenant == latest[0] else latest

    def has_others(self, tenant: str) -> bool:
        """Return whether a tenant other than `tenant` is active. Any thread may call this."""
        latest, other = self._latest
        return self._is_recent(other if tenant == latest[0] else latest)

    @property
    def has_several(self) -> bool:
        """Whether at least two tenants are active."""
        return self._is_recent(self._latest[1])

    def _is_recent(self, request: _LastRequest) -> bool:
        return request[1] > self._clock() - self._seconds


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
        self._active_tenants = ActiveTenants(_ACTIVE_SECONDS, clock)
        self._slots_by_tenant: Counter[str] = Counter()
        self._long_slots = 0
        self._queues: dict[str, deque[_WaitingRequest]] = {}
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
    def num_waiting(self) -> int:
        """The number of requests that wait for their turn."""
        return sum(
            not request.granted.done() for queue in self._queues.values() for request in queue
        )

    @property
    def used_slots(self) -> int:
        """The sum of the sizes of all granted turns."""
        return self._slots_by_tenant.total()

    async def acquire_slots(
        self, tenant: str, num_slots: int, num_tokens: int, tokens_ahead: int = 0
    ) -> SlotLease:
        """Wait for the tenant's turn.

        `num_tokens` is the known cost of the request. `tokens_ahead` is the cost of earlier
        requests of the same model that are still running. The request counts as long if
        `num_tokens + tokens_ahead` exceeds `long_tokens`, because it holds its slots while the
        earlier requests run.
        """
        num_slots = min(num_slots, self._capacity)
        is_long = num_tokens + tokens_ahead > self._long_tokens
        request = _WaitingRequest(
            num_slots, num_tokens, is_long, asyncio.get_running_loop().create_future()
        )
        self._queues.setdefault(tenant, deque()).append(request)
        self._active_tenants.touch(tenant)
        self._grant_slots()
        try:
            await request.granted
        except asyncio.CancelledError:
            if not request.granted.cancelled():
                # the turn was granted at the moment of the cancellation
                self._release_slots(tenant, request)
            else:
                self._grant_slots()
            raise
        return SlotLease(lambda: self._release_slots(tenant, request))

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Charge tokens that were not known when the turn was granted."""
        self._virtual_times[tenant] = self._virtual_time(tenant) + num_tokens

    def _release_slots(self, tenant: str, request: _WaitingRequest) -> None:
        self._slots_by_tenant[tenant] -= request.num_slots
        if not self._slots_by_tenant[tenant]:
            del self._slots_by_tenant[tenant]
        if request.is_long:
            self._long_slots -= request.num_slots
        self._grant_slots()

    def _grant_slots(self) -> None:
        while (tenant := self._next_tenant()) is not None:
            request = self._queues[tenant].popleft()
            self._slots_by_tenant[tenant] += request.num_slots
            if request.is_long:
                self._long_slots += request.num_slots
            self._virtual_now = self._virtual_time(tenant)
            self._virtual_times = {
                name: virtual_time
                for name, virtual_time in self._virtual_times.items()
                if virtual_time > self._virtual_now
            }
            self.charge(tenant, request.num_tokens)
            request.granted.set_result(None)

    def _next_tenant(self) -> str | None:
        """Return the tenant that gets the next turn. Return None if no tenant may have more slots
        now, or if the first request of the next tenant needs more slots than are free.
        """
        limit = self._max_per_tenant if self._active_tenants.has_several else self._capacity
        for tenant in sorted(self._tenants_waiting(), key=self._virtual_time):
            request, held_slots = self._queues[tenant][0], self._slots_by_tenant[tenant]
            if (
                request.is_long
                and self._long_slots
                and self._long_slots + request.num_slots > self._long_capacity
            ):
                continue
            if not held_slots or held_slots + request.num_slots <= limit:
                return tenant if self.used_slots + request.num_slots <= self._capacity else None
        return None

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
class CacheEntry:
    """An adapter that is in memory, being loaded or unloaded, or wanted in memory."""

    adapter: CachedAdapter
    is_loaded: bool = False
    reserved_bytes: int = 0
    num_pins: int = 0
    must_leave: bool = False
    """Whether the adapter is unloaded as soon as it is not pinned."""
    last_used: float = 0.0
    transition: asyncio.Task[Any] | None = None
    """The task that loads or unloads the adapter; None if there is none."""

    @property
    def is_ready(self) -> bool:
        return self.is_loaded and self.transition is None

    @property
    def is_idle(self) -> bool:
        return self.is_ready and not self.num_pins and self.adapter.is_evictable


class AdapterCache:
    """An LRU cache of adapters with a limit on their memory. Pinned adapters are never evicted."""

    def __init__(self, budget: int, counters: Counters) -> None:
        """`budget` is the limit in bytes. `counters` counts loads and unloads."""
        self._counters = counters
        self._budget = budget
        self._entries: dict[str, CacheEntry] = {}
        self._changed = asyncio.Event()
        self._memory_lock = asyncio.Lock()
        """Held by the one caller that waits for memory to be freed. Later callers wait for the
        lock, so callers get memory in the order in which they asked.
        """

    @property
    def used_bytes(self) -> int:
        """Memory of the adapters that are loaded or being loaded."""
        return sum(entry.reserved_bytes for entry in self._entries.values())

    @property
    def is_waiting(self) -> bool:
        """Whether a caller waits for memory."""
        return self._memory_lock.locked()

    def loaded_adapters(self) -> list[CachedAdapter]:
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
    async def pinned(self, adapter: CachedAdapter) -> AsyncGenerator[CacheEntry]:
        """Keep an adapter in memory for the block, and yield its entry. If `load` raises, its error
        is raised here, and the adapter is not loaded.
        """
        entry = self._entry(adapter)
        entry.num_pins += 1
        try:
            while not entry.is_ready:
                await asyncio.shield(
                    entry.transition or self._start_transition(entry, self._load(entry))
                )
            yield entry
        finally:
            entry.num_pins -= 1
            entry.last_used = time.monotonic()
            if entry.must_leave and entry.is_idle:
                self._start_transition(entry, self._evict(entry))
            self._notify(entry)

    async def load(self, adapter: CachedAdapter) -> None:
        """Load an adapter, unless it is in memory. It may be evicted at once."""
        async with self.pinned(adapter):
            pass

    def insert_loaded(self, adapter: CachedAdapter) -> None:
        """Insert an adapter that is in memory already. The cache may exceed its budget until
        another adapter is loaded or `unload_idle` runs.
        """
        entry = self._entry(adapter)
        entry.is_loaded = True
        entry.reserved_bytes = adapter.memory_bytes
        entry.last_used = time.monotonic()

    def discard(self, adapter: CachedAdapter) -> None:
        """Remove the entry of an adapter without unloading it. The caller unloads the adapter."""
        self._entries.pop(adapter.id, None)
        self._changed.set()

    async def evict(self, adapter: CachedAdapter) -> None:
        """Unload an adapter now, or when it is no longer in use. Its next use loads it again."""
        entry = self._entries.get(adapter.id)
        if entry is not None:
            entry.must_leave = True
            await self._unload(entry)

    async def unload_idle(self, seconds: float) -> None:
        """Unload adapters that were idle for `seconds`. Then unload the least recently used
        adapters until the others fit the budget.
        """
        idle_since = time.monotonic() - seconds
        used_bytes = self.used_bytes
        for entry in self._evictable_entries():
            if entry.last_used <= idle_since or used_bytes > self._budget:
                await self._unload(entry)
                used_bytes = self.used_bytes

    def _entry(self, adapter: CachedAdapter) -> CacheEntry:
        return self._entries.setdefault(adapter.id, CacheEntry(adapter))

    def _start_transition(self, entry: CacheEntry, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        async def run() -> R:
            try:
                return await work
            finally:
                entry.transition = None
                self._notify(entry)

        entry.transition = task = asyncio.create_task(run())
        # asyncio logs the exception of a task if it is never retrieved. Retrieve it here, because
        # all callers that wait for the task may have been cancelled.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def _notify(self, entry: CacheEntry) -> None:
        """Wake the callers that wait for memory, and drop the entry if nothing uses it."""
        if (
            not (entry.is_loaded or entry.num_pins or entry.transition)
            and self._entries.get(entry.adapter.id) is entry
        ):
            del self._entries[entry.adapter.id]
        self._changed.set()

    async def _load(self, entry: CacheEntry) -> None:
        if entry.adapter.memory_bytes:
            await self._reserve_memory(entry)
            if not entry.num_pins:  # all callers were cancelled while they waited for memory
                return
        try:
            await retry_briefly(entry.adapter.load, entry.adapter.id)
        except BaseException:
            entry.reserved_bytes = 0
            raise
        entry.is_loaded = True
        self._counters.adapter_loads += 1

    async def _reserve_memory(self, entry: CacheEntry) -> None:
        """Evict adapters until there is memory for the entry, and reserve it. Callers get memory
        in the order in which they asked. The wait ends early if the entry is no longer pinned.
        """
        needed_bytes = entry.adapter.memory_bytes
        async with self._memory_lock:
            while (
                entry.num_pins
                and (used_bytes := self.used_bytes)
                and used_bytes + needed_bytes > self._budget
            ):
                self._changed.clear()
                if not any([await self._unload(idle) for idle in self._evictable_entries()[:1]]):
                    await self._changed.wait()
            if entry.num_pins:
                entry.reserved_bytes = needed_bytes

    def _evictable_entries(self) -> list[CacheEntry]:
        """Return the entries that may be evicted and take memory, the least recently used one
        first.
        """
        idle = [entry for entry in self._entries.values() if entry.is_idle and entry.reserved_bytes]
        return sorted(idle, key=lambda entry: entry.last_used)

    async def _unload(self, entry: CacheEntry) -> bool:
        return entry.is_idle and await asyncio.shield(
            self._start_transition(entry, self._evict(entry))
        )

    async def _evict(self, entry: CacheEntry) -> bool:
        try:
            await entry.adapter.unload()
        except Exception:
            _log.exception("%s could not be unloaded", entry.adapter.id)
            entry.last_used = time.monotonic()
            return False
        entry.is_loaded, entry.reserved_bytes, entry.must_leave = False, 0, False
        self._counters.adapter_unloads += 1
        return True
