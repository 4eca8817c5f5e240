"""The supervised loop on a service whose weights are a digest of all trained data
(ledger_service.py).
"""

import asyncio
import json
import math
from contextlib import contextmanager, suppress

import pytest
from ledger_service import Killed, LedgerClient, LedgerService
from metric_tables import definition_of

from planish.errors import NonFiniteError, UserError
from planish.files import read_rows
from planish.processes.interruption import Interruption
from planish.runlog.evaluators import SamplingClientEvaluator, TrainingClientEvaluator
from planish.runlog.run_directory import RunDirectory
from planish.supervised.datasets import FromConversationFileBuilder
from planish.supervised.types import (
    ChatDatasetBuilderCommonConfig,
    SupervisedDataset,
    SupervisedDatasetBuilder,
)
from planish.training.run_loop import RunLoop
from planish.training.supervised_config import Config
from planish.training.supervised_learner import SupervisedLearner
from planish.training.train_supervised import main

STEPS = 6
"""Three batches of four of 13 conversations, twice."""


def builder(chats, *, test_size=0, **changes):
    common = ChatDatasetBuilderCommonConfig(
        **{"model_name_for_tokenizer": "tiny", "batch_size": 4, **changes}
    )
    return FromConversationFileBuilder(
        common_config=common, file_path=str(chats), test_size=test_size
    )


def config_of(chats, path, test_size=0, common=None, **changes):
    options = {
        "log_path": str(path),
        "model_name": "tiny",
        "dataset_builder": builder(chats, test_size=test_size, **(common or {})),
        "learning_rate": 0.1,
        "num_epochs": 2,
        "save_every": 2,
        "eval_every": 2,
        **changes,
    }
    return Config(**options)


def train(service, chats, path, **changes):
    return asyncio.run(main(config_of(chats, path, **changes), service))


def rows_of(path):
    """Return the rows without values that depend on the clock."""
    timed = ("time/", "tokens_per_second/")
    return [
        {k: v for k, v in row.items() if not k.startswith(timed)}
        for row in read_rows(path / "metrics.jsonl")
    ]


class Digest(SamplingClientEvaluator):
    async def __call__(self, sampling_client):
        return {"sampled/steps": sampling_client.weights.steps}


class Steps(TrainingClientEvaluator):
    async def __call__(self, training_client):
        return {"trained/steps": training_client.weights.steps}


VARIANTS = {
    "plain": {},
    "one by one": {"submit_ahead": 0},
    "far ahead": {"submit_ahead": 3, "save_every": 5},
    "tests": {"test_size": 1, "evaluator_builders": [Digest, Steps], "eval_every": 4},
    "rolling": {"save_every": 4, "rolling_save_every": 1},
    "constant": {"lr_schedule": "constant"},
    "warm-up": {"lr_schedule": "cosine", "warmup_steps": 2},
    "max_steps": {"max_steps": 5, "save_every": 0},
}
ALIKE = ("one by one", "constant", "warm-up", "max_steps")
"""Of those that write and wait as others do, only the slow tests are killed everywhere."""


def test_a_run_writes_all_its_files(service, chats, tmp_path):
    train(service, chats, tmp_path, test_size=1, enable_trace=True)
    expected = {
        "metrics.jsonl",
        "config.json",
        "checkpoints.jsonl",
        "code.diff",
        "command.json",
        "rows.json",
        "timing_spans.jsonl",
        "trace_events.jsonl",
    }
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == expected
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert [row["epoch"] for row in rows[:-1]] == [0, 0, 0, 1, 1, 1]
    assert [row["step"] for row in rows if "test/nll" in row] == [0, 2, 4, 6]
    assert [row["num_sequences"] for row in rows[:-1]] == [4] * STEPS
    assert rows[0]["train_mean_nll"] == pytest.approx(0.5)
    assert rows[0]["num_loss_tokens"] == pytest.approx(4.0), (
        "the weights of each conversation sum to 1"
    )
    assert all(row["time/total"] >= row["time/wait"] > 0 for row in rows[:-1])
    records = read_rows(tmp_path / "checkpoints.jsonl")
    assert [(r["name"], r["batch"], r["epoch"]) for r in records] == [
        ("000002", 2, 0),
        ("000004", 4, 1),
        ("final", 6, 2),
    ]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dataset_builder"]["common_config"]["train_on_what"] == "all_assistant_messages"


@pytest.mark.parametrize("name", VARIANTS)
def test_every_metric_is_defined(service, chats, tmp_path, name):
    train(service, chats, tmp_path, **VARIANTS[name])
    keys = {key for row in read_rows(tmp_path / "metrics.jsonl") for key in row}
    assert [
        key
        for key in keys - {"step"}
        if definition_of(key, "guide/supervised.md") is None and not key.endswith("/steps")
    ] == []


def test_each_epoch_shows_each_conversation_once(service, chats, tmp_path):
    train(service, chats, tmp_path, common={"batch_size": 1})
    texts = [text for [text] in service.clients[0].texts]
    assert len(set(texts)) == 13
    assert sorted(texts[:13]) == sorted(texts[13:])
    assert texts[:13] != texts[13:]


def test_the_number_of_pending_steps_does_not_change_training(tokenizer, chats, tmp_path):
    found = set()
    for ahead in (0, 1, 4):
        service = LedgerService(tokenizer)
        train(service, chats, tmp_path / str(ahead), submit_ahead=ahead)
        found.add((service.weights, str(rows_of(tmp_path / str(ahead))), str(service.states)))
    assert len(found) == 1


def test_the_optimizer_receives_all_its_options(service, chats, tmp_path):
    options = {
        "adam_beta1": 0.8,
        "adam_beta2": 0.9,
        "adam_eps": 1e-6,
        "weight_decay": 0.1,
        "grad_clip_norm": 2.0,
    }
    train(service, chats, tmp_path, max_steps=1, **options)
    (update,) = service.clients[-1].updates
    assert (update.beta1, update.beta2, update.eps) == (0.8, 0.9, 1e-6)
    assert (update.weight_decay, update.grad_clip_norm) == (0.1, 2.0)


def test_the_next_step_is_submitted_before_results_arrive(service, chats, tmp_path, monkeypatch):
    order = []
    log = RunDirectory.log
    monkeypatch.setattr(
        RunDirectory,
        "log",
        lambda self, step, row: (order.append(f"row {step}"), log(self, step, row)),
    )
    monkeypatch.setattr(service, "count", order.append)
    train(service, chats, tmp_path, eval_every=0, save_every=0, max_steps=3)
    assert order[:7] == [
        "forward_backward",
        "optim_step",
        "forward_backward",
        "row 0",
        "optim_step",
        "forward_backward",
        "row 1",
    ]


def killing(service, monkeypatch):
    """Let the service also count writes to the run's files, before they happen."""
    for name in ("log", "log_spans", "log_checkpoint"):
        method = getattr(RunDirectory, name)

        def counted(self, *arguments, method=method, name=name):
            service.count(name)
            return method(self, *arguments)

        monkeypatch.setattr(RunDirectory, name, counted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in VARIANTS],
)
def test_a_run_killed_at_any_operation_resumes_to_the_same_result(
    tokenizer, chats, tmp_path, name, monkeypatch
):
    whole = LedgerService(tokenizer)
    with monkeypatch.context() as patch:
        killing(whole, patch)
        train(whole, chats, tmp_path / "whole", **VARIANTS[name])
    expected = rows_of(tmp_path / "whole")
    points = range(len(whole.operations)) if name == "plain" else range(1, len(whole.operations), 5)
    for die_at in points:
        path = tmp_path / f"killed{die_at}"
        service = LedgerService(tokenizer, die_at=die_at)
        with monkeypatch.context() as patch:
            killing(service, patch)
            with pytest.raises(Killed):
                train(service, chats, path, **VARIANTS[name])
        service.die_at = None
        train(service, chats, path, **VARIANTS[name])
        where = whole.operations[die_at]
        assert rows_of(path) == expected, where
        assert service.weights == whole.weights, where
        assert [row["step"] for row in read_rows(path / "timing_spans.jsonl")] == [
            row["step"] for row in expected
        ]
        records = read_rows(path / "checkpoints.jsonl")
        assert len({(record["name"], record["batch"]) for record in records}) == len(records)
        assert records[-1] == read_rows(tmp_path / "whole" / "checkpoints.jsonl")[-1]


def test_a_checkpoint_has_seen_exactly_the_batches_before_it(tokenizer, chats, tmp_path):
    service = LedgerService(tokenizer)
    train(service, chats, tmp_path, submit_ahead=4, save_every=1)
    for record in read_rows(tmp_path / "checkpoints.jsonl"):
        assert service.states[record["state_path"]].steps == record["batch"]


def test_evaluations_measure_the_weights_before_their_step(service, chats, tmp_path):
    train(
        service,
        chats,
        tmp_path,
        evaluator_builders=[Digest, Steps],
        submit_ahead=4,
        infrequent_eval_every=3,
    )
    found = [
        (row["step"], row["sampled/steps"], row["trained/steps"])
        for row in rows_of(tmp_path)
        if "sampled/steps" in row
    ]
    assert found == [(step, step, step) for step in (0, 2, 4, 6)]
    assert service.operations.count("publish") == 4


def test_the_initial_weights_are_not_evaluated_without_eval_on_start(service, chats, tmp_path):
    train(
        service,
        chats,
        tmp_path,
        evaluator_builders=[Steps],
        infrequent_evaluator_builders=[Digest],
        infrequent_eval_every=3,
        eval_on_start=False,
    )
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows if "trained/steps" in row] == [2, 4, 6]
    assert [row["step"] for row in rows if "sampled/steps" in row] == [3, 6]


class Unknown(SamplingClientEvaluator):
    async def __call__(self, sampling_client):
        return {"sampled/steps": float("nan")}


def test_a_non_finite_metric_is_omitted_with_a_warning(service, chats, tmp_path, capsys):
    train(service, chats, tmp_path, evaluator_builders=[Unknown])
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert all("sampled/steps" not in row for row in rows)
    assert read_rows(tmp_path / "checkpoints.jsonl")[-1]["name"] == "final"
    assert (
        f"WARNING: step {STEPS}: sampled/steps is nan and is left out of the logs"
        in capsys.readouterr().out
    )


class Covering(SamplingClientEvaluator):
    async def __call__(self, sampling_client):
        return {"step": 77}


class Cancelled(SamplingClientEvaluator):
    async def __call__(self, sampling_client):
        raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("evaluators", "error", "message"),
    [
        ([Digest, Digest], UserError, "the metric 'sampled/steps', which is that of another"),
        ([Covering], UserError, "the metric 'step', which is the row's"),
        ([Cancelled], RuntimeError, "although this task was not"),
    ],
)
def test_invalid_evaluators_are_rejected(service, chats, tmp_path, evaluators, error, message):
    with pytest.raises(error, match=message):
        train(service, chats, tmp_path, evaluator_builders=evaluators)


def test_infrequent_evaluators_have_their_own_schedule(service, chats, tmp_path):
    train(
        service,
        chats,
        tmp_path,
        infrequent_evaluator_builders=[Steps],
        infrequent_eval_every=5,
        eval_every=0,
        test_size=1,
    )
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows if "trained/steps" in row] == [0, 5, 6]
    assert not any("test/nll" in row for row in rows)


def test_rolling_states_are_deleted_when_a_newer_state_is_safe(service, chats, tmp_path):
    train(service, chats, tmp_path, **VARIANTS["rolling"])
    kept = {path.rpartition("/")[2] for path in service.states}
    assert kept == {"000004", "final-000006"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "tests", "far ahead"])
def test_control_c_saves_the_finished_steps(tokenizer, chats, tmp_path, name, monkeypatch):
    whole = LedgerService(tokenizer)
    train(whole, chats, tmp_path / "whole", **VARIANTS[name])
    for stop_at in range(1, len(whole.operations), 4):
        path = tmp_path / f"stopped{stop_at}"
        service = LedgerService(tokenizer)
        with monkeypatch.context() as patch:
            interruptions = []
            patch.setattr(Interruption, "handle_signals", recorded(interruptions))
            patch.setattr(service, "count", asking(service, stop_at, interruptions))
            with suppress(KeyboardInterrupt):  # in its last step the run ends by itself
                train(service, chats, path, **VARIANTS[name])
        done = len([row for row in rows_of(path) if "learning_rate" in row])
        saved = [record["batch"] for record in read_rows(path / "checkpoints.jsonl")]
        assert (saved[-1] if saved else 0) == done == service.weights.steps, (
            "nothing that was trained is lost"
        )
        train(service, chats, path, **VARIANTS[name])
        assert rows_of(path) == rows_of(tmp_path / "whole")
        assert service.weights == whole.weights


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(
    ("broken", "method", "at", "saved"),
    [
        (RunLoop, "evaluate", 4, [4]),
        (SupervisedLearner, "batch_of", 5, [5]),
        (RunDirectory, "log_spans", 3, []),
    ],
)
def test_an_error_saves_the_earlier_steps(
    tokenizer, chats, tmp_path, broken, method, at, saved, ahead, monkeypatch
):
    whole, service = LedgerService(tokenizer), LedgerService(tokenizer)
    options = {"save_every": 0, "submit_ahead": ahead, "evaluator_builders": [Digest]}
    train(whole, chats, tmp_path / "whole", **options)
    works, run = getattr(broken, method), tmp_path / "run"

    def fails(self, step, *arguments):
        if step == at:
            raise OSError("it breaks")
        return works(self, step, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(broken, method, fails)
        with pytest.raises(OSError, match="it breaks"):
            train(service, chats, run, **options)
    records = read_rows(run / "checkpoints.jsonl")
    assert [record["batch"] for record in records] == saved
    assert [service.states[record["state_path"]].steps for record in records] == saved
    train(service, chats, run, **options)
    assert service.weights == whole.weights
    assert rows_of(run) == rows_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("ahead", "failing", "saved"),
    [(0, "gradient", [3]), (1, "gradient", [3]), (1, "update", [3]), (3, "update", [])],
)
def test_a_failed_step_saves_the_earlier_steps(
    tokenizer, chats, tmp_path, ahead, failing, saved, monkeypatch
):
    """This does not hold if a later step was submitted, because that step may be applied."""
    whole, service = LedgerService(tokenizer), LedgerService(tokenizer)
    options = {"save_every": 0, "submit_ahead": ahead}
    train(whole, chats, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        patch.setattr(LedgerClient, "refuses", (failing, 3))
        with pytest.raises(NonFiniteError, match="step 3"):
            train(service, chats, tmp_path / "run", **options)
    assert [
        record["batch"] for record in read_rows(tmp_path / "run" / "checkpoints.jsonl")
    ] == saved
    train(service, chats, tmp_path / "run", **options)
    assert service.weights == whole.weights
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


def recorded(interruptions):
    @contextmanager
    def handle_signals(self, say):
        interruptions.append(self)
        yield

    return handle_signals


def asking(service, stop_at, interruptions):
    def counting(operation):
        service.operations.append(operation)
        if len(service.operations) >= stop_at:
            interruptions[-1].request_stop()

    return counting


def test_the_learning_rate_follows_its_schedule(tokenizer, chats, tmp_path):
    expected = {
        "linear": [0.1 * (1 - step / STEPS) for step in range(STEPS)],
        "constant": [0.1] * STEPS,
    }
    for schedule, rates in expected.items():
        service = LedgerService(tokenizer)
        train(service, chats, tmp_path / schedule, lr_schedule=schedule)
        assert service.clients[0].rates == pytest.approx(rates)
        assert [
            row["learning_rate"] for row in rows_of(tmp_path / schedule) if "learning_rate" in row
        ] == pytest.approx(rates)


def test_a_finished_run_continues_if_its_learning_rate_allows(tokenizer, chats, tmp_path):
    options = {"lr_schedule": "constant", "test_size": 1}
    train(whole := LedgerService(tokenizer), chats, tmp_path / "whole", **options)
    service = LedgerService(tokenizer)
    train(service, chats, tmp_path / "parts", **options, max_steps=3)
    operations = len(service.operations)
    train(service, chats, tmp_path / "parts", **options, max_steps=3)
    assert len(service.operations) == operations, "there is nothing to do"
    train(service, chats, tmp_path / "parts", **options)
    assert service.weights == whole.weights
    assert [row["step"] for row in rows_of(tmp_path / "parts")] == list(range(STEPS + 1))
    train(LedgerService(tokenizer), chats, tmp_path / "linear", max_steps=3)
    with pytest.raises(UserError, match="max_steps was 3"):
        train(LedgerService(tokenizer), chats, tmp_path / "linear", max_steps=4)


def test_a_run_can_start_from_the_weights_of_another_run(service, chats, tmp_path):
    train(service, chats, tmp_path / "first")
    train(service, chats, tmp_path / "second", load_checkpoint_path=str(tmp_path / "first"))
    assert service.weights.steps == STEPS, "with a new optimizer"


class Numbered(SupervisedDataset):
    """A dataset as users write it for the public cookbooks: plain lists, and a method that sets
    the epoch.
    """

    def __init__(self, data, empty=()):
        self.data, self.empty, self.epochs = data, empty, []

    def set_epoch(self, seed=0):
        self.epochs.append(seed)

    def get_batch(self, index):
        return [] if index in self.empty else [self.data[index]]

    def __len__(self):
        return len(self.data)


class Given(SupervisedDatasetBuilder):
    def __init__(self, dataset, test=None):
        self.dataset, self.test = dataset, test

    def __call__(self):
        return self.dataset, self.test


def to_batch(chats):
    train_set, _ = builder(chats, batch_size=1)()
    return [train_set.get_batch(index)[0] for index in range(3)]


def test_a_custom_dataset_can_be_trained_on(service, chats, tmp_path):
    dataset = Numbered(to_batch(chats))
    train(service, chats, tmp_path, dataset_builder=Given(dataset))
    assert dataset.epochs == [0, 1]
    assert service.weights.steps == 6


def test_a_dataset_of_another_size_is_rejected_on_resume(service, chats, tmp_path):
    growing = tmp_path / "growing.jsonl"
    growing.write_text(chats.read_text())
    train(service, growing, tmp_path / "run", lr_schedule="constant", max_steps=2)
    growing.write_text(growing.read_text() + chats.read_text().splitlines()[0] + "\n")
    with pytest.raises(UserError, match=r"13 rows then, 14 rows now.*load_checkpoint_path"):
        train(service, growing, tmp_path / "run", lr_schedule="constant", max_steps=4)
    assert len(rows_of(tmp_path / "run")) == 2


def test_a_batch_without_trainable_tokens_takes_no_step(service, chats, tmp_path):
    train(service, chats, tmp_path, dataset_builder=Given(Numbered(to_batch(chats), empty=[1])))
    assert service.weights.steps == 4
    rows = rows_of(tmp_path)
    assert [row["num_sequences"] for row in rows] == [1, 0, 1, 1, 0, 1]
    assert "train_mean_nll" not in rows[1]


def test_a_max_length_that_nothing_fits_is_rejected(service, chats, tmp_path):
    with pytest.raises(UserError, match="max_length"):
        train(service, chats, tmp_path, common={"max_length": 5})
    assert "optim_step" not in service.operations


def test_an_empty_test_set_is_rejected(service, chats, tmp_path):
    given = Given(Numbered(to_batch(chats)), test=Numbered([None], empty=[0]))
    with pytest.raises(UserError, match="the test set has no tokens to measure.*max_length"):
        train(service, chats, tmp_path, dataset_builder=given)
    assert "optim_step" not in service.operations


BAD = {
    "learning_rate": 0.0,
    "lr_schedule": "step",
    "warmup_steps": -1,
    "adam_beta2": 1.0,
    "lora_rank": 0,
    "num_epochs": 0,
    "max_steps": 0,
    "submit_ahead": -1,
    "eval_every": -1,
    "save_every": -1,
    "ttl_seconds": 0,
    "rolling_ttl_seconds": 0,
    "loggers": ["neptune"],
}
BOUNDLESS = dict.fromkeys(("learning_rate", "adam_eps", "weight_decay", "grad_clip_norm"), math.inf)


@pytest.mark.parametrize(("name", "value"), [*BAD.items(), *BOUNDLESS.items()])
def test_an_invalid_option_is_rejected_by_name(service, chats, tmp_path, name, value):
    with pytest.raises(UserError, match=name):
        train(service, chats, tmp_path / "run", **{name: value})
    assert not (tmp_path / "run").exists()
    assert service.operations == []


def test_a_dataset_without_batches_is_rejected(service, chats, tmp_path):
    with pytest.raises(UserError, match="without batches"):
        train(service, chats, tmp_path / "run", dataset_builder=Given(Numbered([])))
    assert not (tmp_path / "run").exists()
