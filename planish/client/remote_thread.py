"""An event loop in a thread of its own, so that blocking and async code can use one connection.

Everything that is awaited runs there, as tasks of one group that ends with the thread. Nothing in
it may block.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from planish.errors import EngineClosedError
from planish.processes.background import BackgroundThread

P = ParamSpec("P")
T = TypeVar("T")

_EXIT_SECONDS = 1.0
"""Only a task that blocks the loop, which none may do, keeps the thread longer."""


class LoopThread:
    def __init__(self, name: str, context: AbstractAsyncContextManager[Any]) -> None:
        """`context` is entered before anything runs, and left when everything has ended. What keeps
        the loop from starting is raised.
        """
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self.at_exit: Callable[[], object] | None = None
        """Called in the main thread when the program has ended, before the thread is asked to end.
        """
        self._thread = BackgroundThread(
            partial(self._run, context), name, stop=self._stop_at_exit, exit_seconds=_EXIT_SECONDS
        )
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self, context: AbstractAsyncContextManager[Any]) -> None:
        # Not `asyncio.run`, which starts a thread to shut down the loop's pool: Python 3.12 starts
        # none when the program has ended.
        loop = asyncio.new_event_loop()
        pool = ThreadPoolExecutor(thread_name_prefix="planish-remote")
        loop.set_default_executor(pool)
        try:
            loop.run_until_complete(self._main(context))
        except BaseException as error:
            if self._started.is_set():
                raise
            self._failure = error
        finally:
            self._started.set()
            loop.run_until_complete(loop.shutdown_asyncgens())
            pool.shutdown()
            loop.close()

    async def _main(self, context: AbstractAsyncContextManager[Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._running: set[asyncio.Task[Any]] = set()
        async with context, asyncio.TaskGroup() as self._tasks:
            self._started.set()
            await self._stopping.wait()
            for task in self._running:
                task.cancel()

    def spawn(
        self, function: Callable[P, Coroutine[Any, Any, None]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Run `function(...)` there, from any thread; nothing if the thread has ended. It must
        raise nothing but CancelledError.
        """
        self.post(lambda: self._begin(function(*args, **kwargs)))

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function(...)` there soon, in the order of the posts; nothing if the thread has
        ended.
        """
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function(...)` there and wait for what it returns; EngineClosedError if the thread
        ends meanwhile.
        """
        assert not self._thread.is_current, "a callback of a future waits for the server"

        async def work() -> T:
            return await function(*args, **kwargs)

        if not self._thread.is_alive():
            raise _ended()
        try:
            return asyncio.run_coroutine_threadsafe(work(), self._loop).result()
        except CancelledError:
            raise _ended() from None

    def stop(self) -> None:
        """Cancel what runs and end; waits for the end, except in the thread itself."""
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
        self.post(lambda: self._stopping.set())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        if self._stopping.is_set():
            work.close()
            return
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)


async def in_pool(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(...)` in another thread, so that the loop goes on; here if the program ends, since
    its pools take no more then.
    """
    call = partial(function, *args, **kwargs)
    try:
        done = asyncio.get_running_loop().run_in_executor(None, call)
    except RuntimeError:
        return call()
    return await done


def _ended() -> EngineClosedError:
    return EngineClosedError("the connection to the server was closed; make a new ServiceClient")
