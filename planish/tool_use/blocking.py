"""Calling what may be async or may block, from an event loop that plays many episodes at once.

A plain function gets a daemon thread for itself. A shared pool would be full for ever after a few
calls that hang, and Python waits for a pool's threads at its end; a thread of one's own is left
behind by whoever stops waiting, and harms nobody.
"""

import asyncio
import contextvars
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from planish.processes.background import BackgroundThread

_EXIT_SECONDS = 0.2
"""For how long a program that ends waits for a call that hangs."""


async def call(function: Callable[[], Any]) -> Any:
    """What `function` returns, awaited if it is async, else computed in a thread. Its exceptions
    come through.
    """
    if inspect.iscoroutinefunction(inspect.unwrap(_unbound(function))):
        return await function()
    value = await _in_thread(function)
    return await value if inspect.isawaitable(value) else value


def _unbound(function: Callable[[], Any]) -> Callable[..., Any]:
    """The function in a partial; an object's __call__."""
    while isinstance(function, partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


async def _in_thread(function: Callable[[], Any]) -> Any:
    done: Future[Any] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(context.run(function))
        except BaseException as error:
            # What asyncio would not carry (StopIteration) or would take as its own end (SystemExit)
            # is a failure like others.
            ordinary = isinstance(error, Exception) and not isinstance(error, StopIteration)
            done.set_exception(
                error if ordinary else RuntimeError(f"{type(error).__name__}: {error}")
            )

    BackgroundThread(work, f"call of {function!r}"[:80], exit_seconds=_EXIT_SECONDS)
    return await asyncio.wrap_future(done)
