"""A learning rate to begin with, by the model's family and width.

    rate = 5e-5 * m * (2000 / hidden_size) ** p         m = 10 for LoRA, 1 for full fine-tuning
                                                        p = 0.781 for Llama, 0.0775 for Qwen

Sources: m is the finding of "LoRA Without Regret" (Schulman et al., Thinking Machines Lab 2025):
the best rate of LoRA is about ten times that of full fine-tuning, whatever the rank. 5e-5 and the
exponents are the published fit over sweeps of supervised training on Llama and Qwen models (the
public Tinker cookbook's hyperparameter helper); its values for eight models are in the tests. The
loss of those sweeps is a sum over examples, and Adam makes the rate nearly independent of that.

SmolLM2 has Llama's architecture and takes its exponent; that lies outside of what was fitted, and
one recorded run is all that speaks for it (docs/results.md). For other families there is no number,
so there is an error.
"""

import re
from pathlib import Path

from planish.errors import UserError
from planish.model.config import read_json

BASE_RATE = 5e-5
WIDTH = 2000
EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen", "qwen3": "qwen", "qwen3_moe": "qwen"}
"""By "model_type" of config.json."""

HIDDEN_SIZES = {
    "llama": {
        "llama-3.2-1b": 2048,
        "llama-3.2-3b": 3072,
        "llama-3.1-8b": 4096,
        "llama-3.1-70b": 8192,
        "llama-3.3-70b": 8192,
        "llama-3.1-405b": 16384,
        "smollm2-135m": 576,
        "smollm2-360m": 960,
        "smollm2-1.7b": 2048,
    },
    "qwen": {
        "qwen2.5-0.5b": 896,
        "qwen2.5-1.5b": 1536,
        "qwen2.5-3b": 2048,
        "qwen2.5-7b": 3584,
        "qwen2.5-14b": 5120,
        "qwen2.5-32b": 5120,
        "qwen2.5-72b": 8192,
        "qwen3-0.6b": 1024,
        "qwen3-1.7b": 2048,
        "qwen3-4b": 2560,
        "qwen3-8b": 4096,
        "qwen3-14b": 5120,
        "qwen3-32b": 5120,
        "qwen3-30b-a3b": 2048,
        "qwen3-235b-a22b": 4096,
    },
}
"""By the model's name without organisation and variant; from each model's config.json."""
VARIANT = re.compile(r"(-instruct|-base)?(-2507)?")


def get_lr(model_name: str, is_lora: bool = True) -> float:
    """The rate for a model name, such as "Qwen/Qwen3-8B", or for a local model directory.

    Divide it for runs that begin with trained weights. UserError for a family of which nothing is
    known.
    """
    family, hidden_size = _family(model_name)
    factor = get_lora_lr_over_full_finetune_lr(model_name) if is_lora else 1.0
    return BASE_RATE * factor * (WIDTH / hidden_size) ** EXPONENTS[family]


def get_lora_lr_over_full_finetune_lr(model_name: str) -> float:
    """How many times larger the best rate of LoRA is than that of full fine-tuning: 10, for every
    model.
    """
    return 10.0


def _family(model_name: str) -> tuple[str, int]:
    """The family and the hidden size."""
    config = Path(model_name).expanduser() / "config.json"
    if config.is_file():
        fields = read_json(config)
        if fields.get("model_type") in MODEL_TYPES and isinstance(fields.get("hidden_size"), int):
            return MODEL_TYPES[fields["model_type"]], fields["hidden_size"]
        raise _unknown(model_name, f"config.json says model_type {fields.get('model_type')!r}")
    name = model_name.rstrip("/").rpartition("/")[2].lower()
    for family, sizes in HIDDEN_SIZES.items():
        for known, hidden_size in sizes.items():
            if name.startswith(known) and VARIANT.fullmatch(name, len(known)):
                return family, hidden_size
    raise _unknown(model_name, "its name is not in the table")


def _unknown(model_name: str, reason: str) -> UserError:
    return UserError(
        f"no learning rate is known for model_name={model_name} ({reason}); give learning_rate=..., for LoRA somewhere from 1e-4 to "
        f"1e-3 (families with a formula: {', '.join(EXPONENTS)})"
    )
