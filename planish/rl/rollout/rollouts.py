"""Rollouts of groups: all environments of a group run concurrently and are graded together.

Legend: G trajectories of a group.

`EnvGroupBuilder.cleanup` is called once after everything else, also if the group fails or is
cancelled. A cancellation does not interrupt it. An error keeps its type; a note names the
trajectory and the group. If an environment raises CancelledError without having been cancelled,
that counts as an error like any other.

With a seed, the samples of a group depend only on (seed, index of the trajectory, attempt):
the first attempt of trajectory g samples with `policy.seeded(derived_seed(seed, g))`.
"""

# pyright: reportUnnecessaryIsInstance=false

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from planish import logtree
from planish.completers import TokenCompleter
from planish.errors import AbstainError, UserError
from planish.processes.interruption import run_uncancelled
from planish.rl.limits import TerminationRewardPolicy
from planish.rl.rewards import read_reward
from planish.rl.rollout.group_rollout import (
    FinishedRollout,
    GroupRun,
    describe,
    error_context,
    is_retryable,
    time_limit,
)
from planish.rl.rollout.single_rollout import OnTurn, do_single_rollout
from planish.rl.rollout.strategy import FailFast, FailureRules, RolloutStrategy
from planish.rl.types import EnvGroupBuilder, Metrics, RolloutError, Trajectory, TrajectoryGroup
from planish.runlog.evaluators import validate_metrics

__all__ = ["GroupRollout", "OnTurn", "do_group_rollout", "do_single_rollout"]

logger = logging.getLogger(__name__)

Grade = tuple[float, Metrics]


@dataclass(frozen=True)
class GroupRollout:
    """A finished group with everything that is reported about it."""

    group_idx: int
    """Index in its batch."""
    tags: list[str]
    group: TrajectoryGroup
    """The trajectories; none if the grader abstained from all of them."""
    sampler_step: int | None
    """Optimizer step of the weights that sampled the group."""
    tree: logtree.Node | None
    """The logs of its environments; None if this group is not logged."""
    seconds: float = 0.0
    """Duration of the rollout."""
    teacher: str | None = None
    """Name of its teacher (`EnvGroupBuilder.teacher`)."""


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
    """Roll out and grade one group; return None if the strategy dropped it. The default strategy is
    FailFast().

    A trajectory whose grader abstained is missing from the group, and counted in its
    `num_abstained`. Failed attempts are appended to `failures`, also if the group is dropped. They are also in the
    `rollout_errors` of the returned group. With `termination.zero_reward_on_limit`, the group
    reward of a trajectory that a limit ended is lowered so that its total reward is at most 0.
    """
    run = GroupRun(builder, policy, strategy or FailFast(), seed, on_turn)
    try:
        async with cleanup_after(builder, run.rules):
            rollouts_G = await run.run()
            graded_G = await run.retry(
                lambda: grade_group(builder, rollouts_G, termination or TerminationRewardPolicy())
            )
            kept_G: list[tuple[Trajectory, Grade]] = []
            for finished, grade in zip(rollouts_G, graded_G, strict=True):
                if isinstance(grade, AbstainError):
                    run.abstain(grade, "one trajectory of the group is left out")
                else:
                    kept_G.append((finished.trajectory, grade))
    except Exception as error:
        if not run.rules.drops_group or not is_retryable(error):
            raise
        logger.warning("a group was dropped: %r in %s", error, describe(builder))
        return None
    finally:
        if failures is not None:
            failures += run.failures
    return TrajectoryGroup(
        [trajectory for trajectory, _ in kept_G],
        [reward for _, (reward, _) in kept_G],
        [metrics for _, (_, metrics) in kept_G],
        run.failures,
        run.num_abstained,
    )


async def grade_group(
    builder: EnvGroupBuilder,
    rollouts_G: list[FinishedRollout],
    termination: TerminationRewardPolicy,
) -> list[Grade | AbstainError]:
    """Return the group reward and metrics of each trajectory, clamped by `termination`, or an
    AbstainError.
    """
    skipped_G = [
        termination.skips_grading(finished.trajectory.stop_reason) for finished in rollouts_G
    ]
    graded_G = [
        finished
        for finished, is_skipped in zip(rollouts_G, skipped_G, strict=True)
        if not is_skipped
    ]
    grades: list[Grade | AbstainError] = []
    if graded_G:
        returned: Sequence[Grade | AbstainError]
        try:
            with error_context("compute_group_rewards", builder):
                async with time_limit("grader_timeout_seconds", termination.grader_timeout_seconds):
                    returned = await builder.compute_group_rewards(
                        [finished.trajectory for finished in graded_G],
                        [finished.env for finished in graded_G],
                    )
        except AbstainError as error:
            returned = [error] * len(graded_G)
        grades = validate_grades(returned, builder, len(graded_G))
    remaining_grades = iter(grades)
    grades_G: list[Grade | AbstainError] = [
        (0.0, {}) if is_skipped else next(remaining_grades) for is_skipped in skipped_G
    ]
    return [
        grade if isinstance(grade, AbstainError) else clamp_reward(grade, finished, termination)
        for grade, finished in zip(grades_G, rollouts_G, strict=True)
    ]


def clamp_reward(
    grade: Grade, finished: FinishedRollout, termination: TerminationRewardPolicy
) -> Grade:
    """Apply `termination.clamp` to the trajectory's total reward, the sum of the group reward and
    the step rewards. Return `grade` with the group reward that gives the clamped total.
    """
    reward, metrics = grade
    trajectory = finished.trajectory
    total = trajectory.step_rewards + reward
    clamped_total = termination.clamp(total, trajectory.stop_reason)
    return (reward if clamped_total == total else clamped_total - trajectory.step_rewards), metrics


def validate_grades(
    returned: Sequence[Grade | AbstainError], builder: EnvGroupBuilder, size: int
) -> list[Grade | AbstainError]:
    """Return the result of `compute_group_rewards` as grades. Raises UserError unless there is one
    (reward, metrics) or AbstainError for each of `size` trajectories, and NonFiniteError for a
    reward that is not finite.
    """
    name = f"compute_group_rewards of {type(builder).__qualname__}"
    remedy = "return one (reward, metrics) for each trajectory"
    if not isinstance(returned, list | tuple):
        raise UserError(f"{name} returned a {type(returned).__name__}; {remedy}, as a list")
    if len(returned) != size:
        raise UserError(
            f"{name} returned {len(returned)} rewards for {size} trajectories; {remedy}"
        )
    grades: list[Grade | AbstainError] = []
    for index, grade in enumerate(returned):
        if isinstance(grade, AbstainError):
            grades.append(grade)
            continue
        if (
            not isinstance(grade, list | tuple)
            or len(grade) != 2
            or not isinstance(grade[1], Mapping)
        ):
            raise UserError(f"{name} returned {grade!r} for trajectory {index}; {remedy}")
        reward = read_reward(grade[0], name, f" for trajectory {index}")
        grades.append((reward, validate_metrics(grade[1], f"{name}, for trajectory {index},")))
    return grades


@asynccontextmanager
async def cleanup_after(builder: EnvGroupBuilder, rules: FailureRules) -> AsyncGenerator[None]:
    """Call `builder.cleanup` once after the block. If the block raises an error, that error is
    raised, and an error of `cleanup` is only logged. After a successful block, an error of
    `cleanup` is raised, or logged if `rules` tolerate failures.
    """

    async def cleanup() -> None:
        with error_context("cleanup", builder):
            await builder.cleanup()

    try:
        yield
    except BaseException as error:
        try:
            await run_uncancelled(cleanup())
        except Exception as cleanup_error:
            logger.warning(
                "cleanup of %s failed: %r, after %r", describe(builder), cleanup_error, error
            )
        raise
    try:
        await run_uncancelled(cleanup())
    except Exception as error:
        if not rules.tolerates_failures:
            raise
        logger.warning("cleanup of %s failed: %r", describe(builder), error)
