"""What is wrong with a run: findings from its metrics, each with a reason, a remedy and a link.

The rules are those of docs/reference/metrics.md ("Sick patterns, and what to do"). A rule looks at
the last steps of the run, so a fault that has gone away is not reported. No rule changes a run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planish.console.metric_table import STEP_SECONDS, MetricTable
from planish.console.run_state import CRASHED, RUNNING

BAD, WARNING, NOTE = "bad", "warning", "note"
LAST_STEPS = 10
"""The number of steps that most rules look at."""
_MIN_STEPS_FLAT = 20
_MIN_STEPS = 3
REWARD = "env/all/reward/total"
_MIXED, _ALL_BAD, _ALL_GOOD = (
    f"env/all/by_group/frac_{name}" for name in ("mixed", "all_bad", "all_good")
)
_GAP = "optim/kl_sample_train_v2"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth a look."""

    rule: str
    severity: str
    """BAD, WARNING or NOTE."""
    title: str
    reason: str
    """The numbers that led to the finding."""
    remedy: str
    metric: str | None = None
    """The metric whose curve shows it."""
    since_step: float | None = None
    rollouts: dict[str, Any] | None = None
    """A filter of the rollouts that show it."""


@dataclass(frozen=True)
class RunFacts:
    """What the rules look at."""

    metrics: MetricTable
    state: str
    seconds_since_metrics: float | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def recent(self, name: str, count: int = LAST_STEPS) -> np.ndarray:
        """Return the last values of a metric."""
        return self.metrics.values(name)[1][-count:]

    def recent_mean(self, name: str) -> float | None:
        """Return the mean of the last values; None if there are fewer than three."""
        values = self.recent(name)
        return float(values.mean()) if len(values) >= _MIN_STEPS else None

    def share_solved(self) -> float:
        """Return the share of the last groups that are solved. A group of equal rewards from 0.5 on
        counts as all good, so where the run says which answers are correct, these count too.
        """
        good, correct = self.recent_mean(_ALL_GOOD) or 0.0, self.recent_mean("env/all/correct")
        return good if correct is None else min(good, correct)

    def recent_step(self, name: str) -> float | None:
        """Return the step at which the last values begin."""
        steps = self.metrics.values(name)[0][-LAST_STEPS:]
        return float(steps[0]) if len(steps) else None


Rule = Callable[[RunFacts], Iterator[Finding]]


def findings(facts: RunFacts) -> list[Finding]:
    """Return what is wrong, the worst first."""
    found = [finding for rule in RULES for finding in rule(facts)]
    return sorted(found, key=lambda finding: (BAD, WARNING, NOTE).index(finding.severity))


def plateau_start(steps: np.ndarray, values: np.ndarray) -> float | None:
    """Return the step from which a noisy curve has stopped rising; None if it still rises, or has
    fewer than _MIN_STEPS_FLAT points.

    The curve is smoothed over a tenth of its points. It has stopped rising if its last quarter is
    not above the quarter before by more than two standard errors, or by less than 5% of the total
    rise. The plateau starts where the smoothed curve first reaches 95% of its total rise.
    """
    count = len(values)
    if count < _MIN_STEPS_FLAT:
        return None
    quarter = count // 4
    before, last = values[-2 * quarter : -quarter], values[-quarter:]
    error = np.sqrt(before.var(ddof=1) / quarter + last.var(ddof=1) / quarter)
    window = max(3, count // 10)
    smooth = np.convolve(values, np.ones(window) / window, "valid")
    low, high = smooth[0], smooth[-quarter:].mean()
    if last.mean() - before.mean() > max(2 * error, 0.05 * (high - low)) + 1e-9:
        return None
    if high <= low:
        return float(steps[0])
    reached = np.flatnonzero(smooth >= low + 0.95 * (high - low))
    return float(steps[min(reached[0] + window // 2, count - 1)])


def _reward_flat(facts: RunFacts) -> Iterator[Finding]:
    steps, values = facts.metrics.values(REWARD)
    start = plateau_start(steps, values)
    if start is None:
        return
    quarter = len(values) // 4
    level, best = float(values[-quarter:].mean()), float(values.max())
    before = float(values[-2 * quarter : -quarter].mean())
    mixed = facts.recent_mean(_MIXED)
    if mixed is not None and facts.share_solved() > 0.8:
        return  # the task is learned
    causes = []
    if mixed is not None and mixed < 0.2:
        causes.append(f"only {mixed:.0%} of the groups have different rewards")
    cut_off = facts.recent_mean("env/all/stop/max_tokens")
    if cut_off is not None and cut_off > 0.1:
        causes.append(f"{cut_off:.0%} of the answers are cut off")
    entropy = facts.metrics.values("optim/entropy")[1]
    if len(entropy) > LAST_STEPS and entropy[-LAST_STEPS:].mean() < 0.2 * entropy[:3].mean():
        causes.append("the entropy has fallen by more than 80%")
    cause = "; ".join(causes) or "no other metric shows a cause, so read rollouts of both sides"
    yield Finding(
        "reward-flat",
        WARNING,
        f"The reward has not risen since step {start:g}",
        f"Its mean over the last {quarter} steps is {level:.3g} (highest value {best:.3g}), and over "
        f"the {quarter} steps before {before:.3g}. The difference is within two standard errors, or "
        f"5% of the whole rise. {cause[0].upper()}{cause[1:]}.",
        "Compare rollouts before and after this step: what do the wrong answers have in common?",
        REWARD,
        start,
        {"step_from": start, "sort": "reward"},
    )


def _groups_equal(facts: RunFacts) -> Iterator[Finding]:
    mixed = facts.recent_mean(_MIXED)
    if mixed is None or mixed >= 0.2:
        return
    bad, good = facts.recent_mean(_ALL_BAD) or 0.0, facts.recent_mean(_ALL_GOOD) or 0.0
    if facts.share_solved() > 0.8:
        yield Finding(
            "groups-solved",
            NOTE,
            "Nearly all groups are solved",
            f"{good:.0%} of the last groups are all right and {mixed:.0%} are mixed, so there is "
            "little left to learn.",
            "Use harder questions, or end the run.",
            _ALL_GOOD,
            facts.recent_step(_ALL_GOOD),
        )
        return
    yield Finding(
        "groups-equal",
        BAD,
        "Groups are all equal",
        f"Only {mixed:.0%} of the last groups have different rewards ({bad:.0%} have equal "
        f"rewards below 0.5, {good:.0%} equal rewards from 0.5 on). Groups of equal rewards have no "
        "advantages.",
        "Too hard: use easier questions or larger groups. Too easy: use harder questions.",
        _MIXED,
        facts.recent_step(_MIXED),
        {"reward_to": 0.0} if bad > good else None,
    )


def _cut_off(facts: RunFacts) -> Iterator[Finding]:
    share = facts.recent_mean("env/all/stop/max_tokens")
    if share is None or share <= 0.1:
        return
    limit = facts.config.get("max_tokens")
    yield Finding(
        "cut-off",
        BAD if share > 0.5 else WARNING,
        "Answers are cut off",
        f"{share:.0%} of the last answers reached max_tokens"
        + (f"={limit}." if limit is not None else "."),
        "Raise max_tokens if right answers do not fit. Otherwise count a cut-off answer as wrong.",
        "env/all/stop/max_tokens",
        facts.recent_step("env/all/stop/max_tokens"),
        {"ending": "max_tokens", "step_from": facts.recent_step("env/all/stop/max_tokens")},
    )


def _unreadable(facts: RunFacts) -> Iterator[Finding]:
    rules = (
        ("parse_error", 0.05, "Answers cannot be parsed", "were not well-formed messages"),
        ("stop/parse_error", 0.05, "Episodes end with parse errors", "ended with a parse error"),
        ("unjudged", 0.0, "Answers cannot be graded", "could not be graded and count as wrong"),
        ("abstained", 0.0, "The grader abstains", "were left out because their grader abstained"),
        ("tool_errors", 0.5, "Tool calls fail", "calls per turn were answered with an error"),
    )
    for name, limit, title, words in rules:
        share = facts.recent_mean(f"env/all/{name}")
        if share is not None and share > limit:
            yield Finding(
                name.replace("/", "-"),
                WARNING,
                title,
                f"{share:.1%} of the last answers {words}."
                if name != "tool_errors"
                else f"{share:.2g} {words}.",
                "Read such rollouts: check renderer, format and grader.",
                f"env/all/{name}",
                facts.recent_step(f"env/all/{name}"),
                {"ending": "parse_error"} if name == "stop/parse_error" else {"sort": "reward"},
            )


def _gap(facts: RunFacts) -> Iterator[Finding]:
    values = facts.recent(_GAP)
    lag = facts.config.get("async_config") or facts.config.get("max_steps_off_policy")
    is_off_policy = bool(lag) or (facts.config.get("num_substeps") or 1) != 1
    limit = 0.1 if is_off_policy else 1e-2
    if len(values) and values.max() > limit:
        yield Finding(
            "gap",
            BAD,
            "Sampler and trainer differ",
            f"kl_sample_train_v2 was {values.max():.2g} in the last {len(values)} steps; rounding "
            f"explains {limit:g} at most.",
            "Check that the loss uses the sampling temperature, and that sampled text is not "
            "tokenised again."
            if not is_off_policy
            else "Use a smaller lag, a lower learning rate, or a loss that clips (ppo, cispo).",
            _GAP,
            facts.recent_step(_GAP),
        )


def _drift(facts: RunFacts) -> Iterator[Finding]:
    for name in ("kl_policy_base", "kl_pre_post_v2"):
        steps, values = facts.metrics.values(name)
        if len(values) < _MIN_STEPS_FLAT:
            continue
        half = len(values) // 2
        before, after = values[:half], values[-half:]
        if after.mean() > 3 * max(np.median(before), 1e-3) and values[-3:].mean() > 0.1:
            yield Finding(
                "kl-rising",
                WARNING,
                f"{name} rises",
                f"Its mean in the second half of the run is {after.mean():.2g}, against "
                f"{before.mean():.2g} in the first half.",
                "Lower the learning rate, or raise kl_penalty_coef.",
                name,
                float(steps[half]),
            )


def _entropy(facts: RunFacts) -> Iterator[Finding]:
    steps, values = facts.metrics.values("optim/entropy")
    if len(values) < 5:
        return
    first, last = values[:3].mean(), values[-3:].mean()
    solved = facts.share_solved()
    if last < 0.15 * first and solved < 0.5:
        fallen = np.flatnonzero(values < 0.15 * first)
        yield Finding(
            "entropy-collapse",
            BAD,
            "The entropy has collapsed",
            f"It fell from {first:.2g} to {last:.2g} nats per token, and only {solved:.0%} of the "
            "groups are all right: the policy repeats itself before it has learned the task.",
            "Lower the learning rate, check that the sampling temperature is 1, or add a KL "
            "penalty.",
            "optim/entropy",
            float(steps[fallen[0]]) if len(fallen) else None,
        )
    elif last > 1.5 * first and last - first > 0.5:
        yield Finding(
            "entropy-rising",
            WARNING,
            "The entropy rises",
            f"It rose from {first:.2g} to {last:.2g} nats per token: updates reinforce text on "
            "which the reward does not depend.",
            "Lower the learning rate, and read the longest rollouts.",
            "optim/entropy",
            None,
            {"sort": "-tokens"},
        )


def _no_value(facts: RunFacts) -> Iterator[Finding]:
    """Metrics that are no number, or that have ended: curves leave such values out, and so does the
    log of a run.
    """
    columns = {name: facts.metrics.values(name)[0] for name in facts.metrics.columns}
    all_steps = max(columns.values(), key=len, default=np.empty(0))
    recent = all_steps[-LAST_STEPS:]
    found = []
    for name, steps in sorted(columns.items()):
        infinite = facts.metrics.steps_without_value(name)
        before = int(np.searchsorted(all_steps, steps[-1], "right")) if len(steps) else 0
        is_each_step = len(steps) >= max(LAST_STEPS, 0.9 * before)
        if len(recent) and np.any(infinite >= recent[0]):
            found.append((name, float(infinite[0])))
        elif is_each_step and len(all_steps) - before >= _MIN_STEPS:
            found.append((name, float(steps[-1])))
    if found:
        name, since = min(found, key=lambda pair: pair[1])
        others = f", and {len(found) - 5} more" if len(found) > 5 else ""
        yield Finding(
            "no-value",
            WARNING,
            "Metrics have no value",
            f"These had a value at each step until about step {since:g}, and then none, or one that "
            f"is no number: {', '.join(name for name, _ in found[:5])}{others}.",
            "Read the run's output at this step. A NaN often comes from a division by zero, or from "
            "a step that is far too large.",
            name,
            since,
            {"step_from": since},
        )


def _reward_falls(facts: RunFacts) -> Iterator[Finding]:
    steps, values = facts.metrics.values(REWARD)
    if len(values) < 2 * LAST_STEPS:
        return
    smooth = np.convolve(values, np.ones(LAST_STEPS) / LAST_STEPS, "valid")
    best = int(smooth.argmax())
    window = values[best : best + LAST_STEPS]
    fall, noise = smooth[best] - smooth[-1], window.std(ddof=1) + values[-LAST_STEPS:].std(ddof=1)
    if fall > max(noise, 0.1 * abs(smooth[best] - smooth[0]), 1e-6):
        yield Finding(
            "reward-falls",
            BAD,
            f"The reward has fallen since step {steps[best + LAST_STEPS - 1]:g}",
            f"Its mean over ten steps was {smooth[best]:.3g} there and is {smooth[-1]:.3g} now.",
            "Lower the learning rate by a factor of 3 to 10, and continue from the last good "
            "checkpoint (load_checkpoint_path).",
            REWARD,
            float(steps[best + LAST_STEPS - 1]),
        )


def _errors(facts: RunFacts) -> Iterator[Finding]:
    for name in sorted(facts.metrics.columns):
        kind = name.removeprefix("rollout_errors/")
        if kind == name or kind == "total":
            continue
        steps, values = facts.metrics.values(name)
        added = float(values[-1] - values[-min(len(values), LAST_STEPS)]) if len(values) else 0.0
        if len(values) and (added > 0 or len(values) < LAST_STEPS) and values[-1] > 0:
            what = "groups were dropped" if kind == "groups_skipped" else f"attempts: {kind}"
            yield Finding(
                f"errors-{kind}",
                WARNING,
                "Rollouts fail" if kind != "groups_skipped" else "Groups are dropped",
                f"{values[-1]:g} {what} in all, {added:g} in the last {LAST_STEPS} steps.",
                "Read the messages on the rollout page of a step, or in the run's output.",
                name,
                float(steps[0]),
                {"error": kind} if kind != "groups_skipped" else None,
            )


def _time(facts: RunFacts) -> Iterator[Finding]:
    seconds = facts.metrics.values(STEP_SECONDS)[1]
    if not len(seconds):
        return
    usual = float(np.median(seconds))
    waiting = facts.seconds_since_metrics
    if facts.state == RUNNING and waiting is not None and waiting > max(60.0, 5 * usual):
        yield Finding(
            "stall",
            BAD,
            "No step for a long time",
            f"The last row is {waiting:.0f} s old, and a step usually takes {usual:.0f} s.",
            "Look at the run's output: which rollouts or requests does it wait for?",
            STEP_SECONDS,
        )
    recent = facts.recent(STEP_SECONDS)
    if len(seconds) >= 2 * LAST_STEPS and recent.mean() > 3 * usual:
        yield Finding(
            "slow",
            WARNING,
            "Steps have become slow",
            f"The last {len(recent)} steps took {recent.mean():.0f} s on average, the median of "
            f"all is {usual:.0f} s.",
            "Compare the spans time/... of slow and fast steps.",
            STEP_SECONDS,
            facts.recent_step(STEP_SECONDS),
        )


def _crash(facts: RunFacts) -> Iterator[Finding]:
    if facts.state == CRASHED:
        yield Finding(
            "crashed",
            WARNING,
            "The run ended between two checkpoints",
            f"Its last step is {facts.metrics.last_step:g}, after its last checkpoint, and no "
            "process works on it.",
            "The same command resumes at the last checkpoint, and trains the steps after it again.",
        )


RULES: tuple[Rule, ...] = (
    _reward_falls,
    _reward_flat,
    _groups_equal,
    _cut_off,
    _unreadable,
    _gap,
    _drift,
    _entropy,
    _no_value,
    _errors,
    _time,
    _crash,
)
