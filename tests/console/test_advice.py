"""Every rule of "What is wrong": a run that it is about, and a healthy run without findings."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from sample_runs import rl_metrics

from planish.console.advice import Finding, RunFacts, findings
from planish.console.metric_table import MetricTable
from planish.console.run_state import CRASHED, FINISHED, RUNNING

STEPS = 60
REWARD = "env/all/reward/total"
GROUPS = "env/all/by_group/frac_"


def found(
    change: Callable[[int], dict[str, Any]] = lambda step: {},
    steps: int = STEPS,
    state: str = FINISHED,
    waiting: float | None = None,
    **config: Any,
) -> dict[str, Finding]:
    """Return the findings by rule of a run whose reward rises, with changed metrics."""
    rising = lambda step: {REWARD: step / steps, "env/all/correct": step / steps}  # noqa: E731
    rows = [
        {"step": step, **rl_metrics(step, steps, **rising(step)), **change(step)}
        for step in range(steps)
    ]
    metrics = MetricTable()
    # A changed value None is a metric that the row does not have.
    metrics.add([{k: v for k, v in row.items() if v is not None} for row in rows])
    return {each.rule: each for each in findings(RunFacts(metrics, state, waiting, config))}


def after(step: int, **metrics: Any) -> Callable[[int], dict[str, Any]]:
    names = {name.replace("__", "/"): value for name, value in metrics.items()}
    return lambda now: names if now >= step else {}


CASES: dict[str, Callable[[], dict[str, Finding]]] = {
    "reward-flat": lambda: found(lambda step: {REWARD: min(step, 30) / 60}),
    "reward-falls": lambda: found(lambda step: {REWARD: 30 - abs(step - 30)}),
    "groups-equal": lambda: found(lambda _: {GROUPS + "mixed": 0.1, GROUPS + "all_bad": 0.9}),
    "groups-solved": lambda: found(
        lambda _: {
            GROUPS + "mixed": 0.1,
            GROUPS + "all_good": 0.9,
            GROUPS + "all_bad": 0.0,
            "env/all/correct": 0.9,
        }
    ),
    "cut-off": lambda: found(after(40, env__all__stop__max_tokens=0.4), max_tokens=64),
    "parse_error": lambda: found(after(40, env__all__parse_error=0.2)),
    "stop-parse_error": lambda: found(after(40, env__all__stop__parse_error=0.2)),
    "unjudged": lambda: found(after(40, env__all__unjudged=0.01)),
    "abstained": lambda: found(after(40, env__all__abstained=0.01)),
    "tool_errors": lambda: found(after(40, env__all__tool_errors=0.8)),
    "gap": lambda: found(after(55, optim__kl_sample_train_v2=0.02)),
    "kl-rising": lambda: found(lambda step: {"kl_policy_base": step / 100}),
    "entropy-collapse": lambda: found(after(30, optim__entropy=0.01)),
    "entropy-rising": lambda: found(lambda step: {"optim/entropy": 1 + step / 20}),
    "no-value": lambda: found(after(30, optim__grad_norm=math.nan)),
    "errors-TimeoutError": lambda: found(lambda step: {"rollout_errors/TimeoutError": step}),
    "errors-groups_skipped": lambda: found(lambda step: {"rollout_errors/groups_skipped": step}),
    "stall": lambda: found(state=RUNNING, waiting=600.0),
    "slow": lambda: found(after(50, time__total=20.0)),
    "crashed": lambda: found(state=CRASHED),
}


@pytest.mark.parametrize("rule", CASES)
def test_a_run_with_one_fault_has_its_finding(rule):
    finding = CASES[rule]()[rule]
    assert finding.reason
    assert finding.remedy


@pytest.mark.parametrize("rule", sorted({*CASES} - {"reward-falls"}))
def test_a_fault_has_no_other_finding(rule):
    assert CASES[rule]().keys() == {rule}


@pytest.mark.parametrize("state", [FINISHED, RUNNING])
def test_a_healthy_run_has_no_finding(state):
    assert found(state=state, waiting=3.0) == {}


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_that_has_just_begun_has_no_finding(steps):
    assert found(steps=steps) == {}


def test_a_fault_that_has_gone_away_is_not_reported():
    assert found(lambda step: {"env/all/stop/max_tokens": 0.5 if step < 30 else 0.0}) == {}


def test_a_rise_that_is_significant_and_tiny_counts_as_flat():
    """The end of a real run: the reward is at its limit, and hardly varies any more."""
    finding = found(lambda step: {REWARD: min(step, 30) / 60 + 1e-4 * step})["reward-flat"]
    assert finding.since_step is not None
    assert 25 <= finding.since_step <= 35
    assert "reward-flat" not in found(lambda step: {REWARD: min(step, 30) / 60 + 5e-3 * step})


def test_equal_rewards_of_answers_that_are_not_correct_solve_nothing():
    """The end of a real run: all rewards are 8/12, and no answer is correct."""
    metrics = {GROUPS + "mixed": 0.0, GROUPS + "all_good": 1.0, GROUPS + "all_bad": 0.0}
    names = found(lambda step: {REWARD: min(step, 30) / 45, "env/all/correct": 0.0, **metrics})
    assert names.keys() == {"reward-flat", "groups-equal"}


def test_a_gap_of_a_run_that_trains_off_policy_may_be_larger():
    change = after(55, optim__kl_sample_train_v2=0.05)
    assert "gap" in found(change)
    assert "gap" not in found(change, async_config={"max_steps_off_policy": 2})


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_metric_that_has_no_value_is_named_with_its_step(value):
    """A run of planish leaves such values out of its log; other programs write NaN."""
    finding = found(after(30, optim__grad_norm=value))["no-value"]
    assert "optim/grad_norm" in finding.reason
    assert finding.since_step == (29 if value is None else 30)
    everywhere = found(after(0, optim__grad_norm=value))
    assert ("no-value" in everywhere) == (value is not None)


def test_a_metric_of_some_steps_only_is_no_fault():
    assert found(lambda step: {"test/env/all/correct": 0.5 if step % 20 == 0 else None}) == {}
    assert found(lambda step: {"early": 1.0 if step < 5 else None}) == {}
