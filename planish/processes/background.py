"""Background threads that are stopped before the interpreter shuts down.

Before Python 3.14, a daemon thread that requests the GIL during shutdown is terminated by a forced
unwind of its stack. If the thread is returning from a torch function at that moment, the unwind
through C++ code aborts the process, although the program succeeded. So planish stops and joins its
threads at exit, before the shutdown.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

MAX_SAVE_WAIT_SECONDS = 60.0
"""How long the program waits at exit for checkpoints that are still being saved."""
_WARN_AFTER_SECONDS = 1.0

_log = logging.getLogger(__name__)


class BackgroundThread:
    """A running daemon thread that is stopped and joined at exit."""

    def __init__(
        self,
        target: Callable[[], object],
        name: str,
        *,
        stop: Callable[[], object] | None = None,
        exit_seconds: float | None = None,
    ) -> None:
        """Start `target()` in a thread.

        `stop` is called at exit in the main thread; it asks the thread to end, without waiting. The
        program then waits `exit_seconds` for the thread (None: until it has ended).
        """
        self._pid = os.getpid()
        self._end_event = threading.Event()
        self._stop = stop
        self._exit_seconds = exit_seconds
        self._thread = threading.Thread(
            target=_run, args=([target], self._end_event), name=name, daemon=True
        )
        _register_for_exit(self)
        try:
            self._thread.start()
        except BaseException:  # too many threads, or the interpreter shuts down
            _live_threads.pop(self, None)
            raise

    @property
    def ident(self) -> int | None:
        """The thread's identifier, as in `threading.get_ident`."""
        return self._thread.ident

    @property
    def is_current(self) -> bool:
        """Return whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def is_alive(self) -> bool:
        """Return whether the target still runs. False in a forked child, which lacks the thread."""
        return self._pid == os.getpid() and not self._end_event.is_set()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended, for at most `seconds`."""
        if self._pid != os.getpid():
            return
        # `Thread.join` alone is not enough: if Ctrl-C interrupts it, Python 3.11 and 3.12 mark the
        # thread as ended, and later calls do not wait.
        if self._end_event.wait(seconds):
            self._thread.join()

    def _join_at_exit(self, exit_start: float) -> None:
        """Wait for the thread at exit. `exit_start` is the monotonic time at which the exit began.
        Ctrl-C ends the wait if it has a time limit.
        """
        deadline = None if self._exit_seconds is None else exit_start + self._exit_seconds
        while True:
            try:
                self.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
                return
            except KeyboardInterrupt:
                if deadline is not None:
                    return


def wait_for_saves(saves: Collection[Future[Any]]) -> None:
    """Wait at exit for checkpoints that are still being saved, for at most MAX_SAVE_WAIT_SECONDS.

    A wait of more than a second is logged as a warning. If checkpoints are still unfinished after
    MAX_SAVE_WAIT_SECONDS, their number is logged as an error.
    """
    unfinished = wait(saves, _WARN_AFTER_SECONDS).not_done
    if not unfinished:
        return
    _log.warning(
        "waiting for checkpoints that are still being saved (%d left), for at most %d s",
        len(unfinished),
        MAX_SAVE_WAIT_SECONDS,
    )
    unfinished = wait(unfinished, MAX_SAVE_WAIT_SECONDS - _WARN_AFTER_SECONDS).not_done
    if unfinished:
        _log.error("the program ends although %d checkpoints are not saved", len(unfinished))


def _run(targets: list[Callable[[], object]], end_event: threading.Event) -> None:
    try:
        targets.pop()()
    finally:
        # The target was popped from the list, so its references are released by now.
        end_event.set()


_live_threads: dict[BackgroundThread, None] = {}
"""The threads that may be alive, in the order of their starts. The dictionary has no lock, since a
forked child could inherit a lock that is held. Single dictionary operations are atomic.
"""


def _register_for_exit(thread: BackgroundThread) -> None:
    for other in list(_live_threads):
        if not (other.is_alive() or other._thread.is_alive()):
            _live_threads.pop(other, None)
    _live_threads[thread] = None
    # Exit callbacks run in reverse order. Registering again here makes ours run before those of
    # libraries imported so far, which the thread may use until it ends.
    atexit.unregister(_stop_all)
    atexit.register(_stop_all)


def _stop_all() -> None:
    # The newest first: a thread may use those that were started before it. For example, a thread
    # that waits for checkpoints needs the one that sends messages to the engine's process.
    for thread in reversed(list(_live_threads)):
        if thread._stop is not None and thread.is_alive():
            with suppress(KeyboardInterrupt):  # Ctrl-C must not keep the others from being stopped
                thread._stop()
    exit_start = time.monotonic()
    for thread in list(_live_threads):
        thread._join_at_exit(exit_start)
