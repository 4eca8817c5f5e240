"""Background threads end before the interpreter does."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import pytest

from planish.processes import background
from planish.processes.background import BackgroundThread, wait_for_saves

WAIT = 60.0

START = """
import os, signal, sys, threading, time
from planish.processes.background import BackgroundThread
stopping = threading.Event()
def work():
    stopping.wait()
    time.sleep(0.2)
    print("worked", flush=True)
"""
PROGRAMS = {
    "a thread that is asked": (
        "BackgroundThread(work, 'w', stop=stopping.set)\nprint('end', flush=True)",
        0,
        "end\nworked\n",
    ),
    "an error": (
        "sys.stderr = open(os.devnull, 'w')\nBackgroundThread(work, 'w', stop=stopping.set)\n1 / 0",
        1,
        "worked\n",
    ),
    "a thread that hangs": (
        "for _ in range(50): BackgroundThread(lambda: time.sleep(3600), 'w', exit_seconds=0.2)\n"
        "print('end', flush=True)",
        0,
        "end\n",
    ),
    "a thread that was dropped and still releases what it holds": (
        "class Slow:\n"
        "    def __del__(self): time.sleep(0.2); print('released', flush=True)\n"
        "held = [Slow()]\n"
        "BackgroundThread(lambda slow=held.pop(): stopping.wait(), 'w', stop=stopping.set)\n"
        "print('end', flush=True)",
        0,
        "end\nreleased\n",
    ),
    "the child of a fork": (
        "BackgroundThread(work, 'w', stop=stopping.set)\n"
        "child = os.fork()\n"
        "if child: print(os.waitpid(child, 0)[1], flush=True)",
        0,
        "0\nworked\n",
    ),
    "Ctrl-C while the program waits for it": (
        "def interrupt():\n"
        "    main = threading.main_thread().ident\n"
        "    stopping.wait()\n"
        "    while sys._current_frames()[main].f_code.co_name != 'wait': time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    work()\n"
        "BackgroundThread(interrupt, 'w', stop=stopping.set)",
        0,
        "worked\n",
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_with_its_threads(name):
    program, status, stdout = PROGRAMS[name]
    done = subprocess.run(
        [sys.executable, "-c", START + program], capture_output=True, text=True, timeout=WAIT
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, stdout, "")


def test_a_join_that_is_interrupted_can_be_repeated():
    """Python 3.11 and 3.12 consider a thread ended after its join was interrupted."""
    go_on = threading.Event()
    thread = BackgroundThread(go_on.wait, "waits", stop=go_on.set)

    def join_and_interrupt() -> None:
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
        thread.join()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            join_and_interrupt()
    finally:
        signal.signal(signal.SIGINT, before)
    assert thread.is_alive()
    thread.join(0.01)
    assert thread.is_alive()
    go_on.set()
    thread.join()
    assert not thread.is_alive()


def test_a_thread_that_cannot_start_is_not_waited_for(monkeypatch):
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    known = list(background._live_threads)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="start new thread"):
        BackgroundThread(lambda: None, "never")
    assert {thread for thread in background._live_threads if thread.is_alive()} <= set(known)


def test_threads_that_have_ended_are_forgotten():
    for _ in range(3):
        thread = BackgroundThread(lambda: None, "ends")
        thread.join()
    BackgroundThread(lambda: None, "last").join()
    names = [other._thread.name for other in background._live_threads]
    assert [name for name in names if name in ("ends", "last")] == ["last"]


def test_checkpoints_that_take_long_are_announced_and_given_up(monkeypatch, caplog):
    monkeypatch.setattr(background, "_WARN_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(background, "MAX_SAVE_WAIT_SECONDS", 0.1)
    written: Future[None] = Future()
    written.set_result(None)
    wait_for_saves([written])
    assert caplog.messages == []
    begun = time.monotonic()
    wait_for_saves([written, Future()])
    assert time.monotonic() - begun < WAIT / 2
    announced, given_up = caplog.messages
    assert "(1 left)" in announced
    assert "1 checkpoints are not saved" in given_up
