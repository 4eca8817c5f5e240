"""Metrics of a batch of rollouts. docs/reference/metrics.md defines each key.

Legend: P groups, G trajectories of a group. Metrics are for reports only; the training loop makes
no decision from them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from planish.rl.answers import group_metrics, mean, pass_metrics
from planish.rl.data_processing import TrainingSequence, count_sequences
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import Metrics, TrajectoryGroup, Transition


def environment_metrics(groups_P: Sequence[GroupRollout]) -> Metrics:
    """Return the metrics env/all/..., which cover all groups; {} without groups.

    The metrics env/<tag>/... of each tag are added if tags tell the groups apart, that is if at
    least one tag does not apply to all groups.
    """
    return _metrics_by_tag(groups_P, _group_metrics)


def repeated_sample_metrics(groups_P: Sequence[GroupRollout]) -> Metrics:
    """Return env/all/avg@n and env/all/pass@k of problems with up to n answers each, and the same
    for each tag; {} if no answer has the metric `correct`.

    An answer is right if its metric `correct` is 1 (`planish.rl.answers.pass_metrics`).
    """
    return _metrics_by_tag(groups_P, _pass_metrics)


def _metrics_by_tag(
    groups_P: Sequence[GroupRollout], metrics_of: Callable[[Sequence[GroupRollout]], Metrics]
) -> Metrics:
    """Return the metrics of all groups, and those of the groups of each tag; {} without groups."""
    if not groups_P:
        return {}
    groups_by_tag: dict[str, list[GroupRollout]] = defaultdict(list)
    for group in groups_P:
        for tag in dict.fromkeys(group.tags):
            groups_by_tag[tag].append(group)
    reported_tags: dict[str, list[GroupRollout]] = (
        groups_by_tag
        if any(len(groups) < len(groups_P) for groups in groups_by_tag.values())
        else {}
    )
    groups_by_name = {**reported_tags, "all": groups_P}
    return {
        f"env/{tag}/{name}": value
        for tag, groups in groups_by_name.items()
        for name, value in metrics_of(groups).items()
    }


def _pass_metrics(groups_P: Sequence[GroupRollout]) -> Metrics:
    return pass_metrics(
        [_verdicts(group.group) for group in groups_P if group.group.trajectories_G]
    )


def _verdicts(group: TrajectoryGroup) -> list[bool | None]:
    """Return the verdict on each trajectory."""
    return [
        verdict([*(turn.metrics for turn in trajectory.transitions), metrics])
        for trajectory, metrics in zip(group.trajectories_G, group.metrics_G, strict=True)
    ]


def verdict(metric_dicts: Iterable[Mapping[str, float]]) -> bool | None:
    """Return whether an episode is right: whether its last metric `correct` is 1. None without this
    metric. `metric_dicts` are the metrics of its turns and those of `compute_group_rewards`.
    """
    values = [metrics["correct"] for metrics in metric_dicts if "correct" in metrics]
    return values[-1] == 1 if values else None


def _group_metrics(groups_P: Sequence[GroupRollout]) -> Metrics:
    num_abstained = sum(group.group.num_abstained for group in groups_P)
    num_episodes = sum(len(group.group.trajectories_G) for group in groups_P)
    abstained: Metrics = {"abstained": num_abstained / (num_abstained + num_episodes)}
    if num_episodes == 0:
        return abstained
    groups_P = [group for group in groups_P if group.group.trajectories_G]
    turns = _turns(groups_P)
    means = _means(
        [
            *(turn.metrics for turn in turns),
            *(m for group in groups_P for m in group.group.metrics_G),
        ]
    )
    num_sequences = sum(
        count_sequences(trajectory)
        for group in groups_P
        for trajectory in group.group.trajectories_G
    )
    return (
        means
        | abstained
        | {"sequences_per_episode": num_sequences / num_episodes}
        | group_metrics(
            [group.group.get_total_rewards() for group in groups_P],
            num_turns=len(turns),
            action_tokens=sum(len(turn.ac.tokens) for turn in turns),
            observation_tokens=sum(turn.ob.length for turn in turns),
            cached_tokens=sum(turn.ac.prompt_cache_hit_tokens for turn in turns),
        )
    )


def _means(metric_dicts: Iterable[Metrics]) -> Metrics:
    """Return for each name its mean over the dictionaries that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for metrics in metric_dicts:
        for name, value in metrics.items():
            values[name].append(value)
    return {name: mean(values[name]) for name in sorted(values)}


def sampling_entropy(data_D: Sequence[TrainingSequence]) -> Metrics:
    """Return optim/entropy, the mean of -logprob over the trained tokens, in nats; {} without such
    tokens.
    """
    num_tokens = sum(float(sequence.mask_N.sum()) for sequence in data_D)
    if num_tokens == 0:
        return {}
    total = sum(float((sequence.logprobs_N * sequence.mask_N).sum()) for sequence in data_D)
    return {"optim/entropy": -total / num_tokens}


def staleness(groups_P: Sequence[GroupRollout], step: int) -> Metrics:
    """Return training_client/step, sampling_client/step_... and async/staleness_.... The staleness
    of a group is `step` minus the optimizer step of the weights that sampled it.
    """
    steps = [group.sampler_step for group in groups_P if group.sampler_step is not None]
    if not steps:
        return {}
    stalenesses = [step - sampler_step for sampler_step in steps]
    return {
        "training_client/step": step,
        **_max_min_mean("sampling_client/step", steps),
        **_max_min_mean("async/staleness", stalenesses),
    }


def sampling_times(groups_P: Sequence[GroupRollout]) -> Metrics:
    """Return time/sampling_time_..., the seconds of each group's rollout; {} without groups."""
    return (
        _max_min_mean("time/sampling_time", [group.seconds for group in groups_P])
        if groups_P
        else {}
    )


def _max_min_mean(name: str, values: Sequence[float]) -> Metrics:
    return {f"{name}_max": max(values), f"{name}_min": min(values), f"{name}_mean": mean(values)}


def token_counts(groups_P: Sequence[GroupRollout]) -> dict[str, int]:
    """Return three numbers of tokens: "sampled", "prefill_cached" (prompt tokens in a cached
    prefix) and "prefill_uncached" (the other prompt tokens).
    """
    turns = _turns(groups_P)
    num_cached = sum(turn.ac.prompt_cache_hit_tokens for turn in turns)
    return {
        "sampled": sum(len(turn.ac.tokens) for turn in turns),
        "prefill_cached": num_cached,
        "prefill_uncached": sum(turn.ob.length for turn in turns) - num_cached,
    }


def _turns(groups_P: Sequence[GroupRollout]) -> list[Transition]:
    return [
        turn
        for group in groups_P
        for trajectory in group.group.trajectories_G
        for turn in trajectory.transitions
    ]
