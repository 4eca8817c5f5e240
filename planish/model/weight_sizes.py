"""Formulas for the memory of base weights, with and without quantization.

This module does not import torch, because commands that list models do not need it.
"""

from __future__ import annotations

from math import prod

from planish.model.config import ModelConfig
from planish.model.weights import expected_shapes

SCHEMES = ("int8", "nf4")
"""The names of the quantization schemes (model/quantization.py)."""
NF4_BLOCK = 64
"""The number of inputs that share a scale in nf4."""
_QUANTIZED_SUFFIXES = ("_proj.weight", ".in_proj_qkv.weight", ".in_proj_z.weight")
"""The suffixes of the names of weights that planish quantizes: the linears of the decoder layers
that adapters can train.
"""

_MXFP4_SUFFIXES = (".blocks", ".scales")
"""The suffixes of the names of mxfp4 tensors. Each element of these tensors has one byte."""


def quantized_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the shape (out, in) of each weight that quantization changes, by its name."""
    return {
        name: (shape[0], shape[1])
        for name, shape in expected_shapes(config).items()
        if name.startswith("model.layers.") and name.endswith(_QUANTIZED_SUFFIXES)
    }


def stored_scheme(config: ModelConfig) -> str | None:
    """Return "fp8" if the checkpoint stores its linears in fp8, else None."""
    return None if config.fp8 is None else "fp8"


def linear_bytes(config: ModelConfig, scheme: str) -> int:
    """Return the bytes of the quantized weights: their codes and scales.

    int8 takes one byte per weight and four bytes per output. nf4 takes half a byte per weight, one
    byte per 64 weights, and four bytes per 64 * 256 weights. fp8 takes one byte per weight, and
    four bytes per block or output.
    """
    shapes = quantized_shapes(config).values()
    if scheme in ("int8", "fp8"):
        rows, columns = (config.fp8.block if config.fp8 and scheme == "fp8" else None) or (1, 0)
        return sum(
            fan_out * fan_in + 4 * -(-fan_out // rows) * -(-fan_in // (columns or fan_in))
            for fan_out, fan_in in shapes
        )
    blocks = [fan_out * fan_in // NF4_BLOCK for fan_out, fan_in in shapes]
    return sum(NF4_BLOCK // 2 * count + count + 4 * -(-count // 256) for count in blocks)


def weight_bytes(config: ModelConfig, itemsize: int, scheme: str | None = None) -> int:
    """Return the bytes of one copy of all weights.

    `itemsize`: the bytes of an unquantized number. `scheme`: a name in SCHEMES, or None for the
    weights as they are stored.
    """
    scheme = scheme or stored_scheme(config)
    return kept_bytes(config, itemsize, scheme) + (linear_bytes(config, scheme) if scheme else 0)


def mxfp4_bytes(config: ModelConfig) -> int:
    """Return the bytes of the codes and scales of weights that the checkpoint stores in mxfp4."""
    shapes = expected_shapes(config)
    return sum(prod(shape) for name, shape in shapes.items() if name.endswith(_MXFP4_SUFFIXES))


def kept_bytes(config: ModelConfig, itemsize: int, scheme: str | None) -> int:
    """Return the bytes of one copy of the weights that `scheme` does not quantize."""
    quantized = quantized_shapes(config) if scheme else {}
    return sum(
        prod(shape) * (1 if name.endswith(_MXFP4_SUFFIXES) else itemsize)
        for name, shape in expected_shapes(config).items()
        if name not in quantized
    )
