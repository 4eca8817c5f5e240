"""An event loop in a thread of its own, so that blocking and async code can share a connection.

Every coroutine given to a `LoopThread` runs in its thread, and is cancelled when the thread stops.
No coroutine may block the thread.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from planish.errors import EngineClosedError
from planish.processes.background import BackgroundThread

P = ParamSpec("P")
T = TypeVar("T")

_EXIT_SECONDS = 1.0
"""How long the program waits for the thread at exit. Only a blocked event loop takes longer."""


class LoopThread:
    """A background thread that runs an event loop."""

    def __init__(self, name: str, context: AbstractAsyncContextManager[Any]) -> None:
        """Start the thread. `context` is entered before any task runs, and left after all tasks
        have ended. An error while starting is raised here.
        """
        self._start_event = threading.Event()
        self._pending_calls: set[Future[Any]] = set()
        self._calls_lock = threading.Lock()
        self._accepts_calls = True
        self._failure: BaseException | None = None
        self.at_exit: Callable[[], object] | None = None
        """Called in the main thread at exit, before the thread is asked to stop."""
        self._thread = BackgroundThread(
            partial(self._run, context), name, stop=self._stop_at_exit, exit_seconds=_EXIT_SECONDS
        )
        self._start_event.wait()
        if self._failure is not None:
            raise self._failure

    def is_alive(self) -> bool:
        """Return whether the thread runs. False in a forked child process."""
        return self._thread.is_alive()

    def _run(self, context: AbstractAsyncContextManager[Any]) -> None:
        # `asyncio.run` would start a thread to shut down the loop's pool, and Python 3.12 cannot
        # start threads at exit.
        loop = asyncio.new_event_loop()
        pool = ThreadPoolExecutor(thread_name_prefix="planish-remote")
        loop.set_default_executor(pool)
        try:
            loop.run_until_complete(self._main(context))
        except BaseException as error:
            if self._start_event.is_set():
                raise
            self._failure = error
        finally:
            self._start_event.set()
            loop.run_until_complete(_cancel_other_tasks())
            loop.run_until_complete(loop.shutdown_asyncgens())
            pool.shutdown()
            loop.close()

    async def _main(self, context: AbstractAsyncContextManager[Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_event = asyncio.Event()
        self._running_tasks: set[asyncio.Task[Any]] = set()
        async with context, asyncio.TaskGroup() as self._tasks:
            self._start_event.set()
            try:
                await self._stop_event.wait()
            finally:
                self._cancel_calls()
            for task in self._running_tasks:
                task.cancel()

    def _cancel_calls(self) -> None:
        """Reject further calls, and wake the threads that wait in `call`.

        The task group does not contain the coroutines of `call`. The loop may close before such a
        coroutine finishes, and then a thread that waits for its result would never wake up.
        """
        with self._calls_lock:
            self._accepts_calls = False
            calls = list(self._pending_calls)
        for future in calls:
            future.cancel()

    def spawn(
        self, function: Callable[P, Coroutine[Any, Any, None]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Start the coroutine `function(...)` in the loop. May be called from any thread; does
        nothing if the loop thread has ended. The coroutine may raise no exception but
        CancelledError.
        """
        self.post(lambda: self._begin(function(*args, **kwargs)))

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Schedule a call of `function(...)` in the loop. Calls run in the order of `post`; does
        nothing if the loop thread has ended.
        """
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the coroutine `function(...)` in the loop, wait, and return its result.

        Raise EngineClosedError if the loop thread stops before the coroutine has finished. The loop
        thread itself must not use `call`, because waiting there would block the loop.
        """
        assert not self._thread.is_current, (
            "a callback of a future runs in the loop thread, so it must not wait for the server"
        )

        async def work() -> T:
            return await function(*args, **kwargs)

        if not self._thread.is_alive():
            raise _closed_error()
        with self._calls_lock:
            if not self._accepts_calls:
                raise _closed_error()
            future = asyncio.run_coroutine_threadsafe(work(), self._loop)
            self._pending_calls.add(future)
        try:
            return future.result()
        except CancelledError:
            raise _closed_error() from None
        finally:
            with self._calls_lock:
                self._pending_calls.discard(future)

    def stop(self) -> None:
        """Cancel all tasks and end the thread. Waits for the end, except when called in the
        thread.
        """
        self._request_stop()
        if not self._thread.is_current:
            self._thread.join()

    def _stop_at_exit(self) -> None:
        try:
            if self.at_exit is not None:
                self.at_exit()
        finally:
            self._request_stop()

    def _request_stop(self) -> None:
        self.post(lambda: self._stop_event.set())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        if self._stop_event.is_set():
            work.close()
            return
        task = self._tasks.create_task(work)
        self._running_tasks.add(task)
        task.add_done_callback(self._running_tasks.discard)


async def _cancel_other_tasks() -> None:
    """Cancel the remaining tasks of the running loop, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def run_in_pool(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function(...)` in another thread, so that the loop is not blocked, and return its
    result.

    At exit it runs in this thread, because thread pools then accept no more work.
    """
    call = partial(function, *args, **kwargs)
    try:
        future = asyncio.get_running_loop().run_in_executor(None, call)
    except RuntimeError:
        return call()
    return await future


def _closed_error() -> EngineClosedError:
    return EngineClosedError("the connection to the server was closed; make a new ServiceClient")
