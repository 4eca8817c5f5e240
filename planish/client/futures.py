"""`Pending`, the future that blocking and async code can wait for, and decorators for async
methods.

Each client method is written once, and a decorator derives its `_async` form:

    async_returning_pending  the method returns a Pending; awaiting the async form returns the
                             Pending too
    async_returning_result   the method returns a Pending; awaiting the async form returns the
                             result
    in_thread                the method blocks and returns the result; the async form runs it in a
                             thread
    in_thread_returning_result
                             the method blocks and returns a completed Pending; the async form runs
                             it in a thread, and awaiting it returns the result
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from functools import wraps
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")


class Pending(Generic[T]):
    """The future result of a submitted operation: call `.result()`, or await it."""

    def __init__(self, future: Future[T], *, cancel_with_waiter: bool = False) -> None:
        """With `cancel_with_waiter`, the operation is cancelled when the task that awaits it is
        cancelled, or when Ctrl-C interrupts the wait.
        """
        self._future = future
        self._cancel_with_waiter = cancel_with_waiter

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Pending cannot be copied or pickled; wait for its result, and copy or send the "
            "result"
        )

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result. Raise TimeoutError after `timeout` seconds; the operation then
        continues.
        """
        try:
            return self._future.result(timeout)
        except KeyboardInterrupt:
            if self._cancel_with_waiter:
                self._future.cancel()
            raise

    async def result_async(self, timeout: float | None = None) -> T:
        """Wait for the result without blocking the event loop. Raise TimeoutError after `timeout`
        seconds; the operation continues.
        """
        try:
            # Several tasks may wait for one future: without the shield, cancelling one of them
            # would cancel the future for all.
            return await asyncio.wait_for(
                asyncio.shield(asyncio.wrap_future(self._future)), timeout
            )
        except asyncio.CancelledError:
            if self._cancel_with_waiter:
                self._future.cancel()
            raise

    def __await__(self) -> Generator[None, None, T]:
        return self.result_async().__await__()

    async def coroutine(self) -> T:
        """Return the result, as `await` does. Use it with functions that accept only coroutines."""
        return await self.result_async()

    def future(self) -> Future[T]:
        """Return the underlying future. Its callbacks run in the engine thread or in the
        connection's thread, so they must be short and must not wait.
        """
        return self._future

    def done(self) -> bool:
        """Return whether there is a result or an error, or the operation was cancelled."""
        return self._future.done()

    def cancel(self) -> bool:
        """Cancel the operation, and return whether that was possible. Sampling requests can be
        cancelled until they are finished, other operations until they begin.
        """
        return self._future.cancel()


class _MappedFuture(Future[T]):
    """A future derived from `source`. Cancelling it cancels `source`."""

    def __init__(self, source: Future[S]) -> None:
        super().__init__()
        self._source: Future[Any] | None = source

    def cancel(self) -> bool:
        source = self._source
        return self.cancelled() if source is None else source.cancel()

    def forget_source(self) -> None:
        """Break the cycle of references. Otherwise a result, such as a sampling client, would stay
        in memory until the next garbage collection.
        """
        self._source = None

    def follow_cancellation(self) -> None:
        super().cancel()
        self.set_running_or_notify_cancel()


def map_future(source: Future[S], convert: Callable[[S], T]) -> Future[T]:
    """Return a future of `convert(result of source)`. `convert` runs once, in the thread that
    completes `source`, so it must be short.
    """
    future: _MappedFuture[T] = _MappedFuture(source)

    def deliver(source: Future[S]) -> None:
        future.forget_source()
        if source.cancelled():
            future.follow_cancellation()
            return
        try:
            future.set_result(convert(source.result()))
        except BaseException as error:
            future.set_exception(error)

    source.add_done_callback(deliver)
    return future


def completed(value: T) -> Pending[T]:
    """Return a Pending that already has the result `value`."""
    future: Future[T] = Future()
    future.set_result(value)
    return Pending(future)


def async_returning_pending(
    method: Callable[P, Pending[T]],
) -> Callable[P, Coroutine[Any, Any, Pending[T]]]:
    """Return an async form of `method` whose awaited value is the Pending. The operation has been
    submitted by then.
    """

    @wraps(method)
    async def async_method(*args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        return method(*args, **kwargs)

    return _rename_method(async_method, method)


def async_returning_result(method: Callable[P, Pending[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return an async form of `method` whose awaited value is the result."""

    @wraps(method)
    async def async_method(*args: P.args, **kwargs: P.kwargs) -> T:
        return await method(*args, **kwargs)

    return _rename_method(async_method, method)


def in_thread(method: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return an async form of a blocking `method`, which runs in another thread."""

    @wraps(method)
    async def async_method(*args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, *args, **kwargs)

    return _rename_method(async_method, method)


def in_thread_returning_result(
    method: Callable[P, Pending[T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return an async form of a blocking `method` that returns a completed Pending. It runs in
    another thread, and the awaited value is the result.
    """

    @wraps(method)
    async def async_method(*args: P.args, **kwargs: P.kwargs) -> T:
        return (await asyncio.to_thread(method, *args, **kwargs)).result()

    return _rename_method(async_method, method)


def _rename_method(async_method: Callable[P, S], method: Callable[P, object]) -> Callable[P, S]:
    async_method.__name__ = f"{method.__name__}_async"
    async_method.__qualname__ = f"{method.__qualname__.rpartition('.')[0]}.{async_method.__name__}"
    return async_method
