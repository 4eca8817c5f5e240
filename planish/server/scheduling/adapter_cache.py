"""An LRU cache of the adapters in memory.

An adapter is loaded before its first use, stays in memory while it is pinned, and may be evicted
afterwards. A caller that needs room waits until enough adapters can be evicted; an adapter with a
size of 0 never waits. An adapter larger than the budget is loaded alone. A load or an unload, once
started, always completes even if the caller is cancelled, because the engine thread doing the work
cannot be interrupted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from planish.server.metrics import Counters

R = TypeVar("R")

_log = logging.getLogger(__name__)


class CachedAdapter(Protocol):
    """A training model or a sampler, as the cache sees it."""

    @property
    def key(self) -> str: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def is_evictable(self) -> bool:
        """Whether it can be loaded again. Only read while it is not pinned."""
        ...

    async def load(self) -> None: ...

    async def unload(self) -> None:
        """Remove it from memory. Must change nothing if it raises."""
        ...


@dataclass(eq=False)
class _CacheEntry:
    adapter: CachedAdapter
    is_loaded: bool = False
    reserved: int = 0
    pins: int = 0
    used: float = 0.0
    changing: asyncio.Task[Any] | None = None
    """The task that loads or unloads it."""

    @property
    def is_idle(self) -> bool:
        return (
            self.is_loaded and not self.pins and self.changing is None and self.adapter.is_evictable
        )


class AdapterCache:
    """An LRU cache of adapters with a limit on their memory. Pinned adapters are never evicted."""

    def __init__(self, budget: int, counters: Counters) -> None:
        self._counters = counters
        self._budget = budget
        self._entries: dict[str, _CacheEntry] = {}
        self._changed = asyncio.Event()
        self._room_lock = asyncio.Lock()
        """Held by the caller that room is being made for. Later callers wait for the lock."""

    @property
    def used_bytes(self) -> int:
        """Memory of the adapters that are loaded or being loaded."""
        return sum(entry.reserved for entry in self._entries.values())

    @property
    def is_waiting(self) -> bool:
        """Whether a caller waits for room."""
        return self._room_lock.locked()

    def loaded(self) -> list[CachedAdapter]:
        """Return the adapters in memory."""
        return [entry.adapter for entry in self._entries.values() if entry.is_loaded]

    def is_loaded(self, adapter: CachedAdapter) -> bool:
        """Return whether an adapter is in memory."""
        entry = self._entries.get(adapter.key)
        return entry is not None and entry.is_loaded

    @asynccontextmanager
    async def pinned(self, adapter: CachedAdapter) -> AsyncIterator[None]:
        """Keep an adapter in memory for the block. If `load` raises, its error is raised here, and
        the adapter is not loaded.
        """
        entry = self._entry(adapter)
        entry.pins += 1
        try:
            while entry.changing is not None or not entry.is_loaded:
                await asyncio.shield(entry.changing or self._change(entry, self._load(entry)))
            yield
        finally:
            entry.pins -= 1
            entry.used = time.monotonic()
            self._notify(entry)

    def insert_loaded(self, adapter: CachedAdapter) -> None:
        """Insert an adapter that is in memory already. It may exceed the budget until somebody
        needs room.
        """
        entry = self._entry(adapter)
        entry.is_loaded, entry.reserved, entry.used = True, adapter.memory_bytes, time.monotonic()

    def discard(self, adapter: CachedAdapter) -> None:
        """Remove an adapter that has left memory for good."""
        self._entries.pop(adapter.key, None)
        self._changed.set()

    async def unload_idle(self, seconds: float) -> None:
        """Unload adapters that were idle for `seconds`, and the least recently used ones until the
        rest fits the budget.
        """
        latest = time.monotonic() - seconds
        for entry in self._idle():
            if entry.used <= latest or self.used_bytes > self._budget:
                await self._unload(entry)

    def _entry(self, adapter: CachedAdapter) -> _CacheEntry:
        return self._entries.setdefault(adapter.key, _CacheEntry(adapter))

    def _change(self, entry: _CacheEntry, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        async def run() -> R:
            try:
                return await work
            finally:
                entry.changing = None
                self._notify(entry)

        entry.changing = task = asyncio.create_task(run())
        # If all who waited were cancelled, its error stays unread.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def _notify(self, entry: _CacheEntry) -> None:
        """Wake the callers that wait for room, and drop the entry if nothing uses it."""
        if (
            not (entry.is_loaded or entry.pins or entry.changing)
            and self._entries.get(entry.adapter.key) is entry
        ):
            del self._entries[entry.adapter.key]
        self._changed.set()

    async def _load(self, entry: _CacheEntry) -> None:
        if entry.adapter.memory_bytes:
            await self._reserve(entry)
            if not entry.pins:  # all were cancelled while there was no room
                return
        try:
            await entry.adapter.load()
        except BaseException:
            entry.reserved = 0
            raise
        entry.is_loaded = True
        self._counters.loads += 1

    async def _reserve(self, entry: _CacheEntry) -> None:
        """Wait for room, in the order of the callers, for as long as the entry is pinned."""
        needed = entry.adapter.memory_bytes
        async with self._room_lock:
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
        return sorted(idle, key=lambda entry: entry.used)

    async def _unload(self, entry: _CacheEntry) -> bool:
        return entry.is_idle and await asyncio.shield(self._change(entry, self._evict(entry)))

    async def _evict(self, entry: _CacheEntry) -> bool:
        try:
            await entry.adapter.unload()
        except Exception:
            _log.exception("%s could not be unloaded", entry.adapter.key)
            entry.used = time.monotonic()
            return False
        entry.is_loaded, entry.reserved = False, 0
        self._counters.unloads += 1
        return True
