"""The rollouts of one group, with retries by the rules of a strategy.

For a retry, `make_envs` is called again on the same builder (never concurrently). The retry of
trajectory i uses the new environment i; the other new environments stay unused. `cleanup` is called
only once, at the end. So a builder that tracks its resources must track those of all calls of
`make_envs`.

The environments of a builder with `plays_together = True` interact. If one of them fails, all
rollouts of the group are cancelled, and a retry makes all environments anew. No trajectory is left
out.

A trajectory whose grader abstains (AbstainError) is left out without a retry. It counts as
successful, because nothing failed. If the environments of a group interact, all its trajectories
are left out.

The seed of a first attempt does not depend on failures. Each retry has a seed of its own, since the
same samples may lead to the same failure.
"""

import asyncio
import logging
import textwrap
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

from planish import logtree
from planish.completers import TokenCompleter, derived_seed
from planish.errors import AbstainError, EngineClosedError, UserError
from planish.processes.interruption import exits_as_errors, first_error
from planish.rl.rollout.single_rollout import OnTurn, do_single_rollout
from planish.rl.rollout.strategy import RolloutStrategy
from planish.rl.types import Env, EnvGroupBuilder, RolloutError, Trajectory

T = TypeVar("T")

DuringTimeLimit = Callable[[float | None], AbstractContextManager[None]]
during_time_limit: ContextVar[DuringTimeLimit] = ContextVar(
    "during_time_limit", default=lambda _: nullcontext()
)
"""Makes a context in which a block with a time limit of so many seconds runs; None = no limit."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedRollout:
    """A finished trajectory and the environment that it was rolled out in."""

    trajectory: Trajectory
    env: Env


@dataclass
class GroupRun:
    """The rollouts of one group, with its retries and failures."""

    builder: EnvGroupBuilder
    policy: TokenCompleter
    strategy: RolloutStrategy
    seed: int | None = None
    on_turn: OnTurn | None = None
    failures: list[RolloutError] = field(default_factory=list[RolloutError])
    """All failed attempts so far, whether or not a retry succeeded."""
    num_abstained: int = 0
    """Number of trajectories that were left out because their grader abstained."""

    def __post_init__(self) -> None:
        self.rules = self.strategy.rules(1)
        self._group_size: int | None = None
        self._num_successful = 0
        self._num_left_out = 0
        self._num_retries = 0
        self._make_envs_lock = asyncio.Lock()

    async def run(self) -> list[FinishedRollout]:
        """Return the finished rollouts in the order of the environments, without those whose grader
        abstained. If too few rollouts succeed, the error of a failed one is raised.
        """
        envs = await self.retry(self._make_envs)
        self.rules = self.strategy.rules(len(envs))
        if plays_together(self.builder):
            return await self._run_together(envs)
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._run_one(index, env)) for index, env in enumerate(envs)
                ]
        return [finished for task in running if (finished := task.result()) is not None]

    async def retry(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`. While it fails and retries are left, it is called again."""
        while True:
            try:
                return await work()
            except AbstainError:
                raise
            except Exception as error:
                if not self._use_retry(error):
                    raise

    def abstain(self, error: AbstainError, consequence: str, count: int = 1) -> None:
        """Count `count` trajectories that are left out because a grader abstained."""
        self.num_abstained += count
        logger.info("a grader abstained, so %s: %s", consequence, error)
        logtree.log_text(f"A grader abstained, so {consequence}: {error}")

    async def _run_one(self, index: int, env: Env) -> FinishedRollout | None:
        """Return a rollout, after retries if necessary; None if it failed and is left out."""
        for attempt in count():
            try:
                if attempt > 0:
                    env = (await self._make_envs())[index]
                finished = await self._attempt(index, env, attempt)
            except AbstainError as error:
                self._num_successful += 1
                self.abstain(error, f"trajectory {index} is left out")
                return None
            except Exception as error:
                if not self._use_retry(
                    error, is_needed=self._num_successful < self.rules.min_successful
                ):
                    return self._leave_out(error)
            else:
                self._num_successful += 1
                return finished
        raise AssertionError("unreachable: the count of attempts never ends")

    async def _run_together(self, envs: Sequence[Env]) -> list[FinishedRollout]:
        for attempt in count():
            try:
                if attempt > 0:
                    envs = await self._make_envs()
                with first_error():
                    async with asyncio.TaskGroup() as tasks:
                        running = [
                            tasks.create_task(self._attempt(i, env, attempt))
                            for i, env in enumerate(envs)
                        ]
            except AbstainError as error:
                self.abstain(error, "all trajectories are left out", len(envs))
                return []
            except Exception as error:
                if not self._use_retry(error):
                    raise
            else:
                return [task.result() for task in running]
        raise AssertionError("unreachable: the count of attempts never ends")

    async def _attempt(self, index: int, env: Env, attempt: int) -> FinishedRollout:
        title = f"Trajectory {index}" + (f", attempt {attempt + 1}" if attempt else "")
        with error_context(title, self.builder), logtree.scope_header(title):
            async with time_limit("per_rollout_timeout", self.rules.timeout_seconds):
                seed = self._sample_seed(index, attempt)
                policy = self.policy if seed is None else self.policy.seeded(seed)
                trajectory = await do_single_rollout(policy, env, on_turn=self.on_turn)
        return FinishedRollout(replace(trajectory, seed=seed), env)

    def _sample_seed(self, index: int, attempt: int) -> int | None:
        """Return the seed of one attempt at a trajectory; None if the group has no seed."""
        if self.seed is None:
            return None
        return derived_seed(self.seed, *((index, attempt) if attempt else (index,)))

    async def _make_envs(self) -> Sequence[Env]:
        """Return new environments. Raise UserError if their number differs from the first call."""
        with error_context("make_envs", self.builder):
            async with self._make_envs_lock:
                envs = await self.builder.make_envs()
        name = f"make_envs of {type(self.builder).__qualname__}"
        if not envs:
            raise UserError(f"{name} returned no environments; return at least one")
        if self._group_size is not None and len(envs) != self._group_size:
            raise UserError(
                f"{name} returned {len(envs)} environments, and {self._group_size} before; return "
                "the same number each time"
            )
        self._group_size = len(envs)
        return envs

    def _use_retry(self, error: Exception, *, is_needed: bool = True) -> bool:
        """Record a failure, and return whether to retry. If so, one retry is used up."""
        self.failures.append(RolloutError(type(error).__name__, str(error)))
        if not is_needed or not is_retryable(error) or self._num_retries == self.rules.retries:
            return False
        self._num_retries += 1
        logger.info("retry %d of %d after %r", self._num_retries, self.rules.retries, error)
        return True

    def _leave_out(self, error: Exception) -> None:
        """Leave a failed trajectory out, or raise its error if too few would remain."""
        self._num_left_out += 1
        assert self._group_size is not None
        if (
            isinstance(error, EngineClosedError)
            or self._group_size - self._num_left_out < self.rules.min_successful
        ):
            raise error


def is_retryable(error: Exception) -> bool:
    """Return whether a retry may succeed (see planish/rl/rollout/strategy.py)."""
    return not isinstance(error, (UserError, EngineClosedError))


def plays_together(builder: EnvGroupBuilder) -> bool:
    """Return whether the environments of the group interact."""
    return bool(getattr(builder, "plays_together", False))


def describe(builder: EnvGroupBuilder) -> str:
    """Return the beginning of `repr(builder)` for an error message. A repr can be slow, so this is
    called for errors only.
    """
    return textwrap.shorten(repr(builder), 200, placeholder=" ...")


@contextmanager
def error_context(where: str, builder: EnvGroupBuilder) -> Generator[None]:
    """Add a note with `where` and the group to errors of the block. A SystemExit becomes a
    RuntimeError, as does a CancelledError if this task was not cancelled (`exits_as_errors`).
    """
    try:
        with exits_as_errors():
            yield
    except Exception as error:
        error.add_note(f"in {where} of {describe(builder)}")
        raise


@asynccontextmanager
async def time_limit(name: str, seconds: float | None) -> AsyncGenerator[None]:
    """Raise TimeoutError if the block takes longer than `seconds`; None = no limit. `name` is the
    name of the option, for the message.
    """
    clock = asyncio.timeout(seconds)
    try:
        with during_time_limit.get()(seconds):
            async with clock:
                yield
    except TimeoutError:
        if not clock.expired():
            raise
        raise TimeoutError(f"it took longer than {name}={seconds} s") from None
