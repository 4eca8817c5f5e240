"""The RL loop on a service whose weights are a digest of all training data (digest_service.py)."""

import asyncio
import json
import random
from contextlib import contextmanager, suppress
from typing import Any, cast

import chz
import pytest
from digest_service import GAP, FakeService, Killed
from digit_env import Digits, DigitsBuilder
from eventful_env import EventfulBuilder
from metric_tables import definition_of

from planish.errors import UnsupportedError, UserError
from planish.files import read_rows
from planish.processes.interruption import Interruption
from planish.reports.rollout_index import INDEX
from planish.rl.environments.datasets import InterleavedRLDatasetBuilder
from planish.rl.kl import AdvantageShaping
from planish.rl.rollout.evaluation import RLTestSetEvaluator
from planish.runlog.evaluators import SamplingClientEvaluator, TrainingClientEvaluator
from planish.training.rl_config import AsyncConfig, Config, KLReferenceConfig, StreamMinibatchConfig
from planish.training.train_rl import main, train as train_with_client

STEPS = 6


@pytest.fixture(autouse=True)
def _no_git(monkeypatch):
    """Skip git, which takes longer than a whole run."""
    monkeypatch.setattr("planish.training.run_loop.code_diff", lambda paths: "")


def config_of(path, **changes):
    options = {
        "learning_rate": 0.1,
        "dataset_builder": DigitsBuilder(),
        "model_name": "tiny",
        "max_tokens": 8,
        "log_path": str(path),
        "save_every": 2,
        "eval_every": 0,
        "num_groups_to_log": 0,
        "rollout_json_export": False,
        **changes,
    }
    return Config(**options)


def train(service, path, **changes):
    return asyncio.run(main(config_of(path, **changes), service))


def final_weights(service):
    return service.clients[-1].weights


def rows_of(path, *, timed=False):
    rows = read_rows(path / "metrics.jsonl")
    return (
        rows
        if timed
        else [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]
    )


@chz.chz
class OnlyTrainingBuilder(DigitsBuilder):
    async def __call__(self) -> Any:
        return (await super().__call__())[0]


@chz.chz
class DigitsInGroups(DigitsBuilder):
    group_size: int = 4


VARIANTS = {
    "plain": {},
    "tests": {"eval_every": 2, "dataset_builder": DigitsBuilder(tests=3)},
    "substeps": {"num_substeps": 2},
    "streaming": {
        "num_substeps": 2,
        "stream_minibatch_config": StreamMinibatchConfig(num_minibatches=2),
    },
    "lag": {"async_config": AsyncConfig(max_steps_off_policy=2)},
    "rolling": {"save_every": 4, "rolling_save_every": 1},
    "two turns": {"dataset_builder": DigitsBuilder(turns=2)},
    "folders": {"rollout_layout": "folders"},
    "epochs": {"num_epochs": 2, "dataset_builder": DigitsBuilder(batches=3)},
    "schedule": {"lr_schedule": "linear", "warmup_steps": 2},
}
ALIKE = ("substeps", "folders", "epochs", "schedule")
"""Variants that only the slow tests kill at every operation."""


@pytest.mark.slow
def test_a_run_writes_all_its_files(service, tmp_path):
    builder = DigitsBuilder(tests=2)
    train(
        service,
        tmp_path,
        eval_every=3,
        dataset_builder=builder,
        max_steps=4,
        rollout_json_export=True,
    )
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    expected = {
        "metrics.jsonl",
        "config.json",
        "checkpoints.jsonl",
        "code.diff",
        "timing_spans.jsonl",
    }
    for step in range(4):
        expected |= {
            f"train_iteration_{step:06d}{end}"
            for end in (".html", "_logtree.json", "_rollout_summaries.jsonl", "_rollouts.jsonl")
        }
    for step in (0, 3, 4):
        expected |= {
            f"eval_test_iteration_{step:06d}{end}"
            for end in (".html", "_logtree.json", "_rollout_summaries.jsonl", "_rollouts.jsonl")
        }
    assert expected <= names
    index = read_rows(tmp_path / INDEX)
    assert {(row["split"], row["step"]) for row in index} == {
        *(("train", step) for step in range(4)),
        *(("eval/test", step) for step in (0, 3, 4)),
    }
    for row in index:
        with open(tmp_path / row["file"], "rb") as file:
            file.seek(row["offset"])
            texts = json.loads(file.read(row["bytes"]))
        assert texts["split"] == row["split"]
        assert (texts["iteration"], texts["group_idx"], texts["traj_idx"]) == (
            row["step"],
            row["group"],
            row["sample"],
        )
    rows = rows_of(tmp_path, timed=True)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows if "test/env/all/reward/total" in row] == [0, 3, 4]
    assert rows[0]["optim/kl_sample_train_v1"] == pytest.approx(GAP, abs=1e-6)
    assert rows[0]["optim/kl_sample_train_v2"] == pytest.approx(0.5 * GAP**2, abs=1e-6)
    assert rows[1]["time/total"] >= rows[1]["time/sampling"] > 0
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dataset_builder"]["tests"] == 2


@pytest.mark.parametrize("name", VARIANTS)
def test_every_metric_is_defined(service, tmp_path, name):
    train(service, tmp_path, **VARIANTS[name])
    keys = {key for row in rows_of(tmp_path, timed=True) for key in row}
    assert [
        key for key in keys - {"step"} if definition_of(key) is None and "digit" not in key
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_seed_gives_the_same_run(tokenizer, tmp_path, name):
    first, second = FakeService(tokenizer), FakeService(tokenizer)
    train(first, tmp_path / "a", **VARIANTS[name])
    train(second, tmp_path / "b", **VARIANTS[name])
    assert final_weights(first) == final_weights(second)
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")
    train(other := FakeService(tokenizer), tmp_path / "c", **VARIANTS[name], seed=1)
    assert final_weights(other) != final_weights(first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in VARIANTS],
)
def test_a_run_killed_at_any_operation_resumes_to_the_same_result(tokenizer, tmp_path, name):
    """With staleness, the first steps after a resume are sampled from newer weights, so only the
    order of the data is equal. Without staleness, the weights are equal too.
    """
    whole = FakeService(tokenizer)
    train(whole, tmp_path / "whole", **VARIANTS[name])
    expected = rows_of(tmp_path / "whole")
    for die_at in range(0, len(whole.operations), max(1, len(whole.operations) // 4)):
        path = tmp_path / f"killed{die_at}"
        service = FakeService(tokenizer, die_at=die_at)
        with pytest.raises(Killed):
            train(service, path, **VARIANTS[name])
        service.die_at = None
        train(service, path, **VARIANTS[name])
        rows = rows_of(path)
        assert [row["step"] for row in rows] == [row["step"] for row in expected]
        assert [row["step"] for row in read_rows(path / "timing_spans.jsonl")] == [
            row["step"] for row in rows
        ]
        records = read_rows(path / "checkpoints.jsonl")
        assert len({(record["name"], record["batch"]) for record in records}) == len(records)
        index, whole_index = (read_rows(run / INDEX) for run in (path, tmp_path / "whole"))
        assert [rollout_of(row) for row in index] == [rollout_of(row) for row in whole_index]
        if "lag" not in name:
            assert rows == expected
            assert index == whole_index
            assert final_weights(service) == final_weights(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "lag",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("streaming", "tests")),
    ],
)
def test_control_c_saves_the_finished_steps(tokenizer, tmp_path, name, monkeypatch):
    whole = FakeService(tokenizer)
    train(whole, tmp_path / "whole", **VARIANTS[name])
    for stop_at in range(3, len(whole.operations), max(1, len(whole.operations) // 5)):
        path = tmp_path / f"stopped{stop_at}"
        service = FakeService(tokenizer)
        interruptions = []
        monkeypatch.setattr(Interruption, "handle_signals", recorded(interruptions))
        monkeypatch.setattr(service, "count", asking(service, stop_at, interruptions))
        with suppress(KeyboardInterrupt):  # in its last step the run completes
            train(service, path, **VARIANTS[name])
        done = len([row for row in read_rows(path / "metrics.jsonl") if "optim/lr" in row])
        saved = [record["batch"] for record in read_rows(path / "checkpoints.jsonl")]
        assert (saved[-1] if saved else 0) == done, "nothing that was trained is lost"
        monkeypatch.undo()
        train(service, path, **VARIANTS[name])
        assert [row["step"] for row in rows_of(path)] == [
            row["step"] for row in rows_of(tmp_path / "whole")
        ]
        if name != "lag":
            assert final_weights(service) == final_weights(whole)


def rollout_of(row):
    return row["step"], row["split"], row["group"], row["sample"], row["seed"]


def recorded(interruptions):
    @contextmanager
    def handle_signals(self, say):
        interruptions.append(self)
        yield

    return handle_signals


def asking(service, stop_at, interruptions):
    count = FakeService.count

    def counting(operation):
        count(service, operation)
        if len(service.operations) >= stop_at:
            interruptions[-1].request_stop()

    return counting


def test_a_finished_run_continues_with_more_steps(tokenizer, tmp_path):
    options = VARIANTS["tests"]
    train(whole := FakeService(tokenizer), tmp_path / "whole", **options)
    service = FakeService(tokenizer)
    train(service, tmp_path / "parts", **options, max_steps=3)
    assert [row["step"] for row in rows_of(tmp_path / "parts")] == [0, 1, 2, 3]
    train(service, tmp_path / "parts", **options, max_steps=3)  # the run has no more steps
    train(service, tmp_path / "parts", **options)
    assert [row["step"] for row in rows_of(tmp_path / "parts")] == list(range(STEPS + 1))
    assert final_weights(service) == final_weights(whole)


def test_a_decaying_learning_rate_fixes_the_number_of_steps(service, tmp_path):
    train(service, tmp_path, max_steps=2, lr_schedule="linear")
    with pytest.raises(UserError, match="max_steps was 2, is 3"):
        train(service, tmp_path, max_steps=3, lr_schedule="linear")


@pytest.mark.parametrize("layout", ["flat", "folders"])
def test_the_console_prints_the_first_rollout_page(service, tmp_path, capsys, layout):
    train(service, tmp_path, max_steps=2, num_groups_to_log=1, rollout_layout=layout)
    [line] = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("rollouts of step")
    ]
    page = line.split("for reading: ")[1].split(";")[0]
    assert "Group 0" in (tmp_path / page).read_text()
    train(service, tmp_path, max_steps=3, num_groups_to_log=0, rollout_layout=layout)
    assert "rollouts of step" not in capsys.readouterr().out


def test_checkpoint_metadata_has_the_run_directory(service, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    train(service, tmp_path / "runs" / "a", max_steps=1, recipe_name="mine")
    assert service.clients[-1].metadata == {"log_path": "~/runs/a", "recipe_name": "mine"}


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"max_steps": 2}, "; give more max_steps to continue"),
        ({"max_steps": STEPS + 5}, "; give more num_epochs to continue"),
        ({"lr_schedule": "linear"}, ""),
    ],
)
def test_a_finished_run_prints_how_to_extend_it(service, tmp_path, capsys, options, remedy):
    train(service, tmp_path, **options)
    capsys.readouterr()
    train(service, tmp_path, **options)
    end = f"steps are done{remedy}; give another log_path to begin a new run\n"
    assert capsys.readouterr().out.endswith(end)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_steps": 2}, "steps 0 to 2, written"),
        ({}, f"steps 0 to {STEPS}, written"),
        (
            {"max_steps": STEPS + 5},
            f"steps 0 to {STEPS} (one pass over the data; "
            f"raise num_epochs to reach max_steps={STEPS + 5}), written",
        ),
    ],
)
def test_a_run_says_why_it_has_fewer_steps_than_max_steps(
    service, tmp_path, capsys, options, reason
):
    train(service, tmp_path, **options)
    assert reason in " ".join(capsys.readouterr().out.split())


def test_staleness_reaches_but_never_exceeds_its_bound(service, tmp_path):
    generator = random.Random(0)
    service.delay = lambda tokens, seed: generator.random() * 0.02
    train(service, tmp_path, async_config=AsyncConfig(max_steps_off_policy=2))
    for row in rows_of(tmp_path):
        assert row["async/staleness_max"] == min(2, row["step"])
        assert row["sampling_client/step_min"] == row["step"] - row["async/staleness_max"]


def test_zero_staleness_equals_the_synchronous_loop(tokenizer, tmp_path):
    train(plain := FakeService(tokenizer), tmp_path / "plain")
    train(
        lagless := FakeService(tokenizer),
        tmp_path / "lagless",
        async_config=AsyncConfig(max_steps_off_policy=0),
    )
    assert final_weights(plain) == final_weights(lagless)
    assert plain.operations == lagless.operations


def test_streaming_trains_while_other_groups_are_rolled_out(service, tmp_path):
    """The last group of the batch waits until a gradient of the first one was requested."""

    async def wait_for_a_gradient(number):
        while number == 1 and "forward_backward" not in service.operations:
            await asyncio.sleep(0.001)

    builder = EventfulBuilder(batches=1, happening=wait_for_a_gradient)
    train(
        service,
        tmp_path,
        dataset_builder=builder,
        stream_minibatch_config=StreamMinibatchConfig(num_minibatches=2),
    )
    assert service.clients[0].calls == [8, 8]


def test_shaping_of_advantages_with_streaming_is_rejected(service, tmp_path):
    async def shaping(data):
        return data, {}

    config = config_of(
        tmp_path / "run", stream_minibatch_config=StreamMinibatchConfig(num_minibatches=2)
    )
    with pytest.raises(
        UnsupportedError, match="shaping and stream_minibatch_config exclude each other"
    ):
        asyncio.run(train_with_client(config, service, cast(AdvantageShaping, shaping)))
    assert not (tmp_path / "run").exists()


def test_a_batch_is_split_into_substeps_and_minibatches(tokenizer, tmp_path):
    cut = {
        "one": ({}, [16]),
        "two": ({"num_substeps": 2}, [8, 8]),
        "more substeps than groups": ({"num_substeps": 9}, [4, 4, 4, 4]),
        "minibatches": (
            {"stream_minibatch_config": StreamMinibatchConfig(num_minibatches=2)},
            [8, 8],
        ),
        "regrouped": (
            {"async_config": AsyncConfig(max_steps_off_policy=0, groups_per_batch=3)},
            [12],
        ),
    }
    for name, (options, calls) in cut.items():
        service = FakeService(tokenizer)
        train(service, tmp_path / name, max_steps=1, **options)
        assert service.clients[0].calls == calls, name


def test_constant_reward_groups_can_be_removed(tokenizer, tmp_path):
    builder = DigitsBuilder(constant_every=2)
    train(kept := FakeService(tokenizer), tmp_path / "kept", dataset_builder=builder, max_steps=1)
    train(
        removed := FakeService(tokenizer),
        tmp_path / "removed",
        dataset_builder=builder,
        max_steps=1,
        remove_constant_reward_groups=True,
    )
    assert (kept.clients[0].calls, removed.clients[0].calls) == ([16], [8])
    [row] = rows_of(tmp_path / "removed")
    # The metrics count all groups, with separate values per tag.
    assert row["env/all/by_group/frac_degenerate"] >= 0.5
    assert row["env/constant/by_group/frac_all_good"] == 1.0
    assert row["env/digits/total_episodes"] == 8


def test_a_batch_of_constant_reward_groups_takes_no_step(service, tmp_path):
    builder = DigitsBuilder(constant_every=1)
    train(
        service, tmp_path, dataset_builder=builder, max_steps=2, remove_constant_reward_groups=True
    )
    assert final_weights(service).steps == 0
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1]


def test_kl_penalty_reaches_the_advantages(tokenizer, tmp_path):
    train(plain := FakeService(tokenizer), tmp_path / "plain", max_steps=1)
    penalty = {"kl_penalty_coef": 0.5, "kl_reference_config": KLReferenceConfig(base_model="tiny")}
    train(pulled := FakeService(tokenizer), tmp_path / "pulled", max_steps=1, **penalty)
    assert final_weights(plain) != final_weights(pulled)
    assert "kl_policy_base" in rows_of(tmp_path / "pulled")[0]


def test_learning_rate_follows_the_schedule(service, tmp_path):
    train(service, tmp_path, lr_schedule="linear", warmup_steps=2)
    assert service.clients[0].rates == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, 0.075, 0.05, 0.025])


def test_post_update_kl_is_reported(service, tmp_path):
    train(service, tmp_path, compute_post_kl=True, max_steps=1)
    assert rows_of(tmp_path)[0]["kl_pre_post_v1"] == pytest.approx(GAP, abs=1e-6)


def test_a_run_can_start_from_the_weights_of_another_run(tokenizer, tmp_path):
    service = FakeService(tokenizer)
    train(service, tmp_path / "first", max_steps=2)
    train(
        service,
        tmp_path / "second",
        max_steps=2,
        load_checkpoint_path=str(tmp_path / "first"),
        lora_rank=32,
    )
    assert final_weights(service).steps == 2
    with pytest.raises(UserError, match="lora_rank=8"):
        train(
            service, tmp_path / "third", load_checkpoint_path=str(tmp_path / "first"), lora_rank=8
        )


BAD = {
    "learning_rate": ({"learning_rate": 0.0}, "learning_rate=0.0"),
    "loss": ({"loss_fn": "stable_reinforce"}, "loss_fn=stable_reinforce"),
    "option of the loss": (
        {"loss_fn": "ppo", "loss_fn_config": {"clip_low": 0.8}},
        "clip_low.*it takes .*clip_low_threshold",
    ),
    "value of an option": ({"loss_fn_config": {"temperature": 0.0}}, "temperature.*above 0"),
    "advantage": ({"advantage": "gae"}, "advantage=gae"),
    "nothing to learn from": ({"advantage": "none"}, "advantage=none and kl_penalty_coef=0"),
    "no reference": ({"kl_penalty_coef": 0.1}, "needs kl_reference_config"),
    "reference without coefficient": (
        {"kl_reference_config": KLReferenceConfig(base_model="x")},
        "kl_penalty_coef",
    ),
    "logger": ({"loggers": ["neptune"]}, "neptune"),
    "lag": ({"async_config": AsyncConfig(max_steps_off_policy=-1)}, "^max_steps_off_policy=-1"),
    "time to live": ({"ttl_seconds": 0}, "ttl_seconds=0"),
    "a time to live that no checkpoint has": (
        {"ttl_seconds": 10**11},
        "ttl_seconds=100000000000: give .* 315360000",
    ),
    "project without its logger": ({"wandb_project": "sums"}, "loggers=wandb"),
    "discount without penalty": ({"kl_discount_factor": 0.9}, "kl_penalty_coef is 0"),
    "tolerance": ({"rollout_error_tolerance": "yes"}, "rollout_error_tolerance='yes'"),
    "evaluators that never run": ({"evaluator_builders": [dict]}, "eval_every"),
    "no pair": (
        {"dataset_builder": OnlyTrainingBuilder()},
        "dataset_builder returned a .*; return a tuple of two datasets",
    ),
    "groups of one answer": (
        {"dataset_builder": DigitsInGroups(group_size=1)},
        "group_size=1: give at least 2",
    ),
    "groups of one answer in a source": (
        {
            "dataset_builder": InterleavedRLDatasetBuilder(
                sources=[DigitsInGroups(group_size=4), DigitsInGroups(group_size=1)],
                groups_per_batch=2,
                total_batches=2,
            )
        },
        "group_size=1: give at least 2",
    ),
    "batch larger than the data": (
        {"async_config": AsyncConfig(max_steps_off_policy=1, groups_per_batch=25)},
        "batch_size=25 .*there are 24 groups to train on",
    ),
    "empty": ({"dataset_builder": DigitsBuilder(batches=0)}, "without batches"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_options_are_rejected_before_any_work(service, tmp_path, name):
    options, message = BAD[name]
    with pytest.raises(UserError, match=message):
        train(service, tmp_path / "run", **options)
    assert service.operations == []
    assert not (tmp_path / "run").exists()


def test_a_kl_penalty_at_another_temperature_is_rejected(service, tmp_path):
    reference = KLReferenceConfig(base_model="tiny")
    with pytest.raises(UnsupportedError, match="temperature 1"):
        train(
            service, tmp_path, temperature=0.7, kl_penalty_coef=0.1, kl_reference_config=reference
        )


def test_changed_options_are_rejected_on_resume(service, tmp_path):
    train(service, tmp_path, max_steps=2)
    with pytest.raises(UserError, match="advantage was 'mean'"):
        train(service, tmp_path, max_steps=4, advantage="std")


def test_a_dataset_of_another_size_is_rejected_on_resume(service, tmp_path, monkeypatch):
    train(service, tmp_path, max_steps=2)
    monkeypatch.setattr(Digits, "__len__", lambda self: STEPS + 1)
    with pytest.raises(
        UserError, match=rf"dataset of size {STEPS}, but this dataset has size {STEPS + 1}"
    ):
        train(service, tmp_path, max_steps=4)


def test_evaluators_with_one_name_are_rejected(service, tmp_path):
    options = {"dataset_builder": DigitsBuilder(tests=1), "eval_every": 1}
    builders = [lambda: RLTestSetEvaluator(Digits(1, 1), 8, name="test")]
    with pytest.raises(UserError, match="give each evaluator another name"):
        train(service, tmp_path / "run", evaluator_builders=builders, **options)


def test_additional_evaluators_run_on_schedule(service, tmp_path):
    class Steps(TrainingClientEvaluator):
        async def __call__(self, training_client):
            return {"steps": training_client.weights.steps}

    class Sampler(SamplingClientEvaluator):
        async def __call__(self, sampling_client):
            return {"sampler": sampling_client.weights.steps}

    train(service, tmp_path, evaluator_builders=[Steps, Sampler], eval_every=2, max_steps=3)
    found = [(row["steps"], row["sampler"]) for row in rows_of(tmp_path) if "steps" in row]
    assert found == [(0, 0), (2, 2), (3, 3)]


def test_trace_events_are_written(service, tmp_path):
    train(service, tmp_path, enable_trace=True, max_steps=2)
    events = read_rows(tmp_path / "trace_events.jsonl")
    assert {"sampling", "train"} <= {event["name"] for event in events}
