"""Metrics of a preference model on held-out comparisons. Ties are left out, because they have no
right answer.

P is the probability that the model assigns to the answer that people prefer: (1 + preference) / 2
if B is preferred, (1 - preference) / 2 if A is.

    accuracy          fraction of comparisons with P > 1/2; P = 1/2 counts half
    log_loss          mean of -log P, with P clamped to at least 1e-6, because a model that samples
                      its label may assign 0
    brier             mean of (1 - P)^2
    ece               expected calibration error: |mean of max(P, 1 - P) - accuracy| in ten bins of
                      max(P, 1 - P), weighted by size
    position_bias     mean over comparisons of (preference + preference of the swap) / 2; above 0,
                      the model favours the second position
    order_agreement   fraction of comparisons in which both orders favour the same answer

If the order of the answers can influence the model, both orders of the N comparisons are judged.
The means are then over 2 N values of P, and position_bias is measured. These metrics apply to any
preference model, trained or not.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from planish import SamplingClient
from planish.preference.preference_models import LogOddsModel, PreferenceModel, preference_of
from planish.preference.types import Label, LabeledComparison
from planish.processes.interruption import gather_or_cancel
from planish.runlog.evaluators import SamplingClientEvaluator
from planish.runlog.statistics import Mean

MIN_PROBABILITY = 1e-6
"""The smallest probability in log_loss."""
NUM_BINS = 10
"""The number of bins of ece."""
LABEL_SIGNS: dict[Label, int] = {"A": -1, "B": 1, "Tie": 0}


@dataclass(frozen=True)
class Judgment:
    """A model's preferences for one comparison."""

    sign: int
    """The label as a number: 1 for B, -1 for A."""
    preference: float
    swapped_preference: float | None = None
    """The model's preference for the swapped comparison; None if it was not asked for."""

    @property
    def probabilities(self) -> list[float]:
        """The probability of the preferred answer, for each order that was asked for."""
        found = [(1 + self.sign * self.preference) / 2]
        return (
            found
            if self.swapped_preference is None
            else [*found, (1 - self.sign * self.swapped_preference) / 2]
        )


async def judge(
    model: PreferenceModel, comparisons: Sequence[LabeledComparison], *, both_orders: bool
) -> list[Judgment]:
    """Return the model's judgments of the comparisons that are not ties.

    All requests run concurrently, and the first error cancels the others.
    """
    ranked = [labeled for labeled in comparisons if labeled.ranked is not None]
    as_given = [labeled.comparison for labeled in ranked]
    swaps = [comparison.swap() for comparison in as_given] if both_orders else []
    found = await gather_or_cancel(
        preference_of(model, comparison) for comparison in [*as_given, *swaps]
    )
    preferences = found[: len(ranked)]
    swapped_preferences = found[len(ranked) :] if both_orders else [None] * len(ranked)
    return [
        Judgment(LABEL_SIGNS[labeled.label], one, other)
        for labeled, one, other in zip(ranked, preferences, swapped_preferences, strict=True)
    ]


async def log_odds_of_chosen(
    model: LogOddsModel, comparisons: Sequence[LabeledComparison], *, both_orders: bool
) -> list[float]:
    """Return the log-odds of each preferred answer over the other one, before any temperature.

    With `both_orders`, the values of the swapped comparisons follow those of the given ones.
    """
    ranked = [labeled for labeled in comparisons if labeled.ranked is not None]
    ordered = [*ranked, *(labeled.swap() for labeled in ranked)] if both_orders else ranked
    given = await gather_or_cancel(model.log_odds(labeled.comparison) for labeled in ordered)
    return [LABEL_SIGNS[labeled.label] * each for labeled, each in zip(ordered, given, strict=True)]


def judgment_metrics(judgments: Sequence[Judgment]) -> dict[str, float]:
    """Return the metrics listed above and num_pairs; {} if there are no judgments.

    With more than one pair, accuracy_stderr is the standard error over comparisons.
    """
    if not judgments:
        return {}
    probabilities = [p for judgment in judgments for p in judgment.probabilities]
    pair_accuracies = [
        _mean([_correctness(p) for p in judgment.probabilities]) for judgment in judgments
    ]
    found = {
        **Mean.from_values(pair_accuracies).as_metrics("accuracy"),
        "log_loss": _mean([-math.log(max(p, MIN_PROBABILITY)) for p in probabilities]),
        "brier": _mean([(1 - p) ** 2 for p in probabilities]),
        "ece": expected_calibration_error(probabilities),
        "num_pairs": len(judgments),
    }
    preference_pairs = [
        (each.preference, each.swapped_preference)
        for each in judgments
        if each.swapped_preference is not None
    ]
    if preference_pairs:
        found["position_bias"] = _mean([(one + other) / 2 for one, other in preference_pairs])
        found["order_agreement"] = _mean(
            [float(one * other < 0) for one, other in preference_pairs]
        )
    return found


def expected_calibration_error(probabilities: Sequence[float]) -> float:
    """Return the ece for the probabilities of preferred answers, with equally wide bins from 1/2 to
    1.
    """
    bins: list[list[float]] = [[] for _ in range(NUM_BINS)]
    for p in probabilities:
        confidence = max(p, 1 - p)
        bins[min(int((confidence - 0.5) * 2 * NUM_BINS), NUM_BINS - 1)].append(p)
    errors = [
        len(group)
        * abs(_mean([max(p, 1 - p) for p in group]) - _mean([_correctness(p) for p in group]))
        for group in bins
        if group
    ]
    return sum(errors) / len(probabilities)


@dataclass(eq=False)
class PreferenceModelEvaluator(SamplingClientEvaluator):
    """An evaluator of a preference model during training: NAME/accuracy and the other metrics
    above.
    """

    comparisons: Sequence[LabeledComparison]
    make_model: Callable[[Any], PreferenceModel]
    """Makes the preference model from a sampling client of the current weights."""
    _: KW_ONLY
    both_orders: bool
    num_left_out: int = 0
    """The number of comparisons that were too long; it is reported as num_left_out."""
    name: str = "test"

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        judgments = await judge(
            self.make_model(sampling_client), self.comparisons, both_orders=self.both_orders
        )
        found = {**judgment_metrics(judgments), "num_left_out": self.num_left_out}
        return {f"{self.name}/{name}": value for name, value in found.items()}


def _correctness(p: float) -> float:
    return 0.5 if p == 0.5 else float(p > 0.5)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
