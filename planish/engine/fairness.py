"""Fair sharing of time: among the waiting keys, the one that has used the least time is next.

Time is charged after each turn, so a key waits after a long turn until the others have caught up.
A key earns no credit while it is absent. When it returns, its used time is raised to that of the
waiting keys. If the key has used more time than the waiting keys, its used time stays unchanged.
"""

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class FairShare(Generic[K]):
    """The seconds that each key has used."""

    def __init__(self) -> None:
        """Start with no time used."""
        self._used_seconds: dict[K, float] = {}
        self._max_picked_seconds = 0.0
        """The highest used time that a picked key has had so far, in seconds.

        Absent keys count as having used at least this time.
        """

    def pick(self, waiting: Sequence[K]) -> K:
        """Return the key of `waiting` (not empty) with the least time, the first if several tie."""
        key_with_least = min(waiting, key=self._effective_seconds)
        self._max_picked_seconds = max(
            self._max_picked_seconds, self._effective_seconds(key_with_least)
        )
        self._used_seconds = {
            key: used
            for key, used in self._used_seconds.items()
            if used > self._max_picked_seconds or key in waiting
        }
        return key_with_least

    def charge(self, key: K, seconds: float) -> None:
        """Add `seconds` to the time that `key` has used."""
        self._used_seconds[key] = self._effective_seconds(key) + seconds

    def _effective_seconds(self, key: K) -> float:
        return max(self._used_seconds.get(key, 0.0), self._max_picked_seconds)
