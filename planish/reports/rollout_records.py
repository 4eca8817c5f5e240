"""Records of the trajectories and turns of a group. Rollout pages, log trees and JSON rows are made
from them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

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
class TrainedTokens:
    """What the trainer knows of the trained tokens of a trajectory, in their order."""

    advantages: np.ndarray
    """float32"""
    logprobs: np.ndarray
    """The trainer's logprobs before the update, float32."""

    @classmethod
    def joined(cls, parts: Sequence["TrainedTokens"]) -> "TrainedTokens":
        """Return the tokens of all parts, one part after another."""
        return cls(
            np.concatenate([part.advantages for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
        )

    def part(self, start: int, end: int) -> "TrainedTokens":
        """Return the tokens from `start` up to `end`."""
        return TrainedTokens(self.advantages[start:end], self.logprobs[start:end])


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

    def turns_with_tokens(
        self, trained: TrainedTokens | None
    ) -> Iterator[tuple[TurnRecord, TrainedTokens | None]]:
        """Yield the turns, each with its part of the trained tokens; None if the turn is not
        trained on.
        """
        counts = [
            len(turn.transition.ac.tokens) for turn in self.turns if turn.transition.train_on_action
        ]
        if trained is not None and sum(counts) != len(trained.logprobs):
            trained = None  # a token without a context, which is not trained on
        start = 0
        for turn in self.turns:
            count = len(turn.transition.ac.tokens)
            if trained is None or not turn.transition.train_on_action or count == 0:
                yield turn, None
                continue
            yield turn, trained.part(start, start + count)
            start += count

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
    """Return the keys of what the policy has read and sampled by the end of a turn (see
    `ModelInput.to_keys`).
    """
    return [*transition.ob.to_keys(), *transition.ac.tokens]


def new_tokens(context: Sequence[int], observation: Observation) -> tuple[list[int], bool]:
    """Return (tokens, extends_context). If the observation begins with `context`, these are its
    tokens after `context`, and True. Otherwise these are all its tokens, and False. Positions of
    images have negative numbers.
    """
    tokens = observation.to_keys()
    extends_context = tokens[: len(context)] == list(context)
    return (tokens[len(context) :] if extends_context else tokens), extends_context
