"""Whose turn it is: among those who wait, the one that has had the least time.

Time is charged after each turn, so a long turn is paid back by as many short ones of the others.
Having been absent gives no credit: whoever comes back starts at the clock of those who waited, but
a debt stays.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class FairShare(Generic[K]):
    def __init__(self) -> None:
        self._clocks: dict[K, float] = {}
        self._now = 0.0
        """The clock of the one that was served last with the least time; never goes back."""

    def pick(self, waiting: Sequence[K]) -> K:
        """The one of `waiting` (not empty) to serve; the first of equals."""
        chosen = min(waiting, key=self._clock)
        self._now = max(self._now, self._clock(chosen))
        self._clocks = {
            key: clock for key, clock in self._clocks.items() if clock > self._now or key in waiting
        }
        return chosen

    def charge(self, key: K, seconds: float) -> None:
        """`key` has used `seconds`."""
        self._clocks[key] = self._clock(key) + seconds

    def _clock(self, key: K) -> float:
        return max(self._clocks.get(key, 0.0), self._now)
