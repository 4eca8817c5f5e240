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
class Scale:
    """The range of the rewards of an iteration, from worst to best."""

    low: float
    high: float

    def place(self, reward: float) -> float:
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
    place: float
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

    scale: Scale
    bars: list[Bar]
    facts: list[Fact]
    metrics: list[Fact]
    """Means of the environments' metrics."""


def overview(iteration: int, groups: Sequence[GroupRollout]) -> Overview:
    """Return the overview of all groups of an iteration."""
    rewards_P_G = [rollout.group.get_total_rewards() for rollout in groups]
    finite = [reward for rewards_G in rewards_P_G for reward in rewards_G if math.isfinite(reward)]
    scale = Scale(min(finite), max(finite)) if finite else Scale(0.0, 0.0)
    trajectories = [trajectory for rollout in groups for trajectory in rollout.group.trajectories_G]
    facts = [
        *_reward_facts(finite, len(trajectories)),
        Fact("groups", str(len(groups)), _kinds(rewards_P_G)),
        *_length_facts(trajectories),
        *_ending_facts(trajectories, groups),
        *_sampler_facts(iteration, groups),
    ]
    return Overview(scale, histogram(finite, scale), facts, _metric_facts(groups))


def histogram(rewards: Sequence[float], scale: Scale) -> list[Bar]:
    """Return a bar for each value if there are at most MAX_BARS values, else MAX_BARS bars of equal
    width.
    """
    values = Counter(rewards)
    if len(values) <= MAX_BARS:
        spans = [(value, value, count) for value, count in sorted(values.items())]
    else:
        width = (scale.high - scale.low) / MAX_BARS
        counts = Counter(
            min(MAX_BARS - 1, int(scale.place(reward) * MAX_BARS)) for reward in rewards
        )
        spans = [
            (scale.low + i * width, scale.low + (i + 1) * width, counts[i]) for i in range(MAX_BARS)
        ]
    highest = max((count for _, _, count in spans), default=1)
    return [
        Bar(low, high, count, count / highest, scale.place((low + high) / 2))
        for low, high, count in spans
    ]


def short(value: float) -> str:
    """Return a number with at most three decimals. A number closer to 0 than 0.0005 keeps one
    digit.
    """
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    if 0 < abs(value) < 0.0005:
        return f"{value:.1g}"
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def kind_of(rewards_G: Sequence[float]) -> str:
    """Return "mixed" if the rewards of a group differ, so that the group has a gradient; else "all
    good" or "all bad". The metrics by_group/... use the same classes.
    """
    if any(reward != rewards_G[0] for reward in rewards_G):
        return "mixed"
    return "all good" if rewards_G[0] >= 0.5 else "all bad"


def _reward_facts(finite: Sequence[float], trajectories: int) -> list[Fact]:
    if not finite:
        return [Fact("mean reward", "none")]
    note = f"± {short(pstdev(finite))} over {trajectories} trajectories"
    return [Fact("mean reward", short(fmean(finite)), note)]


def _kinds(rewards_P_G: Sequence[Sequence[float]]) -> str:
    if not any(len(rewards_G) > 1 for rewards_G in rewards_P_G):
        return ""
    kinds = Counter(kind_of(rewards_G) for rewards_G in rewards_P_G)
    return ", ".join(
        f"{kinds[kind]} {kind}" for kind in ("mixed", "all good", "all bad") if kinds[kind]
    )


def _length_facts(trajectories: Sequence[Trajectory]) -> list[Fact]:
    sampled = [
        sum(len(turn.ac.tokens) for turn in trajectory.transitions) for trajectory in trajectories
    ]
    turns = [len(trajectory.transitions) for trajectory in trajectories]
    if not sampled:
        return []
    facts = [
        Fact("tokens a trajectory", short(round(fmean(sampled), 1)), f"longest {max(sampled)}")
    ]
    if max(turns) > 1:
        facts.append(Fact("turns", short(round(fmean(turns), 2)), f"most {max(turns)}"))
    probability = token_probability(trajectories)
    if probability is not None:
        note = "geometric mean"
        if probability:
            note += f"; mean logprob {short(math.log(probability))}"
        facts.append(Fact("token probability", f"{100 * probability:.1f} %", note))
    return facts


def token_probability(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the geometric mean of the probabilities of all sampled tokens; None without
    logprobs.
    """
    turns = [
        turn.ac.maybe_logprobs or ()
        for trajectory in trajectories
        for turn in trajectory.transitions
    ]
    tokens = sum(map(len, turns))
    return math.exp(math.fsum(map(math.fsum, turns)) / tokens) if tokens else None


def _ending_facts(trajectories: Sequence[Trajectory], groups: Sequence[GroupRollout]) -> list[Fact]:
    ends = Counter(ending(trajectory) for trajectory in trajectories)
    others = ", ".join(f"{count} {end}" for end, count in ends.most_common() if end != "completed")
    facts = []
    if ends:
        facts.append(Fact("completed", f"{ends['completed']} of {len(trajectories)}", others))
    failed = sum(len(rollout.group.rollout_errors) for rollout in groups)
    if failed:
        facts.append(Fact("failed attempts", str(failed), "retried or left out"))
    return facts


def ending(trajectory: Trajectory) -> str:
    """Return the stop reason of a trajectory."""
    return str(trajectory.stop_reason or "completed")


def _sampler_facts(iteration: int, groups: Sequence[GroupRollout]) -> list[Fact]:
    steps = {rollout.sampler_step for rollout in groups if rollout.sampler_step is not None}
    if not steps or steps == {iteration}:
        return []
    span = str(min(steps)) if len(steps) == 1 else f"{min(steps)} to {max(steps)}"
    return [Fact("weights of step", span, f"up to {iteration - min(steps)} behind")]


def _metric_facts(groups: Sequence[GroupRollout]) -> list[Fact]:
    dictionaries: list[Metrics] = []
    for rollout in groups:
        for trajectory in rollout.group.trajectories_G:
            dictionaries += [turn.metrics for turn in trajectory.transitions]
        dictionaries += rollout.group.metrics_G
    return [Fact(name, short(value)) for name, value in own_metrics(pooled(dictionaries)).items()]


def pooled(dictionaries: Sequence[Metrics]) -> dict[str, float]:
    """Return for each name its mean over the dictionaries that have it."""
    names = dict.fromkeys(name for metrics in dictionaries for name in metrics)
    return {
        name: fmean([metrics[name] for metrics in dictionaries if name in metrics])
        for name in names
    }


def own_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without stop/..., since the page names the stop reason in words."""
    return {name: value for name, value in metrics.items() if not name.startswith("stop/")}
