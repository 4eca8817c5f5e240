"""A program that answers, fails, hangs, dies or never starts."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from planish.processes.worker_process import WorkerError, WorkerProcess, WorkerStartError

PROGRAM = """
import os, sys, time
from contextlib import suppress
from pathlib import Path


def start(*arguments):
    {before}

    def answer(question):
        if question.get("hang"):
            time.sleep(60)
        if question.get("die"):
            os._exit(1)
        if question.get("half"):
            for pipe in range(3, 20):
                with suppress(OSError):
                    os.write(pipe, b'{{"half')
            os._exit(1)
        if question.get("fail"):
            raise ValueError("cannot")
        if question.get("leave"):
            exit()
        print("not an answer")
        mine = os.environ.get("MINE")
        return {{"pid": os.getpid(), "group": os.getpgrp(), "said": question, "mine": mine, "arguments": arguments}}

    return answer
"""


@pytest.fixture
def worker(tmp_path):
    made = []

    def make(before="pass", **options):
        program = tmp_path / f"program{len(made)}.py"
        program.write_text(PROGRAM.format(before=before))
        made.append(WorkerProcess(program, **options))
        return made[-1]

    yield make
    for process in made:
        process.close()


def test_one_process_answers_all_requests(worker):
    process = worker(arguments=("a", "b"), environment={"MINE": "x"})
    first, second = process.ask({"n": 1}, 30.0), process.ask({"n": 2}, 30.0)
    assert (first["said"], second["said"]) == ({"n": 1}, {"n": 2})
    assert first["pid"] == second["pid"]
    assert (first["arguments"], first["mine"]) == (["a", "b"], "x")


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"hang": True}, "no answer in 0.3 s"),
        ({"die": True}, "ended"),
        ({"half": True}, "ended without an answer"),
    ],
)
def test_a_process_that_hangs_or_dies_is_replaced(worker, question, message):
    process = worker()
    before = process.ask({}, 30.0)["pid"]
    start = time.monotonic()
    with pytest.raises(WorkerError, match=message):
        process.ask(question, 0.3)
    assert time.monotonic() - start < 10
    assert process.ask({}, 30.0)["pid"] != before


def test_a_process_killed_between_requests_is_replaced(worker):
    process = worker()
    before = process.ask({}, 30.0)["pid"]
    os.kill(before, signal.SIGKILL)
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    assert process.ask({}, 30.0)["pid"] != before


def test_a_failed_request_does_not_end_the_process(worker):
    process = worker()
    before = process.ask({}, 30.0)["pid"]
    for question, message in (
        ({"fail": True}, "ValueError: cannot"),
        ({"leave": True}, "SystemExit"),
    ):
        with pytest.raises(WorkerError, match=message):
            process.ask(question, 30.0)
    assert process.ask({}, 30.0)["pid"] == before


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("import no_such_module", "ModuleNotFoundError: .*no_such_module"),
        ("sys.exit(3)", "ended without"),
    ],
)
def test_a_program_that_does_not_start_says_why(worker, before, message):
    with pytest.raises(WorkerStartError, match=message):
        worker(before).ask({}, 30.0)


SLOW_AT_FIRST = """
    if not Path(arguments[0]).exists():
        Path(arguments[0]).touch()
        time.sleep(60)
"""


@pytest.mark.parametrize("during", ["the start", "a question"])
def test_after_ctrl_c_the_next_request_gets_its_own_answer(worker, tmp_path, during):
    started = tmp_path / "started"
    process = worker(before=SLOW_AT_FIRST, arguments=(str(started),))
    if during == "a question":
        started.touch()
        process.ask({"n": 0}, 30.0)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        process.ask({"n": 1, "hang": True}, 30.0)
    timer.join()
    started.touch()
    assert process.ask({"n": 2}, 30.0)["said"] == {"n": 2}


def test_the_worker_ignores_control_c_but_ends_with_its_process_group(worker):
    process = worker()
    before = process.ask({}, 30.0)
    os.kill(before["pid"], signal.SIGINT)
    assert process.ask({}, 30.0)["pid"] == before["pid"]
    assert before["group"] == os.getpgrp()


KILLED_WHILE_IT_ASKS = """
import os, signal, sys, threading
from pathlib import Path
from planish.processes.worker_process import WorkerProcess
process = WorkerProcess(Path(sys.argv[1]))
process.ask({}, 30.0)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
process.ask({"hang": True}, 1.0)
"""


def test_a_hanging_process_ends_after_its_parent_was_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(before="pass"))
    command = [sys.executable, "-c", KILLED_WHILE_IT_ASKS, str(program)]
    # returns when nobody is left who could write
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=40)
    assert done.returncode == -signal.SIGKILL


def test_threads_take_turns(worker):
    process, answers = worker(), {}

    def ask(n):
        answers[n] = process.ask({"n": n}, 30.0)["said"]["n"]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: n for n in range(8)}


def test_a_request_after_close_starts_a_new_process(worker):
    process = worker()
    before = process.ask({}, 30.0)["pid"]
    process.close()
    process.close()
    assert process.ask({}, 30.0)["pid"] != before
