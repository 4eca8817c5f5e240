"""Results under way: one object that both blocking and async code can wait for.

A method is written once, as one that returns a `Pending`; its `_async` form is made from it by
`submitting` (awaiting it gives the Pending), `awaiting` (gives the result), `in_thread` or
`reading` (for methods that block).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from functools import wraps
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")


class Pending(Generic[T]):
    """The result of a submitted operation: `.result()`, or `await`."""

    def __init__(self, future: Future[T], *, withdraw: bool = False) -> None:
        """`withdraw`: when a task that awaits this is cancelled, or Ctrl-C ends the wait for it, so
        is the operation.
        """
        self._future = future
        self._withdraw = withdraw

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Pending cannot be copied or pickled: wait for its result, and copy or send that"
        )

    def result(self, timeout: float | None = None) -> T:
        """Wait for it. TimeoutError after `timeout` seconds; the operation goes on then."""
        try:
            return self._future.result(timeout)
        except KeyboardInterrupt:
            if self._withdraw:
                self._future.cancel()
            raise

    async def result_async(self, timeout: float | None = None) -> T:
        """Wait for it without blocking the event loop. TimeoutError after `timeout` seconds; the
        operation goes on then.
        """
        try:
            # The shield lets several tasks wait, and one of them give up.
            return await asyncio.wait_for(
                asyncio.shield(asyncio.wrap_future(self._future)), timeout
            )
        except asyncio.CancelledError:
            if self._withdraw:
                self._future.cancel()
            raise

    def __await__(self) -> Generator[None, None, T]:
        return self.result_async().__await__()

    async def coroutine(self) -> T:
        """The same as awaiting it, for functions that insist on a coroutine."""
        return await self.result_async()

    def future(self) -> Future[T]:
        """The underlying future. Its callbacks run in the thread of the engine, or of the
        connection: let them be short, and wait for nothing.
        """
        return self._future

    def done(self) -> bool:
        """Whether there is a result, an error, or it was cancelled."""
        return self._future.done()

    def cancel(self) -> bool:
        """Withdraw the operation if it can still be: a sampling request until it is answered,
        others until they begin.
        """
        return self._future.cancel()


class _Chained(Future[T]):
    """A future made from another one; cancelling it cancels that."""

    def __init__(self, source: Future[S]) -> None:
        super().__init__()
        self._source = source

    def cancel(self) -> bool:
        return self._source.cancel()

    def follow_cancellation(self) -> None:
        super().cancel()
        self.set_running_or_notify_cancel()


def chained(source: Future[S], convert: Callable[[S], T]) -> Future[T]:
    """A future of `convert(result)`. `convert` runs once, in the thread that answers `source`: let
    it be short.
    """
    future: _Chained[T] = _Chained(source)

    def deliver(source: Future[S]) -> None:
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
    """A result that is there already."""
    future: Future[T] = Future()
    future.set_result(value)
    return Pending(future)


def submitting(method: Callable[P, Pending[T]]) -> Callable[P, Coroutine[Any, Any, Pending[T]]]:
    """The async form of a method that submits: awaiting it gives the Pending; the operation is in
    its place by then.
    """

    @wraps(method)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        return method(*args, **kwargs)

    return _renamed(twin, method)


def awaiting(method: Callable[P, Pending[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The async form of a method whose result is what is wanted."""

    @wraps(method)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        return await method(*args, **kwargs)

    return _renamed(twin, method)


def in_thread(method: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The async form of a method that blocks: it runs in another thread."""

    @wraps(method)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, *args, **kwargs)

    return _renamed(twin, method)


def reading(method: Callable[P, Pending[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The async form of a method that does its work before it returns a completed result: that runs
    in another thread.
    """

    @wraps(method)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        return (await asyncio.to_thread(method, *args, **kwargs)).result()

    return _renamed(twin, method)


def _renamed(twin: Callable[P, S], method: Callable[P, object]) -> Callable[P, S]:
    twin.__name__ = f"{method.__name__}_async"
    twin.__qualname__ = f"{method.__qualname__.rpartition('.')[0]}.{twin.__name__}"
    return twin
