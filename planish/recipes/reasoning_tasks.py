"""Tasks of reasoning-gym, which generates problems and scores responses from 0 to 1.

A task with its config is plain data, and so are its entries. Each task runs in a sandboxed process
of its own, for the reasons in planish/recipes/reasoning_worker.py. An index gives the same entry in
every process.
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

NUM_ENTRIES = 10_000
"""Number of entries of a task, unless its config has a size."""
ENTRY_TIMEOUT_SECONDS = 120.0
"""Time limit for making an entry. Entries are slow only on a busy machine, so the limit is long."""


@dataclass(frozen=True)
class Task:
    """A task of reasoning-gym and its config."""

    name: str
    config: str
    """The config as JSON, so that a task can be pickled and hashed."""

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any], seed: int) -> "Task":
        """Return the task with these options. Raise UserError for an unknown task or option."""
        check_name(name)
        known = {field.name for field in fields(task_types()[name][1])} - {"seed"}
        for option in options:
            if option not in known:
                raise UserError(
                    f"task.{option}: {name} has no such option; {suggestion(option, known)}"
                )
        return cls(name, json.dumps({"size": NUM_ENTRIES, **options, "seed": seed}, sort_keys=True))

    @property
    def num_entries(self) -> int:
        """Number of different entries."""
        return json.loads(self.config)["size"]


@dataclass(frozen=True)
class Entry:
    """One problem of a task."""

    task: Task
    index: int
    question: str
    answer: str | None
    """A right answer; None for a task that has many right answers and names none."""


class TaskProcess:
    """The process that runs a task, and one thread that waits for its replies."""

    def __init__(self, task: Task, timeout_seconds: float = 5.0) -> None:
        self.task = task
        self._timeout_seconds = timeout_seconds
        program = Path(__file__).with_name("reasoning_worker.py")
        self._process = WorkerProcess(program, (task.name, task.config))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planish-reasoning")

    def entry(self, index: int) -> Entry:
        """Return an entry. Raise UserError if the task fails to make it, as for an impossible
        config.
        """
        try:
            reply = self._process.request({"index": index}, ENTRY_TIMEOUT_SECONDS)
        except (WorkerError, WorkerStartError) as error:
            raise UserError(
                f"env={self.task.name} with {self.task.config} generates no problem: {error}; "
                "change the task's options"
            ) from error
        return Entry(self.task, index, reply["question"], reply["answer"])

    async def score(self, index: int, response: str) -> float:
        """Return the score of a response, 0 to 1. Raise UnjudgedAnswerError if the task fails on
        the response or takes too long.
        """
        question = {"index": index, "response": response}
        try:
            reply = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._process.request, question, self._timeout_seconds
            )
        except WorkerError as error:
            raise UnjudgedAnswerError(
                f"the response {response[:200]!r} could not be scored: {error}"
            ) from error
        return min(1.0, max(0.0, float(reply["score"])))

    def close(self) -> None:
        """End the process."""
        self._thread.shutdown(cancel_futures=True)
        self._process.close()


@cache
def task_process(task: Task) -> TaskProcess:
    """Return the process of a task, which is started once and closed at exit."""
    process = TaskProcess(task)
    atexit.register(process.close)
    return process


def check_name(name: str) -> None:
    """Raise UserError unless reasoning-gym has a task of this name."""
    if name not in task_types():
        raise UserError(
            f"env={name}: reasoning-gym has no such task; {suggestion(name, task_types())}"
        )


def task_types() -> Mapping[str, tuple[type, type]]:
    """Return {name: (dataset class, config class)} of all tasks. Raise UnsupportedError if
    reasoning-gym is not installed.
    """
    try:
        # reasoning-gym is an optional package, and its import takes a second.
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UnsupportedError(
            "tasks of reasoning-gym need that package: pip install planish[reasoning-gym]"
        ) from error
    return DATASETS


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the names that are similar to `name`, or all names, as the end of an error message."""
    near = difflib.get_close_matches(name, sorted(known), n=5, cutoff=0.5)
    return f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(sorted(known))}"
