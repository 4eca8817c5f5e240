"""pass@k agrees with counting all subsets, and standard errors agree with their textbook
formula.
"""

import itertools
import statistics

import pytest
from hypothesis import given, strategies as st

from planish.errors import UserError
from planish.runlog.statistics import Mean, pass_at_k


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_equals_counting_all_subsets(samples):
    for correct in range(samples + 1):
        answers = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(answers, k))
            assert pass_at_k(samples, correct, k) == pytest.approx(
                sum(map(any, subsets)) / len(subsets)
            )


def test_pass_at_k_is_unbiased():
    chance, samples, k = 0.3, 6, 3
    outcomes = itertools.product([True, False], repeat=samples)
    mean = sum(
        chance ** sum(right)
        * (1 - chance) ** (samples - sum(right))
        * pass_at_k(samples, sum(right), k)
        for right in outcomes
    )
    assert mean == pytest.approx(1 - (1 - chance) ** k)


def test_pass_at_k_of_many_samples_neither_overflows_nor_loses_digits():
    assert pass_at_k(2000, 1, 100) == pytest.approx(0.05)
    assert pass_at_k(2000, 0, 100) == 0.0
    assert pass_at_k(2000, 1999, 2) == 1.0


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 5, 1), (4, 1, 5), (4, 1, 0), (4, -1, 1)])
def test_invalid_values_are_rejected(samples, correct, k):
    with pytest.raises(UserError, match="k is from 1"):
        pass_at_k(samples, correct, k)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_the_standard_error_is_that_of_a_mean(values):
    mean = Mean.from_values(values)
    assert mean.value == pytest.approx(statistics.mean(values))
    assert mean.stderr == pytest.approx(statistics.stdev(values) / len(values) ** 0.5, abs=1e-9)


def test_one_value_says_nothing_of_its_spread():
    assert Mean.from_values([0.5]) == Mean(0.5, None)
