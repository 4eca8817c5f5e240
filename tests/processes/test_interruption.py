"""Signals become stop requests, in loops without asyncio and around whole programs."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from planish.processes import interruption
from planish.processes.interruption import (
    Interrupted,
    StopRequest,
    Terminated,
    sigterm_as_interrupt,
)

WAIT = 60.0


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "name", "kind"),
    [(signal.SIGINT, "Ctrl-C", KeyboardInterrupt), (signal.SIGTERM, "SIGTERM", Terminated)],
)
def test_a_loop_is_asked_between_its_steps(number, name, kind):
    said: list[str] = []
    with StopRequest(said.append) as stop:
        stop.check()
        send(number)
        with pytest.raises(Interrupted):
            stop.check()
    assert [line.partition(":")[0] for line in said] == [name]
    assert isinstance(stop.exit_exception, kind)


def test_work_that_may_be_dropped_is_interrupted():
    with StopRequest(lambda _: None) as stop:
        threading.Timer(0.1, send, [signal.SIGTERM]).start()
        with pytest.raises(Interrupted), stop.interruptible():
            time.sleep(WAIT)
        with pytest.raises(Interrupted), stop.interruptible():
            pytest.fail("asked before")


def test_a_second_control_c_ends_at_once():
    with StopRequest(lambda _: None):
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_sigterms_at_once_count_as_one_and_own_handlers_stay(monkeypatch):
    # On a busy machine, a second may pass between two of the signals.
    monkeypatch.setattr(interruption, "_DUPLICATE_SIGTERM_SECONDS", WAIT)
    came: list[int] = []
    with StopRequest(came.append) as stop:  # type: ignore[arg-type]
        for _ in range(5):
            send(signal.SIGTERM)
        with pytest.raises(Interrupted):
            stop.check()
    assert len(came) == 1
    for own in (signal.SIG_IGN, lambda number, _: came.append(number)):
        signal.signal(signal.SIGTERM, own)
        with StopRequest(lambda _: None) as stop, sigterm_as_interrupt():
            send(signal.SIGTERM)
            stop.check()
        assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is own
    assert came[1:] == [signal.SIGTERM]


SECOND = """
import os, signal, time
from planish.processes import interruption
from planish.processes.interruption import StopRequest
interruption._DUPLICATE_SIGTERM_SECONDS = 0.05
with StopRequest(lambda line: print(line, flush=True)) as stop:
    os.kill(os.getpid(), signal.{first})
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    print("goes on", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["SIGTERM", "SIGINT"])
def test_a_second_sigterm_ends_the_process(first):
    done = subprocess.run(
        [sys.executable, "-c", SECOND.format(first=first)],
        capture_output=True,
        text=True,
        timeout=WAIT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.returncode == -signal.SIGTERM
    assert "goes on" not in done.stdout
    assert done.stderr == ""


def test_a_program_ends_as_by_control_c():
    def wait() -> None:
        threading.Timer(0.1, send, [signal.SIGTERM]).start()
        time.sleep(WAIT)

    async def wait_async() -> None:
        # The timer starts when this coroutine sleeps.
        start_timer = threading.Timer(0.1, send, [signal.SIGTERM]).start
        asyncio.get_running_loop().call_soon(start_timer)
        try:
            await asyncio.sleep(WAIT)
        except asyncio.CancelledError:  # as asyncio.run cancels it at Ctrl-C
            ends.append("cancelled")
            raise

    ends: list[str] = []
    programs: list[Callable[[], object]] = [wait, lambda: asyncio.run(wait_async())]
    for program in programs:
        with pytest.raises(Terminated) as end, sigterm_as_interrupt():
            program()
        assert end.value.code == 128 + signal.SIGTERM
    assert ends == ["cancelled"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as behind nohup
    with pytest.raises(Terminated), sigterm_as_interrupt():
        wait()
    signal.signal(signal.SIGINT, signal.default_int_handler)


async def test_a_loop_in_a_notebook_leaves_sigterm_alone():
    with StopRequest(lambda _: None):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_loop_in_another_thread_is_not_asked():
    found: list[object] = []

    def loop() -> None:
        with StopRequest(lambda _: None):
            found.extend(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler, signal.SIG_DFL]
