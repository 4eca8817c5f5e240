"""Runs of preference models on the engine train and calibrate the model. Their files can be used
and the runs resumed.
"""

import asyncio
import json
import re

import pytest
from metric_tables import definition_of
from variants import slow_after

from planish import ServiceClient
from planish.errors import DamagedFileError, UserError
from planish.files import read_rows
from planish.preference import model_training
from planish.preference.bradley_terry import QUESTION
from planish.preference.datasets import ComparisonBuilderFromRows
from planish.preference.forms import form_of
from planish.preference.judgments import judge, judgment_metrics
from planish.preference.model_datasets import PreferenceDatasetBuilder
from planish.preference.model_files import PreferenceModelBuilderFromRun, PreferenceModelFile
from planish.preference.model_training import Config, main
from planish.preference.splits import prompt_of
from planish.preference.types import read_comparison
from planish.renderers import get_renderer
from planish.runlog import model_renderer
from planish.runlog.model_renderer import learn_renderer
from planish.runlog.run_directory import PREFERENCE_MODEL
from planish.supervised.types import ChatDatasetBuilderCommonConfig
from planish.testing import tiny_model

KINDS = ("chat", "bradley_terry")
ENOUGH = {
    "chat": {"learning_rate": 6e-3, "lora_rank": 16, "num_epochs": 8},
    "bradley_terry": {"learning_rate": 3e-3, "lora_rank": 4, "num_epochs": 3},
}
"""For a random model to learn it."""


@pytest.fixture
def client(tmp_path):
    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as client:
        yield client


@pytest.fixture(scope="module")
def many_pairs(tmp_path_factory):
    """Return a file of 48 pairs: an answer with X is preferred to one with O, whatever their
    lengths.
    """
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {"prompt": f"{n}?", "chosen": "X" * (1 + n % 3), "rejected": "O" * (1 + n % 2)}
        for n in range(48)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def builder(model, path, kind, **changes):
    options = {"test_size": 8, "calibration_size": 6, "max_length": 1024, **changes}
    return PreferenceDatasetBuilder(
        common_config=ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=model, batch_size=8, max_length=options["max_length"]
        ),
        comparison_builder=ComparisonBuilderFromRows(
            dataset=str(path), test_size=options["test_size"]
        ),
        kind=kind,
        calibration_size=options["calibration_size"],
    )


def config(model, path, kind, log_path, *, data=None, **changes):
    options = {
        "learning_rate": 3e-3,
        "lora_rank": 4,
        "num_epochs": 6,
        "eval_every": 6,
        "save_every": 0,
        **changes,
    }
    return Config(
        log_path=str(log_path),
        model_name=model,
        dataset_builder=builder(model, path, kind, **(data or {})),
        **options,
    )


def run(client, *arguments, **changes):
    return asyncio.run(main(config(*arguments, **changes), client))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_preference_model_is_trained_calibrated_and_loaded(
    client, models, many_pairs, tmp_path, kind
):
    path = run(client, models[0], many_pairs, kind, tmp_path / "run", **ENOUGH[kind])
    rows = read_rows(path / "metrics.jsonl")
    assert [
        key
        for row in rows
        for key in row
        if key != "step" and definition_of(key, "recipes/preference_model.md") is None
    ] == []
    assert rows[0]["num_pairs"] == 8
    assert rows[-1]["test/accuracy"] == 1.0
    assert rows[-1]["test/log_loss"] < rows[0]["test/log_loss"]
    assert ("test/position_bias" in rows[-1]) == (kind == "chat")

    description = PreferenceModelFile.read(path)
    assert (description.kind, description.calibration_pairs, description.test["num_pairs"]) == (
        kind,
        6,
        8,
    )
    assert description.temperature != 1.0
    model = PreferenceModelBuilderFromRun(path=str(path))(client)
    test = builder(models[0], many_pairs, kind).splits().test
    found = judgment_metrics(asyncio.run(judge(model, test, both_orders=kind == "chat")))
    assert found == pytest.approx({name: description.test[name] for name in found}, abs=1e-5)


@pytest.mark.parametrize("kind", slow_after(1, list(KINDS)))
def test_a_finished_run_is_unchanged_and_an_uncalibrated_one_calibrated(
    client, models, many_pairs, tmp_path, kind, monkeypatch
):
    arguments = (models[0], many_pairs, kind, tmp_path / "run")

    async def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(model_training, "calibrate", killed)
    with pytest.raises(KeyboardInterrupt):
        run(client, *arguments, max_steps=2)
    assert not (tmp_path / "run" / PREFERENCE_MODEL).exists()
    with pytest.raises(UserError, match="a finished run of preference_model"):
        PreferenceModelBuilderFromRun(path=str(tmp_path / "run"))(client)
    monkeypatch.undo()
    run(client, *arguments, max_steps=2)
    written = (tmp_path / "run" / PREFERENCE_MODEL).read_text()
    monkeypatch.setattr(model_training, "calibrate", killed)
    run(client, *arguments, max_steps=2)
    assert (tmp_path / "run" / PREFERENCE_MODEL).read_text() == written
    (tmp_path / "run" / PREFERENCE_MODEL).write_text('{"kind": "chat"}')
    with pytest.raises(DamagedFileError, match="does not describe a preference model"):
        PreferenceModelFile.read(tmp_path / "run")


def test_splits_share_no_prompt_and_chat_models_train_both_orders(models, many_pairs):
    splits = builder(models[0], many_pairs, "chat").splits()
    parts = [
        {prompt_of(labeled) for labeled in part}
        for part in (splits.train, splits.calibration, splits.test)
    ]
    assert [len(part) for part in parts] == [34, 6, 8]
    assert len(set.union(*parts)) == 48
    places = [labeled.label for labeled in splits.train]
    assert 10 < places.count("A") < 24
    assert {
        labeled.label for labeled in builder(models[0], many_pairs, "bradley_terry").splits().train
    } == {"A"}


@pytest.mark.parametrize("kind", KINDS)
def test_ties_are_a_chat_label_and_dropped_for_bradley_terry(models, tmp_path, kind):
    path = tmp_path / "ties.jsonl"
    tie = {
        "comparison": {"prompt_conversation": "?", "completion_A": "X", "completion_B": "O"},
        "label": "Tie",
    }
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [tie] * 5 + [{**tie, "label": "B"}] * 8)
    )
    train, test = builder(models[0], path, kind, test_size=0, calibration_size=0)()
    assert test is None
    assert len(train.rows) == (13 if kind == "chat" else 8)


def test_overlong_test_pairs_are_reported(client, models, tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": str(n), "chosen": "X" * (300 if n % 2 else 1), "rejected": "O"}
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"max_length": 200, "test_size": 10}
    done = run(client, models[0], path, "bradley_terry", tmp_path / "run", data=data, max_steps=1)
    row = read_rows(done / "metrics.jsonl")[0]
    assert row["test/num_pairs"] + row["test/num_left_out"] == 10
    assert row["test/num_left_out"] > 0
    assert row["num_left_out"] + row["num_pairs"] == 8


@pytest.mark.parametrize("kind", KINDS)
def test_overlong_pairs_are_dropped_and_others_judged(tmp_path, kind):
    tiny_model(tmp_path / "short", max_context=200)
    with ServiceClient(
        models={"short": str(tmp_path / "short")}, data_dir=tmp_path / "data"
    ) as client:
        form = form_of(kind, learn_renderer(client, "short"), QUESTION)
        beside = longest(form, 1) - 1
        rows = [
            {"prompt": f"{n}", "chosen": "X" * (198 - beside + n % 2), "rejected": "O"}
            for n in range(10, 60)
        ]
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        done = run(client, "short", tmp_path / "pairs.jsonl", kind, tmp_path / "run", max_steps=1)
    row = read_rows(done / "metrics.jsonl")[0]
    assert row["num_left_out"] > 0
    assert row["num_pairs"] > 0
    assert row["test/num_left_out"] > 0
    assert '"max_length": 198' in (done / "config.json").read_text()


def longest(form, length):
    row = {"prompt": "10", "chosen": "X" * length, "rejected": "O"}
    return max(
        datum.model_input.length for datum in form.to_batch(read_comparison(row, "here"), None)
    )


@pytest.mark.parametrize(("data", "left_out"), [({"test_size": 0}, None), ({"max_length": 200}, 2)])
def test_a_run_without_test_pairs_completes(client, models, tmp_path, capsys, data, left_out):
    for split, count, length in (("train", 20, 1), ("test", 2, 300)):
        rows = [
            {"prompt": f"{split} {n}", "chosen": "X" * length, "rejected": "O"}
            for n in range(count)
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(
        client, models[0], tmp_path, "bradley_terry", tmp_path / "run", data=data, max_steps=1
    )
    assert PreferenceModelFile.read(done).test == (
        {} if left_out is None else {"num_left_out": left_out}
    )
    assert ("2 held-out pairs" in capsys.readouterr().out) == (left_out is not None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate="),
        ({"data": {"calibration_size": -1}}, "calibration_size=-1"),
        ({"data": {"calibration_size": 40}}, "calibration_size=40: each of"),
    ],
)
def test_an_invalid_option_is_rejected(client, models, many_pairs, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        run(client, models[0], many_pairs, "chat", tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_an_unrenderable_comparison_is_rejected_with_its_number(client, models, tmp_path):
    path = tmp_path / "bad.jsonl"
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": [{"role": "king", "content": "a"}], "chosen": "b", "rejected": "c"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="line 2: .*king"):
        builder(models[0], path, "chat", test_size=0)()


@pytest.mark.parametrize("kind", KINDS)
def test_reasoning_that_a_preference_model_does_not_read_is_reported(
    monkeypatch, renderer, tmp_path, caplog, kind
):
    """The format qwen3 leaves the reasoning of earlier answers out, and a Bradley-Terry model reads
    an answer as an earlier one.
    """
    thinking = get_renderer("qwen3", renderer.tokenizer)
    monkeypatch.setattr(model_renderer, "_RENDERERS", {("tiny", None): thinking})
    answers = [
        {"role": "assistant", "content": "4", "reasoning_content": thought}
        for thought in ("Two and two.", "A guess.")
    ]
    path = tmp_path / "pairs.jsonl"
    row = {"prompt": "2 + 2?", "chosen": [answers[0]], "rejected": [answers[1]]}
    path.write_text(json.dumps(row) + "\n")
    train_set, _ = PreferenceDatasetBuilder(
        common_config=ChatDatasetBuilderCommonConfig(model_name_for_tokenizer="tiny", batch_size=1),
        comparison_builder=ComparisonBuilderFromRows(dataset=str(path)),
        kind=kind,
    )()
    message = "2 train answers have reasoning, the first in .*pairs.jsonl, line 1; the chat format"
    batch = train_set.get_batch(0)
    if kind == "chat":
        assert "have reasoning" not in caplog.text
        assert "A guess." in thinking.tokenizer.decode(batch[0].model_input.to_ints())
    else:
        assert re.search(message, caplog.text)
        assert (len(batch), batch.num_left_out) == (0, 1), "the answers that it reads are equal"
