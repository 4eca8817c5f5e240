"""The main program of the process of a `worker_process.WorkerProcess`, in its sandbox.

    python -P worker_program.py PROGRAM ARGUMENT...

PROGRAM is a Python file. Its function `start(*arguments)` returns a function that answers requests.
An exception of either function is returned as the error. What the program prints goes to standard
error. PROGRAM is not loaded if this process turns out not to be in the sandbox.

Protocol: at the start, this program writes a line of JSON, {"ready": true} or {"error": REASON}.
Then it reads lines [SECONDS, REQUEST], and writes one object for each, the answer or {"error":
REASON}, until standard input ends. This file imports nothing of planish, so the process starts
fast.
"""

import importlib.util
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

SPARE_SECONDS = 1.0


def main() -> None:
    """Start the program and answer requests until standard input ends."""
    program, *arguments = sys.argv[1:]
    questions, out = private_pipes()
    try:
        check_isolation()
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


def check_isolation() -> None:
    """Raise RuntimeError if this process can open a socket or sees the files of the system."""
    if os.path.exists("/proc") or os.path.exists("/etc/passwd"):
        raise RuntimeError("the sandbox shows the files of this machine; no answer is evaluated")
    with suppress(OSError):
        socket.socket().close()
        raise RuntimeError("the sandbox allows sockets; no answer is evaluated")


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
