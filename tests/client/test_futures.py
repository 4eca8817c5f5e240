"""`Pending` gives blocking and async code the same result."""

import asyncio
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from planish.client.futures import (
    Pending,
    async_returning_pending,
    async_returning_result,
    completed,
    in_thread,
    in_thread_returning_result,
    map_future,
)


def later(value: Any, seconds: float = 0.02) -> Future[Any]:
    future: Future[Any] = Future()
    deliver = future.set_exception if isinstance(value, Exception) else future.set_result
    threading.Timer(seconds, deliver, [value]).start()
    return future


def test_every_form_of_waiting_returns_the_result():
    assert Pending(later(1)).result() == 1
    assert Pending(later(2)).future().result() == 2

    async def main() -> list[int]:
        return [
            await Pending(later(3)),
            await Pending(later(4)).result_async(),
            await asyncio.create_task(Pending(later(5)).coroutine()),
            *await asyncio.gather(Pending(later(6)), Pending(later(7))),
        ]

    assert asyncio.run(main()) == [3, 4, 5, 6, 7]


def test_async_forms_are_coroutines_for_task_groups():
    def submit(value: int) -> Pending[int]:
        return completed(value)

    async def main() -> list[int]:
        async with asyncio.TaskGroup() as tasks:
            first, second = (
                tasks.create_task(async_returning_result(submit)(1)),
                tasks.create_task(in_thread_returning_result(submit)(2)),
            )
            third, fourth = (
                tasks.create_task(async_returning_pending(submit)(3)),
                tasks.create_task(in_thread(submit)(4)),
            )
        return [first.result(), second.result(), await third.result(), await fourth.result()]

    assert asyncio.run(main()) == [1, 2, 3, 4]


def test_a_pending_future_cannot_be_pickled():
    with pytest.raises(TypeError, match="wait for its result"):
        pickle.dumps(completed(1))


async def test_every_form_of_waiting_raises_the_error():
    with pytest.raises(KeyError):
        Pending(later(KeyError("x"))).result()

    with pytest.raises(KeyError):
        await Pending(later(KeyError("x")))


def test_a_timeout_does_not_end_the_operation():
    future: Future[int] = Future()
    pending = Pending(future, cancel_with_waiter=True)
    with pytest.raises(TimeoutError):
        pending.result(timeout=0.01)

    async def main() -> int:
        with pytest.raises(TimeoutError):
            await pending.result_async(timeout=0.01)
        threading.Timer(0.02, future.set_result, [1]).start()
        return await pending

    assert asyncio.run(main()) == 1


@pytest.mark.parametrize("withdraw", [True, False])
async def test_cancelling_a_task_cancels_only_its_own_operation(withdraw):
    future: Future[int] = Future()

    task = asyncio.create_task(Pending(future, cancel_with_waiter=withdraw).result_async())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert future.cancelled() is withdraw


def test_several_tasks_can_wait_for_one_result():
    async def main() -> list[int]:
        pending = Pending(later(1, 0.05))
        first, second = asyncio.ensure_future(pending), asyncio.ensure_future(pending)
        await asyncio.sleep(0.01)
        first.cancel()
        return [await second, await pending]

    assert asyncio.run(main()) == [1, 1]


def test_a_chained_future_converts_once_and_cancels_its_source():
    calls = []
    future = map_future(later(2), lambda value: calls.append(value) or value * 10)
    assert [future.result(), future.result(), calls] == [20, 20, [2]]
    with pytest.raises(ZeroDivisionError):
        map_future(later(0), lambda value: 1 / value).result()
    with pytest.raises(KeyError):
        map_future(later(KeyError()), lambda value: value).result()
    source: Future[int] = Future()
    future = map_future(source, lambda value: value)
    assert future.cancel()
    assert source.cancelled()
    assert future.cancelled()
    with pytest.raises(CancelledError):
        future.result(0)
    assert Pending(future).done()


def test_a_running_operation_cannot_be_cancelled():
    source: Future[int] = Future()
    source.set_running_or_notify_cancel()
    future = map_future(source, lambda value: value + 1)
    assert not Pending(future).cancel()
    source.set_result(1)
    assert future.result() == 2


class Methods:
    def __init__(self) -> None:
        self.go_on = threading.Event()

    def submit(self, value: int) -> Pending[int]:
        """What it does."""
        return Pending(later(value))

    def block(self, value: int) -> int:
        assert self.go_on.wait(60)
        return value

    def read(self, value: int) -> Pending[int]:
        assert self.go_on.wait(60)
        return completed(value)

    submit_async = async_returning_pending(submit)
    sample_async = async_returning_result(submit)
    block_async = in_thread(block)
    read_async = in_thread_returning_result(read)


async def test_async_forms_return_awaitables():
    methods = Methods()
    pending = await methods.submit_async(1)
    assert await pending.result_async() == 1
    assert await methods.sample_async(2) == 2
    both = asyncio.gather(methods.block_async(3), methods.read_async(4))
    await asyncio.sleep(0.005)
    assert not both.done()
    methods.go_on.set()
    assert await both == [3, 4]
    assert Methods.submit_async.__doc__ == "What it does."


WAITER = """
import os, signal, sys, threading, time
from concurrent.futures import Future
from planish.client.futures import Pending
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt():
    main = threading.main_thread().ident
    while True:
        frame = sys._current_frames()[main]
        if frame.f_code.co_name == "wait" and frame.f_back.f_code.co_name == "result":
            break
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

pending = Pending(Future(), cancel_with_waiter=True)
threading.Thread(target=interrupt, daemon=True).start()
try:
    pending.result()
except KeyboardInterrupt:
    print("interrupted", pending.future().cancelled(), flush=True)
"""


def test_ctrl_c_interrupts_a_wait_and_cancels_its_operation():
    waiter = subprocess.run(
        [sys.executable, "-c", WAITER], capture_output=True, text=True, timeout=170
    )
    assert (waiter.stdout, waiter.stderr) == ("interrupted True\n", "")


class Result:
    """A value that can be referred to weakly, as a sampling client can."""


def test_a_result_is_freed_with_its_last_reference():
    source: Future[int] = Future()
    mapped = Pending(map_future(source, lambda _: Result()))
    gc.disable()
    try:
        source.set_result(1)
        del source
        result = weakref.ref(mapped.result())
        assert result() is not None
        del mapped
        assert result() is None
    finally:
        gc.enable()
