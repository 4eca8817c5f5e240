"""The main program of a `WorkerProcess` (worker_process.py). It runs in the sandbox.

    python -P worker_program.py PROGRAM ARGUMENT...

PROGRAM is a Python file. Its function `start(*arguments)` returns a function that answers requests.
If either function raises an exception, the exception is sent as the error. The output of PROGRAM
goes to standard error. PROGRAM is not loaded if this process finds that it is not in the sandbox.

Protocol: at the start, this program writes one line of JSON, {"ready": true} or {"error": REASON}.
Then it reads one request per line, [SECONDS, REQUEST], until standard input ends. For each request
it writes one JSON object: the answer, or {"error": REASON}. This file imports nothing from planish,
so that the process starts fast.
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

GRACE_SECONDS = 1.0


def main() -> None:
    """Start the program and answer requests until standard input ends."""
    program, *arguments = sys.argv[1:]
    requests, replies = private_pipes()
    try:
        check_isolation()
        handler = load(program).start(*arguments)
    except Exception as error:
        send(replies, error_reply(error))
        return
    send(replies, {"ready": True})
    for line in requests:
        seconds, request = json.loads(line)
        # Normally the parent kills this process at the time limit. If the parent has been killed
        # itself, this alarm ends the process: the default action of SIGALRM is to terminate.
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE_SECONDS)
        reply = handle_request(handler, request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(replies, reply)


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


def handle_request(
    handler: Callable[[dict[str, Any]], dict[str, Any]], request: dict[str, Any]
) -> dict[str, Any]:
    """Return the answer to a request, or an error object if `handler` raises an exception."""
    try:
        return handler(request)
    except (Exception, SystemExit) as error:
        return error_reply(error)


def error_reply(error: BaseException) -> dict[str, Any]:
    """Return the protocol's error object for an exception."""
    return {"error": f"{type(error).__name__}: {error}"}


def send(stream: TextIO, message: dict[str, Any]) -> None:
    """Write a message as one line of JSON."""
    print(json.dumps(message), file=stream, flush=True)


if __name__ == "__main__":
    main()
