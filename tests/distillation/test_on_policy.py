"""On-policy distillation: advantages computed by hand, gradients of plain torch, and runs with one
and with two teachers.
"""

import asyncio
import json
import pickle
from dataclasses import dataclass

import chz
import numpy as np
import pytest
import torch
from metric_tables import definition_of
from peft import LoraConfig as PeftConfig, get_peft_model
from transformers import AutoModelForCausalLM

from planish.distillation.datasets import (
    DistillationDatasetBuilder,
    DistillationDatasetConfig,
    TaughtGroup,
)
from planish.distillation.on_policy import Config, TeacherKL, main
from planish.distillation.prompts import PromptOnlyDatasetBuilder, PromptOnlyEnv
from planish.distillation.teachers import TeacherConfig
from planish.errors import UnsupportedError, UserError
from planish.files import read_rows
from planish.model.architecture.config import ModelConfig
from planish.model.layers.lora import LoraLayout
from planish.rl.data_processing import TrainingSequence
from planish.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from planish.training.rl_config import KLReferenceConfig, StreamMinibatchConfig
from planish.types import LoraConfig


def sequence(tokens, logprobs, mask, teacher, advantage=0.0):
    mask_N = np.array(mask, np.float32)
    return TrainingSequence(
        np.array(tokens),
        np.array(logprobs, np.float32),
        mask_N * np.float32(advantage),
        mask_N,
        teacher,
    )


class Teacher:
    """A teacher that gives token t the probability exp(-t / scale), up to a constant, at every
    position.
    """

    def __init__(self, scale):
        self.scale = scale
        self.asked = []

    async def compute_logprobs_async(self, prompt, prompt_logprobs_last_n):
        tokens = prompt.to_ints()
        self.asked.append((tokens, prompt_logprobs_last_n))
        scores = [-token / self.scale for token in tokens]
        return [None] * (len(tokens) - prompt_logprobs_last_n) + scores[-prompt_logprobs_last_n:]


def test_every_token_gets_the_kl_term_of_its_group_s_teacher_without_a_baseline():
    first, second = Teacher(1.0), Teacher(2.0)
    data = [
        sequence([9, 1, 2], [0, -1.5, -1.0], [0, 1, 1], "dataset_0"),
        sequence([9, 3, 4, 2], [0, -1.0, 0, -0.5], [0, 1, 0, 1], "dataset_1", advantage=10.0),
    ]
    shaping = TeacherKL({"dataset_0": first, "dataset_1": second}, coefficient=2.0, discount=0.0)
    shaped, metrics = asyncio.run(shaping(data))
    gaps = [[0, -0.5, 1.0], [0, 0.5, 0, 0.5]]  # log p_student - log p_teacher
    assert shaped[0].advantages_N.tolist() == [0, 1.0, -2.0]
    assert shaped[1].advantages_N.tolist() == [0, 10 - 1.0, 0, 10 - 1.0]
    assert metrics == pytest.approx(
        {
            "teacher_kl": sum(map(sum, gaps)) / 4,
            "teacher_kl/dataset_0": sum(gaps[0]) / 2,
            "teacher_kl/dataset_1": sum(gaps[1]) / 2,
        }
    )
    assert [first.asked, second.asked] == [[([9, 1, 2], 2)], [([9, 3, 4, 2], 3)]], (
        "each its own, from its first token on"
    )


def test_with_a_discount_a_token_answers_for_those_behind_it():
    data = [sequence([9, 1, 5, 2], [0, -2.0, 0, -4.0], [0, 1, 0, 1], "dataset_0")]
    shaped, metrics = asyncio.run(
        TeacherKL({"dataset_0": Teacher(1.0)}, coefficient=1.0, discount=0.5)(data)
    )
    # the terms are 1 and 2; the first sees a quarter of the second, two places on
    assert shaped[0].advantages_N.tolist() == [0, 1 + 0.25 * 2, 0, 2]
    assert metrics == {"teacher_kl": -1.5}


def logits_of(model, tokens):
    return model(torch.tensor([tokens])).logits[0].float()


def test_in_expectation_the_gradient_is_that_of_the_reverse_kl(client, models):
    """Instead of samples, use all answers of one token, each weighted by its probability."""
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in models[:2]
    )
    prompt = [60, 61, 62]
    logprobs = torch.log_softmax(logits_of(student, prompt)[-1], -1)
    with torch.no_grad():
        theirs = torch.log_softmax(logits_of(teacher, prompt)[-1], -1)
    (logprobs.exp() * (logprobs - theirs)).sum().backward(retain_graph=True)
    expected = [p.grad.clone() for p in student.parameters() if p.grad is not None]
    student.zero_grad()
    sampled = logprobs.detach().numpy()
    data = [
        sequence([*prompt, v], [0, 0, 0, sampled[v]], [0, 0, 0, 1], "dataset_0")
        for v in range(len(sampled))
    ]
    clients = {"dataset_0": client.create_sampling_client(base_model=models[1])}
    shaped, metrics = asyncio.run(TeacherKL(clients, coefficient=1.0, discount=0.0)(data))
    advantages = torch.tensor([float(one.advantages_N[-1]) for one in shaped])
    chances = logprobs.detach().exp()
    ratios = (logprobs - logprobs.detach()).exp()
    (-(chances * ratios * advantages)).sum().backward()
    found = [p.grad for p in student.parameters() if p.grad is not None]
    for ours, want in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-3, atol=1e-5)
    assert metrics["teacher_kl"] == pytest.approx(
        float((sampled - theirs.numpy()).mean()), abs=1e-4
    )


def builder_of(models, prompts, *teachers, **changes):
    """Return a dataset of prompts for each teacher, given by its model or by (model,
    checkpoint).
    """
    parts = [
        DistillationDatasetConfig(
            dataset_builder=PromptOnlyDatasetBuilder(
                **{
                    "dataset": str(prompts),
                    "model_name": models[0],
                    "batch_size": 3,
                    "group_size": 2,
                    **changes,
                }
            ),
            teacher_config=TeacherConfig(base_model=teacher),
        )
        for teacher in teachers
    ]
    return DistillationDatasetBuilder(parts=parts)


def config_of(models, builder, path, **changes):
    options = {
        "learning_rate": 1e-2,
        "model_name": models[0],
        "max_tokens": 6,
        "log_path": str(path),
        "lora_rank": 4,
        "max_steps": 1,
        "eval_every": 0,
        "num_groups_to_log": 1,
        **changes,
    }
    return Config(dataset_builder=builder, **options)


def recorded(client, monkeypatch):
    """Record the data of each later forward_backward."""
    calls = []
    create = client.create_lora_training_client

    def recording(**options):
        training_client = create(**options)
        submit = training_client.forward_backward_async

        async def forward_backward_async(data, loss_fn, loss_fn_config=None):
            calls.append((data, loss_fn))
            return await submit(data, loss_fn, loss_fn_config=loss_fn_config)

        training_client.forward_backward_async = forward_backward_async
        return training_client

    monkeypatch.setattr(client, "create_lora_training_client", recording)
    return calls


def by_transformers(model, datum):
    tokens = [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]]
    with torch.no_grad():
        logprobs = torch.log_softmax(logits_of(model, tokens)[:-1], -1)
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def test_a_run_trains_on_the_gap_of_two_models_by_transformers(
    client, models, prompts, tmp_path, monkeypatch
):
    """Compare the data, and the norm of the whole gradient, with transformers and PEFT."""
    calls = recorded(client, monkeypatch)
    run = asyncio.run(
        main(config_of(models, builder_of(models, prompts, models[1]), tmp_path / "run"), client)
    )
    [(data, loss_fn)] = calls
    assert (len(data), loss_fn) == (6, "importance_sampling")
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in models[:2]
    )
    gaps = []
    for datum in data:
        sampled = datum.loss_fn_inputs["logprobs"].to_numpy() != 0
        gap = (by_transformers(student, datum) - by_transformers(teacher, datum)) * sampled
        np.testing.assert_allclose(datum.loss_fn_inputs["advantages"].to_numpy(), -gap, atol=2e-3)
        gaps.append(gap[sampled])
    [row] = read_rows(run / "metrics.jsonl")
    assert row["teacher_kl"] == pytest.approx(float(np.concatenate(gaps).mean()), abs=1e-3)
    assert row["optim/grad_norm"] == pytest.approx(peft_gradient_norm(models[0], data), rel=1e-3)


def peft_gradient_norm(path, data):
    """Return the gradient norm of a new adapter of rank 4 and seed 0, by the importance-sampling
    loss as a plain formula.
    """
    layout = LoraLayout(ModelConfig.from_directory(path), LoraConfig(rank=4, seed=0))
    targets = sorted({entry.target for entry in layout.entries})
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    peft = get_peft_model(
        base, PeftConfig(r=4, lora_alpha=32, target_modules=targets, lora_dropout=0.0)
    )
    parameters = dict(peft.named_parameters())
    for name, value in layout.views(layout.init(0)).items():
        target, part = name.rsplit(".", 1)
        parameters[f"base_model.model.{target}.{part}.default.weight"].data.copy_(value)
    for datum in data:
        inputs = {name: tensor.to_torch() for name, tensor in datum.loss_fn_inputs.items()}
        logprobs = torch.log_softmax(logits_of(peft, datum.model_input.to_ints()), -1)
        logprobs = logprobs.gather(1, inputs["target_tokens"][:, None])[:, 0]
        (-((logprobs - inputs["logprobs"]).exp() * inputs["advantages"]).sum()).backward()
    return float(
        torch.stack([p.grad.norm() for p in peft.parameters() if p.grad is not None]).norm()
    )


@pytest.mark.slow
def test_the_student_comes_nearer_to_its_teacher_and_every_metric_is_defined(
    client, models, prompts, tmp_path
):
    builder = builder_of(models, prompts, models[1], batch_size=12, group_size=8)
    run = asyncio.run(
        main(
            config_of(models, builder, tmp_path / "run", max_steps=7, num_epochs=7, max_tokens=4),
            client,
        )
    )
    rows = read_rows(run / "metrics.jsonl")
    assert rows[-1]["teacher_kl"] < 0.7 * rows[0]["teacher_kl"]
    assert [
        key
        for row in rows
        for key in row
        if key != "step" and definition_of(key, "guide/distillation.md") is None
    ] == []


def test_each_dataset_is_taught_by_its_own_teacher(client, models, prompts, tmp_path, monkeypatch):
    calls = recorded(client, monkeypatch)
    builder = builder_of(models, prompts, models[1], models[2])
    run = asyncio.run(main(config_of(models, builder, tmp_path / "run"), client))
    [(data, _)] = calls
    student, *teachers = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in models
    )
    assert len(data) == 12
    for index, datum in enumerate(data):
        sampled = datum.loss_fn_inputs["logprobs"].to_numpy() != 0
        gap = (
            by_transformers(student, datum) - by_transformers(teachers[index // 6], datum)
        ) * sampled
        np.testing.assert_allclose(datum.loss_fn_inputs["advantages"].to_numpy(), -gap, atol=2e-3)
    [row] = read_rows(run / "metrics.jsonl")
    tokens = [
        sum(int((d.loss_fn_inputs["logprobs"].to_numpy() != 0).sum()) for d in half)
        for half in (data[:6], data[6:])
    ]
    assert row["teacher_kl"] == pytest.approx(
        np.average([row["teacher_kl/dataset_0"], row["teacher_kl/dataset_1"]], weights=tokens),
        abs=1e-5,
    )


@pytest.mark.slow
def test_a_checkpoint_as_teacher_is_pinned_when_the_run_begins(client, models, prompts, tmp_path):
    builder = builder_of(models, prompts, models[1])
    teacher = asyncio.run(main(config_of(models, builder, tmp_path / "teacher"), client))

    def taught(path, **changes):
        [part] = builder.parts
        own = TeacherConfig(base_model=models[0], load_checkpoint_path=str(teacher))
        part = chz.replace(part, teacher_config=own)
        return config_of(models, DistillationDatasetBuilder(parts=[part]), path, **changes)

    run = asyncio.run(main(taught(tmp_path / "run"), client))
    [row] = read_rows(run / "metrics.jsonl")
    assert row["teacher_kl"] != pytest.approx(0.0, abs=1e-4), (
        "the teacher has moved away from the base model"
    )
    [state] = [row["state_path"] for row in read_rows(teacher / "checkpoints.jsonl")]
    config = json.loads((run / "config.json").read_text())
    assert config["dataset_builder"]["parts"][0]["teacher_config"]["load_checkpoint_path"] == state
    asyncio.run(main(config_of(models, builder, tmp_path / "teacher", max_steps=2), client))
    with pytest.raises(
        UserError, match=r"parts.0.teacher_config.load_checkpoint_path was .*000001"
    ):
        asyncio.run(main(taught(tmp_path / "run", max_steps=2), client))


def test_rewards_are_added_to_what_the_teacher_says(client, models, prompts, tmp_path, monkeypatch):
    """The reward is the parity of the last token. The group's mean is subtracted from the reward
    only.
    """
    calls = recorded(client, monkeypatch)
    step = PromptOnlyEnv.step

    async def rewarded(self, action, *, extra=None):
        result = await step(self, action, extra=extra)
        result.reward = float(len(set(action)))
        return result

    monkeypatch.setattr(PromptOnlyEnv, "step", rewarded)
    builder = builder_of(models, prompts, models[1])
    for name, advantage in (("alone", "none"), ("both", "mean")):
        asyncio.run(main(config_of(models, builder, tmp_path / name, advantage=advantage), client))
    (alone, _), (both, _) = calls
    for datums in zip(*[iter(list(zip(alone, both, strict=True)))] * 2, strict=True):
        rewards = [float(len(set(sampled_tokens(datum)))) for datum, _ in datums]
        for (without, with_reward), reward in zip(datums, rewards, strict=True):
            sampled = without.loss_fn_inputs["logprobs"].to_numpy() != 0
            added = (
                with_reward.loss_fn_inputs["advantages"].to_numpy()
                - without.loss_fn_inputs["advantages"].to_numpy()
            )
            np.testing.assert_allclose(added, (reward - np.mean(rewards)) * sampled, atol=1e-5)


def sampled_tokens(datum):
    sampled = datum.loss_fn_inputs["logprobs"].to_numpy() != 0
    return datum.loss_fn_inputs["target_tokens"].to_numpy()[sampled].tolist()


@dataclass(frozen=True)
class Pair(EnvGroupBuilder):
    """Two environments that play against each other."""

    plays_together = True
    cleaned: list[str]

    async def make_envs(self):
        return [PromptOnlyEnv(None, []), PromptOnlyEnv(None, [])]  # type: ignore[arg-type]

    async def compute_group_rewards(self, trajectory_group, env_group):
        return [(float(index), {}) for index, _ in enumerate(env_group)]

    async def cleanup(self):
        self.cleaned.append("once")

    def logging_tags(self):
        return ["pairs"]


def test_a_group_with_a_teacher_is_otherwise_what_it_was():
    inner = Pair([])
    taught = pickle.loads(pickle.dumps(TaughtGroup(inner, "dataset_3")))
    assert (taught.teacher(), taught.logging_tags(), taught.plays_together) == (
        "dataset_3",
        ["pairs"],
        True,
    )

    async def play():
        envs = await taught.make_envs()
        rewards = await taught.compute_group_rewards([], envs)
        await taught.cleanup()
        return rewards

    assert asyncio.run(play()) == [(0.0, {}), (1.0, {})]
    assert taught.inner.cleaned == ["once"]
    assert inner.teacher() is None


class Batches(RLDataset):
    def __init__(self, sizes):
        self.sizes = sizes

    def get_batch(self, index):
        return [Pair([f"{index}"]) for _ in range(self.sizes[index])]

    def __len__(self):
        return len(self.sizes)


@chz.chz
class BatchesBuilder(RLDatasetBuilder):
    sizes: list[int]

    async def __call__(self):
        return Batches(self.sizes), Batches([1])


def test_a_batch_holds_one_of_each_part_and_there_are_as_many_as_the_shortest_has():
    teacher = TeacherConfig(base_model="x")
    parts = [
        DistillationDatasetConfig(
            dataset_builder=BatchesBuilder(sizes=[2, 2, 2]), teacher_config=teacher
        ),
        DistillationDatasetConfig(
            dataset_builder=BatchesBuilder(sizes=[4]), teacher_config=teacher, groups_per_batch=2
        ),
    ]
    train, test = asyncio.run(DistillationDatasetBuilder(parts=parts)())
    assert len(train) == 2
    assert [group.teacher() for group in train.get_batch(1)] == ["dataset_0"] * 2 + [
        "dataset_1"
    ] * 2
    assert test is not None
    assert len(test) == 2


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kl_penalty_coef": 0.0}, UserError, "kl_penalty_coef=0"),
        (
            {"kl_reference_config": KLReferenceConfig(base_model="x")},
            UserError,
            "kl_reference_config",
        ),
        ({"remove_constant_reward_groups": True}, UserError, "remove_constant_reward_groups"),
        ({"temperature": 0.7}, UnsupportedError, "temperature=0.7"),
        (
            {"stream_minibatch_config": StreamMinibatchConfig(num_minibatches=2)},
            UnsupportedError,
            "as a whole",
        ),
        ({"learning_rate": 0.0}, UserError, "learning_rate="),
        (
            {"dataset_builder": DistillationDatasetBuilder(parts=[])},
            UserError,
            "at least one dataset",
        ),
    ],
)
def test_an_invalid_option_is_rejected(client, models, prompts, tmp_path, changes, error, message):
    builder = changes.pop("dataset_builder", builder_of(models, prompts, models[1]))
    with pytest.raises(error, match=message):
        asyncio.run(main(config_of(models, builder, tmp_path / "run", **changes), client))
    assert not (tmp_path / "run").exists()
