"""The evaluations of a run: scores by step, and each question before and after."""

import math
from typing import Any

import numpy as np

from planish.console.metric_table import MetricTable
from planish.console.rollout_table import Filter, RolloutTable

_SCORES = ("/env/all/correct", "/env/all/reward/total", "/env/all/avg@", "/env/all/pass@")
_OTHER_SCORES = ("test/nll", "test/bpb", "test/accuracy", "test/margin", "test/teacher_kl")


def score_names(metrics: MetricTable) -> list[str]:
    """Return the metrics of evaluations that count as scores."""
    return sorted(
        name
        for name in metrics.columns
        if any(part in name and not name.startswith("env/") for part in _SCORES)
        or name in _OTHER_SCORES
        or "/win_rate" in name
    )


def evaluations(metrics: MetricTable, rollouts: RolloutTable) -> dict[str, Any]:
    """Return the `scores` by step and the `splits` with their questions.

    A split has the mean reward of each step with its standard error over questions, because answers
    to one question are not independent.
    """
    names = score_names(metrics)
    steps = sorted({float(step) for name in names for step in metrics.values(name)[0]})
    columns = {}
    for name in names:
        at, values = metrics.values(name)
        columns[name] = dict(zip(at.tolist(), values.tolist(), strict=True))
    scores = [
        {"step": step, "values": {name: columns[name].get(step) for name in names}}
        for step in steps
    ]
    splits = [
        _split(rollouts, split)
        for split, _ in rollouts.choices("split")
        if split.startswith("eval/")
    ]
    return {"names": names, "scores": scores, "splits": splits}


def _split(rollouts: RolloutTable, split: str) -> dict[str, Any]:
    rows = rollouts.select(Filter(split=split))
    step, group, reward = (rollouts.column(name)[rows] for name in ("step", "group", "reward"))
    by_step: dict[float, dict[int, list[float]]] = {}
    for at, number, value in zip(step.tolist(), group.tolist(), reward.tolist(), strict=True):
        by_step.setdefault(at, {}).setdefault(int(number), []).append(value)
    ordered = sorted(by_step)
    prompts = dict(zip(group.tolist(), rollouts.texts("prompt_id", rows), strict=True))
    first, last = by_step[ordered[0]], by_step[ordered[-1]]
    questions = [
        {
            "group": number,
            "prompt_id": prompts[number],
            "before": _mean(first.get(number, [])),
            "after": _mean(last.get(number, [])),
        }
        for number in sorted(first.keys() | last.keys())
    ]
    return {
        "split": split,
        "steps": [{"step": at, **_summary(by_step[at])} for at in ordered],
        "first_step": ordered[0],
        "last_step": ordered[-1],
        "questions": questions,
    }


def _summary(rewards: dict[int, list[float]]) -> dict[str, Any]:
    means = np.array([mean for values in rewards.values() if (mean := _mean(values)) is not None])
    count = len(means)
    return {
        "questions": count,
        "answers": sum(map(len, rewards.values())),
        "mean": float(means.mean()) if count else None,
        "stderr": float(means.std(ddof=1) / math.sqrt(count)) if count > 1 else None,
    }


def _mean(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
