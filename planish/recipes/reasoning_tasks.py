"""Tasks of reasoning-gym: problems that a program makes, and responses that it scores from 0 to 1.

A task with its config is plain data, and so is an entry of it. The work is done in a process of its
own, one for each task, for the reasons that planish/recipes/reasoning_worker.py gives. An index is
the same entry everywhere and at all times.
"""

import asyncio
import atexit
import difflib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from planish.errors import UnjudgedAnswerError, UnsupportedError, UserError
from planish.sandbox.worker_process import WorkerError, WorkerProcess, WorkerStartError

ENTRIES = 10_000
"""Different entries of a task, unless its config names a size."""
MAKING_SECONDS = 120.0
"""An entry is the task's own work, so that it takes long says only that the machine is busy."""


@dataclass(frozen=True)
class Task:
    """A task of reasoning-gym and its config."""

    name: str
    config: str
    """JSON, so that it pickles and can be a key."""

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any], seed: int) -> "Task":
        """UserError if there is no such task, or if an option is not one of its config."""
        check_name(name)
        known = {field.name for field in fields(task_types()[name][1])} - {"seed"}
        for option in options:
            if option not in known:
                raise UserError(
                    f"task.{option}: {name} has no such option; {suggestion(option, known)}"
                )
        return cls(name, json.dumps({"size": ENTRIES, **options, "seed": seed}, sort_keys=True))

    @property
    def num_entries(self) -> int:
        return json.loads(self.config)["size"]


@dataclass(frozen=True)
class Entry:
    """One problem of a task."""

    task: Task
    index: int
    question: str
    answer: str | None
    """None where many are right and none is named."""


class TaskProcess:
    """The process in which a task works, and the one thread that waits for it."""

    def __init__(self, task: Task, timeout_seconds: float = 5.0) -> None:
        self.task = task
        self._timeout_seconds = timeout_seconds
        program = Path(__file__).with_name("reasoning_worker.py")
        self._process = WorkerProcess(program, (task.name, task.config))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planish-reasoning")

    def entry(self, index: int) -> Entry:
        """UserError if the task cannot make it, as with a config of which it makes nothing."""
        try:
            reply = self._process.ask({"index": index}, MAKING_SECONDS)
        except (WorkerError, WorkerStartError) as error:
            raise UserError(
                f"env={self.task.name} with {self.task.config} makes no problem: {error}; change the task's options"
            ) from error
        return Entry(self.task, index, reply["question"], reply["answer"])

    async def score(self, index: int, response: str) -> float:
        """From 0 to 1. UnjudgedAnswerError if the task fails on the response or takes too long."""
        question = {"index": index, "response": response}
        try:
            reply = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._process.ask, question, self._timeout_seconds
            )
        except WorkerError as error:
            raise UnjudgedAnswerError(
                f"the response {response[:200]!r} could not be scored: {error}"
            ) from error
        return min(1.0, max(0.0, float(reply["score"])))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._process.close()


@cache
def task_process(task: Task) -> TaskProcess:
    """One for the whole process that asks, closed when that ends."""
    process = TaskProcess(task)
    atexit.register(process.close)
    return process


def check_name(name: str) -> None:
    """UserError unless reasoning-gym has a task of this name."""
    if name not in task_types():
        raise UserError(
            f"env={name}: reasoning-gym has no such task; {suggestion(name, task_types())}"
        )


def task_types() -> Mapping[str, tuple[type, type]]:
    """Name -> (dataset, config) of every task. UnsupportedError if reasoning-gym is not installed."""
    try:
        from reasoning_gym.factory import DATASETS  # an extra, and a second to import
    except ImportError as error:
        raise UnsupportedError(
            "tasks of reasoning-gym need that package: pip install planish[reasoning-gym]"
        ) from error
    return DATASETS


def suggestion(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=5, cutoff=0.5)
    return f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(sorted(known))}"
