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
    `extends_context` is False.
    """
    extends_context: bool
    """Whether the observation begins with all tokens that the policy read and sampled before."""


@dataclass(frozen=True)
class TrajectoryRecord:
    """One trajectory with its grades."""

    index: int
    """Index in the group."""
    trajectory: Trajectory
    total_reward: float
    group_reward: float
    """The part of `total_reward` that is from `compute_group_rewards`."""
    group_metrics: Metrics
    advantage: float | None
    """None if the trajectory is not trained on."""
    turns: list[TurnRecord]

    @property
    def initial_prompt(self) -> Observation:
        """The prompt of the first turn."""
        turns = self.trajectory.transitions
        return turns[0].ob if turns else self.trajectory.final_ob


def trajectory_records(
    rollout: GroupRollout, advantages_G: Sequence[float | None] | None = None
) -> Iterator[TrajectoryRecord]:
    """Yield the trajectories of a group in order."""
    group = rollout.group
    no_advantages_G: list[float | None] = [None] * len(group.trajectories_G)
    trajectory_fields = zip(
        group.trajectories_G,
        group.get_total_rewards(),
        group.final_rewards_G,
        group.metrics_G,
        no_advantages_G if advantages_G is None else advantages_G,
        strict=True,
    )
    for index, (trajectory, total, group_reward, metrics, advantage) in enumerate(
        trajectory_fields
    ):
        turns = list(_turn_records(trajectory))
        yield TrajectoryRecord(index, trajectory, total, group_reward, metrics, advantage, turns)


def _turn_records(trajectory: Trajectory) -> Iterator[TurnRecord]:
    context: list[int] = []
    for transition in trajectory.transitions:
        yield TurnRecord(transition, *new_tokens(context, transition.ob))
        context = context_after(transition)


def context_after(transition: Transition) -> list[int]:
    """Return the tokens that the policy has read and sampled by the end of a turn."""
    return [*transition.ob.to_ints(), *transition.ac.tokens]


def new_tokens(context: Sequence[int], observation: Observation) -> tuple[list[int], bool]:
    """Return (tokens, extends_context). If the observation begins with `context`, these are its
    tokens after `context`, and True. Otherwise these are all its tokens, and False.
    """
    tokens = observation.to_ints()
    extends_context = tokens[: len(context)] == list(context)
    return (tokens[len(context) :] if extends_context else tokens), extends_context
