"""What runs in the process of a `worker_process.WorkerProcess`: a program's answers, and what all
such programs need.

    python -P worker_program.py PROGRAM ARGUMENT...

PROGRAM is a Python file. Its function `start`, given the arguments, returns the function that
answers questions; what either raises is the reason why there is no answer. Memory is bounded, and
what a program prints goes to standard error.

One line of JSON goes out at the start, {"ready": true} or {"error": REASON}. Then [SECONDS,
QUESTION] comes in and an object goes out, the answer or again {"error": REASON}, until standard
input ends. This file imports nothing of planish, so that the process starts fast and needs no start
method, no guard in the user's script and no main thread.
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
        # If the one that asks is killed meanwhile, nobody else ends an endless answer; the signal
        # does, whatever is computed.
        signal.setitimer(signal.ITIMER_REAL, seconds + SPARE_SECONDS)
        reply = answered(answer, question)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(out, reply)


def private_pipes() -> tuple[TextIO, TextIO]:
    """The pipes of the protocol, out of the way of what prints, reads, or calls `exit`, which
    closes standard input.
    """
    pipes = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return pipes


def limit_memory() -> None:
    """A huge number becomes a MemoryError here instead of the end of the training process."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (MEMORY_BYTES if hard < 0 else min(MEMORY_BYTES, hard), hard)
    )


def load(program: str) -> Any:
    """The module in a file, wherever it is."""
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
