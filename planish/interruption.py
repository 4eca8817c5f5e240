"""Ctrl-C as a request: the loop ends at a point from which it can be resumed. A second Ctrl-C ends it at once. And what else may
end a task from outside: cancellation, and the first error of several tasks."""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
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
        """The result of `work`. If the run is asked to end, or this is cancelled, `work` is cancelled and has ended before
        Interrupted, or the cancellation, is raised."""
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not self.is_asked:
                return task.result()
        finally:
            asked.cancel()
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # or the event loop would complain that nobody asked for it
        raise Interrupted

    @contextmanager
    def on_control_c(self, say: Callable[[str], None]) -> Iterator[None]:
        """Within the block the first Ctrl-C asks, and is answered by `say`; the next one is an ordinary KeyboardInterrupt.

        Not where signals do not arrive, which is in other threads, nor where Ctrl-C is not for this process, as behind nohup.
        """
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
            yield
            return
        loop = asyncio.get_running_loop()

        def answer() -> None:
            self.ask()
            say("Ctrl-C: stopping where the run can go on from; once more, and it stops at once")

        def first(*_: object) -> None:
            # Not `before`: asyncio's cancels the run, which then waits until all that it plays has cleaned up.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            loop.call_soon_threadsafe(answer)

        signal.signal(signal.SIGINT, first)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Ctrl-C does not reach a process that is started in the block before that process lets it."""
    if not hasattr(signal, "pthread_sigmask"):  # not on this system
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def only_asked_cancellation() -> Iterator[None]:
    """A cancellation that leaves the block, and that nobody asked this task for, is a RuntimeError.

    Code that awaits a task of its own which was cancelled lets one out. asyncio takes it for the end of the task around it, of
    which nobody would hear.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling() > 0:
            raise
        raise RuntimeError("CancelledError: what was awaited was cancelled, and nobody asked for that here") from error


@contextmanager
def first_error() -> Iterator[None]:
    """Several tasks run at once; of their errors the first is raised as it is, and says how many others there were.

    Interrupted comes before all others, since they followed from it.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        leaves = list({id(error): error for error in leaves_of(group)}.values())  # two tasks may have seen one error
        first = next((error for error in leaves if isinstance(error, Interrupted)), leaves[0])
        if len(leaves) > 1:
            another = next(error for error in leaves if error is not first)
            first.add_note(f"{len(leaves) - 1} more tasks failed, the first of them with: {another!r}")
        raise first from first.__cause__


def leaves_of(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for part in error.exceptions for leaf in leaves_of(part)]
