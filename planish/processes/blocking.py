"""Call functions that may be async or may block, from an event loop that runs many episodes.

A plain function runs in its own daemon thread. A few calls that hang would fill a shared thread
pool for ever, and Python waits for a pool's threads at exit. A hanging daemon thread can be
abandoned instead.
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
"""How long the process waits at exit for a call that hangs, in seconds."""


async def call_function(function: Callable[[], Any]) -> Any:
    """Return the result of `function`: awaited if it is async, otherwise computed in a thread.
    Exceptions of `function` propagate.
    """
    if inspect.iscoroutinefunction(inspect.unwrap(_underlying_function(function))):
        return await function()
    value = await _run_in_thread(function)
    return await value if inspect.isawaitable(value) else value


def _underlying_function(function: Callable[[], Any]) -> Callable[..., Any]:
    """Return the function inside a partial, or the __call__ of a callable object."""
    while isinstance(function, partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


async def _run_in_thread(function: Callable[[], Any]) -> Any:
    future: Future[Any] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(context.run(function))
        except BaseException as error:
            # A future cannot hold StopIteration, and SystemExit would end the event loop. Both
            # become ordinary errors.
            is_ordinary = isinstance(error, Exception) and not isinstance(error, StopIteration)
            future.set_exception(
                error if is_ordinary else RuntimeError(f"{type(error).__name__}: {error}")
            )

    BackgroundThread(run, f"call of {function!r}"[:80], exit_seconds=_EXIT_SECONDS)
    return await asyncio.wrap_future(future)
