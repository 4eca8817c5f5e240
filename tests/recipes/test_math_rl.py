"""math_rl from its options to its rows, for each kind of environment. Options that an environment
would ignore are rejected.
"""

from pathlib import Path

import pytest

from planish import ServiceClient
from planish.errors import UserError
from planish.files import read_rows
from planish.recipes import math_rl
from planish.recipes.math_rl import (
    ENV_DEFAULTS,
    Options,
    check,
    dataset_builder,
    options_for,
    with_env_defaults,
)
from planish.recipes.reasoning_problems import TaskDatasetBuilder
from planish.recipes.sum_tasks import SumDatasetBuilder
from planish.recipes.training_run import read_options
from planish.rl.environments.boxed_problems import BoxedProblemDatasetBuilder
from planish.testing import tiny_model

DATA = Path(__file__).parents[1] / "datasets" / "data"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceClient(data_dir=tmp_path_factory.mktemp("data")) as client:
        yield client


ENVS = [
    ("arithmetic", {"max_operand": 5}, {"correct", "format"}),
    ("gsm8k", {"dataset": "sums"}, {"correct", "format", "unjudged"}),
    ("math", {"dataset": str(DATA / "math")}, {"correct", "format", "unjudged"}),
    ("polaris", {"dataset": str(DATA / "polaris.jsonl")}, {"correct", "format", "unjudged"}),
    ("deepmath", {"dataset": str(DATA / "deepmath.jsonl")}, {"correct", "format", "unjudged"}),
    (
        "reasoning_gym:chain_sum",
        {"task": {"max_terms": 2}, "shown_examples": 1},
        {"correct", "format", "score"},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "changes", "metrics"),
    [*ENVS[:-1], pytest.param(*ENVS[-1], marks=pytest.mark.sandbox)],
    ids=[env for env, _, _ in ENVS],
)
def test_two_steps_of_each_kind(model, service, sums_dataset, tmp_path, env, changes, metrics):
    if env.startswith("reasoning_gym"):
        pytest.importorskip("reasoning_gym")
    if changes.get("dataset") == "sums":
        changes = {"dataset": str(sums_dataset)}
    small = {
        "batch_size": 2,
        "group_size": 2,
        "lora_rank": 4,
        "max_tokens": 4,
        "max_steps": 2,
        "eval_problems": 2,
    }
    options = options_for(env, model_name=model, log_path=str(tmp_path / "run"), **small, **changes)
    run = math_rl.main(options, service)
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {f"env/all/{name}" for name in metrics} <= rows[0].keys()
    assert rows[0]["env/all/total_episodes"] == 4
    assert rows[0]["test/env/all/total_episodes"] == rows[2]["test/env/all/total_episodes"] == 2
    assert (run / "eval_test_iteration_000000_logtree.json").exists()


def test_each_env_brings_its_sizes_and_options_override_them():
    for env in ("arithmetic", "math", "reasoning_gym:gcd"):
        presets, arguments = with_env_defaults([f"env={env}", "batch_size=3"])
        options = read_options(Options, presets, arguments)
        assert options == options_for(env, batch_size=3)
        assert options.log_path == f"/tmp/planish-examples/math_rl-{env.replace(':', '-')}"
    presets, arguments = with_env_defaults(["max_tokens=9", "env=math"])
    assert read_options(Options, presets, arguments).max_tokens == 9
    assert read_options(Options, *with_env_defaults([])) == options_for("arithmetic")
    assert options_for("gsm8k").max_steps is None


def test_options_reach_the_data():
    task = {"max_terms": 3}
    builder = dataset_builder(
        options_for("reasoning_gym:chain_sum", task=task, seed=4, eval_problems=7)
    )
    assert isinstance(builder, TaskDatasetBuilder)
    assert (builder.task_name, builder.task, builder.seed, builder.eval_problems) == (
        "chain_sum",
        task,
        4,
        7,
    )
    assert builder.shown_examples == 2
    assert dataset_builder(options_for("chain_sum")) == dataset_builder(
        options_for("reasoning_gym:chain_sum")
    )
    builder = dataset_builder(options_for("arithmetic", max_operand=9, group_size=5))
    assert isinstance(builder, SumDatasetBuilder)
    assert (builder.max_operand, builder.group_size) == (9, 5)
    builder = dataset_builder(options_for("deepmath", dataset="here.jsonl"))
    assert isinstance(builder, BoxedProblemDatasetBuilder)
    assert (builder.collection, builder.dataset) == ("deepmath", "here.jsonl")


@pytest.mark.parametrize("env", ENV_DEFAULTS)
def test_the_sizes_of_every_env_are_right(env):
    if env == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
        env = "reasoning_gym:gcd"
    check(options_for(env))


@pytest.mark.parametrize(
    ("env", "changes", "message"),
    [
        (
            "arithmetic",
            {"dataset": "rows.jsonl"},
            "dataset=rows.jsonl is no option of env=arithmetic",
        ),
        ("math", {"max_operand": 10}, "max_operand=10 is no option of env=math"),
        ("math", {"task": {"max_terms": 3}}, "task=.* is no option of env=math"),
        ("polaris", {"shown_examples": 0}, "shown_examples=0 is no option of env=polaris"),
        ("arithmetic", {"max_operand": 0}, "max_operand=0"),
        (
            "arithmetic",
            {"max_steps": None},
            "max_steps=None: give a number, because the problems of env=arithmetic are unlimited",
        ),
        ("arithmetic", {"num_epochs": 2}, "num_epochs=2: give 1"),
        ("arithmetic", {"group_size": 1}, "group_size=1"),
        ("gsm8k", {"batch_size": 0}, "batch_size=0"),
        ("gsm8k", {"eval_problems": -1}, "eval_problems=-1"),
    ],
)
def test_invalid_or_ignored_options_are_rejected(env, changes, message):
    with pytest.raises(UserError, match=message):
        math_rl.main(options_for(env, **changes))


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("reasoning_gym:chain_sums", "did you mean chain_sum"),
        (
            "arithmetics",
            "did you mean .*arithmetic.*the environments of planish itself are arithmetic, gsm8k",
        ),
        ("reasoning_gym", "env=reasoning_gym: .*no such task"),
    ],
)
def test_an_unknown_env_is_rejected_with_suggestions(env, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match=message):
        math_rl.main(options_for(env))
