"""Graceful interruption: the first Ctrl-C or SIGTERM asks a training loop to stop at a point from
which it can be resumed; the second one ends it at once. The module also has helpers for cancelled
and failed tasks.

A SIGTERM handler of the program stays in effect. If the program ignores SIGTERM, so does planish.
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

_DUPLICATE_SIGTERM_SECONDS = 1.0
"""Within this time a second SIGTERM counts as the same request: `timeout` sends two at once, one to
the program and one to its process group.
"""
_STOP_MESSAGES = {
    signal.SIGINT: "Ctrl-C: stopping where the run can be resumed; a second one ends it at once",
    signal.SIGTERM: "SIGTERM: stopping where the run can be resumed; a second one ends it at once",
}


class Interrupted(Exception):
    """The run was asked to stop during work that may be dropped."""


class Terminated(SystemExit):
    """SIGTERM ended the program. The exit status is 143 (128 + SIGTERM), as shells report it for a
    program that the signal killed.
    """

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class SavedInterrupt(SystemExit, KeyboardInterrupt):
    """Ctrl-C ended a run, which was saved. `except KeyboardInterrupt` catches it. A program that
    does not ends with the exit status 130 (128 + SIGINT) and without a traceback: the run has said
    how it is resumed.
    """

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGINT)


def exception_for_signal(number: int) -> BaseException:
    """Return the exception to raise after a run was stopped by a signal and saved: SavedInterrupt
    for SIGINT, Terminated for SIGTERM.
    """
    return Terminated() if number == signal.SIGTERM else SavedInterrupt()


class Stopped(SystemExit):
    """A run was stopped on request, without a signal, and saved. The exit status is 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Interruption:
    """A request to stop a run that uses asyncio. `guard` runs work that the request cancels."""

    def __init__(self) -> None:
        self._stop_requested = asyncio.Event()
        self._signal: int | None = signal.SIGINT

    @property
    def is_stop_requested(self) -> bool:
        """Whether the run was asked to stop."""
        return self._stop_requested.is_set()

    @property
    def exit_exception(self) -> BaseException:
        """The exception to raise when the run was asked to stop and is saved."""
        return Stopped() if self._signal is None else exception_for_signal(self._signal)

    def request_stop(self) -> None:
        """Ask the run to stop at the next point from which it can be resumed."""
        self._stop_requested.set()

    def request_normal_exit(self) -> None:
        """Ask the run to stop as `request_stop` does, and the process to exit with status 0."""
        self._signal = None
        self.request_stop()

    async def guard(self, work: Awaitable[T]) -> T:
        """Return the result of `work`. If the run is asked to stop, or this call is cancelled,
        cancel `work`, wait until it has ended, and raise Interrupted or CancelledError.
        """
        task = asyncio.ensure_future(work)
        stop_requested = asyncio.ensure_future(self._stop_requested.wait())
        try:
            await asyncio.wait({task, stop_requested}, return_when=asyncio.FIRST_COMPLETED)
            if not self.is_stop_requested:
                return task.result()
        finally:
            stop_requested.cancel()
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # else asyncio logs "exception was never retrieved"
        raise Interrupted

    @contextmanager
    def handle_signals(self, notify: Callable[[str], None]) -> Iterator[None]:
        """In this block the first Ctrl-C or SIGTERM asks the run to stop, and `notify` is called
        with a message for the user. The next Ctrl-C raises KeyboardInterrupt; the next SIGTERM ends
        the process.

        This works in the main thread, and, for Ctrl-C only, within `run_in_thread`. In any other
        thread the block has no effect. A signal that the process ignores, such as Ctrl-C under
        nohup, stays ignored.
        """
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            self._signal = number
            self.request_stop()
            notify(_STOP_MESSAGES[signal.Signals(number)])

        def schedule_stop(number: int) -> None:
            with suppress(RuntimeError):  # the event loop has just been closed
                loop.call_soon_threadsafe(on_signal, number)

        if (main_thread_handler := _main_thread.get()) is not None:
            with main_thread_handler.passing_signals(schedule_stop):
                yield
        elif threading.current_thread() is threading.main_thread():
            with _signal_requests(schedule_stop):
                yield
        else:
            yield


class StopRequest:
    """A request by Ctrl-C or SIGTERM, or by `takes_request`, to stop a loop that does not use
    asyncio.

    Use it as a context manager in the main thread. In any other thread, signals have no effect. In
    a notebook, SIGTERM keeps its usual effect.
    """

    def __init__(
        self,
        notify: Callable[[str], None],
        takes_request: Callable[[], bool] = lambda: False,
    ) -> None:
        """`notify` is called with a message at the first signal. Later signals end the loop.
        `takes_request` returns whether something other than a signal asks the loop to stop. The
        process then exits with status 0.
        """
        self._notify = notify
        self._takes_request = takes_request
        self._exits_normally = False
        self._signal: int | None = None
        self._is_interruptible = False
        self._stop_requested: SimpleQueue[int | None] = SimpleQueue()
        self._handlers = ExitStack()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # Print the message in another thread: the signal may have interrupted the main thread
            # while it writes a line, and stdout cannot be re-entered.
            end = partial(self._stop_requested.put, None)
            thread = BackgroundThread(
                self._notify_requests, "planish-signals", stop=end, exit_seconds=1.0
            )
            self._handlers.callback(thread.join)
            self._handlers.callback(end)
            self._handlers.enter_context(
                _signal_requests(self._on_signal, heeds_sigterm=not _has_running_loop())
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    @property
    def exit_exception(self) -> BaseException:
        """The exception to raise when the loop was asked to stop and is saved."""
        if self._exits_normally:
            return Stopped()
        return exception_for_signal(self._signal or signal.SIGINT)

    def check(self) -> None:
        """Raise Interrupted if the loop was asked to stop."""
        if self._signal is not None:
            raise Interrupted
        if self._takes_request():
            self._exits_normally = True
            raise Interrupted

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """In this block a signal raises Interrupted immediately. Use it for work that may be
        dropped.
        """
        self._is_interruptible = True
        try:
            self.check()
            yield
        finally:
            self._is_interruptible = False

    def _on_signal(self, number: int) -> None:
        self._signal = number
        self._stop_requested.put(number)
        if self._is_interruptible:
            raise Interrupted

    def _notify_requests(self) -> None:
        while (number := self._stop_requested.get()) is not None:
            self._notify(_STOP_MESSAGES[signal.Signals(number)])


def _has_running_loop() -> bool:
    """Return whether an event loop runs in this thread, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def _signal_requests(
    on_signal: Callable[[int], None], *, heeds_sigterm: bool = True
) -> Iterator[None]:
    """In this block, in the main thread, the first Ctrl-C or SIGTERM calls `on_signal`."""
    with (
        _ControlC(_next_control_c_handler(signal.getsignal(signal.SIGINT))) as control_c,
        control_c.passing_signals(on_signal),
        _Sigterm(lambda: control_c.pass_signal(signal.SIGTERM)) if heeds_sigterm else nullcontext(),
    ):
        yield


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """In this block, in the main thread, SIGTERM stops the code as Ctrl-C would, and the block
    raises `Terminated`. A second SIGTERM ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_terminated = False

    def end() -> bool:
        nonlocal is_terminated
        is_terminated = True
        control_c = signal.getsignal(signal.SIGINT)  # asyncio's handler cancels the main task
        if not callable(control_c):
            raise Terminated
        control_c(signal.SIGINT, None)
        return True

    with _Sigterm(end):
        try:
            yield
        except KeyboardInterrupt:
            if is_terminated:
                raise Terminated from None
            raise


class _Sigterm:
    """Handles SIGTERM in a block of the main thread, unless the program has its own handler.

    The first signal calls `on_first`. If `on_first` returns False, that signal ends the process. A
    later signal ends the process too, unless it comes within _DUPLICATE_SIGTERM_SECONDS of the
    first.
    """

    def __init__(self, on_first: Callable[[], bool]) -> None:
        self._on_first = on_first
        self._first_time: float | None = None
        self._previous_handler: Any = None

    def __enter__(self) -> Self:
        current_handler = signal.getsignal(signal.SIGTERM)
        if current_handler is signal.SIG_DFL or isinstance(
            getattr(current_handler, "__self__", None), _Sigterm
        ):
            self._previous_handler = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_first, self._first_time = self._first_time is None, self._first_time or now
        if not (
            self._on_first() if is_first else now - self._first_time < _DUPLICATE_SIGTERM_SECONDS
        ):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            os._exit(128 + number)  # the signal does not kill PID 1 of a container


def _next_control_c_handler(previous_handler: Any) -> Handler:
    """Return the handler for a second Ctrl-C. `previous_handler` is the handler that was installed
    before.

    asyncio's own handler is not used, because it only cancels the run, and a cancelled run first
    waits until all rollouts have cleaned up. Instead, the second Ctrl-C raises KeyboardInterrupt.
    Any other handler is kept: in a notebook, for example, a KeyboardInterrupt in the event loop
    would end the kernel.
    """
    is_from_asyncio = isinstance(
        getattr(getattr(previous_handler, "func", None), "__self__", None), asyncio.Runner
    )
    return (
        previous_handler
        if callable(previous_handler) and not is_from_asyncio
        else signal.default_int_handler
    )


class _ControlC:
    """Handles Ctrl-C in a block of the main thread.

    The first signal calls the function of `passing_signals`, if there is one. All other signals
    call `next_handler`.
    """

    def __init__(self, next_handler: Handler = signal.default_int_handler) -> None:
        self._next_handler = next_handler
        self._receiver: Callable[[int], None] | None = None

    def __enter__(self) -> Self:
        self._previous_handler = signal.getsignal(signal.SIGINT)
        if self._previous_handler is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous_handler is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._previous_handler)

    @contextmanager
    def passing_signals(self, receiver: Callable[[int], None]) -> Iterator[None]:
        """In this block, in any thread, the first signal calls `receiver` with its number."""
        self._receiver = receiver
        try:
            yield
        finally:
            self._receiver = None

    def pass_signal(self, number: int) -> bool:
        """Pass a signal to the `passing_signals` block.

        Return False if there is no such block, or if the block has already received a signal.
        """
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return False
        receiver(number)
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.pass_signal(number):
            self._next_handler(number, frame)


_main_thread: ContextVar[_ControlC | None] = ContextVar("main thread", default=None)
"""The Ctrl-C handler of the main thread while it waits in `run_in_thread`; None elsewhere."""


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result. If an event loop is running already, as in a notebook,
    the coroutine runs in a thread with its own loop.
    """
    return run_in_thread(work) if _has_running_loop() else asyncio.run(work)


def run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in an event loop in another thread, wait, and return its result. For notebooks,
    where this thread already runs a loop.

    The first Ctrl-C within `Interruption.handle_signals` asks the run to stop. Any other Ctrl-C
    cancels `work`, and KeyboardInterrupt is raised after `work` has cleaned up.
    """
    if threading.current_thread() is not threading.main_thread():
        return _run_in_thread(work, None)
    with _ControlC() as control_c:
        return _run_in_thread(work, control_c)


def _run_in_thread(work: Coroutine[Any, Any, T], control_c: _ControlC | None) -> T:
    cancel_future: Future[Callable[[], object]] = Future()

    async def cancellable() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        _main_thread.set(control_c)
        cancel_future.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await work

    with ThreadPoolExecutor(1, "planish-notebook") as pool:
        result_future = pool.submit(asyncio.run, cancellable())
        try:
            return result_future.result()
        except KeyboardInterrupt:
            with suppress(RuntimeError):  # the loop has just been closed
                cancel_future.result()()
            raise


@contextmanager
def blocked_interrupts() -> Iterator[None]:
    """Block SIGINT and SIGTERM in this thread. A process started in the block inherits the mask, so
    it does not get these signals until it unblocks them.
    """
    if not hasattr(signal, "pthread_sigmask"):  # not available on this system
        yield
        return
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Turn a SystemExit into RuntimeError. Turn a CancelledError into RuntimeError if this task was
    not cancelled.

    A CancelledError can also come from code that awaits another, cancelled task. asyncio would then
    treat this task as cancelled, and the error would be lost. A SystemExit comes from code that
    calls `exit()`. It would end the program before anything is saved.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling() > 0:
            raise
        raise RuntimeError(
            "CancelledError: an awaited task was cancelled, although this task was not"
        ) from error
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error


@contextmanager
def first_error() -> Iterator[None]:
    """Turn an exception group of concurrent tasks into its first error, with a note about the
    others.

    Interrupted takes precedence, because it causes the others.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        # Two tasks may have raised the same error object.
        leaves = list({id(error): error for error in flatten_errors(group)}.values())
        first = next((error for error in leaves if isinstance(error, Interrupted)), leaves[0])
        if len(leaves) > 1:
            another = next(error for error in leaves if error is not first)
            first.add_note(
                f"another task failed with: {another!r}"
                if len(leaves) == 2
                else f"{len(leaves) - 1} more tasks failed, the first of them with: {another!r}"
            )
        raise first from first.__cause__


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order. The first error cancels the
    rest.
    """
    with first_error():
        async with asyncio.TaskGroup() as tasks:
            running_tasks = [tasks.create_task(coroutine) for coroutine in work]
    return [task.result() for task in running_tasks]


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


def flatten_errors(error: BaseException) -> list[BaseException]:
    """Return the errors of a nested exception group, each with the notes of its groups."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    for part in error.exceptions:
        for note in getattr(error, "__notes__", []):
            if note not in getattr(part, "__notes__", []):
                part.add_note(note)
    return [leaf for part in error.exceptions for leaf in flatten_errors(part)]
