"""Soft targets, compared with values computed by hand and with plain torch over the whole
vocabulary, and runs on the engine.
"""

import asyncio
import json

import numpy as np
import pytest
import torch
from metric_tables import definition_of
from transformers import AutoModelForCausalLM

from planish import ServiceClient
from planish.distillation.off_policy import Config, main
from planish.distillation.soft_targets import SoftTargetData, soft_datum, soft_targets
from planish.distillation.teachers import TeacherConfig
from planish.errors import UserError
from planish.files import read_rows
from planish.runlog.model_renderer import learn_renderer
from planish.supervised.datasets import FromRowsBuilder
from planish.supervised.types import ChatDatasetBuilderCommonConfig
from planish.testing import VOCAB_SIZE, tiny_model
from planish.types import Datum, ModelInput, TopkLogprobs


def test_the_likeliest_tokens_are_made_to_sum_to_one():
    datum = Datum(
        ModelInput.from_ints([7, 8, 9]), {"target_tokens": [8, 9, 10], "weights": [0.0, 0.5, 1.0]}
    )
    chances = [[np.nan, np.nan], [np.nan, np.nan], [0.6, 0.2], [0.5, 0.5]]
    top = TopkLogprobs(
        np.array([[0, 0], [0, 0], [3, 4], [5, 6]], np.int32),
        np.log(np.array(chances)).astype(np.float32),
    )
    soft = soft_datum(datum, top)
    [made] = soft.data
    assert made.model_input == datum.model_input
    assert made.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [[8, 8], [3, 4], [5, 6]]
    assert made.loss_fn_inputs["target_tokens"].dtype == "int64"
    assert made.loss_fn_inputs["weights"].to_numpy() == pytest.approx(
        np.array([[0, 0], [0.375, 0.125], [0.5, 0.5]])
    )
    entropies = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)), np.log(2)
    assert soft.weight == 1.5
    assert soft.entropy_sum == pytest.approx(0.5 * entropies[0] + entropies[1])
    assert soft.topk_mass == pytest.approx(0.5 * 0.8 + 1.0)
    both = SoftTargetData.concatenate([soft, soft])
    assert both.metrics(2.0, "test/") == pytest.approx(
        {
            "test/teacher_kl": 2.0 - soft.entropy_sum / 1.5,
            "test/teacher_entropy": soft.entropy_sum / 1.5,
            "test/teacher_topk_mass": 1.4 / 1.5,
        }
    )
    assert len(both.data) == 2
    assert both.metrics(None) == {}


def test_ids_that_the_student_lacks_are_left_out_of_the_distributions():
    """A student of 5 ids: only 3 and 4 are known at position 1, and none at position 2."""
    datum = Datum(
        ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [1.0, 0.5, 1.0]}
    )
    chances = [[np.nan] * 3, [0.6, 0.2, 0.2], [0.5, 0.3, 0.1], [0.4, 0.3, 0.2]]
    top = TopkLogprobs(
        np.array([[0, 0, 0], [5, 3, 4], [6, 7, 5], [0, 1, 2]], np.int32),
        np.log(np.array(chances)).astype(np.float32),
    )
    soft = soft_datum(datum, top, num_ids=5)
    inputs = soft.data[0].loss_fn_inputs
    assert inputs["target_tokens"].to_numpy().max() < 5
    assert inputs["target_tokens"].to_numpy().tolist()[0] == [2, 3, 4]
    assert inputs["weights"].to_numpy() == pytest.approx(
        np.array([[0, 0.5, 0.5], [0, 0, 0], [4 / 9, 3 / 9, 2 / 9]])
    )
    assert soft.weight == 2.0
    assert soft.topk_mass == pytest.approx(0.4 + 0.9)
    last = np.array([4, 3, 2]) / 9
    assert soft.entropy_sum == pytest.approx(np.log(2) - (last * np.log(last)).sum())
    whole = soft_datum(datum, top, num_ids=8)
    assert whole == soft_datum(datum, top)


def to_batch(model, chats):
    train, _ = builder_of(model, chats)()
    return list(train.get_batch(0))


def builder_of(model, chats, max_length=64):
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, batch_size=4, max_length=max_length
    )
    return FromRowsBuilder(common_config=common, dataset=str(chats), test_size=2)


def whole(path, datum):
    """Return the log-softmax over the vocabulary at every position, [N, V]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([datum.model_input.to_ints()])).logits[0], -1)


@pytest.mark.parametrize("topk", [VOCAB_SIZE, 5])
def test_the_loss_is_the_cross_entropy_of_two_whole_distributions(client, models, chats, topk):
    """k is the whole vocabulary. With a smaller k, the teacher's distribution is truncated."""
    data = to_batch(models[0], chats)
    teacher = client.create_sampling_client(base_model=models[1])
    student = client.create_lora_training_client(base_model=models[0], rank=2, seed=0)
    soft = asyncio.run(soft_targets(data, teacher, topk))
    output = student.forward(soft.data, "cross_entropy").result()
    loss = entropy = mass = 0.0
    for datum in data:
        weights = datum.loss_fn_inputs["weights"].to_torch()
        own, theirs = whole(models[0], datum), whole(models[1], datum)
        best = theirs.topk(topk)
        kept = (
            torch.full_like(theirs, -torch.inf)
            .scatter(1, best.indices, best.values)
            .log_softmax(-1)
        )
        chances = kept.exp()
        loss -= float((weights[:, None] * chances * own).sum())
        entropy -= float((weights[:, None] * chances * kept.nan_to_num(neginf=0.0)).sum())
        mass += float((weights * best.values.exp().sum(-1)).sum())
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    assert soft.entropy_sum == pytest.approx(entropy, rel=1e-4)
    assert soft.topk_mass == pytest.approx(mass, rel=1e-4)
    assert soft.weight == pytest.approx(len(data))


def config_of(models, chats, path, max_length=64, **changes):
    options = {
        "log_path": str(path),
        "model_name": models[0],
        "learning_rate": 1e-2,
        "lora_rank": 4,
        "num_epochs": 6,
        "eval_every": 6,
        "save_every": 4,
        "teacher_config": TeacherConfig(base_model=models[1]),
        "topk": 8,
        **changes,
    }
    return Config(dataset_builder=builder_of(models[0], chats, max_length), **options)


def test_the_student_takes_on_the_distribution_and_every_metric_is_defined(
    client, models, chats, tmp_path
):
    run = asyncio.run(main(config_of(models, chats, tmp_path / "run"), client))
    rows = read_rows(run / "metrics.jsonl")
    assert rows[-1]["test/teacher_kl"] < 0.7 * rows[0]["test/teacher_kl"]
    assert rows[-2]["teacher_kl"] < rows[0]["teacher_kl"]
    for row in rows[:-1]:
        assert row["teacher_kl"] == pytest.approx(row["train_mean_nll"] - row["teacher_entropy"])
        assert 0 < row["teacher_topk_mass"] < 1
    assert rows[0]["test/nll"] == pytest.approx(
        rows[0]["test/teacher_kl"] + rows[0]["test/teacher_entropy"]
    )
    assert [
        key
        for row in rows
        for key in row
        if key != "step" and definition_of(key, "guide/distillation.md") is None
    ] == []


def test_answers_beyond_the_context_are_cut_so_that_the_teacher_holds_them_too(models, tmp_path):
    tiny_model(tmp_path / "short", max_context=100, tied=False)
    names = {"short": str(tmp_path / "short"), "long": models[0]}
    rows = [{"prompt": f"Say {n}.", "completion": "a" * 300} for n in range(10)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ServiceClient(models=names, data_dir=tmp_path / "data") as client:
        learn_renderer(client, "long")
        given = {
            "teacher_config": TeacherConfig(base_model="short"),
            "max_length": None,
            "num_epochs": 1,
        }
        run = asyncio.run(
            main(
                config_of(["long", "short"], tmp_path / "chats.jsonl", tmp_path / "run", **given),
                client,
            )
        )
    first, *_, last = read_rows(run / "metrics.jsonl")
    assert first["num_tokens"] == 98 * first["num_sequences"]
    assert "test/teacher_kl" in last
    assert '"max_length": 98' in (run / "config.json").read_text()


def test_a_teacher_that_is_the_student_has_nothing_to_teach(client, models, chats, tmp_path):
    config = config_of(
        models,
        chats,
        tmp_path / "run",
        topk=VOCAB_SIZE,
        teacher_config=TeacherConfig(base_model=models[0]),
        max_steps=1,
    )
    row = read_rows(asyncio.run(main(config, client)) / "metrics.jsonl")[0]
    assert row["teacher_kl"] == pytest.approx(0.0, abs=1e-4)
    assert row["teacher_topk_mass"] == pytest.approx(1.0, abs=1e-4)
    assert row["optim/grad_norm"] == pytest.approx(0.0, abs=1e-2)


class StoppedError(Exception):
    pass


@pytest.mark.slow
def test_a_resumed_run_ends_as_without_the_stop(client, models, chats, tmp_path, monkeypatch):
    asyncio.run(main(config_of(models, chats, tmp_path / "whole"), client))
    create = client.create_lora_training_client

    def mortal(**options):
        training_client = create(**options)
        submit, steps = training_client.optim_step_async, iter(range(6))

        async def optim_step_async(adam_params):
            if next(steps, None) is None:
                raise StoppedError
            return await submit(adam_params)

        training_client.optim_step_async = optim_step_async
        return training_client

    monkeypatch.setattr(client, "create_lora_training_client", mortal)
    with pytest.raises(StoppedError):
        asyncio.run(main(config_of(models, chats, tmp_path / "parts"), client))
    monkeypatch.undo()
    asyncio.run(main(config_of(models, chats, tmp_path / "parts"), client))
    timed = ("time/", "tokens_per_second/")
    whole_run, parts = (
        [
            {k: v for k, v in row.items() if not k.startswith(timed)}
            for row in read_rows(tmp_path / name / "metrics.jsonl")
        ]
        for name in ("whole", "parts")
    )
    assert whole_run == parts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": 0}, "topk=0"),
        ({"topk": VOCAB_SIZE + 1}, "topk=273"),
        ({"learning_rate": -1.0}, "learning_rate="),
    ],
)
def test_an_invalid_option_is_rejected(client, models, chats, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        asyncio.run(main(config_of(models, chats, tmp_path / "run", **changes), client))
    assert not (tmp_path / "run").exists()


def test_a_teacher_with_more_padded_ids_is_reported_and_trains(
    client, models, chats, tmp_path, capsys
):
    """Nearly all tokens of the teacher are candidates, so some of its padding are among them."""
    padded = str(tiny_model(tmp_path / "padded", seed=3, vocab_size=VOCAB_SIZE + 16, tied=False))
    config = config_of(
        models,
        chats,
        tmp_path / "run",
        topk=VOCAB_SIZE,
        teacher_config=TeacherConfig(base_model=padded),
        max_steps=2,
    )
    rows = read_rows(asyncio.run(main(config, client)) / "metrics.jsonl")
    assert 0.5 < rows[0]["teacher_topk_mass"] < 1
    assert rows[0]["teacher_kl"] > 0
    line = (
        f"teacher_config: {padded} has {VOCAB_SIZE + 16} token ids, and {models[0]} only "
        f"{VOCAB_SIZE}"
    )
    assert line in capsys.readouterr().out
    too_many = config_of(
        models, chats, tmp_path / "b", topk=VOCAB_SIZE + 1, teacher_config=config.teacher_config
    )
    with pytest.raises(UserError, match=f"topk={VOCAB_SIZE + 1}: .* only {VOCAB_SIZE} token ids"):
        asyncio.run(main(too_many, client))
