"""Ctrl-C as a request: the loop ends at a point from which it can be resumed. A second Ctrl-C ends
it at once. And what else may end a task from outside: cancellation, and the first error of several
tasks.
"""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FrameType
from typing import Any, Self, TypeVar

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], object]


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
        """The result of `work`. If the run is asked to end, or this is cancelled, `work` is
        cancelled and has ended before Interrupted, or the cancellation, is raised.
        """
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
        """Within the block the first Ctrl-C asks, and is answered by `say`; the next one is an
        ordinary KeyboardInterrupt.

        Not where signals do not arrive, which is in threads other than those of `run_in_thread`,
        nor where Ctrl-C is not for this process, as behind nohup.
        """
        loop = asyncio.get_running_loop()

        def answer() -> None:
            self.ask()
            say("Ctrl-C: stopping where the run can go on from; once more, and it stops at once")

        def ask() -> None:
            loop.call_soon_threadsafe(answer)

        if (waiting := _main_thread.get()) is not None:
            with waiting.asking(ask):
                yield
        elif threading.current_thread() is threading.main_thread():
            with (
                _ControlC(_further_one(signal.getsignal(signal.SIGINT))) as control_c,
                control_c.asking(ask),
            ):
                yield
        else:
            yield


def _further_one(before: Any) -> Handler:
    """What a Ctrl-C does that nobody is asked by, where `before` is what the first one would have
    done.

    asyncio's would cancel the run, which then waits until all that it plays has cleaned up. That of
    others is theirs: a KeyboardInterrupt in the loop of a notebook ends the notebook.
    """
    is_asyncios = isinstance(
        getattr(getattr(before, "func", None), "__self__", None), asyncio.Runner
    )
    return before if callable(before) and not is_asyncios else signal.default_int_handler


class _ControlC:
    """What Ctrl-C does, in the main thread, within the block: it asks, or `further` where there is
    nobody to ask.
    """

    def __init__(self, further: Handler = signal.default_int_handler) -> None:
        self._further = further
        self._ask: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def asking(self, ask: Callable[[], None]) -> Iterator[None]:
        """Within the block, in whichever thread it is, the first one calls `ask`."""
        self._ask = ask
        try:
            yield
        finally:
            self._ask = None

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        ask, self._ask = self._ask, None
        if ask is None:
            self._further(number, frame)
        else:
            with suppress(RuntimeError):  # the loop that is to hear of it has just ended
                ask()


_main_thread: ContextVar[_ControlC | None] = ContextVar("main thread", default=None)
"""That which waits for the loop of this context, if it is not the loop's own thread."""


def run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work` from an event loop in a thread of its own, while this one waits: for a
    notebook, whose loop runs already.

    Ctrl-C does what it does to a run in this thread: the first one within `on_control_c` asks. Any
    other cancels `work`, and is raised when that has cleaned up.
    """
    if threading.current_thread() is not threading.main_thread():
        return _run_in_thread(work, None)
    with _ControlC() as control_c:
        return _run_in_thread(work, control_c)


def _run_in_thread(work: Coroutine[Any, Any, T], control_c: _ControlC | None) -> T:
    begun: Future[Callable[[], object]] = Future()

    async def cancellable() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        _main_thread.set(control_c)
        begun.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await work

    with ThreadPoolExecutor(1, "planish-notebook") as pool:
        done = pool.submit(asyncio.run, cancellable())
        try:
            return done.result()
        except KeyboardInterrupt:
            with suppress(RuntimeError):  # it has just ended
                begun.result()()
            raise


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
def only_errors() -> Iterator[None]:
    """A cancellation that leaves the block, and that nobody asked this task for, is a RuntimeError,
    and so is SystemExit.

    Code that awaits a task of its own which was cancelled lets a cancellation out: asyncio takes it
    for the end of the task around it, of which nobody would hear. SystemExit, of code that calls
    `exit()`, would end the program at once, with nothing saved.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling() > 0:
            raise
        raise RuntimeError(
            "CancelledError: what was awaited was cancelled, and nobody asked for that here"
        ) from error
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error


@contextmanager
def first_error() -> Iterator[None]:
    """Several tasks run at once; of their errors the first is raised as it is, and says how many
    others there were.

    Interrupted comes before all others, since they followed from it.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        # two tasks may have seen one error
        leaves = list({id(error): error for error in leaves_of(group)}.values())
        first = next((error for error in leaves if isinstance(error, Interrupted)), leaves[0])
        if len(leaves) > 1:
            another = next(error for error in leaves if error is not first)
            first.add_note(
                f"{len(leaves) - 1} more tasks failed, the first of them with: {another!r}"
            )
        raise first from first.__cause__


async def at_once(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first error ends the others, and nothing outlives the call."""
    with first_error():
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(each) for each in work]
    return [task.result() for task in begun]


def leaves_of(error: BaseException) -> list[BaseException]:
    """The errors in a group and in the groups within it, each with the notes of what held it."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    for part in error.exceptions:
        for note in getattr(error, "__notes__", []):
            if note not in getattr(part, "__notes__", []):
                part.add_note(note)
    return [leaf for part in error.exceptions for leaf in leaves_of(part)]
