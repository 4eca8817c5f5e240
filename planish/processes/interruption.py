"""Ctrl-C and SIGTERM as requests: the loop ends at a point from which it can be resumed. A second
one ends it at once. And what else may end a task from outside: cancellation, and the first error of
several tasks.

A program that has a handler of its own for SIGTERM, or ignores it, keeps that.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any, Self, TypeVar

from planish.processes.background import BackgroundThread

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], object]

_ONE_SIGTERM_SECONDS = 1.0
"""`timeout` sends two signals at once, one to the program and one to its process group."""
_ANSWERS = {
    signal.SIGINT: "Ctrl-C: stopping where the run can be resumed; a second one ends it at once",
    signal.SIGTERM: "SIGTERM: stopping where the run can be resumed; a second one ends it at once",
}


class Interrupted(Exception):
    """The run was asked to end while something was waited for that can be left undone."""


class Terminated(SystemExit):
    """SIGTERM ended the program. Its exit status is 143, 128 + SIGTERM, which is what a shell
    reports of a program that the signal ended.
    """

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def ending(number: int) -> BaseException:
    """The exception that leaves a run which a signal ended, once it is saved: KeyboardInterrupt for
    SIGINT, Terminated for SIGTERM.
    """
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


class Interruption:
    """Whether the run was asked to end, and waiting that heeds it."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._signal: int = signal.SIGINT

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    @property
    def ending(self) -> BaseException:
        """The exception to raise when the run was asked to end, and is saved."""
        return ending(self._signal)

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
    def heed_signals(self, say: Callable[[str], None]) -> Iterator[None]:
        """Within the block the first Ctrl-C or SIGTERM asks the run to end, and `say` gets the
        answer. The next Ctrl-C is an ordinary KeyboardInterrupt; the next SIGTERM ends the process.

        Signals arrive in the main thread only, and from there in `run_in_thread`, which leaves
        SIGTERM alone. In any other thread the block does nothing. A signal that the process
        ignores, such as Ctrl-C behind nohup, stays ignored.
        """
        loop = asyncio.get_running_loop()

        def answer(number: int) -> None:
            self._signal = number
            self.ask()
            say(_ANSWERS[signal.Signals(number)])

        def ask(number: int) -> None:
            with suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(answer, number)

        if (waiting := _main_thread.get()) is not None:
            with waiting.asking(ask):
                yield
        elif threading.current_thread() is threading.main_thread():
            with _requests(ask):
                yield
        else:
            yield


class StopRequest:
    """Whether a loop without asyncio was asked to end, by Ctrl-C or SIGTERM.

    Use it as a context manager in the main thread. In any other thread no signal asks the loop to
    end. In a notebook SIGTERM keeps its effect.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """The first signal is answered by `say`; the next ones end the loop at once."""
        self._say = say
        self._signal: int | None = None
        self._is_at_once = False
        self._asked: SimpleQueue[int | None] = SimpleQueue()
        self._handlers = ExitStack()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # The answer comes from another thread, since a signal may interrupt the main thread in
            # the middle of a line that it is writing.
            end = partial(self._asked.put, None)
            thread = BackgroundThread(self._answer, "planish-signals", stop=end, exit_seconds=1.0)
            self._handlers.callback(thread.join)
            self._handlers.callback(end)
            self._handlers.enter_context(_requests(self._ask, heeds_sigterm=not _runs_a_loop()))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    @property
    def ending(self) -> BaseException:
        """The exception to raise when the loop was asked to end, and is saved."""
        return ending(self._signal or signal.SIGINT)

    def check(self) -> None:
        """Raise Interrupted if the loop was asked to end."""
        if self._signal is not None:
            raise Interrupted

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a request raise Interrupted in the middle of the block, whose work may be left
        undone.
        """
        self._is_at_once = True
        try:
            self.check()
            yield
        finally:
            self._is_at_once = False

    def _ask(self, number: int) -> None:
        self._signal = number
        self._asked.put(number)
        if self._is_at_once:
            raise Interrupted

    def _answer(self) -> None:
        while (number := self._asked.get()) is not None:
            self._say(_ANSWERS[signal.Signals(number)])


def _runs_a_loop() -> bool:
    """Whether an event loop runs in this thread: around code without asyncio, a notebook's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def _requests(ask: Callable[[int], None], *, heeds_sigterm: bool = True) -> Iterator[None]:
    """Within the block of the main thread the first Ctrl-C or SIGTERM calls `ask`."""
    with (
        _ControlC(_further_one(signal.getsignal(signal.SIGINT))) as control_c,
        control_c.asking(ask),
        _Sigterm(lambda: control_c.ask(signal.SIGTERM)) if heeds_sigterm else nullcontext(),
    ):
        yield


@contextmanager
def sigterm_like_control_c() -> Iterator[None]:
    """Within the block, in the main thread, SIGTERM ends what runs as Ctrl-C does, and `Terminated`
    leaves the block. A second one ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    has_come = False

    def end() -> bool:
        nonlocal has_come
        has_come = True
        control_c = signal.getsignal(signal.SIGINT)  # asyncio's cancels the task that runs
        if not callable(control_c):
            raise Terminated
        control_c(signal.SIGINT, None)
        return True

    with _Sigterm(end):
        try:
            yield
        except KeyboardInterrupt:
            if has_come:
                raise Terminated from None
            raise


class _Sigterm:
    """A handler of SIGTERM for a block of the main thread, unless the program has one of its own.

    The first signal calls `first`. If that returns False, the signal ends the process, as further
    ones do.
    """

    def __init__(self, first: Callable[[], bool]) -> None:
        self._first = first
        self._came: float | None = None
        self._before: Any = None

    def __enter__(self) -> Self:
        found = signal.getsignal(signal.SIGTERM)
        if found is signal.SIG_DFL or isinstance(getattr(found, "__self__", None), _Sigterm):
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_first, self._came = self._came is None, self._came or now
        if not (self._first() if is_first else now - self._came < _ONE_SIGTERM_SECONDS):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            os._exit(128 + number)  # the first process of a container does not die of it


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
        self._ask: Callable[[int], None] | None = None

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def asking(self, ask: Callable[[int], None]) -> Iterator[None]:
        """Within the block, in whichever thread it is, the first one calls `ask` with its number."""
        self._ask = ask
        try:
            yield
        finally:
            self._ask = None

    def ask(self, number: int) -> bool:
        """Call `ask` of the block for this signal. False if there is no such block, or it was asked
        before.
        """
        ask, self._ask = self._ask, None
        if ask is None:
            return False
        ask(number)
        return True

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if not self.ask(number):
            self._further(number, frame)


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
    """Ctrl-C and SIGTERM do not reach a process that is started in the block before that process
    lets them.
    """
    if not hasattr(signal, "pthread_sigmask"):  # not on this system
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
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


async def run_uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. A cancellation is raised only after `work` has ended."""
    task = asyncio.create_task(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation from (None if task.cancelled() else task.exception())
    return task.result()


def leaves_of(error: BaseException) -> list[BaseException]:
    """The errors in a group and in the groups within it, each with the notes of what held it."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    for part in error.exceptions:
        for note in getattr(error, "__notes__", []):
            if note not in getattr(part, "__notes__", []):
                part.add_note(note)
    return [leaf for part in error.exceptions for leaf in leaves_of(part)]
