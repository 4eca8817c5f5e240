"""A GPU's whole distributions against transformers: every logprob of every position, short prompts
and long ones, with kernels and without.
"""

from pathlib import Path

import numpy as np
import pytest
import test_trainer
import torch
from backends import load_on
from rounding import assert_equal_but_for_rounding
from test_sampler import request, run, sampler_of
from test_trainer import group_datums, relative
from transformers import AutoModelForCausalLM

from planish.engine.training.adapters import Adapter
from planish.engine.training.trainer import Trainer
from planish.engine.training.trainer_settings import TrainerSettings
from planish.model.decoder.decoder import Decoder
from planish.model.kernels.cpp import ops
from planish.model.layers.lora import LoraLayout
from planish.types import Datum, LoraConfig, ModelInput

pytestmark = pytest.mark.gpu
LONG = 8192


def new_adapter(decoder: Decoder, is_identity: bool = False, rank: int = 8) -> Adapter:
    layout = LoraLayout(decoder.config, LoraConfig(rank=rank))
    noise = 0.02 * torch.randn(layout.size, generator=torch.Generator().manual_seed(1))
    return Adapter(layout, decoder.backend, layout.init(0) + (0 if is_identity else noise))


def distributions(decoder: Decoder, sequence: list[int]) -> torch.Tensor:
    """float32 [T, V] on the CPU: the trainer's logprobs of all tokens at all positions."""
    every = np.broadcast_to(
        np.arange(decoder.config.vocab_size), (len(sequence), decoder.config.vocab_size)
    )
    datum = Datum(ModelInput.from_ints(sequence), {"target_tokens": every.copy()})
    output, _ = test_trainer.run(
        Trainer(decoder), new_adapter(decoder, is_identity=True), [datum], forward_only=True
    )
    return output.loss_fn_outputs[0]["logprobs"].to_torch()


def theirs(
    path: Path, sequence: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.to(device)  # pyright: ignore[reportArgumentType]
    with torch.inference_mode():
        return (
            model(torch.tensor([sequence], device=device)).logits[0].float().log_softmax(-1).cpu()
        )


def random_tokens(count: int) -> list[int]:
    return np.random.default_rng(0).integers(0, 256, count).tolist()


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "qwen3", "gemma3", "gpt_oss", "olmo3", "phi3", "qwen3_5", "qwen3_moe"],
)
def test_float32_equals_transformers(model_of, device, family):
    path, sequence = model_of(family, tied=family == "llama"), random_tokens(300)
    expected = theirs(path, sequence, torch.float32, torch.device("cpu"))
    assert expected.std() > 0.5
    found = distributions(load_on(path, torch.float32, device), sequence)
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bf16_is_as_close_to_float32_as_transformers_bf16(model_of, device, family):
    """The same weights, rounded to bf16, in both; what differs is arithmetic."""
    path, sequence = model_of(family, layers=4, dtype="bfloat16"), random_tokens(300)
    exact = theirs(path, sequence, torch.float32, torch.device("cpu"))
    their_error = relative(theirs(path, sequence, torch.bfloat16, device), exact)
    our_error = relative(distributions(load_on(path, torch.bfloat16, device), sequence), exact)
    assert our_error < 1.2 * their_error
    assert our_error < 0.02


@pytest.fixture(scope="module")
def long_model(model_of):
    return model_of("qwen3", max_context=LONG + 64)


def test_a_long_prompt_equals_transformers(long_model, device):
    """In the sampler, in pieces, and in the trainer, as one sequence of more tokens than a
    micro-batch.
    """
    sequence = random_tokens(LONG)
    expected = theirs(long_model, sequence, torch.float32, torch.device("cpu"))[
        torch.arange(LONG - 1), sequence[1:]
    ]
    decoder = load_on(long_model, torch.float32, device)
    (response,) = run(
        sampler_of(decoder), request(sequence, 3, max_tokens=40, seed=0, prompt_logprobs=True)
    )
    sampled = torch.tensor(response.prompt_logprobs[1:])  # pyright: ignore[reportOptionalSubscript]
    assert (sampled - expected).abs().max() < 1e-4
    datum = Datum(ModelInput.from_ints(sequence[:-1]), {"target_tokens": sequence[1:]})
    trainer, adapter = Trainer(decoder), new_adapter(decoder, is_identity=True)
    output, gradient = test_trainer.gradient(trainer, adapter, [datum])
    assert (output.loss_fn_outputs[0]["logprobs"].to_torch() - expected).abs().max() < 1e-4
    _, at_once = test_trainer.gradient(Trainer(decoder, TrainerSettings(LONG)), adapter, [datum])
    assert relative(gradient.cpu(), at_once.cpu()) < 1e-5


def without_kernels(monkeypatch) -> None:
    monkeypatch.setenv("PLANISH_KERNELS", "torch")
    monkeypatch.setattr(ops, "load_library", lambda: None)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_kernels_equal_torch(model_of, device, family, dtype, tolerance, monkeypatch):
    path = model_of(family)
    data = group_datums(7, prompts=6, samples=5)
    ops = [request(random_tokens(20 + 40 * seed), 4, seed=seed, max_tokens=60) for seed in range(4)]

    def outcome() -> tuple[torch.Tensor, torch.Tensor, list]:
        decoder = load_on(path, dtype, device)
        output, gradient = test_trainer.gradient(
            Trainer(decoder), new_adapter(decoder), data, "importance_sampling"
        )
        logprobs = torch.cat([out["logprobs"].to_torch() for out in output.loss_fn_outputs])
        return logprobs, gradient.cpu(), run(sampler_of(decoder), *ops)

    logprobs, gradient, sampled = outcome()
    without_kernels(monkeypatch)
    plain_logprobs, plain_gradient, plain_sampled = outcome()
    assert relative(logprobs, plain_logprobs) < tolerance
    assert relative(gradient, plain_gradient) < tolerance
    if dtype == torch.float32:
        assert_equal_but_for_rounding(sampled, plain_sampled)
