"""Advantages: how much better than its group a trajectory did. Each is a pure function of the total
rewards of one group.

Legend: G trajectories of a group.

A new one is a function here and a line in `ADVANTAGES`. In a group whose rewards are all equal
every advantage is 0.
"""

from collections.abc import Callable, Sequence

Advantage = Callable[[Sequence[float]], list[float]]


def mean_centred(rewards_G: Sequence[float]) -> list[float]:
    """R - mean(R). Without division by the standard deviation, which would favour problems that are
    nearly always or nearly never solved (Dr. GRPO, Liu et al. 2025).
    """
    if is_constant(rewards_G):
        return [0.0] * len(rewards_G)  # the mean of equal numbers may be another one, by rounding
    mean = sum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


def standardised(rewards_G: Sequence[float]) -> list[float]:
    """(R - mean(R)) / (std(R) + 1e-6), the standard deviation over the group itself: GRPO as
    published (Shao et al. 2024).
    """
    centred_G = mean_centred(rewards_G)
    deviation = (sum(value * value for value in centred_G) / len(centred_G)) ** 0.5
    return [value / (deviation + 1e-6) for value in centred_G]


def leave_one_out(rewards_G: Sequence[float]) -> list[float]:
    """R minus the mean of the others' rewards: RLOO (Ahmadian et al. 2024). It is mean_centred
    times G / (G - 1).
    """
    if len(rewards_G) == 1:
        return [0.0]
    scale = len(rewards_G) / (len(rewards_G) - 1)
    return [scale * value for value in mean_centred(rewards_G)]


def none(rewards_G: Sequence[float]) -> list[float]:
    """0, whatever the rewards: they are reported, and what is learned is what a KL term adds."""
    return [0.0] * len(rewards_G)


ADVANTAGES: dict[str, Advantage] = {
    "mean": mean_centred,
    "std": standardised,
    "leave_one_out": leave_one_out,
    "none": none,
}


def is_constant(rewards_G: Sequence[float]) -> bool:
    """Whether the group teaches nothing: all rewards are equal."""
    return all(reward == rewards_G[0] for reward in rewards_G)
