"""Gradients of DPO and related losses on the LoRA weights equal those of transformers, PEFT and
TRL's formulas, in float32. The engine's gradient is read from a checkpoint: with beta1 = 0, the
first moment of AdamW is the gradient of the last step.
"""

import asyncio

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from planish import AdamParams, ServiceClient
from planish.model.architecture.config import ModelConfig
from planish.model.layers.lora import LoraLayout
from planish.preference.datasets import comparison_to_data
from planish.preference.dpo import PairObjective
from planish.preference.losses import DPOLoss, IPOLoss, SimPOLoss
from planish.preference.types import Comparison, LabeledComparison
from planish.supervised.types import Batch
from planish.testing import tiny_model
from planish.types import CheckpointPath, LoraConfig

RANK = 4
ANSWERS = (("Yes, seven.", "No."), ("4", "It is hard to say, I think."), ("a b c", "a b d"))
BETA, SMOOTHING, SIMPO_BETA, GAMMA = 0.3, 0.1, 2.0, 0.7
LOSSES = {
    "dpo": DPOLoss(BETA, SMOOTHING),
    "ipo": IPOLoss(BETA),
    "simpo": SimPOLoss(SIMPO_BETA, GAMMA),
}


def trl_losses(
    name, chosen, rejected, chosen_reference, rejected_reference, chosen_tokens, rejected_tokens
):
    """Return the losses as TRL 0.23.1 computes them: DPOTrainer.dpo_loss (sigmoid, ipo) and
    CPOTrainer.cpo_loss (simpo, of mean logprobs).
    """
    logits = (chosen - rejected) - (chosen_reference - rejected_reference)
    match name:
        case "dpo":
            return (
                -logsigmoid(BETA * logits) * (1 - SMOOTHING)
                - logsigmoid(-BETA * logits) * SMOOTHING
            )
        case "ipo":
            return (logits - 1 / (2 * BETA)) ** 2
        case _:
            logits = chosen / chosen_tokens - rejected / rejected_tokens - GAMMA / SIMPO_BETA
            return -logsigmoid(SIMPO_BETA * logits)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def service_client(data_dir):
    with ServiceClient(data_dir=data_dir, dtype="float32") as client:
        yield client


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("model"), tied=False))


@pytest.fixture(scope="module")
def data(renderer):
    def says(role, content):
        return [{"role": role, "content": content}]

    comparisons = [
        LabeledComparison(
            Comparison(says("user", "What?"), *(says("assistant", text) for text in pair)), "A"
        )
        for pair in ANSWERS
    ]
    return Batch.concatenate(comparison_to_data(comparison, renderer) for comparison in comparisons)


@pytest.fixture(scope="module")
def trained(service_client, model, data):
    """Return the path of a state with a trained adapter, so that both of LoRA's matrices have
    gradients.
    """
    training_client = service_client.create_lora_training_client(
        base_model=model, rank=RANK, seed=0
    )
    for _ in range(3):
        training_client.forward_backward(data[::2], "cross_entropy").result()
        training_client.optim_step(AdamParams(learning_rate=0.02)).result()
    return training_client.save_state("trained").result().path


def directory(data_dir, path):
    parsed = CheckpointPath.parse(path)
    return data_dir / parsed.run_id / "weights" / parsed.name


def engine_gradients(service_client, data_dir, trained, objective, data, model):
    """Return the objective's metrics, and its gradients by the names of PEFT's parameters."""
    training_client = service_client.create_training_client_from_state(trained)

    async def step():
        gradient = await objective.submit(training_client, data)
        return await gradient.metrics()

    measured = asyncio.run(step())
    training_client.optim_step(AdamParams(learning_rate=1e-12, beta1=0.0)).result()
    path = training_client.save_state(f"stepped-{objective.name}").result().path
    moments = load_file(directory(data_dir, path) / "optimizer.safetensors")["exp_avg"]
    layout = LoraLayout(ModelConfig.from_directory(model), LoraConfig(rank=RANK))
    return measured, {
        f"base_model.model.{name}.weight": view for name, view in layout.views(moments).items()
    }


def answer_logprobs(model, data):
    """Return the logprob of the trained tokens of each datum."""
    found = []
    for datum in data:
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        logprobs = model(torch.tensor([datum.model_input.to_ints()])).logits[0].log_softmax(-1)
        chosen = logprobs.gather(1, targets[:, None])[:, 0]
        found.append((chosen * datum.loss_fn_inputs["weights"].to_torch()).sum())
    return torch.stack(found)


def peft_gradients(name, data_dir, trained, data, model):
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, directory(data_dir, trained), is_trainable=True)
    with torch.no_grad(), peft.disable_adapter():
        reference = answer_logprobs(peft, data)
    policy = answer_logprobs(peft, data)
    tokens = torch.tensor(
        [float(datum.loss_fn_inputs["weights"].to_torch().sum()) for datum in data]
    )
    sides = [side for values in (policy, reference, tokens) for side in (values[::2], values[1::2])]
    loss = trl_losses(name, *sides).mean()
    loss.backward()
    named = {
        key.replace(".default", ""): parameter.grad for key, parameter in peft.named_parameters()
    }
    return loss.item(), {key: grad for key, grad in named.items() if grad is not None}


@pytest.mark.parametrize("name", LOSSES)
def test_lora_gradients_equal_peft_with_the_trl_formula(
    service_client, data_dir, trained, data, model, name
):
    loss = LOSSES[name]
    reference = (
        service_client.create_sampling_client(base_model=model) if loss.needs_reference else None
    )
    objective = PairObjective(name, loss, reference)
    measured, ours = engine_gradients(service_client, data_dir, trained, objective, data, model)
    value, theirs = peft_gradients(name, data_dir, trained, data, model)
    assert measured[f"{name}_loss"] == pytest.approx(value, rel=1e-5)
    assert ours.keys() == theirs.keys()
    for key, gradient in theirs.items():
        distance = (ours[key] - gradient).norm() / gradient.norm()
        assert distance < 1e-4, f"{key} differs by {distance}"
