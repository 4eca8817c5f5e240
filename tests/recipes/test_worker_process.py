"""A program that answers, hangs, dies or never starts."""

import os
import signal
import threading
import time

import pytest

from planish.recipes.worker_process import WorkerError, WorkerProcess, WorkerStartError

PROGRAM = """
import json, os, sys, time
{before}
print(json.dumps({ready}), flush=True)
for line in sys.stdin:
    question = json.loads(line)
    if question.get("hang"):
        time.sleep(60)
    if question.get("die"):
        os._exit(1)
    print(json.dumps({{"pid": os.getpid(), "said": question, "home": os.environ.get("MINE"), "argv": sys.argv[1:]}}), flush=True)
"""


@pytest.fixture
def worker(tmp_path):
    made = []

    def make(before="", ready='{"ready": True}', **options):
        program = tmp_path / f"program{len(made)}.py"
        program.write_text(PROGRAM.format(before=before, ready=ready))
        made.append(WorkerProcess(program, **options))
        return made[-1]

    yield make
    for process in made:
        process.close()


def test_one_process_answers_all_questions(worker):
    process = worker(arguments=("a", "b"), environment={"MINE": "x"})
    first, second = process.ask({"n": 1}), process.ask({"n": 2})
    assert (first["said"], second["said"]) == ({"n": 1}, {"n": 2})
    assert first["pid"] == second["pid"]
    assert (first["argv"], first["home"]) == (["a", "b"], "x")


@pytest.mark.parametrize(("question", "message"), [({"hang": True}, "no answer in 0.3 s"), ({"die": True}, "ended")])
def test_a_process_that_hangs_or_dies_is_replaced(worker, question, message):
    process = worker(timeout_seconds=0.3)
    before = process.ask({})["pid"]
    start = time.monotonic()
    with pytest.raises(WorkerError, match=message):
        process.ask(question)
    assert time.monotonic() - start < 10
    assert process.ask({})["pid"] != before


def test_a_question_may_have_a_time_of_its_own(worker):
    process = worker(timeout_seconds=30.0)
    with pytest.raises(WorkerError, match=r"no answer in 0\.2 s"):
        process.ask({"hang": True}, timeout_seconds=0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"ready": '{"error": "no such module"}'}, "no such module"), ({"before": "sys.exit(3)"}, "ended without")],
)
def test_a_program_that_does_not_start_says_why(worker, options, message):
    with pytest.raises(WorkerStartError, match=message):
        worker(**options).ask({})


SLOW_AT_FIRST = """
from pathlib import Path
if not Path(sys.argv[1]).exists():
    Path(sys.argv[1]).touch()
    time.sleep(60)
"""


@pytest.mark.parametrize("during", ["the start", "a question"])
def test_after_ctrl_c_the_next_question_gets_its_own_answer(worker, tmp_path, during):
    started = tmp_path / "started"
    process = worker(before=SLOW_AT_FIRST, arguments=(str(started),), timeout_seconds=30.0)
    if during == "a question":
        started.touch()
        process.ask({"n": 0})
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        process.ask({"n": 1, "hang": True})
    timer.join()
    started.touch()
    assert process.ask({"n": 2})["said"] == {"n": 2}


def test_threads_take_turns(worker):
    process, answers = worker(), {}

    def ask(n):
        answers[n] = process.ask({"n": n})["said"]["n"]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: n for n in range(8)}


def test_after_close_the_next_question_starts_it_again(worker):
    process = worker()
    before = process.ask({})["pid"]
    process.close()
    process.close()
    assert process.ask({})["pid"] != before
