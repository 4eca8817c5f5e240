"""Full garbage collections, at times when they disturb no request."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

_THRESHOLDS = (1000, 10, 1 << 30)
"""The thresholds of garbage collection. The last one is so high that Python never starts a full
collection. `GarbageCollector` starts the full collections.
"""


class GarbageCollector:
    """Runs full garbage collections while few objects exist.

    A large JSON body becomes up to 131,072 objects and lists when it is decoded, and each running
    sample has about a hundred objects. While so many objects exist, a full collection holds the
    interpreter lock for 70 to 200 ms, and no request is answered during this time. So a collection
    waits until they are gone.
    """

    SECONDS = 30.0
    """The minimum time between two collections."""
    LATEST_SECONDS = 300.0
    """A collection runs after this time even if many objects exist."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._last = clock()

    def tick(self, is_busy: bool) -> None:
        """Run a full collection if one is due. `is_busy`: many objects exist."""
        passed = self._clock() - self._last
        has_new_objects = gc.get_count()[2] > 0
        if has_new_objects and passed >= (self.LATEST_SECONDS if is_busy else self.SECONDS):
            gc.collect()
            self._last = self._clock()


def freeze_objects() -> None:
    """Exclude all present objects from garbage collection, and leave full collections to
    `GarbageCollector`.

    Modules and base models are about 250,000 objects and stay for the life of the process. Without
    this, each full collection would hold the interpreter lock for 120 ms to examine them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
