"""Threads that end before the interpreter does.

While Python shuts down, a daemon thread that asks for the interpreter lock is ended on the spot
(before Python 3.14), by an exception that C++ code may not catch: a thread that is just then
leaving a function of torch aborts the process, after a program that went well. So each thread of
planish that may be in such code is asked to end when the program has ended, and is waited for,
before that point.
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

SAVING_SECONDS = 60.0
"""For how long a program that has ended still waits for checkpoints that it asked for."""
_SILENT_SECONDS = 1.0

_log = logging.getLogger(__name__)


class BackgroundThread:
    """A running daemon thread, which the program stops and waits for when it ends."""

    def __init__(
        self,
        target: Callable[[], object],
        name: str,
        *,
        stop: Callable[[], object] | None = None,
        exit_seconds: float | None = None,
    ) -> None:
        """Start `target()` in a thread.

        `stop` is called when the program has ended, in its main thread: it asks the thread to end,
        and does not wait for it. `exit_seconds`: how long the program then waits for the thread;
        None is until the thread has ended.
        """
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._stop = stop
        self._exit_seconds = exit_seconds
        self._thread = threading.Thread(
            target=_run, args=([target], self._ended), name=name, daemon=True
        )
        _end_all_at_exit(self)
        try:
            self._thread.start()
        except BaseException:  # no thread is left, or the interpreter shuts down
            _threads.pop(self, None)
            raise

    @property
    def ident(self) -> int | None:
        """The thread's identifier, as of `threading.get_ident`."""
        return self._thread.ident

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def is_alive(self) -> bool:
        """Whether the target still runs. False in the child of a fork, which has no such thread."""
        return self._pid == os.getpid() and not self._ended.is_set()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended, for at most so many seconds."""
        if self._pid != os.getpid():
            return
        # `Thread.join` alone would not do: when Ctrl-C interrupts it, Python 3.11 and 3.12 take
        # the thread for ended, and no later call waits for it.
        if self._ended.wait(seconds):
            self._thread.join()

    def _end(self, began: float) -> None:
        """Wait at the end of the program, which began at the time `began`. Ctrl-C ends a wait that
        has a limit.
        """
        give_up = None if self._exit_seconds is None else began + self._exit_seconds
        while True:
            try:
                self.join(None if give_up is None else max(0.0, give_up - time.monotonic()))
                return
            except KeyboardInterrupt:
                if give_up is not None:
                    return


def wait_for_saves(saves: Collection[Future[Any]]) -> None:
    """Wait, at the end of a program, for checkpoints that it asked for: SAVING_SECONDS at most.

    A wait of more than a second is logged as a warning, and so are checkpoints that are given up.
    """
    left = wait(saves, _SILENT_SECONDS).not_done
    if not left:
        return
    _log.warning(
        "the program ends when its checkpoints are written (%d left), in %d s at the latest",
        len(left),
        SAVING_SECONDS,
    )
    left = wait(left, SAVING_SECONDS - _SILENT_SECONDS).not_done
    if left:
        _log.error("the program ends without %d checkpoints that it asked for", len(left))


def _run(targets: list[Callable[[], object]], ended: threading.Event) -> None:
    try:
        targets.pop()()
    finally:
        # Nothing of the target is left here: what it held was released before this.
        ended.set()


_threads: dict[BackgroundThread, None] = {}
"""Those that may be alive, in the order of their starts. Any thread adds to it, by single operations
that need no lock: the child of a fork would find that held.
"""


def _end_all_at_exit(thread: BackgroundThread) -> None:
    for other in list(_threads):
        if not (other.is_alive() or other._thread.is_alive()):
            _threads.pop(other, None)
    _threads[thread] = None
    # Exit callbacks run last one first. This one comes before those that libraries have registered
    # by now, since the thread may use them to its end.
    atexit.unregister(_end_all)
    atexit.register(_end_all)


def _end_all() -> None:
    for thread in list(_threads):
        if thread._stop is not None and thread.is_alive():
            with suppress(KeyboardInterrupt):  # each `stop` asks its thread all the same
                thread._stop()
    began = time.monotonic()
    for thread in list(_threads):
        thread._end(began)
