"""rl_basic from its options to its files, on an untrained tiny model."""

import json
from pathlib import Path

import pandas
import pytest
from matplotlib.figure import Figure

from planish import ServiceClient
from planish.engine import settings as engine_settings
from planish.errors import UserError
from planish.files import read_rows
from planish.recipes import rl_basic
from planish.recipes.training_run import read_options
from planish.rl.environments.boxed_problems import BoxedProblemEnv
from planish.runlog.curves import read_series
from planish.testing import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def service(tmp_path):
    with ServiceClient(data_dir=tmp_path / "data") as client:
        yield client


def options(model, sums_dataset, tmp_path, **changes):
    usual = {
        "model_name": model,
        "dataset": str(sums_dataset),
        "log_path": str(tmp_path / "run"),
        "batch_size": 2,
        "group_size": 2,
        "lora_rank": 4,
        "max_tokens": 4,
        "max_steps": 2,
        "eval_problems": 2,
        "eval_every": 1,
    }
    return rl_basic.Options(**{**usual, **changes})


def test_a_run_and_its_files(model, sums_dataset, tmp_path, service):
    run = rl_basic.main(options(model, sums_dataset, tmp_path), service)
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all("test/env/all/correct" in row for row in rows)
    assert rows[0]["env/all/reward/total"] == pytest.approx(
        rows[0]["env/all/correct"] + 0.1 * (rows[0]["env/all/format"] - 1)
    )
    written = {path.name for path in run.iterdir()}
    for iteration in (
        "train_iteration_000000",
        "train_iteration_000001",
        "eval_test_iteration_000002",
    ):
        assert {
            f"{iteration}.html",
            f"{iteration}_logtree.json",
            f"{iteration}_rollout_summaries.jsonl",
        } <= written
    config = json.loads((run / "config.json").read_text())
    assert (config["recipe_name"], config["renderer_name"]) == ("rl_basic", "qwen3_instruct")
    assert config["dataset_builder"]["eval_problems"] == 2


def test_a_training_column_of_a_finished_run_has_no_gaps(model, sums_dataset, tmp_path, service):
    run = rl_basic.main(options(model, sums_dataset, tmp_path, eval_every=2), service)
    metric = "env/all/reward/total"
    rows = read_rows(run / "metrics.jsonl")
    expected = [row[metric] for row in rows[:2]]
    assert metric not in rows[2]

    assert read_series(run, metric) == dict(enumerate(expected))
    table = pandas.read_json(run / "metrics.jsonl", lines=True).set_index("step")[metric].dropna()
    for series in (pandas.Series(read_series(run / "metrics.jsonl", metric)), table):
        figure = Figure()
        axes = series.plot(ax=figure.add_subplot())
        assert list(axes.lines[0].get_ydata()) == expected
    with pytest.raises(
        UserError, match="has no metric env/all/reward; it has env/all/reward/total"
    ):
        read_series(run, "env/all/reward")


def test_the_same_command_with_more_steps_continues(model, sums_dataset, tmp_path, service):
    rl_basic.main(options(model, sums_dataset, tmp_path, eval_every=0), service)
    run = rl_basic.main(options(model, sums_dataset, tmp_path, eval_every=0, max_steps=3), service)
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.slow
def test_groups_rolled_out_in_another_process_use_that_one_s_renderer_and_grader(
    model, sums_dataset, tmp_path, service
):
    def trained(name, processes):
        changes = {"rollout_processes": processes, "log_path": str(tmp_path / name), "max_steps": 1}
        run = rl_basic.main(options(model, sums_dataset, tmp_path, **changes), service)
        # Which beginnings are known when a prompt comes depends on when that is.
        return [
            {
                k: v
                for k, v in row.items()
                if k.startswith(("env/", "test/")) and not k.endswith("total_cached_ob_tokens")
            }
            for row in read_rows(run / "metrics.jsonl")
        ]

    assert trained("here", 0) == trained("there", 1)


def test_the_penalty_is_reached_from_the_options(
    model, sums_dataset, tmp_path, service, monkeypatch
):
    async def chance(self, sample_str):
        return sum(sample_str.encode()) % 2 == 0

    monkeypatch.setattr(BoxedProblemEnv, "check_answer", chance)
    changes = {"kl_penalty_coef": 0.1, "eval_every": 0, "group_size": 4, "learning_rate": 1e-2}
    first = rl_basic.main(options(model, sums_dataset, tmp_path, **changes), service)
    rows = read_rows(first / "metrics.jsonl")
    assert rows[0]["kl_policy_base"] == pytest.approx(0.0, abs=1e-5), (
        "a fresh adapter is the base model"
    )
    assert abs(rows[1]["kl_policy_base"]) > 1e-4, "and no longer after a step"
    again = options(
        model,
        sums_dataset,
        tmp_path,
        load_checkpoint_path=str(first),
        log_path=str(tmp_path / "b"),
        **changes,
    )
    row = read_rows(rl_basic.main(again, service) / "metrics.jsonl")[0]
    assert row["kl_policy_base"] == pytest.approx(0.0, abs=1e-5), (
        "the reference is what the run begins with"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("group_size", 1),
        ("eval_problems", -1),
        ("learning_rate", 0.0),
        ("max_steps", 0),
    ],
)
def test_an_invalid_option_is_rejected_by_name(model, sums_dataset, tmp_path, name, value):
    with pytest.raises(UserError, match=f"{name}="):
        rl_basic.main(options(model, sums_dataset, tmp_path, **{name: value}))
    assert not (tmp_path / "run").exists()


def test_a_batch_larger_than_the_data_is_rejected(model, sums_dataset, tmp_path, service):
    with pytest.raises(UserError, match="batch_size=512 .*there are 26 groups to train on"):
        rl_basic.main(options(model, sums_dataset, tmp_path, batch_size=512), service)
    assert not (tmp_path / "run").exists()


def test_a_dataset_that_does_not_exist_is_rejected(model, tmp_path):
    with pytest.raises(UserError, match="the dataset ./nowhere: no such file"):
        rl_basic.main(options(model, Path("./nowhere"), tmp_path, dataset="./nowhere"))


def test_the_seed_preset_has_the_published_sizes():
    config = read_options(rl_basic.Options, rl_basic.PRESETS, ["preset=seed", "max_steps=15"])
    published = ("Qwen/Qwen3-8B", 128, 16, 4e-5, 256)
    assert (
        config.model_name,
        config.batch_size,
        config.group_size,
        config.learning_rate,
        config.max_tokens,
    ) == published
    assert (config.max_steps, config.eval_temperature, config.eval_problems) == (15, None, None)
    assert (
        read_options(rl_basic.Options, rl_basic.PRESETS, []).log_path
        == "/tmp/planish-examples/rl_basic"
    )


@pytest.mark.slow
def test_processes_that_share_a_base_model_train_as_one_process_does(
    model, sums_dataset, tmp_path, monkeypatch
):
    async def chance(self, sample_str):
        return sum(sample_str.encode()) % 2 == 0

    monkeypatch.setattr(BoxedProblemEnv, "check_answer", chance)
    monkeypatch.setattr(engine_settings, "_cpu_multiplies_bfloat16", lambda: False)
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "data"))

    def trained(name: str, tensor_parallel: int | None) -> list[dict[str, float]]:
        changes = {"log_path": str(tmp_path / name), "group_size": 4, "learning_rate": 1e-2}
        run = rl_basic.main(
            options(model, sums_dataset, tmp_path, tensor_parallel=tensor_parallel, **changes)
        )
        measured = ("env/", "test/", "optim/", "tokens/trained")
        return [
            {k: v for k, v in row.items() if k.startswith(measured) and "cached" not in k}
            for row in read_rows(run / "metrics.jsonl")
        ]

    whole = trained("whole", None)
    assert any(row.get("tokens/trained") for row in whole)
    for row, expected in zip(trained("divided", 2), whole, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)
