"""The returns that trajectories of a group are compared by, and answers that were cut off.

Legend: G trajectories of a group, T turns of a trajectory.

By default every turn of a trajectory has the same return, the trajectory's total reward. With a
`turn_discount` each turn has its own (`TrainingRewards.returns`).

`truncated` says what happens to a trajectory whose last answer was cut off by a token limit:

    keep       nothing: the trajectory is trained on with the reward that it got
    mask       none of its tokens are trained on; its reward stays in the group's baseline
               (overlong filtering, DAPO, Yu et al. 2025; mask_truncated_completions in TRL)
    penalise   long answers get a penalty before they would be cut off (`overlong_penalty`)

These options change what is trained on. The rewards in metrics and files are those of the
environment.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from planish.rl.advantages import ADVANTAGES, is_constant
from planish.rl.own_functions import advantage_estimator
from planish.rl.types import Trajectory, TrajectoryGroup, Transition

Truncated = Literal["keep", "mask", "penalise"]
DEFAULT_BUFFER_FRACTION = 0.2
"""The default length of the buffer of `overlong_penalty`, as a fraction of the maximum length. It
is that of DAPO: 4,096 of 20,480 tokens.
"""


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """Return DAPO's soft overlong punishment of an answer of length L, from -1 to 0:

    0                                     if L <= max_tokens - buffer
    ((max_tokens - buffer) - L) / buffer  if max_tokens - buffer < L <= max_tokens
    -1                                    if L > max_tokens
    """
    return max(-1.0, min(0.0, (max_tokens - buffer - num_tokens) / buffer))


def is_cut_off(turn: Transition) -> bool:
    """Return whether a token limit cut off the answer of a turn."""
    return turn.ac.stop_reason == "length"


def is_truncated(trajectory: Trajectory) -> bool:
    """Return whether the last answer of a trajectory was cut off."""
    return bool(trajectory.transitions) and is_cut_off(trajectory.transitions[-1])


@dataclass(frozen=True)
class TrainingRewards:
    """How the rewards of a group become the advantages of its turns."""

    advantage: str = "mean"
    """Name of the estimator in `ADVANTAGES`, or its import path."""
    turn_discount: float | None = None
    """Discount of later turns' rewards, above 0 and at most 1. None: every turn has the total
    reward.
    """
    truncated: Truncated = "keep"
    max_tokens: int = 0
    """Maximum number of tokens in an answer, for truncated="penalise"."""
    overlong_buffer: int = 1
    """Length of the buffer before `max_tokens`, in tokens, in which the penalty grows."""
    overlong_coef: float = 1.0
    """Factor of the penalty."""
    advantage_config: Mapping[str, float] | None = None
    """Keyword arguments of an estimator of the user's own."""

    def penalty(self, turn: Transition) -> float:
        """Return the penalty of the length of a turn's answer, 0 or less. An answer that was cut
        off at a smaller limit than `max_tokens` gets the penalty of an answer of `max_tokens`.
        """
        if self.truncated != "penalise":
            return 0.0
        num_tokens = self.max_tokens if is_cut_off(turn) else len(turn.ac.tokens)
        return self.overlong_coef * overlong_penalty(
            num_tokens, self.max_tokens, self.overlong_buffer
        )

    def turn_rewards(self, trajectory: Trajectory, final_reward: float) -> list[float]:
        """Return the reward of each turn, [T], with its penalty. The last turn's includes
        `final_reward`, the reward of `compute_group_rewards`.
        """
        rewards_T = [turn.reward + self.penalty(turn) for turn in trajectory.transitions]
        rewards_T[-1] += final_reward
        return rewards_T

    def returns(self, group: TrajectoryGroup) -> list[list[float]]:
        """Return the returns that are compared with each other, one list [G] per comparison.

        Without `turn_discount` there is one comparison, of the total rewards. With a discount d
        there is one for each turn t of the longest trajectory. The return of a trajectory with T
        turns and the rewards r is

            R_t = sum over k from t to T - 1 of d^(k - t) r_k

        It is 0 for a trajectory that has ended before turn t. So each turn is compared with what
        the group's trajectories earned from that turn on.
        """
        if self.turn_discount is None:
            totals_G = group.get_total_rewards()
            penalties_G = [
                sum(self.penalty(turn) for turn in trajectory.transitions)
                for trajectory in group.trajectories_G
            ]
            return [[total + p for total, p in zip(totals_G, penalties_G, strict=True)]]
        returns_G_T = [
            discounted_returns(self.turn_rewards(trajectory, final_reward), self.turn_discount)
            for trajectory, final_reward in zip(
                group.trajectories_G, group.final_rewards_G, strict=True
            )
        ]
        num_turns = max((len(returns_T) for returns_T in returns_G_T), default=0)
        return [
            [returns_T[t] if t < len(returns_T) else 0.0 for returns_T in returns_G_T]
            for t in range(num_turns)
        ]

    def is_constant(self, group: TrajectoryGroup) -> bool:
        """Return whether the group has no gradient: all returns of every comparison are equal, and
        an estimator of the user's own gives them the advantage 0.
        """
        returns = self.returns(group)
        if not all(is_constant(returns_G) for returns_G in returns):
            return False
        if self.advantage in ADVANTAGES:
            return True
        estimate = advantage_estimator(self.advantage, self.advantage_config)
        return not any(any(estimate(returns_G)) for returns_G in returns)

    def advantages(self, group: TrajectoryGroup) -> list[list[float] | None]:
        """Return the advantage of each turn, [G][T]; None for a masked trajectory."""
        estimate = advantage_estimator(self.advantage, self.advantage_config)
        advantages_by_comparison = [estimate(returns_G) for returns_G in self.returns(group)]
        last = len(advantages_by_comparison) - 1
        return [
            None
            if self.is_masked(trajectory)
            else [
                advantages_by_comparison[min(t, last)][g]
                for t in range(len(trajectory.transitions))
            ]
            for g, trajectory in enumerate(group.trajectories_G)
        ]

    def mean_advantages(self, group: TrajectoryGroup) -> list[float | None]:
        """Return the mean advantage of each trajectory's turns, [G]; None for a masked one."""
        return [
            None if advantages_T is None else math.fsum(advantages_T) / len(advantages_T)
            for advantages_T in self.advantages(group)
        ]

    def is_masked(self, trajectory: Trajectory) -> bool:
        """Return whether no token of the trajectory is trained on."""
        return self.truncated == "mask" and is_truncated(trajectory)

    def metrics(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Return truncated/masked or truncated/penalty; {} for truncated="keep". They are the
        fraction of trajectories that are masked, and their mean penalty.
        """
        trajectories = [trajectory for group in groups for trajectory in group.trajectories_G]
        if self.truncated == "keep" or not trajectories:
            return {}
        if self.truncated == "mask":
            return {"truncated/masked": sum(map(self.is_masked, trajectories)) / len(trajectories)}
        penalties = [self.penalty(turn) for one in trajectories for turn in one.transitions]
        return {"truncated/penalty": sum(penalties) / len(trajectories)}


def discounted_returns(rewards_T: Sequence[float], discount: float) -> list[float]:
    """Return R_t = r_t + discount * R_(t + 1) for each turn, [T]."""
    returns_T: list[float] = []
    following = 0.0
    for reward in reversed(rewards_T):
        following = reward + discount * following
        returns_T.append(following)
    return returns_T[::-1]
