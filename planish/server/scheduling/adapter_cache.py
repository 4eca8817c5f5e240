"""Which adapters are in memory: those in use, and of the others the ones that were used last,
within a budget.

A resident is loaded before its first use, stays while somebody holds it, and may leave when nobody
does. Whoever needs room waits until enough residents can leave; one that takes none waits for
nobody. One that is larger than the budget is let in alone. What has begun to load or to leave does
so to its end, whoever gives up meanwhile, since the engine's threads do.
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
    @property
    def key(self) -> str: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def is_evictable(self) -> bool:
        """Whether it could be loaded again; asked only while nobody holds it."""
        ...

    async def load(self) -> None: ...

    async def unload(self) -> None:
        """Must leave it as it was if it raises."""
        ...


@dataclass(eq=False)
class _CacheEntry:
    resident: CachedAdapter
    is_loaded: bool = False
    reserved: int = 0
    holders: int = 0
    used: float = 0.0
    moving: asyncio.Task[Any] | None = None
    """While it is loaded or unloaded."""

    @property
    def is_idle(self) -> bool:
        return (
            self.is_loaded
            and not self.holders
            and self.moving is None
            and self.resident.is_evictable
        )


class AdapterCache:
    def __init__(self, budget: int, counters: Counters) -> None:
        self._counters = counters
        self._budget = budget
        self._places: dict[str, _CacheEntry] = {}
        self._changed = asyncio.Event()
        self._entrance = asyncio.Lock()
        """Held by the one for whom room is made; others come after it."""

    @property
    def used_bytes(self) -> int:
        return sum(place.reserved for place in self._places.values())

    @property
    def waiting(self) -> bool:
        """Whether somebody waits for room."""
        return self._entrance.locked()

    def loaded(self) -> list[CachedAdapter]:
        return [place.resident for place in self._places.values() if place.is_loaded]

    def is_loaded(self, resident: CachedAdapter) -> bool:
        place = self._places.get(resident.key)
        return place is not None and place.is_loaded

    @asynccontextmanager
    async def held(self, resident: CachedAdapter) -> AsyncIterator[None]:
        """Have it in memory for the block. Errors of `load` are raised; it is not loaded then."""
        place = self._place(resident)
        place.holders += 1
        try:
            while place.moving is not None or not place.is_loaded:
                await asyncio.shield(place.moving or self._move(place, self._load(place)))
            yield
        finally:
            place.holders -= 1
            place.used = time.monotonic()
            self._look_again(place)

    def adopt(self, resident: CachedAdapter) -> None:
        """It came into memory by itself. The budget may be exceeded by it until somebody needs
        room.
        """
        place = self._place(resident)
        place.is_loaded, place.reserved, place.used = True, resident.memory_bytes, time.monotonic()

    def forget(self, resident: CachedAdapter) -> None:
        """It left memory by itself, for good."""
        self._places.pop(resident.key, None)
        self._changed.set()

    async def unload_idle(self, seconds: float) -> None:
        """Unload what nobody used for so long, and what exceeds the budget."""
        latest = time.monotonic() - seconds
        for place in self._idle():
            if place.used <= latest or self.used_bytes > self._budget:
                await self._unload(place)

    def _place(self, resident: CachedAdapter) -> _CacheEntry:
        return self._places.setdefault(resident.key, _CacheEntry(resident))

    def _move(self, place: _CacheEntry, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        async def moved() -> R:
            try:
                return await work
            finally:
                place.moving = None
                self._look_again(place)

        place.moving = task = asyncio.create_task(moved())
        # Where all who waited gave up, nobody asks for its error.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def _look_again(self, place: _CacheEntry) -> None:
        """Something of it changed."""
        if (
            not (place.is_loaded or place.holders or place.moving)
            and self._places.get(place.resident.key) is place
        ):
            del self._places[place.resident.key]
        self._changed.set()

    async def _load(self, place: _CacheEntry) -> None:
        if place.resident.memory_bytes:
            await self._reserve(place)
            if not place.holders:  # all gave up while there was no room
                return
        try:
            await place.resident.load()
        except BaseException:
            place.reserved = 0
            raise
        place.is_loaded = True
        self._counters.loads += 1

    async def _reserve(self, place: _CacheEntry) -> None:
        """Wait for room, behind those who came before, for as long as somebody holds it."""
        needed = place.resident.memory_bytes
        async with self._entrance:
            while place.holders and (used := self.used_bytes) and used + needed > self._budget:
                self._changed.clear()
                if not any([await self._unload(idle) for idle in self._idle()[:1]]):
                    await self._changed.wait()
            if place.holders:
                place.reserved = needed

    def _idle(self) -> list[_CacheEntry]:
        """Those that may leave and take memory, the one that was used longest ago first."""
        idle = [place for place in self._places.values() if place.is_idle and place.reserved]
        return sorted(idle, key=lambda place: place.used)

    async def _unload(self, place: _CacheEntry) -> bool:
        return place.is_idle and await asyncio.shield(self._move(place, self._leave(place)))

    async def _leave(self, place: _CacheEntry) -> bool:
        try:
            await place.resident.unload()
        except Exception:
            _log.exception("%s could not leave memory", place.resident.key)
            place.used = time.monotonic()
            return False
        place.is_loaded, place.reserved = False, 0
        self._counters.unloads += 1
        return True
