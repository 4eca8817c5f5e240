"""Ends a rollout worker in which an environment blocks the event loop.

A time limit of asyncio cannot end a call that blocks, such as a request without a timeout, or a
regular expression that takes forever and holds the interpreter lock. So while all groups of a worker
are within time limits, a thread of faulthandler ends the process if its event loop does not run for
the longest of these limits. It first writes the stack of each thread to stderr.
"""

import asyncio
import faulthandler
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

from planish.rl.rollout.group_rollout import during_time_limit

_CHECK_SECONDS = 1.0
_EXTRA_SECONDS = 5.0
"""How much longer than the longest time limit the event loop may be blocked."""


class LoopWatch:
    """The time limits that are running, of each group of a worker."""

    def __init__(self) -> None:
        self._groups: list[list[float | None]] = []

    async def run(self) -> NoReturn:
        """Show again and again that the event loop runs."""
        while True:
            self._update()
            await asyncio.sleep(_CHECK_SECONDS)

    @contextmanager
    def group(self) -> Generator[None]:
        """Watch a group, whose rollout is in the block."""
        limits: list[float | None] = []

        @contextmanager
        def during(seconds: float | None) -> Generator[None]:
            limits.append(seconds)
            self._update()
            try:
                yield
            finally:
                limits.remove(seconds)
                self._update()

        self._groups.append(limits)
        self._update()
        token = during_time_limit.set(during)
        try:
            yield
        finally:
            during_time_limit.reset(token)
            self._groups = [group for group in self._groups if group is not limits]
            self._update()

    def _update(self) -> None:
        # Code outside of time limits, such as make_envs, may block as long as it likes.
        longest = [_longest(group) for group in self._groups]
        seconds = [limit for limit in longest if limit is not None]
        if seconds and len(seconds) == len(longest):
            faulthandler.dump_traceback_later(max(seconds) + _EXTRA_SECONDS, exit=True)
        else:
            faulthandler.cancel_dump_traceback_later()


def _longest(limits: list[float | None]) -> float | None:
    """Return the longest time limit, or None if there is none or one is missing."""
    seconds = [limit for limit in limits if limit is not None]
    return max(seconds) if seconds and len(seconds) == len(limits) else None
