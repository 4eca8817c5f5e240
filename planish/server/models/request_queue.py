"""The requests of one model in the order of their numbers, however they come. Plain decisions, no
clock and no disk.

A request may be taken when all lower numbers were. A number that never comes blocks those behind it
until somebody gives up: then it is passed over, and a request of it that comes later is too late.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class RequestQueue(Generic[T]):
    def __init__(self, next_seq: int, passed: int = 0) -> None:
        """`next_seq`: the first number that was not taken. Of those below `passed`, the missing
        ones are not waited for.
        """
        self.next_seq = next_seq
        self.passed = passed
        self._waiting: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, seq: int, item: T) -> None:
        assert seq >= self.next_seq, seq
        assert seq not in self._waiting, seq
        self._waiting[seq] = item

    def is_used(self, seq: int) -> bool:
        """Whether a request of this number came, or is not waited for any more."""
        return seq < max(self.next_seq, self.passed) or seq in self._waiting

    @property
    def is_ready(self) -> bool:
        self._skip()
        return self.next_seq in self._waiting

    @property
    def is_blocked(self) -> bool:
        """Whether requests wait for a number that has not come."""
        return bool(self._waiting) and not self.is_ready

    @property
    def end(self) -> int:
        """Above every number that was used."""
        return max([self.next_seq, self.passed, *(seq + 1 for seq in self._waiting)])

    def take(self) -> T | None:
        """The next request, if it is there."""
        if not self.is_ready:
            return None
        item = self._waiting.pop(self.next_seq)
        self.next_seq += 1
        return item

    def peek(self) -> T | None:
        """What `take` would answer."""
        return self._waiting[self.next_seq] if self.is_ready else None

    def give_up(self) -> list[T]:
        """Pass over the numbers that are missing before the last one that waits; answers those that
        wait, in order. They can be taken now.
        """
        self.passed = self.end
        return [self._waiting[seq] for seq in sorted(self._waiting)]

    def _skip(self) -> None:
        """Over missing numbers that are not waited for."""
        if self.next_seq < self.passed and self.next_seq not in self._waiting:
            self.next_seq = min(
                [self.passed, *(seq for seq in self._waiting if seq >= self.next_seq)]
            )
