"""Which adapters are in memory: those in use, and of the others the ones that were used last, within a budget.

A resident is loaded before its first use, stays while somebody holds it, and may leave when nobody does. Whoever needs room waits until enough
residents can leave. One that is larger than the budget is let in alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from planish.server.measurements import Counters

_log = logging.getLogger(__name__)


class Resident(Protocol):
    @property
    def key(self) -> str: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def can_leave(self) -> bool:
        """Whether it could be loaded again; asked only while nobody holds it."""
        ...

    async def load(self) -> None: ...

    async def unload(self) -> None:
        """Must leave it as it was if it raises."""
        ...


@dataclass(eq=False)
class _Place:
    resident: Resident
    is_loaded: bool = False
    reserved: int = 0
    holders: int = 0
    used: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is loaded or unloaded."""

    @property
    def is_idle(self) -> bool:
        return self.is_loaded and not self.holders and not self.lock.locked() and self.resident.can_leave


class Residency:
    def __init__(self, budget: int, counters: Counters) -> None:
        self._counters = counters
        self._budget = budget
        self._places: dict[str, _Place] = {}
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

    def loaded(self) -> list[Resident]:
        return [place.resident for place in self._places.values() if place.is_loaded]

    def is_loaded(self, resident: Resident) -> bool:
        place = self._places.get(resident.key)
        return place is not None and place.is_loaded

    @asynccontextmanager
    async def held(self, resident: Resident) -> AsyncIterator[None]:
        """Have it in memory for the block. Errors of `load` are raised; it is not loaded then."""
        place = self._place(resident)
        place.holders += 1
        try:
            async with place.lock:
                if not place.is_loaded:
                    await self._load(place)
            yield
        finally:
            place.holders -= 1
            place.used = time.monotonic()
            if not place.is_loaded and not place.holders:
                self._places.pop(resident.key, None)
            self._changed.set()

    def adopt(self, resident: Resident) -> None:
        """It came into memory by itself. The budget may be exceeded by it until `make_room`."""
        place = self._place(resident)
        place.is_loaded, place.reserved, place.used = True, resident.memory_bytes, time.monotonic()

    def forget(self, resident: Resident) -> None:
        """It left memory by itself, for good."""
        self._places.pop(resident.key, None)
        self._changed.set()

    async def unload_idle(self, seconds: float) -> None:
        """Unload what nobody used for so long, and what exceeds the budget."""
        latest = time.monotonic() - seconds
        for place in self._idle():
            if place.used <= latest or self.used_bytes > self._budget:
                await self._unload(place)

    def _place(self, resident: Resident) -> _Place:
        return self._places.setdefault(resident.key, _Place(resident))

    async def _load(self, place: _Place) -> None:
        async with self._entrance:
            await self._make_room(place.resident.memory_bytes)
            place.reserved = place.resident.memory_bytes
        try:
            await place.resident.load()
        except BaseException:
            place.reserved = 0
            raise
        place.is_loaded = True
        self._counters.loads += 1

    async def _make_room(self, needed: int) -> None:
        while (used := self.used_bytes) and used + needed > self._budget:
            self._changed.clear()
            if not any([await self._unload(place) for place in self._idle()[:1]]):
                await self._changed.wait()

    def _idle(self) -> list[_Place]:
        """Those that may leave and take memory, the one that was used longest ago first."""
        idle = [place for place in self._places.values() if place.is_idle and place.reserved]
        return sorted(idle, key=lambda place: place.used)

    async def _unload(self, place: _Place) -> bool:
        async with place.lock:
            if place.holders or not place.is_loaded:
                return False
            try:
                await place.resident.unload()
            except Exception:
                _log.exception("%s could not leave memory", place.resident.key)
                place.used = time.monotonic()
                return False
            place.is_loaded, place.reserved = False, 0
            self._counters.unloads += 1
        if not place.holders:
            self._places.pop(place.resident.key, None)
        self._changed.set()
        return True
