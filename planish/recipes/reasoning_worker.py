"""The process in which a reasoning-gym task makes its entries and scores answers: `reasoning_tasks.TaskProcess` starts it.

    python reasoning_worker.py TASK CONFIG_AS_JSON

Scoring runs apart because some tasks hand the policy's answer to `eval` or to a computer algebra system: an answer may
take for ever, take all memory, or be a program. Here it can be killed, memory is bounded, and the ways in which a chance
answer would do harm are barred: writing and removing files, starting programs, the network. That is a seat belt, not a
sandbox. Entries are made here too, because those of some tasks depend on the order of sets: it is started with a fixed
PYTHONHASHSEED, so that an index is the same entry in every process.

One JSON object a line comes in, one goes out: {"index"} gives the entry's "question" and "answer", {"index", "response"}
the "score" of a response, and either may give an "error". It imports nothing of planish.
"""

import json
import os
import sys
from functools import lru_cache
from typing import TextIO

MEMORY_BYTES = 4 << 30
BARRED = ("os.", "subprocess.", "shutil.", "socket.", "ctypes.", "signal.", "webbrowser.", "tempfile.")
ALLOWED = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr")


def main() -> None:
    name, config = sys.argv[1:]
    requests, out = private_pipes()
    sys.dont_write_bytecode = True
    limit_memory()
    try:
        import reasoning_gym

        dataset = reasoning_gym.create_dataset(name, **json.loads(config))
        entry_of = lru_cache(maxsize=64)(dataset.__getitem__)
        dataset.score_answer(None, entry_of(0))  # what it imports at first use comes before the bar
    except Exception as error:
        send(out, {"error": str(error) or type(error).__name__})
        return
    sys.addaudithook(bar)
    send(out, {"ready": True})
    for line in requests:
        request = json.loads(line)
        try:
            entry = entry_of(request["index"])
            if "response" in request:
                reply: dict[str, object] = {"score": float(dataset.score_answer(request["response"], entry))}
            else:
                reply = {"question": entry["question"], "answer": entry["answer"]}
        except (Exception, SystemExit) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        send(out, reply)


def private_pipes() -> tuple[TextIO, TextIO]:
    """The pipes of the protocol, out of the way of what prints, reads, or calls `exit`, which closes standard input."""
    pipes = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return pipes


def bar(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook (PEP 578) that lets reading pass and nothing else."""
    writes = event == "open" and (set(str(arguments[1])) & set("wax+") or is_for_writing(arguments[2]))
    if writes or (event.startswith(BARRED) and event not in ALLOWED):
        raise PermissionError(f"{event} is barred while an answer is scored")


def is_for_writing(flags: object) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))


def send(out: TextIO, message: dict[str, object]) -> None:
    print(json.dumps(message), file=out, flush=True)


def limit_memory() -> None:
    """A huge number becomes a MemoryError here instead of the end of the training process."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES if hard < 0 else min(MEMORY_BYTES, hard), hard))


if __name__ == "__main__":
    main()
