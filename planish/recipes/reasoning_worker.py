"""The program of the sandboxed process that `reasoning_tasks.TaskProcess` starts: it makes the
entries of a reasoning-gym task and scores responses.

Some tasks pass the policy's response to `eval` or to a computer algebra system. So a response can
run arbitrary code, run forever, or use all memory. The sandbox protects the machine from such code,
and the process can be killed. This process makes the entries too. Some tasks make entries that
depend on the iteration order of sets. The sandbox sets PYTHONHASHSEED, so an index gives the same
entry in every process.

The reply to {"index"} is the entry's "question" and "answer"; the reply to {"index", "response"} is
the "score" of the response.
"""

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any


def start(name: str, config: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that answers requests for a task."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, **json.loads(config))
    entry_of = lru_cache(maxsize=64)(dataset.__getitem__)
    # The first score imports modules of the task, which should not count in a response's time.
    dataset.score_answer(None, entry_of(0))

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        entry = entry_of(question["index"])
        if "response" in question:
            return {"score": float(dataset.score_answer(question["response"], entry))}
        return {"question": entry["question"], "answer": entry["answer"]}

    return answer
