"""Makes the entries of a reasoning-gym task and scores answers, in the sandboxed process that
`reasoning_tasks.TaskProcess` starts.

Some tasks pass the policy's answer to `eval` or to a computer algebra system. So an answer may take
for ever, use all memory, or be a program. The sandbox keeps such a program from this machine, and
the process can be killed. Entries are made here too, because those of some tasks depend on the
order of sets: the sandbox sets PYTHONHASHSEED, so an index is the same entry in every process.

{"index"} is answered by the entry's "question" and "answer", {"index", "response"} by the "score"
of a response.
"""

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any


def start(name: str, config: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, **json.loads(config))
    entry_of = lru_cache(maxsize=64)(dataset.__getitem__)
    dataset.score_answer(None, entry_of(0))  # imports what it needs before an answer is timed

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        entry = entry_of(question["index"])
        if "response" in question:
            return {"score": float(dataset.score_answer(question["response"], entry))}
        return {"question": entry["question"], "answer": entry["answer"]}

    return answer
