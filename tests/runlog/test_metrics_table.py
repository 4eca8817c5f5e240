"""The table of a step fits its width and leaves nothing out but what it says."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from planish.runlog.metrics_table import VALUE_WIDTH, metrics_table, number

METRICS = {
    "time/total": 23.456,
    "time/env_step:total": 3.1,
    "time/env_step:count": 128,
    "time/env_step:mean": 0.02,
    "time/env_step:max": 0.5,
    "progress/batch": 12,
    "optim/lr": 2.5e-4,
    "optim/kl_sample_train_v2": 2.6e-13,
    "kl_policy_base": 0.01,
    "test/env/all/correct": 0.4,
    "test/env/all/reward/total": 0.41,
    "async/staleness_max": 2,
    "env/all/by_group/frac_mixed": 0.44,
    "env/all/total_ac_tokens": 1234567,
    "env/all/reward/total": 0.4843,
    "env/[tag]/a_metric_with_a_very_long_name_indeed": 1.5,
}


def shown(metrics: dict[str, float], width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(metrics_table(12, 100, metrics, width))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [48, 80, 120, 200])
def test_it_fits_its_width_and_holds_every_value(width):
    lines = shown(METRICS, width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for name, value in METRICS.items():
        if not name.endswith((":count", ":mean", ":max")):
            assert number(value) in words


def test_rewards_come_first_and_time_last():
    lines = shown(METRICS, 80)
    sections = [line.split()[0] for line in lines[1:] if not line.startswith(" ")]
    assert sections == [
        "reward",
        "env/[tag]",
        "env/all",
        "test/env/all",
        "optim",
        "kl",
        "async",
        "progress",
        "time",
    ]
    assert lines[0].startswith("── step 12/100 ──")
    assert lines[1].split() == ["reward", "test/env/all", "0.41", "env/all", "0.4843"]


def test_of_a_span_that_ran_often_the_total_is_shown():
    text = "\n".join(shown(METRICS, 120))
    assert "env_step:total" in text
    assert ":count" not in text
    assert ":mean" not in text


def test_it_is_compact():
    assert len(shown(METRICS, 80)) <= 14


def test_a_step_without_metrics_is_its_title():
    assert [line.rstrip("─ ") for line in shown({}, 80)] == ["── step 12/100"]


@given(st.one_of(st.integers(-(10**12), 10**12), st.floats(-1e300, 1e300)))
def test_a_number_is_short_and_near_the_truth(value):
    text = number(value)
    assert len(text) <= VALUE_WIDTH + 1  # an exponent of three digits with a sign
    assert float(text.replace(",", "")) == pytest.approx(value, rel=6e-3)
