"""Each metric has one definition, and the page shows it."""

import re

import pytest

from planish.errors import UserError
from planish.recipes.grpo import Judgement, Rollout, RolloutGroup, rollout_metrics
from planish.rl import metric_definitions
from planish.rl.metric_definitions import SECTIONS, definition_of, page_with_table
from planish.types import ModelInput

DEFINITIONS = [metric for section in SECTIONS for metric in section.metrics]
PAGE = metric_definitions.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("env/all/reward/total", "env/<tag>/reward/total"),
        ("env/gsm8k/level_5/reward/total", "env/<tag>/reward/total"),
        ("test/env/all/correct", "env/<tag>/correct"),
        ("hard_sums/env/all/by_group/frac_mixed", "env/<tag>/by_group/frac_mixed"),
        ("env/all/stop/max_tokens", "env/<tag>/stop/<reason>"),
        ("env/all/guesses", "env/<tag>/<name>"),
        ("env/all/tool_calls", "env/<tag>/tool_calls"),
        ("test/env/all/tool_calls/calculate", "env/<tag>/tool_calls/<tool>"),
        ("env/all/tool_errors", "env/<tag>/tool_errors"),
        ("test/rollout_errors/groups_skipped", "<evaluator>/rollout_errors/groups_skipped"),
        ("training_client/step", "training_client/step"),
        ("time/sampling_time_max", "time/sampling_time_max"),
        ("reward/total", "reward/total"),
        ("optim/kl_sample_train_v2", "optim/kl_sample_train_v2"),
        ("optim/loss:sum", "optim/loss:sum"),
        ("tokens/sampled", "tokens/sampled"),
        ("tokens/cumulative/sampled", "tokens/cumulative/<kind>"),
        ("rollout_errors/total", "rollout_errors/total"),
        ("rollout_errors/TimeoutError", "rollout_errors/<type>"),
        ("time/total", "time/total"),
        ("time/env_step:mean", "time/<span>:mean"),
        ("time/sampling", "time/<span>"),
    ],
)
def test_a_key_has_the_definition_of_its_pattern(key, pattern):
    found = definition_of(key)
    assert found is not None
    assert found.pattern == pattern


@pytest.mark.parametrize(
    "key", ["reward", "env/all", "optim/unknown", "tests/reward/total", "time", "", "xreward/total"]
)
def test_what_is_no_metric_of_the_loop_has_none(key):
    assert definition_of(key) is None


@pytest.mark.parametrize("metric", DEFINITIONS, ids=lambda metric: metric.pattern)
def test_no_pattern_hides_behind_an_earlier_one(metric):
    assert definition_of(re.sub(r"<\w+>", "something", metric.pattern)) is metric
    assert metric.definition


def test_every_metric_of_rl_loop_has_a_definition():
    rollout = Rollout(
        [1, 2],
        [-0.5, -0.1],
        "stop",
        Judgement(1.0, {"correct": 1.0, "format": 1.0, "unjudged": 0.0}),
    )
    logged = rollout_metrics([RolloutGroup(ModelInput.from_ints([1]), [rollout], 0)])
    assert [key for key in logged if definition_of(key) is None] == []
    catch_all = [
        key for key in logged if definition_of(key) is definition_of("env/all/no_such_metric")
    ]
    assert catch_all == []


def test_the_page_is_up_to_date():
    assert page_with_table(PAGE) == PAGE, "run: python -m planish.rl.metric_definitions"


def test_the_page_names_only_metrics_that_exist():
    named = set(re.findall(r"`((?:env|test|optim|time|async|tokens)/[\w/:]+)`", PAGE))
    assert len(named) > 10
    assert [key for key in named if definition_of(key) is None] == []


def test_the_table_is_rewritten_in_its_place(tmp_path, monkeypatch):
    page = tmp_path / "metrics.md"
    page.write_text(
        f"before\n{metric_definitions.BEGIN}\nan old table\n{metric_definitions.END}\nafter\n"
    )
    monkeypatch.setattr(metric_definitions, "PAGE", page)
    metric_definitions.main()
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "an old table" not in text
    assert text.count("| `optim/entropy` |") == 1
    metric_definitions.main()
    assert page.read_text() == text


def test_a_page_without_its_marks_is_refused():
    with pytest.raises(UserError, match="put them around the place of the table"):
        page_with_table("# Metrics\n")


def test_an_installed_package_has_no_page_to_rewrite(tmp_path, monkeypatch):
    monkeypatch.setattr(metric_definitions, "PAGE", tmp_path / "none.md")
    with pytest.raises(SystemExit, match="run this in a checkout"):
        metric_definitions.main()
