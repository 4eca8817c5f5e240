"""Adapters that PEFT saves, and logprobs of models with them."""

from pathlib import Path
from typing import Any

import peft
import torch
from trained_adapters import TOKENS
from transformers import AutoModelForCausalLM

from planish import ModelInput, ServiceClient
from planish.export.importing import ImportedAdapter


def loaded(directory: Path | str) -> Any:
    """Return a model in float32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def model_logprobs(model: Any) -> list[float]:
    """Return the logprobs of TOKENS[1:]."""
    with torch.no_grad():
        logits = model.eval()(torch.tensor([TOKENS])).logits[0].float()
    return torch.log_softmax(logits, -1)[range(len(TOKENS) - 1), TOKENS[1:]].tolist()


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
