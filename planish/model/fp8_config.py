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


def read_fp8(stored: Mapping[str, Any]) -> Fp8Config:
    """Return the layout that the `quantization_config` of a config.json describes.

    Raises UnsupportedError if planish cannot read the layout, and TypeError for malformed fields.
    """
    method = stored.get("quant_method")
    if method == "fp8":
        return _of_transformers(stored)
    if method == "compressed-tensors":
        return _of_compressed_tensors(stored)
    if method == "modelopt":
        algorithm = str(stored.get("quant_algo")).upper()
        if algorithm not in _MODELOPT_BLOCKS:
            raise _unsupported(stored, f"quant_algo {stored.get('quant_algo')!r}")
        return Fp8Config(_MODELOPT_BLOCKS[algorithm])
    raise _unsupported(stored)


def _of_transformers(stored: Mapping[str, Any]) -> Fp8Config:
    for key, supported in (("fmt", "e4m3"), ("expert_dtype", "fp8")):
        if stored.get(key, supported) != supported:
            raise _unsupported(stored, f"{key} {stored[key]!r}")
    block = stored.get("weight_block_size")
    return Fp8Config(None if block is None else _block(block, "weight_block_size"))


def _of_compressed_tensors(stored: Mapping[str, Any]) -> Fp8Config:
    if stored.get("format") not in ("float-quantized", "naive-quantized"):
        raise _unsupported(stored, f"format {stored.get('format')!r}")
    if (sparsity := stored.get("sparsity_config")) and sparsity.get("format") != "dense":
        raise _unsupported(stored, f"sparsity_config {sparsity.get('format')!r}")
    blocks = set()
    for group in (stored.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            raise _unsupported(
                stored, f"weights of type {weights.get('type')!r}, {weights.get('num_bits')} bits"
            )
        strategy = weights.get("strategy")
        if strategy == "block":
            blocks.add(_block(weights.get("block_structure"), "block_structure"))
        elif strategy not in ("tensor", "channel"):
            raise _unsupported(stored, f"strategy {strategy!r}")
    if len(blocks) > 1:
        raise _unsupported(stored, "blocks of several sizes")
    return Fp8Config(next(iter(blocks), None))


def _block(value: object, key: str) -> tuple[int, int]:
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or not all(isinstance(size, int) and size > 0 for size in value)
    ):
        raise TypeError(f"{key} is {value!r}; it must be a list of two positive integers")
    return value[0], value[1]


def _unsupported(stored: Mapping[str, Any], detail: str = "") -> UnsupportedError:
    layout = f"quant_method {stored.get('quant_method')!r}" + (f" with {detail}" if detail else "")
    return UnsupportedError(
        f"quantization_config has {layout}, and planish does not load such weights. It loads fp8 "
        "(e4m3) as transformers, compressed-tensors (float-quantized) and modelopt (FP8) write it. "
        "Use such a checkpoint or the unquantized one, with quantize='int8' or 'nf4' to save memory"
    )
