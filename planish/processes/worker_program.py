"""The main program of the process of a `worker_process.WorkerProcess`.

    python -P worker_program.py PROGRAM ARGUMENT...

PROGRAM is a Python file. Its function `start(*arguments)` returns a function that answers requests.
An exception of either function is returned as the error. Memory is limited, and what the program
prints goes to standard error.

Protocol: at the start, this program writes a line of JSON, {"ready": true} or {"error": REASON}.
Then it reads lines [SECONDS, REQUEST], and writes one object for each, the answer or {"error":
REASON}, until standard input ends. This file imports nothing of planish, so the process starts
fast.
"""

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO

MEMORY_BYTES = 4 << 30
SPARE_SECONDS = 1.0


def main() -> None:
    """Start the program and answer requests until standard input ends."""
    program, *arguments = sys.argv[1:]
    questions, out = private_pipes()
    try:
        limit_memory()
        answer = load(program).start(*arguments)
    except Exception as error:
        send(out, failure(error))
        return
    send(out, {"ready": True})
    for line in questions:
        seconds, question = json.loads(line)
        # If the parent process is killed, it cannot kill this one. The default action of SIGALRM
        # then ends a computation that never returns.
        signal.setitimer(signal.ITIMER_REAL, seconds + SPARE_SECONDS)
        reply = answered(answer, question)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(out, reply)


def private_pipes() -> tuple[TextIO, TextIO]:
    """Return the pipes of the protocol, as copies of standard input and output.

    Standard output then goes to standard error and standard input is empty, so a program that
    prints, reads or calls `exit` (which closes standard input) does not disturb the protocol.
    """
    pipes = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return pipes


def limit_memory() -> None:
    """Limit memory, so that a huge number raises MemoryError and does not exhaust the machine."""
    try:
        import resource
    except ImportError:  # not available on this system
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (MEMORY_BYTES if hard < 0 else min(MEMORY_BYTES, hard), hard)
    )


def load(program: str) -> Any:
    """Import a Python file as a module."""
    spec = importlib.util.spec_from_file_location("program", program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answered(
    answer: Callable[[dict[str, Any]], dict[str, Any]], question: dict[str, Any]
) -> dict[str, Any]:
    try:
        return answer(question)
    except (Exception, SystemExit) as error:
        return failure(error)


def failure(error: BaseException) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}"}


def send(out: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=out, flush=True)


if __name__ == "__main__":
    main()
