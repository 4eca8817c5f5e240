"""Detects an engine that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

SILENT_SECONDS = 60.0
"""A process that does not answer for so long is given up by default. Loading a large library can
keep a process from answering for seconds.
"""
STALL_SECONDS = 900.0
"""The longest time without progress that is normal by default."""
_MAX_CHECK_SECONDS = 5.0


class StallWatch:
    """Detects an engine that hangs, which means that it has work but makes no progress."""

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`timeout` is the longest time without progress that is normal, in seconds."""
        self._timeout = timeout
        self._clock = clock
        self._last_check = clock()
        self._last_progress: int | None = None
        self._stalled_seconds = 0.0
        """How long the engine has made no progress, in seconds."""

    def is_stalled(self, progress: int | None) -> bool:
        """Return whether the engine hangs. Call this every second with `Engine.progress()`."""
        now = self._clock()
        # If the whole process was stopped for a while, the engine had no chance to make progress.
        # So at most `_MAX_CHECK_SECONDS` seconds count per check.
        elapsed, self._last_check = min(now - self._last_check, _MAX_CHECK_SECONDS), now
        if progress is None or progress != self._last_progress:
            self._last_progress, self._stalled_seconds = progress, 0.0
            return False
        self._stalled_seconds += elapsed
        return self._stalled_seconds >= self._timeout
