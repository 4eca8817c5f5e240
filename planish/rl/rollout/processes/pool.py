"""Groups played in other processes, for environments that are heavy: they compute, block, or may
crash.

    async with RolloutPool(4) as pool:
        group = await pool.do_group_rollout(builder, policy, seed=1)

A group gives the same as in `do_group_rollout`, which is what runs in the other process. Only the
policy stays here: calls of it travel over a socket and are answered by the policy that was given,
whatever it is, so one engine serves all processes and nothing of it has to be pickled. Builders do:
they are plain data. What a builder changes in itself while it makes environments stays in the
process where it does so.

A process plays any number of groups at once; a new one goes to the process with the fewest. A
process that dies takes its groups with it. To the strategy that is a failure of those groups like
any other, and another process takes its place. Processes start afresh (the "spawn" method of
multiprocessing, whatever the program's own is): a fork of a process in which an engine runs would
copy locks that its threads hold, and might wait for them for ever. So a script that uses a pool
begins its work under `if __name__ == "__main__":`.

When the pool is left, groups under way are cancelled and their builders clean up; a process that
takes longer than ten seconds is killed. If this process is killed, the others notice and end as
well.
"""

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any, Self

from planish.completers import TokenCompleter, derived_seed
from planish.errors import UserError
from planish.logtree.nodes import Node
from planish.logtree.trace import append
from planish.rl.limits import TerminationRewardPolicy
from planish.rl.rollout.group_rollout import named
from planish.rl.rollout.processes.messages import Play, Task
from planish.rl.rollout.processes.process import ProcessDiedError, RolloutProcess
from planish.rl.rollout.rollouts import OnTurn
from planish.rl.rollout.strategy import FailFast, RolloutStrategy
from planish.rl.types import EnvGroupBuilder, RolloutError, TrajectoryGroup

logger = logging.getLogger(__name__)


class RolloutPool:
    """`max_workers` processes that play groups; used as an async context manager."""

    def __init__(self, max_workers: int) -> None:
        if isinstance(max_workers, bool) or not isinstance(max_workers, int) or max_workers < 1:
            raise UserError(f"max_workers={max_workers!r}: give a whole number of at least 1")
        self.max_workers = max_workers
        self._processes: list[RolloutProcess] = []
        self._choosing = asyncio.Lock()
        self._numbers = count()

    @staticmethod
    @asynccontextmanager
    async def opened(max_workers: int) -> "AsyncIterator[RolloutPool | None]":
        """A pool, or None for 0 workers: groups are then played in this process."""
        if max_workers == 0:
            yield None
            return
        async with RolloutPool(max_workers) as pool:
            yield pool

    async def __aenter__(self) -> Self:
        try:
            for _ in range(self.max_workers):
                self._processes.append(await RolloutProcess.start())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        async with self._choosing:  # one that is being started is among them then
            processes, self._processes = self._processes, []
        async with asyncio.TaskGroup() as tasks:
            for process in processes:
                tasks.create_task(process.close())

    @property
    def pids(self) -> list[int]:
        """The processes, for those who watch them from outside."""
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
        """As `planish.rl.rollout.rollouts.do_group_rollout`, in one of the processes."""
        strategy = strategy or FailFast()
        task = pickled(Task(builder, strategy, termination), builder)
        logs = log_place()
        rules = strategy.rules(1)
        failures = [] if failures is None else failures
        deaths: list[RolloutError] = []
        while True:
            draws = derived_seed(seed, len(deaths)) if seed is not None and deaths else seed
            play = Play(
                next(self._numbers),
                task,
                type(builder).__qualname__,
                draws,
                is_logged=logs is not None,
            )
            try:
                outcome = await (await self._idlest()).play(play, policy, on_turn)
            except ProcessDiedError as error:
                error.add_note(f"in the rollout of {named(builder)}")
                deaths.append(RolloutError(type(error).__name__, str(error)))
                if len(deaths) <= rules.retries:
                    continue
                if not rules.drops_group:
                    raise
                logger.warning("a group was dropped: %r in %s", error, named(builder))
                failures += deaths
                return None
            if logs is not None:
                logs.children += outcome.logged
            errors = [*deaths, *outcome.failures]
            failures += errors
            return None if outcome.group is None else replace(outcome.group, rollout_errors=errors)

    async def _idlest(self) -> RolloutProcess:
        """The process that plays the fewest groups; those that have died are replaced first."""
        async with self._choosing:
            if not self._processes:
                raise UserError("a RolloutPool plays only in its `async with` block")
            while ended := [process for process in self._processes if process.has_ended]:
                # another may die meanwhile
                self._processes[self._processes.index(ended[0])] = await RolloutProcess.start()
                await ended[0].close()
            return min(self._processes, key=lambda process: process.groups)


def log_place() -> Node | None:
    """Where in the current tree that which the group logs will stand; None if nobody listens."""
    places: list[Node] = []

    def make(level: int) -> Node:
        places.append(Node("div"))
        return places[0]

    append(make)
    return places[0] if places else None


def pickled(task: Task, builder: EnvGroupBuilder) -> bytes:
    try:
        return pickle.dumps(task)
    except Exception as error:
        culprit = unpicklable_part(builder, type(builder).__qualname__)
        where = "" if culprit is None else f" because of {culprit}"
        raise UserError(
            f"{type(builder).__qualname__} cannot be sent to a rollout process{where}: {error}; a builder holds plain data, and "
            "functions of a module (functools.partial instead of a lambda)"
        ) from error


def unpicklable_part(value: Any, name: str, seen: frozenset[int] = frozenset()) -> str | None:
    """The innermost attribute or item of `value` that does not pickle, by its path; None if `value`
    pickles.
    """
    if id(value) in seen or pickles(value):
        return None
    for part, inner in parts_of(value, name):
        found = unpicklable_part(inner, part, seen | {id(value)})
        if found is not None:
            return found
    return name


def pickles(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # any class may raise anything when it is asked for its state
        return False
    return True


def parts_of(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, partial):
        yield from (
            (f"{name}.{part}", getattr(value, part)) for part in ("func", "args", "keywords")
        )
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))
    elif not isinstance(value, (type, FunctionType)):
        yield from (
            (f"{name}.{attribute}", item)
            for attribute, item in getattr(value, "__dict__", {}).items()
        )
