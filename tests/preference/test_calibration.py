"""Calibration finds the temperature with which the data were sampled."""

import math
import random

import pytest
from hypothesis import given, strategies as st

from planish.preference.calibration import MAX_TEMPERATURE, fit_temperature


def drawn(temperature, count, seed=0):
    """Return the log-odds of preferred answers, sampled with the probability sigmoid(odds /
    temperature).
    """
    generator = random.Random(seed)
    found = []
    for _ in range(count):
        odds = generator.gauss(0, 3)
        right = generator.random() < 1 / (1 + math.exp(-odds / temperature))
        found.append(odds if right else -odds)
    return found


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_calibration_recovers_the_temperature(temperature):
    assert fit_temperature(drawn(temperature, 20_000)) == pytest.approx(temperature, rel=0.1)


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=30), st.floats(0.1, 10))
def test_calibration_minimises_the_smoothed_log_loss(odds, factor):
    found = fit_temperature(odds)
    target = (len(odds) + 1) / (len(odds) + 2)

    def loss(temperature):
        def softplus(x):
            return max(x, 0) + math.log1p(math.exp(-abs(x)))

        return sum(
            target * softplus(-x / temperature) + (1 - target) * softplus(x / temperature)
            for x in odds
        )

    assert loss(found) <= loss(min(max(found * factor, 1e-3), MAX_TEMPERATURE)) + 1e-6


def test_a_perfect_model_gets_a_bounded_temperature():
    few, many = fit_temperature([2.0] * 4), fit_temperature([2.0] * 400)
    assert few == pytest.approx(2.0 / math.log(5))
    assert many < few
    assert fit_temperature([2.0] * 8, num_pairs=4) == pytest.approx(few), (
        "both orders of a pair are one opinion"
    )


def test_a_wrong_model_is_flattened_and_no_data_change_nothing():
    assert fit_temperature([-1.0, -2.0]) == pytest.approx(MAX_TEMPERATURE, rel=1e-3)
    assert fit_temperature([]) == 1.0
