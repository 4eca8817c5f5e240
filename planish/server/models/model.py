"""What the server knows of one training model, in memory or not."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from planish.server.durable.journal import RequestRow
from planish.server.durable.records import ModelRow
from planish.server.durable.request_log import Request
from planish.server.models.request_queue import RequestQueue
from planish.server.results import Tenant
from planish.server.scheduling.adapter_cache import CachedAdapter

R = TypeVar("R")

Item = Request | RequestRow
"""What a lane holds: a request to be done, or a row of one that was answered and whose effect is to
be had again.
"""


@dataclass
class Progress:
    """What would be done again after a crash now."""

    seconds: float = 0.0
    bytes: int = 0
    changes: int = 0
    requests: int = 0


@dataclass(eq=False)
class Model:
    row: ModelRow
    lane: RequestQueue[Item]
    residence: CachedAdapter
    worker: asyncio.Task[None] | None = None
    running: dict[int, Request] = field(default_factory=dict)
    """Taken from the lane and not answered, by number."""
    arriving: dict[int, asyncio.Task[Any]] = field(default_factory=dict)
    """By number, the taking of requests that are looked at, or being journaled."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Something came into the lane, or was answered."""
    unwritten: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """Answers that are on their way to disk, by number."""
    unsaved: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """Published samplers whose weights are on their way to disk, by number."""
    private: set[str] = field(default_factory=set)
    """Its checkpoints that the server made for itself, apart from those of samplers."""
    unload_seq: int | None = None
    """RequestLog from this number on are not taken, because it is to be unloaded."""
    blocked: tuple[int, float] | None = None
    """The number that is missing, and since when it has been waited for."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Those that wait for the engine's answers."""

    # Of the adapter in memory.
    applied: int = -1
    """The number of the last request that it had."""
    is_dirty: bool = False
    """Whether it may hold a gradient, which no snapshot has."""
    is_lossy: bool = False
    """A sampler of it could not be saved, so a snapshot now would lose it; loading it again saves
    it.
    """
    is_snapshotting: bool = False
    progress: Progress = field(default_factory=Progress)

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def tenant(self) -> Tenant:
        return Tenant(self.row.tenant)

    @property
    def end(self) -> int:
        """Above every number that was used."""
        return max([self.lane.end, *(seq + 1 for seq in self.arriving)])

    @property
    def snapshot_seq(self) -> int:
        """-1: there is none."""
        return -1 if self.row.snapshot_seq is None else self.row.snapshot_seq

    async def arrive(self, seq: int, taking: Coroutine[Any, Any, R]) -> R:
        """Take a request of this number, to its end even if whoever waits gives up: what was
        journaled must be queued.
        """
        task = asyncio.create_task(taking)
        self.arriving[seq] = task
        task.add_done_callback(lambda _: self.arriving.pop(seq))
        return await asyncio.shield(task)

    def spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def forget_adapter(self) -> None:
        """It is not in memory any more."""
        self.applied, self.is_dirty, self.is_lossy = -1, False, False
        self.progress = Progress()

    async def settled(self, below: int | None = None) -> None:
        """Wait until fewer than `below` requests are with the engine; by default until none is."""
        while len(self.running) >= (below or 1):
            await self.change()

    async def change(self) -> None:
        """Wait for the next one."""
        self.changed.clear()
        await self.changed.wait()
