"""Records of the trajectories and turns of a group. Rollout pages, log trees and JSON rows are made
from them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import Metrics, Observation, Trajectory, Transition


@dataclass(frozen=True)
class TurnRecord:
    """One turn, with the part of its observation that the policy has not seen before."""

    transition: Transition
    new_tokens: list[int]
    """The tokens of the observation after the tokens of earlier turns; all its tokens if
    `continues` is False.
    """
    continues: bool
    """Whether the observation begins with all tokens that the policy read and sampled before."""


@dataclass(frozen=True)
class TrajectoryRecord:
    """One trajectory with its grades."""

    number: int
    """Index in the group."""
    trajectory: Trajectory
    total_reward: float
    group_reward: float
    """The part of `total_reward` that is from `compute_group_rewards`."""
    group_metrics: Metrics
    advantage: float | None
    """None if the trajectory is not trained on."""
    turns: list[TurnRecord]


def trajectory_records(
    rollout: GroupRollout, advantages_G: Sequence[float] | None = None
) -> Iterator[TrajectoryRecord]:
    """Yield the trajectories of a group in order."""
    group = rollout.group
    none_G: list[float | None] = [None] * len(group.trajectories_G)
    rows = zip(
        group.trajectories_G,
        group.get_total_rewards(),
        group.final_rewards_G,
        group.metrics_G,
        none_G if advantages_G is None else advantages_G,
        strict=True,
    )
    for number, (trajectory, total, group_reward, metrics, advantage) in enumerate(rows):
        turns = list(_turn_records(trajectory))
        yield TrajectoryRecord(number, trajectory, total, group_reward, metrics, advantage, turns)


def _turn_records(trajectory: Trajectory) -> Iterator[TurnRecord]:
    seen: list[int] = []
    for transition in trajectory.transitions:
        yield TurnRecord(transition, *new_tokens(seen, transition.ob))
        seen = seen_after(transition)


def seen_after(transition: Transition) -> list[int]:
    """Return the tokens that the policy has read and sampled by the end of a turn."""
    return [*transition.ob.to_ints(), *transition.ac.tokens]


def new_tokens(seen: Sequence[int], observation: Observation) -> tuple[list[int], bool]:
    """Return (tokens, continues). If the observation begins with `seen`, these are its tokens after
    `seen`, and True. Otherwise these are all its tokens, and False.
    """
    tokens = observation.to_ints()
    continues = tokens[: len(seen)] == list(seen)
    return (tokens[len(seen) :] if continues else tokens), continues
