"""Groups of episodes: all environments of a group are rolled out at once, graded together, and given
back.

Legend: G trajectories of a group.

Whatever happens, also when the group is cancelled, `EnvGroupBuilder.cleanup` is called once, after
everything else, and runs to its end. An error keeps its type; a note says in which trajectory of
which group it happened. A cancellation that an environment lets out without having been asked to
end is an error like others.

With a seed, a group's draws are a function of (seed, index of the trajectory, attempt): trajectory
g is sampled by `policy.seeded(derived_seed(seed, g))`, whatever the others do.
"""

import logging
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from planish import logtree
from planish.completers import TokenCompleter
from planish.errors import NonFiniteError, UserError
from planish.processes.interruption import run_uncancelled
from planish.rl.limits import TerminationRewardPolicy
from planish.rl.rollout.group_rollout import (
    FinishedRollout,
    GroupRun,
    located,
    may_succeed_again,
    named,
    time_limit,
)
from planish.rl.rollout.single_rollout import OnTurn, do_single_rollout
from planish.rl.rollout.strategy import FailFast, FailureRules, RolloutStrategy
from planish.rl.types import EnvGroupBuilder, Metrics, RolloutError, TrajectoryGroup
from planish.runlog.evaluators import checked_metrics

__all__ = ["GroupRollout", "OnTurn", "do_group_rollout", "do_single_rollout"]

logger = logging.getLogger(__name__)

Grade = tuple[float, Metrics]


@dataclass(frozen=True)
class GroupRollout:
    """One group after it was finished, with all that is said of it later."""

    group_idx: int
    """Within its batch."""
    tags: list[str]
    group: TrajectoryGroup
    """At least one trajectory."""
    sampler_step: int | None
    """Training steps of the weights that sampled it."""
    tree: logtree.Node | None
    """What its environments logged; None when this group is not logged."""
    seconds: float = 0.0
    """How long it took."""
    teacher: str | None = None
    """As `EnvGroupBuilder.teacher` says."""


async def do_group_rollout(
    builder: EnvGroupBuilder,
    policy: TokenCompleter,
    strategy: RolloutStrategy | None = None,
    termination: TerminationRewardPolicy | None = None,
    *,
    seed: int | None = None,
    on_turn: OnTurn | None = None,
    failures: list[RolloutError] | None = None,
) -> TrajectoryGroup | None:
    """Play and grade one group; None if the strategy dropped it. The strategy is FailFast() if none
    is given.

    Attempts that fail are added to `failures`, also where the group is dropped; those of a group
    are its `rollout_errors` too. With `termination.zero_reward_on_limit`, the reward of the group
    holds what bounds the total of a trajectory by 0.
    """
    run = GroupRun(builder, policy, strategy or FailFast(), seed, on_turn)
    try:
        async with cleanup_after(builder, run.rules):
            finished_G = await run.run()
            grades_G = await run.retry(
                lambda: graded(builder, finished_G, termination or TerminationRewardPolicy())
            )
    except Exception as error:
        if not run.rules.drops_group or not may_succeed_again(error):
            raise
        logger.warning("a group was dropped: %r in %s", error, named(builder))
        return None
    finally:
        if failures is not None:
            failures += run.failures
    return TrajectoryGroup(
        [finished.trajectory for finished in finished_G],
        [reward for reward, _ in grades_G],
        [metrics for _, metrics in grades_G],
        run.failures,
    )


async def graded(
    builder: EnvGroupBuilder,
    finished_G: list[FinishedRollout],
    termination: TerminationRewardPolicy,
) -> list[Grade]:
    """What the group adds to the reward of each trajectory, within the bounds of `termination`."""
    skipped_G = [
        termination.skips_grading(finished.trajectory.stop_reason) for finished in finished_G
    ]
    graded_G = [
        finished
        for finished, is_skipped in zip(finished_G, skipped_G, strict=True)
        if not is_skipped
    ]
    answers: list[Grade] = []
    if graded_G:
        with located("compute_group_rewards", builder):
            async with time_limit("grader_timeout_seconds", termination.grader_timeout_seconds):
                given = await builder.compute_group_rewards(
                    [finished.trajectory for finished in graded_G],
                    [finished.env for finished in graded_G],
                )
        answers = validate_grades(given, builder, len(graded_G))
    remaining = iter(answers)
    grades_G: list[Grade] = [
        (0.0, {}) if is_skipped else next(remaining) for is_skipped in skipped_G
    ]
    return [
        clamp_reward(grade, finished, termination)
        for grade, finished in zip(grades_G, finished_G, strict=True)
    ]


def clamp_reward(
    grade: Grade, finished: FinishedRollout, termination: TerminationRewardPolicy
) -> Grade:
    """The grade by which the total reward of the trajectory is what `termination` makes of it."""
    reward, metrics = grade
    trajectory = finished.trajectory
    total = trajectory.step_rewards + reward
    allowed = termination.bounded(total, trajectory.stop_reason)
    return (reward if allowed == total else allowed - trajectory.step_rewards), metrics


def validate_grades(given: Any, builder: EnvGroupBuilder, size: int) -> list[Grade]:
    """What a builder's `compute_group_rewards` gave; UserError if it is no reward for each
    trajectory.
    """
    name = f"compute_group_rewards of {type(builder).__qualname__}"
    wanted = "give one (reward, metrics) for each trajectory"
    if not isinstance(given, list | tuple):
        raise UserError(f"{name} gave a {type(given).__name__}; {wanted}, as a list")
    if len(given) != size:
        raise UserError(f"{name} gave {len(given)} rewards for {size} trajectories; {wanted}")
    grades: list[Grade] = []
    for index, grade in enumerate(given):
        if (
            not isinstance(grade, list | tuple)
            or len(grade) != 2
            or not isinstance(grade[1], Mapping)
        ):
            raise UserError(f"{name} gave {grade!r} for trajectory {index}; {wanted}")
        try:
            reward = float(grade[0])
        except (TypeError, ValueError):
            raise UserError(
                f"{name} gave the reward {grade[0]!r} for trajectory {index}; give a number"
            ) from None
        if not math.isfinite(reward):
            raise NonFiniteError(
                f"{name} gave the reward {reward} for trajectory {index}; give a finite number"
            )
        grades.append((reward, checked_metrics(grade[1], f"{name}, of trajectory {index},")))
    return grades


@asynccontextmanager
async def cleanup_after(builder: EnvGroupBuilder, rules: FailureRules) -> AsyncIterator[None]:
    """Call `cleanup` after the block, once. An error of it does not hide one of the block, and does
    not undo a group where failures are tolerated.
    """

    async def cleaning() -> None:
        with located("cleanup", builder):
            await builder.cleanup()

    async def clean() -> None:
        await run_uncancelled(cleaning())

    try:
        yield
    except BaseException as error:
        try:
            await clean()
        except Exception as another:
            logger.warning("cleanup of %s failed: %r, after %r", named(builder), another, error)
        raise
    try:
        await clean()
    except Exception as error:
        if not rules.tolerates_failures:
            raise
        logger.warning("cleanup of %s failed: %r", named(builder), error)
