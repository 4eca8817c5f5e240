"""Environments that run a given action when they begin: they fail, wait, or send Ctrl-C."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import chz
from digit_env import DigitEnv

from planish.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder

Happening = Callable[[int], Awaitable[None]]
"""The action that runs when the group with this number begins."""


@dataclass
class EventfulEnv(DigitEnv):
    happening: Happening | None = None

    async def initial_observation(self):
        if self.happening is not None:
            await self.happening(self.number)
        return await super().initial_observation()


@dataclass(frozen=True)
class EventfulGroup(EnvGroupBuilder):
    number: int
    happening: Happening | None
    size: int = 2

    async def make_envs(self):
        return [EventfulEnv(self.number, happening=self.happening) for _ in range(self.size)]


@dataclass(frozen=True)
class Eventful(RLDataset):
    batches: int
    groups: int
    happening: Happening | None = None
    size: int = 2

    def get_batch(self, index):
        return [
            EventfulGroup(index * self.groups + place, self.happening, self.size)
            for place in range(self.groups)
        ]

    def __len__(self):
        return self.batches


@chz.chz
class EventfulBuilder(RLDatasetBuilder):
    batches: int = 4
    happening: Any = None
    size: int = 8
    tests: int = 0
    at_test: Any = None

    async def __call__(self):
        return Eventful(self.batches, 2, self.happening, self.size), Eventful(
            1, self.tests, self.at_test
        ) if self.tests else None


async def nothing(number: int) -> None:
    """Do nothing."""


@dataclass
class AtGroup:
    """A group builder that runs an action when its group begins."""

    number: int
    action: Callable[[], Any]
    times: int = 1

    async def __call__(self, number: int) -> None:
        if number == self.number and self.times > 0:
            self.times -= 1
            result = self.action()
            if asyncio.iscoroutine(result):
                await result
