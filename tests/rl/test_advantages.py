import statistics

import pytest
from hypothesis import given, strategies as st

from planish.rl.advantages import ADVANTAGES, is_constant

rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=8)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(rewards_G=rewards)
def test_advantages_of_a_group_sum_to_zero(name, rewards_G):
    assert sum(ADVANTAGES[name](rewards_G)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("rewards_G", [[0.3], [0.25, 0.25, 0.25], [0.1, 0.1, 0.1]])
def test_a_group_with_equal_rewards_has_zero_advantages(name, rewards_G):
    assert ADVANTAGES[name](rewards_G) == [0.0] * len(rewards_G)
    assert is_constant(rewards_G)


def test_each_advantage_estimator_equals_its_formula():
    rewards_G = [1.0, 0.0, 0.5, -2.0]
    mean, deviation = statistics.fmean(rewards_G), statistics.pstdev(rewards_G)
    assert ADVANTAGES["mean"](rewards_G) == pytest.approx([r - mean for r in rewards_G])
    assert ADVANTAGES["std"](rewards_G) == pytest.approx(
        [(r - mean) / (deviation + 1e-6) for r in rewards_G]
    )
    others = [statistics.fmean([x for j, x in enumerate(rewards_G) if j != i]) for i in range(4)]
    assert ADVANTAGES["leave_one_out"](rewards_G) == pytest.approx(
        [r - other for r, other in zip(rewards_G, others, strict=True)]
    )
    assert ADVANTAGES["none"](rewards_G) == [0.0] * 4
    assert not is_constant(rewards_G)
