"""Measures of judgments, on cases that can be counted by hand."""

import asyncio
import math

import pytest
from hypothesis import given, strategies as st

from planish.preference.judgments import (
    Judgment,
    PreferenceModelEvaluator,
    expected_calibration_error,
    judge,
    judgment_metrics,
    log_odds_of_chosen,
)
from planish.preference.types import Comparison, LabeledComparison


def says(text):
    return [{"role": "assistant", "content": text}]


LONG, SHORT = says("a long answer"), says("short")
PAIRS = [
    LabeledComparison(Comparison([], LONG, SHORT), "B"),
    LabeledComparison(Comparison([], SHORT, LONG), "A"),
    LabeledComparison(Comparison([], SHORT, LONG), "B"),
    LabeledComparison(Comparison([], SHORT, SHORT), "Tie"),
]


async def shorter(comparison):
    """Prefer short answers with 0.6, and the second position with 0.2."""
    a, b = (
        len(answer[0]["content"]) for answer in (comparison.completion_A, comparison.completion_B)
    )
    return 0.2 + (0.6 if b < a else -0.6)


def test_metrics_of_one_order_equal_a_hand_computation():
    found = judgment_metrics(asyncio.run(judge(shorter, PAIRS, both_orders=False)))
    right, wrong = [0.9, 0.7], 0.3
    assert found["num_pairs"] == 3, "a tie is not judged"
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["accuracy_stderr"] == pytest.approx(math.sqrt(2 / 9 * 3 / 2 / 3))
    assert found["log_loss"] == pytest.approx(-sum(math.log(p) for p in [*right, wrong]) / 3)
    assert found["brier"] == pytest.approx((0.01 + 0.09 + 0.49) / 3)
    assert found["ece"] == pytest.approx((0.1 + 2 * abs(0.7 - 0.5)) / 3)
    assert "position_bias" not in found


def test_metrics_of_both_orders_equal_a_hand_computation():
    found = judgment_metrics(asyncio.run(judge(shorter, PAIRS[:2], both_orders=True)))
    assert found["num_pairs"] == 2
    assert found["accuracy"] == 1.0
    assert found["position_bias"] == pytest.approx(0.2)
    assert found["order_agreement"] == 1.0
    assert found["log_loss"] == pytest.approx(-(math.log(0.9) + math.log(0.7)) / 2)


async def always_second(comparison):
    return 1.0


def test_a_model_with_only_a_position_bias_is_at_chance():
    found = judgment_metrics(asyncio.run(judge(always_second, PAIRS, both_orders=True)))
    assert (found["accuracy"], found["order_agreement"], found["position_bias"]) == (0.5, 0.0, 1.0)
    assert found["accuracy_stderr"] == 0.0
    assert found["log_loss"] == pytest.approx(-math.log(1e-6) / 2)
    assert found["ece"] == pytest.approx(0.5)


def test_one_comparison_has_no_standard_error():
    assert "accuracy_stderr" not in judgment_metrics(
        asyncio.run(judge(always_second, PAIRS[:1], both_orders=True))
    )


@given(st.lists(st.tuples(st.sampled_from([-1, 1]), st.floats(-1, 1)), min_size=1, max_size=40))
def test_an_antisymmetric_model_has_equal_metrics_in_both_orders(judged):
    one = judgment_metrics([Judgment(sign, value) for sign, value in judged])
    both = judgment_metrics([Judgment(sign, value, -value) for sign, value in judged])
    assert both.pop("position_bias") == 0
    both.pop("order_agreement")
    assert one == pytest.approx(both)
    assert 0 <= one["ece"] <= 1


def test_calibration_error_includes_bin_edges():
    assert expected_calibration_error([1.0, 1.0]) == 0
    assert expected_calibration_error([0.5, 0.5]) == 0
    assert expected_calibration_error([0.0]) == 1


class Odds:
    async def __call__(self, comparison):
        return await shorter(comparison)

    async def log_odds(self, comparison):
        return 3.0 if await shorter(comparison) > 0 else -1.0


def test_log_odds_are_those_of_the_preferred_answer():
    assert asyncio.run(log_odds_of_chosen(Odds(), PAIRS, both_orders=False)) == [3.0, 1.0, -1.0]
    assert asyncio.run(log_odds_of_chosen(Odds(), PAIRS[:1], both_orders=True)) == [3.0, 1.0]


class Busy:
    """A model that fails on one question and never answers the others."""

    def __init__(self):
        self.running = 0

    async def __call__(self, comparison):
        self.running += 1
        try:
            if comparison.completion_A == PAIRS[0].comparison.completion_A:
                raise OSError("gone")
            await asyncio.sleep(60)
            return 0.0
        finally:
            self.running -= 1

    log_odds = __call__


@pytest.mark.parametrize("ask", [judge, log_odds_of_chosen])
@pytest.mark.parametrize("pairs", [PAIRS, PAIRS[1:2]], ids=["an error", "a cancellation"])
def test_no_request_is_sent_after_a_judge_has_failed(ask, pairs):
    async def left():
        model = Busy()
        asking = asyncio.create_task(ask(model, pairs, both_orders=True))
        await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises((OSError, asyncio.CancelledError)):
            await asking
        return model.running

    assert asyncio.run(left()) == 0


def test_the_evaluator_names_its_metrics_and_dropped_comparisons():
    evaluator = PreferenceModelEvaluator(
        PAIRS, lambda client: client, both_orders=False, num_left_out=2, name="dev"
    )
    found = asyncio.run(evaluator(shorter))  # pyright: ignore[reportArgumentType]
    assert (found["dev/num_pairs"], found["dev/num_left_out"]) == (3, 2)
    assert all(name.startswith("dev/") for name in found)
