"""Ctrl-C as a request: the loop ends at a point from which it can be resumed. A second Ctrl-C ends it at once."""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """The run was asked to end while something was waited for that can be left undone."""


class Interruption:
    """Whether the run was asked to end, and waiting that heeds it."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        """End the run at the next point where it can be."""
        self._asked.set()

    async def guard(self, work: Awaitable[T]) -> T:
        """The result of `work`. Interrupted, with `work` going on, as soon as the run is asked to end."""
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if self.is_asked:
            raise Interrupted
        return task.result()

    @contextmanager
    def on_control_c(self) -> Iterator[None]:
        """Within the block the first Ctrl-C asks; the next one is an ordinary KeyboardInterrupt."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)
        loop = asyncio.get_running_loop()

        def first(*_: object) -> None:
            signal.signal(signal.SIGINT, before)
            loop.call_soon_threadsafe(self.ask)

        signal.signal(signal.SIGINT, first)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGINT) is first:
                signal.signal(signal.SIGINT, before)
