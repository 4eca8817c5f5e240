"""Limits the share of the time in which a thread computes.

Only one thread of a process runs Python code at a time. While one thread reads a large body, every
other thread waits each time it needs the interpreter lock: the engine several dozen times per
sampled token, and the event loop several times per request. Within `paced`, a thread sleeps at
intervals, so that the other threads find the lock free most of the time.

A thread sleeps only in calls of `pause_if_due`. Code that works for long on one body must call it
at least once per millisecond or so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

_SLICE_SECONDS = 1e-3
"""A thread computes for this long before it sleeps."""


class _Pace(threading.local):
    """The limit of the current thread."""

    share: Callable[[], float] | None = None
    """Returns the share of the time in which the thread may compute; None: no limit."""
    slept_at = 0.0
    """The thread's CPU time when it last slept, in seconds."""


_pace = _Pace()


@contextmanager
def paced(share: Callable[[], float]) -> Generator[None]:
    """Limit the current thread to a share of the time, in the block and for a pause at its end.

    `share` returns the share, above 0 and at most 1. It is called before each pause.
    """
    _pace.share, _pace.slept_at = share, time.thread_time()
    try:
        yield
    finally:
        try:
            _pause(0.0)
        finally:
            _pace.share = None


def pause_if_due() -> None:
    """Sleep, if the thread has a limit and has computed for a millisecond since it last slept."""
    if _pace.share is not None:
        _pause(_SLICE_SECONDS)


def _pause(min_seconds: float) -> None:
    """Sleep in proportion to the CPU time since the last pause, if it is at least `min_seconds`."""
    assert _pace.share is not None
    computed = time.thread_time() - _pace.slept_at
    if computed < min_seconds:
        return
    share = _pace.share()
    if share < 1:
        time.sleep(computed * (1 / share - 1))
    _pace.slept_at = time.thread_time()
