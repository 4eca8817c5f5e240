"""A sandboxed worker that answers, fails, hangs, dies, does not start, or tries to escape."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from planish.sandbox import SandboxUnavailableError
from planish.sandbox.worker_process import (
    WORKER_PROGRAM,
    WorkerError,
    WorkerProcess,
    WorkerStartError,
)

pytestmark = pytest.mark.sandbox

PROGRAM = """
import os, socket, sys, time
from contextlib import suppress

RUN = os.urandom(8).hex()


def start(*arguments):
    {before}

    def answer(question):
        if question.get("hang"):
            time.sleep(600)
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
        if "attempt" in question:
            try:
                return {{"got": repr(eval(question["attempt"]))}}
            except Exception as error:
                return {{"error of the attempt": type(error).__name__}}
        return {{"run": RUN, "said": question, "arguments": arguments}}

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
    process = worker(arguments=("a", "b"))
    first, second = process.request({"n": 1}, 120.0), process.request({"n": 2}, 120.0)
    assert (first["said"], second["said"]) == ({"n": 1}, {"n": 2})
    assert first["run"] == second["run"]
    assert first["arguments"] == ["a", "b"]


@pytest.mark.parametrize(
    "attempt",
    [
        "open('/etc/passwd')",
        "open('/proc/self/environ')",
        "open(__file__, 'a')",
        "open(sys.prefix + '/new', 'w')",
        "socket.create_connection(('127.0.0.1', 9))",
        "os.fork()",
        "os.listdir(os.environ['SECRET'])",
        "bytearray(8 << 30)",
    ],
)
def test_code_in_an_answer_reaches_nothing_of_the_machine(worker, monkeypatch, attempt):
    monkeypatch.setenv("SECRET", "/")
    assert "error of the attempt" in worker().request({"attempt": attempt}, 120.0)


def test_without_bubblewrap_nothing_is_evaluated_and_the_error_says_what_to_install(
    worker, monkeypatch
):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SandboxUnavailableError, match="apt-get install bubblewrap"):
        worker().request({}, 120.0)


def test_a_sandbox_that_does_not_start_is_an_error_that_says_what_to_allow(
    worker, monkeypatch, tmp_path
):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1")
    broken.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(broken))
    with pytest.raises(SandboxUnavailableError, match="user.max_user_namespaces"):
        worker().request({}, 120.0)


def test_a_process_outside_the_sandbox_loads_no_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit('loaded')")
    done = subprocess.run(
        [sys.executable, "-P", str(WORKER_PROGRAM), str(program)], capture_output=True, text=True
    )
    assert "no answer is evaluated" in json.loads(done.stdout)["error"]
    assert "loaded" not in done.stderr


@pytest.mark.parametrize(
    ("question", "seconds", "message"),
    [
        ({"hang": True}, 0.3, "no answer within 0.3 s"),
        ({"die": True}, 120.0, "ended"),
        ({"half": True}, 120.0, "ended without an answer"),
    ],
)
def test_a_process_that_hangs_or_dies_is_replaced(worker, question, seconds, message):
    process = worker()
    before = process.request({}, 120.0)["run"]
    start = time.monotonic()
    with pytest.raises(WorkerError, match=message):
        process.request(question, seconds)
    assert time.monotonic() - start < 50
    assert process.request({}, 120.0)["run"] != before


def test_a_process_killed_between_requests_is_replaced(worker):
    process = worker()
    before = process.request({}, 120.0)["run"]
    pid = process._process.pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert process.request({}, 120.0)["run"] != before


def test_a_failed_request_does_not_end_the_process(worker):
    process = worker()
    before = process.request({}, 120.0)["run"]
    for question, message in (
        ({"fail": True}, "ValueError: cannot"),
        ({"leave": True}, "SystemExit"),
    ):
        with pytest.raises(WorkerError, match=message):
            process.request(question, 120.0)
    assert process.request({}, 120.0)["run"] == before


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("import no_such_module", "ModuleNotFoundError: .*no_such_module"),
        ("raise OSError('no disk')", "OSError: no disk"),
    ],
)
def test_a_program_that_does_not_start_says_why(worker, before, message):
    with pytest.raises(WorkerStartError, match=message):
        worker(before).request({}, 120.0)


@pytest.mark.parametrize("during", ["the start", "a question"])
def test_after_ctrl_c_the_next_request_gets_its_own_answer(worker, tmp_path, during):
    process = worker(before="time.sleep(60)" if during == "the start" else "pass")
    if during == "a question":
        process.request({"n": 0}, 120.0)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))

    def ask_until_interrupted():
        timer.start()
        process.request({"n": 1, "hang": True}, 120.0)

    with pytest.raises(KeyboardInterrupt):
        ask_until_interrupted()
    timer.join()
    (tmp_path / "program0.py").write_text(PROGRAM.format(before="pass"))
    assert process.request({"n": 2}, 120.0)["said"] == {"n": 2}


def test_the_worker_ignores_control_c_but_ends_with_its_process_group(worker):
    process = worker()
    before = process.request({}, 120.0)["run"]
    pid = process._process.pid
    os.kill(pid, signal.SIGINT)
    assert process.request({}, 120.0)["run"] == before
    assert os.getpgid(pid) == os.getpgrp()


KILLED_WHILE_IT_ASKS = """
import os, signal, sys, threading
from pathlib import Path
from planish.sandbox.worker_process import WorkerProcess
process = WorkerProcess(Path(sys.argv[1]))
process.request({}, 120.0)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
process.request({"hang": True}, 5.0)
"""


def test_a_hanging_process_ends_after_its_parent_was_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(before="pass"))
    command = [sys.executable, "-c", KILLED_WHILE_IT_ASKS, str(program)]
    # returns when nobody is left who could write
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == -signal.SIGKILL


def test_threads_take_turns(worker):
    process, answers = worker(), {}

    def ask(n):
        answers[n] = process.request({"n": n}, 120.0)["said"]["n"]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: n for n in range(8)}


def test_the_process_outlives_the_thread_that_started_it(worker):
    process = worker()
    with ThreadPoolExecutor(1) as thread:
        before = thread.submit(process.request, {}, 120.0).result()["run"]
    time.sleep(0.2)  # a signal at the thread's end would have arrived by now
    assert process.request({}, 120.0)["run"] == before


def test_a_request_after_close_starts_a_new_process(worker):
    process = worker()
    before = process.request({}, 120.0)["run"]
    process.close()
    process.close()
    assert process.request({}, 120.0)["run"] != before
