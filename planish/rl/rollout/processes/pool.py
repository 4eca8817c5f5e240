"""Rollouts in worker processes, for environments that compute much, block, or may crash.

    async with RolloutPool(4) as pool:
        group = await pool.do_group_rollout(builder, policy, seed=1)

The result is the same as that of `do_group_rollout`, which runs in the worker. The policy stays in
this process: when a worker calls the policy, the call is sent here over a socket. So one engine
serves all workers, and the policy need not be picklable. Builders must be picklable, so they hold
plain data. If `make_envs` sets attributes of the builder, only the worker's copy changes.

A worker rolls out any number of groups at once; a new group goes to the worker with the fewest. If
a worker dies, its groups fail, and another worker is started. The strategy handles such a failure
like any other. Workers always start with the "spawn" method of multiprocessing. A forked process
would copy locks that the engine's threads hold, and could wait for them forever. With "spawn", each
worker imports the main script, so the script must begin its work under
`if __name__ == "__main__":`.

`RolloutPool.open("ray")` has one worker for each free CPU of a Ray cluster instead. Classes of the
main script are sent to these workers with the builder, because the workers do not import the script.

When the `async with` block ends, unfinished groups are cancelled and their builders clean up. A
worker that takes longer than ten seconds is killed. If this process is killed, the workers end too.
"""

# pyright: reportUnnecessaryIsInstance=false

import asyncio
import logging
import pickle
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any, Literal, Self

from planish.completers import TokenCompleter, derived_seed
from planish.errors import UserError
from planish.logtree.nodes import Node
from planish.logtree.trace import append
from planish.rl.limits import TerminationRewardPolicy
from planish.rl.rollout.group_rollout import describe
from planish.rl.rollout.processes.local_worker import LocalWorker
from planish.rl.rollout.processes.process import (
    NoRoomError,
    ProcessDiedError,
    RolloutProcess,
    StartWorker,
)
from planish.rl.rollout.processes.ray_worker import RayWorker, dump, open_cluster
from planish.rl.rollout.processes.worker import RolloutRequest, RolloutTask
from planish.rl.rollout.rollouts import OnTurn
from planish.rl.rollout.strategy import FailFast, RolloutStrategy
from planish.rl.types import EnvGroupBuilder, RolloutError, TrajectoryGroup

# With a class as literal, isinstance would narrow a value of any type to unknown type arguments.
_PARTIAL: type = partial
_MAPPING: type = Mapping
_COLLECTIONS: tuple[type, ...] = (list, tuple, set, frozenset)

logger = logging.getLogger(__name__)

Dump = Callable[[Any], bytes]
"""Pickles an object."""


class RolloutPool:
    """`max_workers` rollout workers; used as an async context manager."""

    def __init__(
        self,
        max_workers: int,
        start_worker: StartWorker = LocalWorker.start,
        dump: Dump = pickle.dumps,
    ) -> None:
        """`dump` pickles a builder for the workers that `start_worker` starts."""
        if isinstance(max_workers, bool) or not isinstance(max_workers, int) or max_workers < 1:
            raise UserError(f"max_workers={max_workers!r}: give a whole number of at least 1")
        self.max_workers = max_workers
        self._start_worker = start_worker
        self._dump = dump
        self._processes: list[RolloutProcess] = []
        self._choosing = asyncio.Lock()

    @staticmethod
    @asynccontextmanager
    async def open(
        workers: int | Literal["ray"], ray_address: str | None = None
    ) -> "AsyncGenerator[RolloutPool | None]":
        """Yield a pool, or None for 0 workers: groups are then rolled out in this process. "ray"
        stands for as many workers as have room on a Ray cluster (see `open_cluster`).
        """
        if workers == 0:
            yield None
            return
        if workers == "ray":
            max_workers = await asyncio.to_thread(open_cluster, ray_address)
            pool = RolloutPool(max_workers, RayWorker.start, dump)
        else:
            pool = RolloutPool(workers)
        async with pool:
            yield pool

    async def __aenter__(self) -> Self:
        try:
            for _ in range(self.max_workers):
                self._processes.append(await RolloutProcess.start(self._start_worker))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all workers."""
        async with self._choosing:  # wait for a worker that is being started, and end it too
            processes, self._processes = self._processes, []
        async with asyncio.TaskGroup() as tasks:
            for process in processes:
                tasks.create_task(process.close())

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, to watch them from outside."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def do_group_rollout(
        self,
        builder: EnvGroupBuilder,
        policy: TokenCompleter,
        strategy: RolloutStrategy | None = None,
        termination: TerminationRewardPolicy | None = None,
        *,
        seed: int | None = None,
        on_turn: OnTurn | None = None,
        failures: list[RolloutError] | None = None,
    ) -> TrajectoryGroup | None:
        """Roll out and grade one group in one of the workers. Arguments and result are those of
        `planish.rl.rollout.rollouts.do_group_rollout`.
        """
        strategy = strategy or FailFast()
        task = pickle_task(RolloutTask(builder, strategy, termination), builder, self._dump)
        logs = current_log_node()
        rules = strategy.rules(1)
        failures = [] if failures is None else failures
        deaths: list[RolloutError] = []
        while True:
            # The seed that killed a worker may kill the next one, so a retry uses another seed.
            retry_seed = derived_seed(seed, len(deaths)) if seed is not None and deaths else seed
            request = RolloutRequest(
                task, type(builder).__qualname__, retry_seed, is_logged=logs is not None
            )
            try:
                process = await self._least_busy()
                result = await process.run(request, policy, on_turn)
            except ProcessDiedError as error:
                error.add_note(f"in the rollout of {describe(builder)}")
                deaths.append(RolloutError(type(error).__name__, str(error)))
                if len(deaths) <= rules.retries:
                    continue
                if not rules.drops_group:
                    raise
                logger.warning("a group was dropped: %r in %s", error, describe(builder))
                failures += deaths
                return None
            if logs is not None:
                logs.children += result.logged
            errors = [*deaths, *result.failures]
            failures += errors
            return None if result.group is None else replace(result.group, rollout_errors=errors)

    async def _least_busy(self) -> RolloutProcess:
        """Return the worker with the fewest groups. Workers that have died are replaced first."""
        async with self._choosing:
            if not self._processes:
                raise UserError("a RolloutPool runs rollouts only in its `async with` block")
            # Look again after each replacement, since another worker may die meanwhile.
            while ended := [process for process in self._processes if process.has_ended]:
                await ended[0].close()  # on a cluster, the next worker needs its place
                try:
                    new = [await RolloutProcess.start(self._start_worker)]
                except NoRoomError as error:
                    if len(ended) == len(self._processes):
                        raise
                    logger.warning("a rollout process is not replaced: %s", error)
                    new = []
                index = self._processes.index(ended[0])
                self._processes[index : index + 1] = new
            return min(self._processes, key=lambda process: process.groups)


def current_log_node() -> Node | None:
    """Return a new node at the current position of the log tree; None if nothing is logged."""
    nodes: list[Node] = []

    def make(level: int) -> Node:
        nodes.append(Node("div"))
        return nodes[0]

    append(make)
    return nodes[0] if nodes else None


def pickle_task(task: RolloutTask, builder: EnvGroupBuilder, dump: Dump = pickle.dumps) -> bytes:
    """Return the pickled task. If the builder cannot be pickled, raise a UserError that names the
    part that cannot.
    """
    try:
        return dump(task)
    except Exception as error:
        culprit = unpicklable_attribute(builder, type(builder).__qualname__, dump)
        where = "" if culprit is None else f" because of {culprit}"
        raise UserError(
            f"{type(builder).__qualname__} cannot be sent to a rollout process{where}: {error}; a "
            "builder must contain only plain data and module-level functions (use "
            "functools.partial instead of a lambda)"
        ) from error


def unpicklable_attribute(
    value: Any, name: str, dump: Dump = pickle.dumps, seen: frozenset[int] = frozenset()
) -> str | None:
    """Return the path of the innermost attribute or item of `value` that `dump` cannot pickle; None
    if it can. `name` is the path of `value` itself.
    """
    if id(value) in seen or can_be_pickled(value, dump):
        return None
    for part, inner in attributes_and_items(value, name):
        found = unpicklable_attribute(inner, part, dump, seen | {id(value)})
        if found is not None:
            return found
    return name


def can_be_pickled(value: Any, dump: Dump) -> bool:
    """Return whether `dump` accepts `value`."""
    try:
        dump(value)
    except Exception:  # pickling may raise any error, depending on the class
        return False
    return True


def attributes_and_items(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for each attribute or item of `value`."""
    if isinstance(value, _PARTIAL):
        yield from (
            (f"{name}.{part}", getattr(value, part)) for part in ("func", "args", "keywords")
        )
    elif isinstance(value, _MAPPING):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, _COLLECTIONS):
        yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))
    elif not isinstance(value, (type, FunctionType)):
        yield from (
            (f"{name}.{attribute}", item)
            for attribute, item in getattr(value, "__dict__", {}).items()
        )
