"""Time limits of rollouts under a clock that stands still while code runs."""

import asyncio
import selectors
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from planish.rl import limits
from planish.rl.environments import message_env
from planish.rl.rollout import single_rollout

T = TypeVar("T")


class VirtualSelector(selectors.DefaultSelector):
    """A selector that adds to its clock instead of waiting."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if not (events := super().select(0)):
            self.seconds += timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when every task waits.

    The loop must not wait for other threads, because its clock does not.
    """

    def __init__(self) -> None:
        self._clock = VirtualSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.seconds

    def block(self, seconds: float) -> None:
        """Advance the clock, as code that blocks the loop does."""
        self._clock.seconds += seconds


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a VirtualTimeLoop, whose clock the time limits of rollouts use too. A slow
    machine does not reach them, and a test does not wait for them.
    """
    with (
        asyncio.Runner(loop_factory=VirtualTimeLoop) as runner,
        pytest.MonkeyPatch.context() as patch,
    ):
        clock = SimpleNamespace(monotonic=runner.get_loop().time)
        for module in (limits, message_env, single_rollout):
            patch.setattr(module, "time", clock)
        return runner.run(work)
