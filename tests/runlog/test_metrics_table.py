"""The table of a step fits its width and shows the main metrics."""

import io

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from planish.runlog.metrics_table import VALUE_WIDTH, format_number, metrics_table

METRICS = {
    "time/total": 23.456,
    "time/publish": 0.03,
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
DETAILS = {
    "time/publish",
    "time/env_step:count",
    "time/env_step:mean",
    "time/env_step:max",
    "progress/batch",
    "env/all/total_ac_tokens",
}
RL_STEP = {
    **{
        f"env/all/{name}": 0.5
        for name in (
            "reward/total",
            "correct",
            "format",
            "ac_tokens_per_turn",
            "ob_tokens_per_turn",
            "turns_per_episode",
            "total_turns",
            "total_ac_tokens",
            "by_group/frac_mixed",
            "by_group/frac_all_bad",
            "by_group/frac_all_good",
            "stop/completed",
            "stop/max_tokens",
        )
    },
    **{f"env/all/{name}": 0.0 for name in ("unjudged", "stop/max_turns", "stop/rollout_timeout")},
    **{
        f"optim/{name}": 0.001
        for name in (
            "lr",
            "loss:sum",
            "grad_norm",
            "entropy",
            "ratio:min",
            "ratio:max",
            "kl_sample_train_v1",
            "kl_sample_train_v2",
            "tokens:sum",
            "adam_step",
        )
    },
    **{f"tokens/cumulative/{name}": 1e6 for name in ("sampled", "trained", "prefill_cached")},
    **{f"tokens/{name}": 1e4 for name in ("sampled", "trained", "prefill_cached")},
    "progress/batch": 3,
    "progress/done_frac": 0.04,
    "time/total": 20.0,
    "time/sampling": 15.0,
    "time/train": 4.0,
    "time/publish": 0.1,
    "time/rollout_files": 0.2,
}


def shown(metrics: dict[str, float], width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(metrics_table(12, 100, metrics, width))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [48, 80, 120, 200])
def test_it_fits_its_width_and_shows_every_main_value(width):
    lines = shown(METRICS, width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for name, value in METRICS.items():
        assert (format_number(value) in words) is (name not in DETAILS), name


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
        "time",
    ]
    assert lines[0].startswith("── step 12/100 ──")
    assert lines[1].split() == ["reward", "test/env/all", "0.41", "env/all", "0.4843"]


def test_a_rare_event_is_shown_once_it_happens():
    names = ("env/all/stop/parse_error", "env/all/unjudged", "num_truncated")
    assert len(shown(dict.fromkeys(names, 0.0), 80)) == 1
    assert len(shown(dict.fromkeys(names, 0.25), 80)) == 3


def test_a_step_of_rl_has_about_ten_lines():
    assert len(shown(RL_STEP, 80)) <= 11


def test_a_step_without_metrics_is_its_title():
    assert [line.rstrip("─ ") for line in shown({}, 80)] == ["── step 12/100"]


@given(st.one_of(st.integers(-(10**12), 10**12), st.floats(-1e300, 1e300)))
def test_a_number_is_short_and_near_the_truth(value):
    text = format_number(value)
    assert len(text) <= VALUE_WIDTH + 1  # an exponent of three digits with a sign
    assert float(text.replace(",", "")) == pytest.approx(value, rel=6e-3)
