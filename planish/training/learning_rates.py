"""A default learning rate, computed from the model's family and hidden size.

    rate = 5e-5 * m * (2000 / hidden_size) ** p         m = 10 for LoRA, 1 for full fine-tuning
                                                        p = 0.781 for Llama, 0.0775 for Qwen

Qwen covers Qwen2.5, Qwen3 and Qwen3.5 to 3.8, dense and with experts.

Sources: m is from "LoRA Without Regret" (Schulman et al., Thinking Machines Lab 2025): the best
rate of LoRA is about ten times that of full fine-tuning, whatever the rank. 5e-5 and the exponents
are from the public Tinker cookbook's hyperparameter helper, a fit over sweeps of supervised
training on Llama and Qwen models. The helper (cookbook 0.6.1) applies Qwen's exponent to Qwen3.5
and later models too. The tests contain its values for twelve models. Those sweeps summed the loss
over examples. Adam is nearly invariant to the scale of the loss, so the rate also suits averaged
losses.

SmolLM2 has Llama's architecture, so it uses Llama's exponent. SmolLM2 was not part of the fit, and
only one recorded run supports that choice (docs/lab/results.md). Other families raise an error. One
of them is gpt-oss, which the helper rejects as not yet calibrated.
"""

import re
from pathlib import Path

from planish.errors import UserError
from planish.model.architecture.hf_config.families import text_fields
from planish.model.architecture.hf_config.json_fields import read_json

BASE_RATE = 5e-5
REFERENCE_HIDDEN_SIZE = 2000
HIDDEN_SIZE_EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
FAMILY_BY_MODEL_TYPE = {
    "llama": "llama",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "qwen3_moe": "qwen",
    "qwen3_5_text": "qwen",
    "qwen3_5_moe_text": "qwen",
}
"""Maps "model_type" in the config of the text model to the family."""

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
        "qwen3.5-0.8b": 1024,
        "qwen3.5-4b": 2560,
        "qwen3.5-9b": 4096,
        "qwen3.5-27b": 5120,
        "qwen3.5-35b-a3b": 2048,
        "qwen3.5-397b-a17b": 4096,
        "qwen3.6-27b": 5120,
        "qwen3.6-35b-a3b": 2048,
        "qwen3.8-27b": 5120,
    },
}
"""Maps each family to its models (names without organisation and variant) and their hidden sizes.
The sizes are from each model's config.json.
"""
VARIANT_SUFFIX = re.compile(r"(-instruct|-base)?(-2507)?(-fp8(-dynamic|-block)?)?")


def get_lr(model_name: str, is_lora: bool = True) -> float:
    """Return the rate for a model name, such as "Qwen/Qwen3-8B", or for a local model directory,
    of LoRA or, if `is_lora` is False, of full fine-tuning.

    Use a smaller rate for runs that start from trained weights. Raises UserError for a family
    without a formula.
    """
    family, hidden_size = _family_and_hidden_size(model_name)
    factor = get_lora_lr_over_full_finetune_lr(model_name) if is_lora else 1.0
    return (
        BASE_RATE * factor * (REFERENCE_HIDDEN_SIZE / hidden_size) ** HIDDEN_SIZE_EXPONENTS[family]
    )


def get_lora_lr_over_full_finetune_lr(model_name: str) -> float:
    """Return the ratio of LoRA's best rate to that of full fine-tuning: 10 for every model."""
    return 10.0


def _family_and_hidden_size(model_name: str) -> tuple[str, int]:
    """Return the family and the hidden size of a model."""
    config_path = Path(model_name).expanduser() / "config.json"
    if config_path.is_file():
        fields = read_json(config_path)
        try:
            fields = text_fields(fields)
        except TypeError as error:
            reason = f"config.json says model_type {fields['model_type']!r}, and {error}"
            raise _unknown_model_error(model_name, reason) from None
        if fields.get("model_type") in FAMILY_BY_MODEL_TYPE and isinstance(
            fields.get("hidden_size"), int
        ):
            return FAMILY_BY_MODEL_TYPE[fields["model_type"]], fields["hidden_size"]
        raise _unknown_model_error(
            model_name, f"config.json says model_type {fields.get('model_type')!r}"
        )
    name = model_name.rstrip("/").rpartition("/")[2].lower()
    for family, sizes in HIDDEN_SIZES.items():
        for base_name, hidden_size in sizes.items():
            if name.startswith(base_name) and VARIANT_SUFFIX.fullmatch(name, len(base_name)):
                return family, hidden_size
    raise _unknown_model_error(model_name, "its name is not in the table")


def _unknown_model_error(model_name: str, reason: str) -> UserError:
    return UserError(
        f"no learning rate is known for model_name={model_name} ({reason}); give "
        "learning_rate=..., for LoRA somewhere from 1e-4 to 1e-3 (families with a formula: "
        f"{', '.join(HIDDEN_SIZE_EXPONENTS)})"
    )
