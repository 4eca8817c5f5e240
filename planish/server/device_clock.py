"""How much of the device's time each model's requests took, from when they were answered."""

from __future__ import annotations

import time
from collections.abc import Callable


class DeviceClock:
    """One device: what ends next has had it since what ended last, or since it was asked for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()

    def now(self) -> float:
        return self._clock()

    def spent(self, submitted: float) -> float:
        """Seconds that a request took which ends now. The parts of all requests add up to no more
        than the time that passed.
        """
        now = self._clock()
        spent = now - max(submitted, self._last)
        self._last = now
        return spent
