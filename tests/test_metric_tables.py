"""Each metric has one definition in docs, and the definition is found by the metric's key."""

import re

import pytest
from metric_tables import BEGIN, DOCS, END, PAGES, definition_of, metrics_in, metrics_of

from planish.rl.answers import Answer, AnswerGroup, answer_metrics
from planish.types import ModelInput


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("env/all/reward/total", "env/<tag>/reward/total"),
        ("env/gsm8k/level_5/reward/total", "env/<tag>/reward/total"),
        ("test/env/all/correct", "env/<tag>/correct"),
        ("hard_sums/env/all/by_group/frac_mixed", "env/<tag>/by_group/frac_mixed"),
        ("env/all/ended", "env/<tag>/ended"),
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
    ("key", "page"),
    [
        *(
            (key, "reference/metrics.md")
            for key in ("reward", "env/all", "optim/unknown", "tests/reward/total", "time", "")
        ),
        ("xreward/total", "reference/metrics.md"),
        ("reward/total", "guide/supervised.md"),
        ("eval/gsm8k/reward", "guide/evaluation.md"),
    ],
)
def test_a_key_that_no_run_logs_has_no_definition(key, page):
    assert definition_of(key, page) is None


@pytest.mark.parametrize("page", PAGES)
def test_no_pattern_hides_behind_an_earlier_one(page):
    for metric in metrics_of(page):
        assert definition_of(re.sub(r"<\w+>", "something", metric.pattern), page) is metric
        assert metric.definition


def test_every_metric_of_rl_loop_has_a_definition_of_its_own():
    grade = {"correct": 1.0, "format": 1.0, "unjudged": 0.0}
    answer = Answer([1, 2], [-0.5, -0.1], "stop", 1.0, grade)
    logged = answer_metrics([AnswerGroup(ModelInput.from_ints([1]), [answer], 0)])
    assert [key for key in logged if definition_of(key) is None] == []
    catch_all = definition_of("env/all/no_such_metric")
    assert [key for key in logged if definition_of(key) is catch_all] == []


def test_the_page_names_only_metrics_that_exist():
    page = (DOCS / "reference/metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:env|test|optim|time|async|tokens)/[\w/:]+)`", page))
    assert len(named) > 10
    assert [key for key in named if definition_of(key) is None] == []


def test_an_unreadable_page_is_rejected():
    with pytest.raises(ValueError, match="around its tables"):
        metrics_in("# Metrics\n")
    with pytest.raises(ValueError, match="has 3 cells"):
        metrics_in(f"{BEGIN}\n| `reward` | | cut off |\n{END}\n")
