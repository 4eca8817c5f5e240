"""How a reasoning-gym task makes its entries and scores answers, in the process that
`reasoning_tasks.TaskProcess` starts.

Scoring runs apart because some tasks hand the policy's answer to `eval` or to a computer algebra
system: an answer may take for ever, take all memory, or be a program. Here it can be killed, memory
is bounded, and the ways in which a chance answer would do harm are barred: writing and removing
files, starting programs, the network. That is a seat belt, not a sandbox. Entries are made here
too, because those of some tasks depend on the order of sets: it is started with a fixed
PYTHONHASHSEED, so that an index is the same entry in every process.

{"index"} is answered by the entry's "question" and "answer", {"index", "response"} by the "score"
of a response.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

BARRED = (
    "os.",
    "subprocess.",
    "shutil.",
    "socket.",
    "ctypes.",
    "signal.",
    "webbrowser.",
    "tempfile.",
)
ALLOWED = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr")


def start(name: str, config: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    sys.dont_write_bytecode = True
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, **json.loads(config))
    entry_of = lru_cache(maxsize=64)(dataset.__getitem__)
    dataset.score_answer(None, entry_of(0))  # what it imports at first use comes before the bar
    sys.addaudithook(bar)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        entry = entry_of(question["index"])
        if "response" in question:
            return {"score": float(dataset.score_answer(question["response"], entry))}
        return {"question": entry["question"], "answer": entry["answer"]}

    return answer


def bar(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook (PEP 578) that lets reading pass and nothing else."""
    writes = event == "open" and (
        set(str(arguments[1])) & set("wax+") or is_for_writing(arguments[2])
    )
    if writes or (event.startswith(BARRED) and event not in ALLOWED):
        raise PermissionError(f"{event} is barred while an answer is scored")


def is_for_writing(flags: object) -> bool:
    return isinstance(flags, int) and bool(
        flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    )
