"""Advantage estimators: how a trajectory's reward compares with its group.

Legend: G trajectories of a group.

Each estimator is a pure function of the total rewards of one group. To add one to planish, write a
function and add it to `ADVANTAGES`. A run can also use a function of the user's own
(own_functions.py). If all rewards of a group are equal, all advantages are 0. A group is
empty if its grader abstained from all answers.
"""

from collections.abc import Callable, Sequence

AdvantageEstimator = Callable[[Sequence[float]], list[float]]


def mean_centred(rewards_G: Sequence[float]) -> list[float]:
    """Return R - mean(R). There is no division by the standard deviation, which would favour
    problems that are nearly always or nearly never solved (Dr. GRPO, Liu et al. 2025).
    """
    if is_constant(rewards_G):
        # The mean of equal numbers can differ from them by rounding.
        return [0.0] * len(rewards_G)
    mean = sum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


def standardised(rewards_G: Sequence[float]) -> list[float]:
    """Return (R - mean(R)) / (std(R) + 1e-6) with the population standard deviation of the group:
    GRPO as published (Shao et al. 2024).
    """
    centred_G = mean_centred(rewards_G)
    if not centred_G:
        return []
    std = (sum(value * value for value in centred_G) / len(centred_G)) ** 0.5
    return [value / (std + 1e-6) for value in centred_G]


def leave_one_out(rewards_G: Sequence[float]) -> list[float]:
    """Return R minus the mean reward of the other trajectories: RLOO (Ahmadian et al. 2024). It
    equals mean_centred times G / (G - 1).
    """
    if len(rewards_G) == 1:
        return [0.0]
    scale = len(rewards_G) / (len(rewards_G) - 1)
    return [scale * value for value in mean_centred(rewards_G)]


def zero_advantages(rewards_G: Sequence[float]) -> list[float]:
    """Return zeros. Rewards are then only reported, and the policy learns from a KL term alone."""
    return [0.0] * len(rewards_G)


ADVANTAGES: dict[str, AdvantageEstimator] = {
    "mean": mean_centred,
    "std": standardised,
    "leave_one_out": leave_one_out,
    "none": zero_advantages,
}


def is_constant(rewards_G: Sequence[float]) -> bool:
    """Return whether all rewards are equal, so that the group has no gradient."""
    return all(reward == rewards_G[0] for reward in rewards_G)
