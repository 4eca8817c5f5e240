"""DPO: losses equal TRL's, logprobs equal those of transformers, and the reference of a run on the
engine does not change.
"""

import asyncio
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from metric_tables import definition_of
from transformers import AutoModelForCausalLM

from planish import ServiceClient
from planish.errors import UserError
from planish.files import read_rows
from planish.preference.datasets import ComparisonBuilderFromRows, DPODatasetBuilderFromComparisons
from planish.preference.dpo import (
    Config,
    PairObjective,
    answer_logprob,
    main,
    pair_loss,
    reference_logprobs,
)
from planish.preference.losses import DPOLoss, IPOLoss, SimPOLoss
from planish.runlog.model_renderer import learn_renderer
from planish.runlog.run_directory import REFERENCE, checkpoint_of
from planish.supervised.types import ChatDatasetBuilderCommonConfig
from planish.testing import tiny_model
from planish.training.supervised_learner import SupervisedLearner
from planish.types import Datum, ModelInput

TRL = json.loads((Path(__file__).parent / "data" / "trl_dpo.json").read_text())


def interleaved(kind):
    return [
        value
        for pair in zip(TRL[f"{kind}_chosen"], TRL[f"{kind}_rejected"], strict=True)
        for value in pair
    ]


LOSSES = {"dpo": DPOLoss, "ipo": IPOLoss, "simpo": SimPOLoss}
SHARES = torch.tensor([0.0, 0.5, 0.3, 0.2])
"""Each answer's logprob is spread over three tokens, with an unlearned one in front that must not
count.
"""


def recorded_logprobs(dtype=torch.float32):
    assert TRL["tokens"] == 3
    unlearned = torch.tensor([-7.0, 0, 0, 0], dtype=dtype)
    return [
        (SHARES.to(dtype) * value + unlearned).requires_grad_() for value in interleaved("policy")
    ]


RECORDED = [
    Datum(
        ModelInput.from_ints([1] * 4), {"target_tokens": [1] * 4, "weights": [0.0, 1.0, 1.0, 1.0]}
    )
] * 24


@pytest.mark.parametrize("case", TRL["cases"], ids=lambda case: f"{case['name']} {case['options']}")
def test_losses_metrics_and_gradients_equal_trl(case):
    loss = LOSSES[case["name"]](**case["options"])
    logprobs_D = recorded_logprobs()
    value, measured = pair_loss(
        loss, RECORDED, logprobs_D, interleaved("reference") if loss.needs_reference else None
    )
    value.backward()
    assert value.dtype is torch.float32
    assert float(value.detach()) == pytest.approx(case["loss"], rel=1e-5)
    names = ("accuracy", "margin", "chosen_reward", "rejected_reward")
    assert measured == pytest.approx({name: case[name] for name in names}, rel=1e-5)
    expected = [
        g
        for pair in zip(case["chosen_gradient"], case["rejected_gradient"], strict=True)
        for g in pair
    ]
    for logprobs, gradient in zip(logprobs_D, expected, strict=True):
        assert logprobs.grad is not None
        torch.testing.assert_close(
            logprobs.grad, gradient * torch.tensor([0.0, 1.0, 1.0, 1.0]), rtol=1e-4, atol=1e-7
        )


def test_losses_equal_the_formulas_of_the_papers():
    """This is a third computation, pair by pair, without torch."""
    [chosen], [rejected] = (TRL[f"policy_{side}"][:1] for side in ("chosen", "rejected"))
    [chosen_reference], [rejected_reference] = (
        TRL[f"reference_{side}"][:1] for side in ("chosen", "rejected")
    )
    h = (chosen - chosen_reference) - (rejected - rejected_reference)

    def minus_log_sigmoid(x):
        return math.log1p(math.exp(-x))

    expected = {
        DPOLoss(0.3): minus_log_sigmoid(0.3 * h),
        DPOLoss(0.3, 0.1): 0.9 * minus_log_sigmoid(0.3 * h) + 0.1 * minus_log_sigmoid(-0.3 * h),
        IPOLoss(0.3): (h - 1 / (2 * 0.3)) ** 2,
        SimPOLoss(2.0, 0.7): minus_log_sigmoid(2.0 * (chosen / 3 - rejected / 3) - 0.7),
    }
    pair = recorded_logprobs(torch.float64)[:2]
    reference = interleaved("reference")[:2]
    for loss, value in expected.items():
        found, _ = pair_loss(loss, RECORDED[:2], pair, reference if loss.needs_reference else None)
        assert float(found.detach()) == pytest.approx(value, rel=1e-6)


def test_measures_of_the_custom_loss_contain_the_loss():
    case = TRL["cases"][0]
    objective = PairObjective("dpo", DPOLoss(case["options"]["beta"]), None)
    value, measured = objective.loss_and_metrics(
        RECORDED, recorded_logprobs(), interleaved("reference")
    )
    assert float(value.detach()) == measured["dpo_loss"] == pytest.approx(case["loss"], rel=1e-5)


def builder(model, pairs, **changes):
    common = ChatDatasetBuilderCommonConfig(
        **{"model_name_for_tokenizer": model, "batch_size": 5, **changes}
    )
    comparisons = ComparisonBuilderFromRows(dataset=str(pairs), test_size=3)
    return DPODatasetBuilderFromComparisons(common_config=common, comparison_builder=comparisons)


def train(client, model, pairs, path, max_length=None, **changes):
    options = {
        "learning_rate": 1e-3,
        "lora_rank": 4,
        "num_epochs": 3,
        "save_every": 2,
        "eval_every": 3,
        **changes,
    }
    config = Config(
        log_path=str(path),
        model_name=model,
        dataset_builder=builder(model, pairs, max_length=max_length),
        **options,
    )
    return asyncio.run(main(config, client))


@pytest.fixture
def client(tmp_path):
    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as client:
        yield client


def by_transformers(model, datum):
    """Return the logprob of a datum's answer by transformers, in float32."""
    tokens = [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(
            torch.tensor([tokens])
        ).logits[0, :-1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return float((logprobs * datum.loss_fn_inputs["weights"].to_torch()).sum())


@pytest.mark.slow
def test_rewards_equal_the_difference_of_two_transformers_models(client, models, pairs, tmp_path):
    policy, reference = models
    _, test = builder(policy, pairs)()
    assert test is not None
    data = list(test.get_batch(0))
    rewards = torch.tensor(
        [0.1 * (by_transformers(policy, d) - by_transformers(reference, d)) for d in data]
    )
    margins = rewards[::2] - rewards[1::2]
    run = train(
        client, policy, pairs, tmp_path / "run", reference_model_name=reference, max_steps=1
    )
    row = read_rows(run / "metrics.jsonl")[0]
    assert row["test/chosen_reward"] == pytest.approx(float(rewards[::2].mean()), abs=1e-5)
    assert row["test/rejected_reward"] == pytest.approx(float(rewards[1::2].mean()), abs=1e-5)
    assert row["test/dpo_loss"] == pytest.approx(
        float(torch.log1p(torch.exp(-margins)).mean()), abs=1e-5
    )
    assert row["test/accuracy"] == pytest.approx(float((margins > 0).float().mean()))
    chosen = [by_transformers(policy, datum) for datum in data[::2]]
    tokens = sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in data[::2])
    assert row["test/nll"] == pytest.approx(-sum(chosen) / tokens, rel=1e-5)


@pytest.mark.slow
def test_preferences_are_learned_and_every_metric_is_defined(client, models, pairs, tmp_path):
    run = train(client, models[0], pairs, tmp_path / "run", dpo_beta=0.5, num_epochs=6)
    rows = read_rows(run / "metrics.jsonl")
    assert rows[0]["dpo_loss"] == pytest.approx(0.693147, abs=1e-4), (
        "policy and reference are the same at first"
    )
    assert rows[0]["margin"] == pytest.approx(0.0, abs=1e-4)
    assert rows[0]["num_pairs"] == 5
    assert rows[-1]["test/margin"] > 0.5
    assert rows[-1]["test/accuracy"] == 1.0
    assert rows[-1]["test/dpo_loss"] < rows[0]["test/dpo_loss"]
    assert [
        key
        for row in rows
        for key in row
        if key != "step" and definition_of(key, "recipes/dpo.md") is None
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ipo", "simpo"])
def test_other_losses_learn_the_same_preferences(client, models, pairs, tmp_path, loss):
    run = train(client, models[0], pairs, tmp_path / "run", loss=loss, num_epochs=6)
    rows = read_rows(run / "metrics.jsonl")
    assert rows[-1][f"test/{loss}_loss"] < rows[0][f"test/{loss}_loss"]
    assert rows[-1]["test/margin"] > rows[0]["test/margin"]
    assert "dpo_loss" not in rows[0]
    assert [
        key
        for row in rows
        for key in row
        if key != "step" and definition_of(key, "recipes/dpo.md") is None
    ] == []
    assert (run / REFERENCE).exists() == (loss == "ipo")
    if loss == "ipo":
        assert rows[0]["ipo_loss"] == pytest.approx(1 / (4 * 0.1**2), rel=1e-3), "beta is 0.1"


class StoppedError(Exception):
    pass


@pytest.mark.slow
def test_a_resumed_run_keeps_its_reference_and_result(client, models, pairs, tmp_path, monkeypatch):
    start = train(client, models[0], pairs, tmp_path / "start", max_steps=2)
    options = {"load_checkpoint_path": str(start), "lr_schedule": "constant"}
    train(client, models[0], pairs, tmp_path / "whole", **options)
    create = client.create_training_client_from_state

    def mortal(*arguments, **keywords):
        training_client = create(*arguments, **keywords)
        submit, steps = training_client.optim_step_async, iter(range(3))

        async def optim_step_async(adam_params):
            if next(steps, None) is None:
                raise StoppedError
            return await submit(adam_params)

        training_client.optim_step_async = optim_step_async
        return training_client

    monkeypatch.setattr(client, "create_training_client_from_state", mortal)
    with pytest.raises(StoppedError):
        train(client, models[0], pairs, tmp_path / "parts", **options)
    monkeypatch.undo()
    named = json.loads((tmp_path / "parts" / REFERENCE).read_text())
    train(client, models[0], pairs, tmp_path / "parts", **options)
    assert json.loads((tmp_path / "parts" / REFERENCE).read_text()) == named
    timed = ("time/", "tokens_per_second/")
    first, second = (
        [
            {k: v for k, v in row.items() if not k.startswith(timed)}
            for row in read_rows(tmp_path / run / "metrics.jsonl")
        ]
        for run in ("whole", "parts")
    )
    assert first == second
    assert first[0]["chosen_reward"] == pytest.approx(0.0, abs=1e-4), (
        "the reference is what the run begins with"
    )
    assert abs(first[-1]["test/chosen_reward"]) > 1e-3


@pytest.mark.slow
def test_a_restarted_run_records_its_reference_again(client, models, pairs, tmp_path, monkeypatch):
    first, second = (
        str(train(client, models[0], pairs, tmp_path / name, max_steps=1, seed=seed))
        for seed, name in enumerate(("first", "second"))
    )

    async def killed(self):
        raise StoppedError

    monkeypatch.setattr(SupervisedLearner, "run_steps", killed)
    with pytest.raises(StoppedError):
        train(client, models[0], pairs, tmp_path / "run", load_checkpoint_path=first, max_steps=1)
    monkeypatch.undo()
    train(client, models[0], pairs, tmp_path / "run", load_checkpoint_path=second, max_steps=1)
    named = json.loads((tmp_path / "run" / REFERENCE).read_text())
    assert named == {"model_path": checkpoint_of(second)}
    row = read_rows(tmp_path / "run" / "metrics.jsonl")[0]
    assert row["dpo_loss"] == pytest.approx(math.log(2), abs=1e-5), (
        "policy and reference are the same at first"
    )


def test_overlong_pairs_are_truncated_for_policy_and_reference(tmp_path):
    tiny_model(tmp_path / "short", max_context=100)
    rows = [{"prompt": f"Say {n}.", "chosen": "a" * 300, "rejected": "b"} for n in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ServiceClient(
        models={"short": str(tmp_path / "short")}, data_dir=tmp_path / "data"
    ) as client:
        learn_renderer(client, "short")
        run = train(client, "short", tmp_path / "pairs.jsonl", tmp_path / "run", num_epochs=1)
    first, last = read_rows(run / "metrics.jsonl")
    assert (first["num_truncated"], first["num_tokens"] // 5 > 99) == (5, True)
    assert "test/margin" in last
    assert '"max_length": 99' in (run / "config.json").read_text()


def test_an_empty_test_set_is_rejected(client, models, tmp_path):
    for split, count, length in (("train", 10, 1), ("test", 3, 200)):
        rows = [{"prompt": f"{n}" * length, "chosen": "a", "rejected": "b"} for n in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="the test set has no tokens to measure.*max_length"):
        train(client, models[0], tmp_path, tmp_path / "run", max_length=120)
    assert read_rows(tmp_path / "run" / "metrics.jsonl") == []


@pytest.mark.parametrize("option", ["reference_model_name", "reference_checkpoint_path"])
def test_a_reference_with_another_tokenizer_is_rejected_before_training(
    client, models, pairs, tmp_path, option
):
    other = shutil.copytree(models[1], tmp_path / "other")
    tokens = other / "tokenizer.json"
    tokens.write_text(tokens.read_text().replace("<think>", "<muse>"))
    reference = str(other)
    if option == "reference_checkpoint_path":
        policy = client.create_lora_training_client(base_model=reference, rank=2, seed=0)
        reference = policy.save_state("x").result().path
    with pytest.raises(UserError, match=rf"{option}: the vocabulary of .*'<(think|muse)>'"):
        train(client, models[0], pairs, tmp_path / "run", **{option: reference})
    assert not (tmp_path / "run").exists()


def test_a_failed_reference_gets_no_further_requests(models, pairs):
    train_set, _ = builder(models[0], pairs)()
    begun, ended = [], []

    class Reference:
        async def compute_logprobs_async(self, tokens):
            begun.append(tokens)
            if len(begun) == 1:
                await asyncio.sleep(0.01)
                raise OSError("no reference")
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(tokens)

    async def run():
        with pytest.raises(OSError, match="no reference"):
            await reference_logprobs(Reference(), train_set.get_batch(0))
        return len(ended)

    assert asyncio.run(run()) == len(train_set.get_batch(0)) - 1


def test_reference_logprobs_equal_the_trainers(client, models, pairs):
    train_set, _ = builder(models[0], pairs)()
    data = list(train_set.get_batch(0))
    reference = client.create_sampling_client(base_model=models[0])
    training_client = client.create_lora_training_client(base_model=models[0], rank=2, seed=0)
    output = training_client.forward(data, "cross_entropy").result()
    trained = [
        float(answer_logprob(datum, tensors["logprobs"].to_torch()))
        for datum, tensors in zip(data, output.loss_fn_outputs, strict=True)
    ]
    assert asyncio.run(reference_logprobs(reference, data)) == pytest.approx(trained, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dpo_beta": 0.0}, "dpo_beta=0.0"),
        ({"learning_rate": -1.0}, "learning_rate="),
        ({"loss": "kto"}, "loss=kto: give one of dpo, ipo, simpo"),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5"),
        ({"label_smoothing": 0.1, "loss": "ipo"}, "label_smoothing=0.1: loss=ipo"),
        ({"simpo_gamma": 0.5}, "simpo_gamma=0.5: loss=dpo"),
        ({"simpo_gamma": -0.5, "loss": "simpo"}, "simpo_gamma=-0.5: give"),
        ({"loss": "simpo", "reference_model_name": "a"}, "loss=simpo has no reference"),
        ({"reference_model_name": "a", "reference_checkpoint_path": "b"}, "two references"),
    ],
)
def test_an_invalid_option_is_rejected(client, models, pairs, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        train(client, models[0], pairs, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()
