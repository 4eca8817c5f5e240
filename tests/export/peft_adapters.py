"""Adapters that PEFT saves, and logprobs of models with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from trained_adapters import TOKENS
from transformers import AutoModelForCausalLM

from planish import ModelInput, ServiceClient
from planish.export.importing import ImportedAdapter

MERGED = 1e-5
"""How far logprobs of merged weights may be off, in nats, if both are computed in float64.

A merged weight is rounded to float32, which changes logprobs of the random adapters of these tests
by up to 6e-6.
"""
FLOAT32 = 3e-5
"""How far planish's logprobs in float32 may be off from those in float64.

The random adapters make logprobs of up to -18. transformers in float32 is off by up to 1.2e-5, and
planish by up to 1.4e-5, both with a root mean square of 4e-6 at most.
"""


def loaded(directory: Path | str) -> Any:
    """Return a model in float32."""
    # The default implementation of experts computes no float64.
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )


def model_logprobs(model: Any, tokens: Sequence[int] = TOKENS) -> list[float]:
    """Return the logprobs of tokens[1:], computed in float64. The model's dtype is changed."""
    with torch.no_grad():
        logits = model.double().eval()(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits, -1)[range(len(tokens) - 1), list(tokens[1:])].tolist()


def fill(model: torch.nn.Module, marks: tuple[str, ...] = ("lora_",), scale: float = 0.3) -> None:
    """Fill the parameters whose names contain one of `marks` with seeded normal noise."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(mark in name for mark in marks):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def saved(base: Path, out: Path, model: Any = None, **options) -> list[float]:
    """Return the logprobs of TOKENS[1:] with an adapter of random matrices, which PEFT saves.

    `model`: the base model, by default the causal model in `base`.
    """
    config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    tuned = peft.get_peft_model(model or loaded(base), config)
    fill(tuned)
    tuned.save_pretrained(str(out))
    return model_logprobs(tuned)


def service(base: Path, data: Path) -> ServiceClient:
    return ServiceClient(models={str(base): str(base)}, data_dir=data, dtype="float32")


def imported_logprobs(base: Path, data: Path, found: ImportedAdapter) -> list[float]:
    """Return planish's logprobs of TOKENS[1:] with an imported adapter."""
    with service(base, data) as client:
        sampler = client.create_sampling_client(model_path=str(found.path))
        _, *logprobs = sampler.compute_logprobs(ModelInput.from_ints(TOKENS)).result()
    return [logprob for logprob in logprobs if logprob is not None]
