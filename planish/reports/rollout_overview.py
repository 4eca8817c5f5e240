"""The head of a rollout page: a few numbers about all groups of an iteration, and a histogram of
their rewards.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import Metrics, Trajectory

MAX_BARS = 12


@dataclass(frozen=True)
class RewardRange:
    """The range of the rewards of an iteration, from worst to best."""

    low: float
    high: float

    def position(self, reward: float) -> float:
        """Return the position of a reward in the range: 0 for the worst, 1 for the best. It is 0.5
        if all rewards are equal, or if `reward` is not finite.
        """
        if not self.high > self.low or not math.isfinite(reward):
            return 0.5
        return (reward - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Bar:
    """Trajectories with a reward from `low` to `high`, both included."""

    low: float
    high: float
    count: int
    height: float
    """Height as a fraction of the highest bar."""
    position: float
    """Position of its centre in the range of rewards, 0 to 1."""


@dataclass(frozen=True)
class Fact:
    """A name, a number as text, and a note, shown in the head of the page."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Overview:
    """Everything that the head of a page shows."""

    reward_range: RewardRange
    bars: list[Bar]
    facts: list[Fact]
    metrics: list[Fact]
    """Means of the environments' metrics."""


def iteration_overview(iteration: int, groups: Sequence[GroupRollout]) -> Overview:
    """Return the overview of all groups of an iteration."""
    rewards_P_G = [rollout.group.get_total_rewards() for rollout in groups]
    finite_rewards = [
        reward for rewards_G in rewards_P_G for reward in rewards_G if math.isfinite(reward)
    ]
    reward_range = (
        RewardRange(min(finite_rewards), max(finite_rewards))
        if finite_rewards
        else RewardRange(0.0, 0.0)
    )
    trajectories = [trajectory for rollout in groups for trajectory in rollout.group.trajectories_G]
    facts = [
        *_reward_facts(finite_rewards, len(trajectories)),
        Fact("groups", str(len(groups)), _reward_class_counts(rewards_P_G)),
        *_length_facts(trajectories),
        *_stop_reason_facts(trajectories, groups),
        *_sampler_facts(iteration, groups),
    ]
    return Overview(
        reward_range, histogram(finite_rewards, reward_range), facts, _metric_facts(groups)
    )


def histogram(rewards: Sequence[float], reward_range: RewardRange) -> list[Bar]:
    """Return a bar for each value if there are at most MAX_BARS values, else MAX_BARS bars of equal
    width.
    """
    values = Counter(rewards)
    if len(values) <= MAX_BARS:
        intervals = [(value, value, count) for value, count in sorted(values.items())]
    else:
        width = (reward_range.high - reward_range.low) / MAX_BARS
        counts = Counter(
            min(MAX_BARS - 1, int(reward_range.position(reward) * MAX_BARS)) for reward in rewards
        )
        intervals = [
            (reward_range.low + i * width, reward_range.low + (i + 1) * width, counts[i])
            for i in range(MAX_BARS)
        ]
    highest = max((count for _, _, count in intervals), default=1)
    return [
        Bar(low, high, count, count / highest, reward_range.position((low + high) / 2))
        for low, high, count in intervals
    ]


def format_short(value: float) -> str:
    """Return a number with at most three decimals. A number closer to 0 than 0.0005 keeps one
    digit.
    """
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    if 0 < abs(value) < 0.0005:
        return f"{value:.1g}"
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def reward_class(rewards_G: Sequence[float]) -> str:
    """Return "mixed" if the rewards of a group differ, so that the group has a gradient; else "all
    good" or "all bad". The metrics by_group/... use the same classes.
    """
    if any(reward != rewards_G[0] for reward in rewards_G):
        return "mixed"
    return "all good" if rewards_G[0] >= 0.5 else "all bad"


def _reward_facts(finite_rewards: Sequence[float], num_trajectories: int) -> list[Fact]:
    if not finite_rewards:
        return [Fact("mean reward", "none")]
    note = f"± {format_short(pstdev(finite_rewards))} over {num_trajectories} trajectories"
    return [Fact("mean reward", format_short(fmean(finite_rewards)), note)]


def _reward_class_counts(rewards_P_G: Sequence[Sequence[float]]) -> str:
    if not any(len(rewards_G) > 1 for rewards_G in rewards_P_G):
        return ""
    class_counts = Counter(reward_class(rewards_G) for rewards_G in rewards_P_G if rewards_G)
    return ", ".join(
        f"{class_counts[group_class]} {group_class}"
        for group_class in ("mixed", "all good", "all bad")
        if class_counts[group_class]
    )


def _length_facts(trajectories: Sequence[Trajectory]) -> list[Fact]:
    token_counts = [
        sum(len(turn.ac.tokens) for turn in trajectory.transitions) for trajectory in trajectories
    ]
    turn_counts = [len(trajectory.transitions) for trajectory in trajectories]
    if not token_counts:
        return []
    facts = [
        Fact(
            "tokens a trajectory",
            format_short(round(fmean(token_counts), 1)),
            f"longest {max(token_counts)}",
        )
    ]
    if max(turn_counts) > 1:
        facts.append(
            Fact("turns", format_short(round(fmean(turn_counts), 2)), f"most {max(turn_counts)}")
        )
    probability = token_probability(trajectories)
    if probability is not None:
        note = "geometric mean"
        if probability:
            note += f"; mean logprob {format_short(math.log(probability))}"
        facts.append(Fact("token probability", f"{100 * probability:.1f} %", note))
    return facts


def token_probability(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the geometric mean of the probabilities of all sampled tokens; None without
    logprobs.
    """
    logprobs_by_turn = [
        turn.ac.maybe_logprobs or ()
        for trajectory in trajectories
        for turn in trajectory.transitions
    ]
    num_tokens = sum(map(len, logprobs_by_turn))
    return (
        math.exp(math.fsum(map(math.fsum, logprobs_by_turn)) / num_tokens) if num_tokens else None
    )


def _stop_reason_facts(
    trajectories: Sequence[Trajectory], groups: Sequence[GroupRollout]
) -> list[Fact]:
    reason_counts = Counter(stop_reason(trajectory) for trajectory in trajectories)
    others = ", ".join(
        f"{count} {reason}"
        for reason, count in reason_counts.most_common()
        if reason != "completed"
    )
    facts = []
    if reason_counts:
        facts.append(
            Fact("completed", f"{reason_counts['completed']} of {len(trajectories)}", others)
        )
    failed = sum(len(rollout.group.rollout_errors) for rollout in groups)
    if failed:
        facts.append(Fact("failed attempts", str(failed), "retried or left out"))
    abstained = sum(rollout.group.num_abstained for rollout in groups)
    if abstained:
        facts.append(Fact("left out", str(abstained), "their grader abstained"))
    return facts


def stop_reason(trajectory: Trajectory) -> str:
    """Return the stop reason of a trajectory."""
    return str(trajectory.stop_reason or "completed")


def _sampler_facts(iteration: int, groups: Sequence[GroupRollout]) -> list[Fact]:
    sampler_steps = {rollout.sampler_step for rollout in groups if rollout.sampler_step is not None}
    if not sampler_steps or sampler_steps == {iteration}:
        return []
    step_range = (
        str(min(sampler_steps))
        if len(sampler_steps) == 1
        else f"{min(sampler_steps)} to {max(sampler_steps)}"
    )
    return [Fact("weights of step", step_range, f"up to {iteration - min(sampler_steps)} behind")]


def _metric_facts(groups: Sequence[GroupRollout]) -> list[Fact]:
    metric_dicts: list[Metrics] = []
    for rollout in groups:
        for trajectory in rollout.group.trajectories_G:
            metric_dicts += [turn.metrics for turn in trajectory.transitions]
        metric_dicts += rollout.group.metrics_G
    return [
        Fact(name, format_short(value))
        for name, value in without_stop_metrics(mean_metrics(metric_dicts)).items()
    ]


def mean_metrics(metric_dicts: Sequence[Metrics]) -> dict[str, float]:
    """Return for each name its mean over the dictionaries that have it."""
    names = dict.fromkeys(name for metrics in metric_dicts for name in metrics)
    return {
        name: fmean([metrics[name] for metrics in metric_dicts if name in metrics])
        for name in names
    }


def without_stop_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without stop/..., since the page names the stop reason in words."""
    return {name: value for name, value in metrics.items() if not name.startswith("stop/")}
