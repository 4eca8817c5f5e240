"""The futures of operations in other processes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

R = TypeVar("R")


class RemoteFuture(Future[R]):
    """The future of an operation in another process. `cancel` asks the engine there."""

    def __init__(self, ask_to_cancel: Callable[[], bool]) -> None:
        super().__init__()
        self._ask_to_cancel: Callable[[], bool] | None = ask_to_cancel
        self._notifications = [None]
        """One entry until the waiting threads are told of a cancellation."""
        self.add_done_callback(_forget_engine)

    def cancel(self) -> bool:
        """Cancel the operation, and return whether that was possible."""
        ask_to_cancel = self._ask_to_cancel
        if self.done() or ask_to_cancel is None:
            return self.cancelled()
        return ask_to_cancel() and self.cancel_here()

    def cancel_here(self) -> bool:
        """Cancel the future alone, and wake up those that wait for it."""
        was_cancelled = super().cancel()
        if was_cancelled:
            with suppress(IndexError):  # another thread has done the same
                self._notifications.pop()
                self.set_running_or_notify_cancel()
        return was_cancelled

    def forget_engine(self) -> None:
        """Drop the reference to the engine, so that a result does not keep the process alive."""
        self._ask_to_cancel = None


def _forget_engine(future: Future[Any]) -> None:
    assert isinstance(future, RemoteFuture)
    future.forget_engine()


def copy_outcome(source: Future[Any] | asyncio.Future[Any], target: Future[Any]) -> None:
    """Complete `target` like the completed future `source`, unless it is already completed."""
    with suppress(InvalidStateError):  # another thread has completed `target` meanwhile
        if source.cancelled():
            if isinstance(target, RemoteFuture):
                target.cancel_here()
            elif target.cancel():
                target.set_running_or_notify_cancel()
        elif (error := source.exception()) is not None:
            target.set_exception(error)
        else:
            target.set_result(source.result())


def done_future(value: Any = None) -> Future[Any]:
    """Return a future with a result."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future
