"""The thread in which requests to vLLM run."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from planish.errors import EngineClosedError
from planish.fleet.futures import RemoteFuture, copy_outcome

R = TypeVar("R")


class RequestThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="planish-vllm", daemon=True
        )
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        """Run a coroutine, and return its future. Cancelling the future cancels the coroutine."""
        tasks: list[asyncio.Task[R]] = []

        def begin() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            self._tasks.add(task)
            task.add_done_callback(end)

        def end(task: asyncio.Task[R]) -> None:
            self._tasks.discard(task)
            if task.cancelled() and self._is_closed and not future.done():
                future.set_exception(EngineClosedError("the engine was closed"))
            else:
                copy_outcome(task, future)

        def cancel() -> bool:
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            return True

        # A future of asyncio.run_coroutine_threadsafe refers to itself. It would keep the clients
        # that wait for it in memory, and with them their samplers.
        future: RemoteFuture[R] = RemoteFuture(cancel)
        self._loop.call_soon_threadsafe(begin)
        return future

    def end_tasks(self, finish: bool) -> None:
        """Wait for all coroutines, or cancel them, so that they fail with EngineClosedError."""

        async def end() -> None:
            tasks = list(self._tasks)
            if not finish:
                self._is_closed = True
                for task in tasks:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()

    def end(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not threading.current_thread():
            self._thread.join()
            self._loop.close()
