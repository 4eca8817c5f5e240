"""The layout of a checkpoint whose linears are stored in fp8, read from `quantization_config`.

A linear has codes in float8_e4m3fn and scales. One scale belongs to the whole weight, to an output
channel, or to a block of outputs and inputs. Three tools write such checkpoints:

* `fp8`: transformers, DeepSeek, Qwen and Mistral. Scales are named `weight_scale_inv`, for blocks
  of `weight_block_size` or for the whole weight.
* `compressed-tensors`: llm-compressor and vLLM. Scales are named `weight_scale`.
* `modelopt`: NVIDIA's Model Optimizer. Scales are named `weight_scale`.

The scales of activations and of the KV cache are not used: planish computes with the activations of
the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planish.errors import UnsupportedError
from planish.model.architecture.hf_config.json_fields import optional_object

SCALE_NAMES = ("weight_scale_inv", "weight_scale")
"""The last part of the names of a weight's scales."""
UNUSED_SCALES = ("activation_scale", "input_scale", "output_scale", "k_scale", "v_scale", "q_scale")
"""The last part of the names of scales that planish does not use."""
_MODELOPT_BLOCKS = {
    "FP8": None,
    "FP8_PER_CHANNEL_PER_TOKEN": None,
    "FP8_PB_WO": (128, 128),
}
"""The supported values of modelopt's `quant_algo`, and their blocks."""


@dataclass(frozen=True)
class Fp8Config:
    """The layout of the scales of an fp8 checkpoint."""

    block: tuple[int, int] | None = None
    """The numbers of outputs and inputs that share a scale. None: each scale belongs to a whole
    weight or to an output channel, as its shape says.
    """


def read_fp8(quantization: Mapping[str, Any]) -> Fp8Config:
    """Return the layout that the `quantization_config` of a config.json describes.

    Raises UnsupportedError if planish cannot read the layout, and TypeError for malformed fields.
    """
    method = quantization.get("quant_method")
    if method == "fp8":
        return _read_transformers(quantization)
    if method == "compressed-tensors":
        return _read_compressed_tensors(quantization)
    if method == "modelopt":
        algorithm = str(quantization.get("quant_algo")).upper()
        if algorithm not in _MODELOPT_BLOCKS:
            raise _unsupported_error(quantization, f"quant_algo {quantization.get('quant_algo')!r}")
        return Fp8Config(_MODELOPT_BLOCKS[algorithm])
    raise _unsupported_error(quantization)


def _read_transformers(quantization: Mapping[str, Any]) -> Fp8Config:
    for key, supported in (("fmt", "e4m3"), ("expert_dtype", "fp8")):
        if quantization.get(key, supported) != supported:
            raise _unsupported_error(quantization, f"{key} {quantization[key]!r}")
    block = quantization.get("weight_block_size")
    return Fp8Config(None if block is None else _read_block(block, "weight_block_size"))


def _read_compressed_tensors(quantization: Mapping[str, Any]) -> Fp8Config:
    if quantization.get("format") not in ("float-quantized", "naive-quantized"):
        raise _unsupported_error(quantization, f"format {quantization.get('format')!r}")
    sparsity = optional_object(quantization, "sparsity_config")
    if sparsity and sparsity.get("format") != "dense":
        raise _unsupported_error(quantization, f"sparsity_config {sparsity.get('format')!r}")
    blocks = set()
    groups = optional_object(quantization, "config_groups")
    for name in groups:
        weights = optional_object(optional_object(groups, name), "weights")
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            raise _unsupported_error(
                quantization,
                f"weights of type {weights.get('type')!r}, {weights.get('num_bits')} bits",
            )
        strategy = weights.get("strategy")
        if strategy == "block":
            blocks.add(_read_block(weights.get("block_structure"), "block_structure"))
        elif strategy not in ("tensor", "channel"):
            raise _unsupported_error(quantization, f"strategy {strategy!r}")
    if len(blocks) > 1:
        raise _unsupported_error(quantization, "blocks of several sizes")
    return Fp8Config(next(iter(blocks), None))


def _read_block(value: object, key: str) -> tuple[int, int]:
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or not all(isinstance(size, int) and size > 0 for size in value)
    ):
        raise TypeError(f"{key} is {value!r}; it must be a list of two positive integers")
    return value[0], value[1]


def _unsupported_error(quantization: Mapping[str, Any], detail: str = "") -> UnsupportedError:
    layout = f"quant_method {quantization.get('quant_method')!r}" + (
        f" with {detail}" if detail else ""
    )
    return UnsupportedError(
        f"quantization_config has {layout}, and planish does not load such weights. It loads fp8 "
        "(e4m3) as transformers, compressed-tensors (float-quantized) and modelopt (FP8) write it. "
        "Use such a checkpoint or the unquantized one, with quantize='int8' or 'nf4' to save memory"
    )
