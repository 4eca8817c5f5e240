"""Fair sharing of time: among the waiting keys, the one that has used the least time is next.

Time is charged after each turn, so a key waits after a long turn until the others have caught up.
A key earns no credit while it is absent: when it returns, its clock is set to that of the waiting
keys. If its clock is ahead of theirs, it stays there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class FairShare(Generic[K]):
    """A clock of used seconds per key."""

    def __init__(self) -> None:
        """Create clocks that all start at 0."""
        self._clocks: dict[K, float] = {}
        self._now = 0.0
        """The clock of the key that was picked last. This value never decreases."""

    def pick(self, waiting: Sequence[K]) -> K:
        """Return the key of `waiting` (not empty) with the least time, the first if several tie."""
        chosen = min(waiting, key=self._clock)
        self._now = max(self._now, self._clock(chosen))
        self._clocks = {
            key: clock for key, clock in self._clocks.items() if clock > self._now or key in waiting
        }
        return chosen

    def charge(self, key: K, seconds: float) -> None:
        """Add `seconds` of used time to the clock of `key`."""
        self._clocks[key] = self._clock(key) + seconds

    def _clock(self, key: K) -> float:
        return max(self._clocks.get(key, 0.0), self._now)
