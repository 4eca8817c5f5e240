"""The memory that base weights take, with and without quantization.

This module does not import torch, because importing torch takes seconds and commands that list
models do not need it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import repeat
from math import prod

from planish.model.architecture.config import ModelConfig
from planish.model.architecture.linears import (
    fused_modules,
    layer_name,
    linear_shape,
    num_experts_of,
)
from planish.model.architecture.weight_shapes import expected_shapes

SCHEMES = ("int8", "nf4")
"""The names of the schemes that planish can quantize weights with (layers/quantization.py)."""
NF4_BLOCK_SIZE = 64
"""The number of inputs that share a scale in nf4."""
_QUANTIZED_SUFFIXES = ("_proj.weight", ".in_proj_qkv.weight", ".in_proj_z.weight")
"""The ends of the names of weights that planish quantizes. These weights are the linears of the
decoder layers that adapters can train.
"""

_MXFP4_SUFFIXES = (".blocks", ".scales")
"""The ends of the names of tensors in mxfp4. An element of such a tensor has one byte."""


def quantized_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the shape (out, in) of each weight that planish quantizes, by the weight's name.

    The weight of all experts of a layer (model/hf) has the outputs of all experts.
    """
    if config.hf is not None:
        return {
            f"{layer_name(config, layer)}.{linear.name}{'' if linear.num_experts else '.weight'}": (
                linear.fan_out * max(1, linear.num_experts),
                linear.fan_in,
            )
            for layer, linears in enumerate(config.hf.layers)
            for linear in linears
        }
    return {
        name: (shape[0], shape[1])
        for name, shape in expected_shapes(config).items()
        if name.startswith("model.layers.") and name.endswith(_QUANTIZED_SUFFIXES)
    }


def fused_quantized_shapes(config: ModelConfig) -> Iterator[list[tuple[int, int]]]:
    """Yield the shapes (out, in) of the linears that each matmul with quantized weights computes.

    If the checkpoint stores experts in mxfp4, these are the experts' matmuls.
    """
    for layer in range(config.num_layers):
        for names in fused_modules(config, layer):
            num_experts = num_experts_of(config, names)
            if config.mxfp4_experts and not num_experts:
                continue
            shapes = [linear_shape(config, name, layer) for name in names]
            is_native_pair = names == ("mlp.experts.gate_up_proj",) and config.hf is None
            if is_native_pair and not config.expert_biases:
                fan_out, fan_in = shapes[0]
                shapes = 2 * [(fan_out // 2, fan_in)]  # a gate and an up projection
            yield from repeat(shapes, num_experts or 1)


def stored_scheme(config: ModelConfig) -> str | None:
    """Return "fp8" if the checkpoint stores its linears in fp8, else None."""
    return None if config.fp8 is None else "fp8"


def linear_bytes(config: ModelConfig, scheme: str) -> int:
    """Return the bytes of the codes and scales of all quantized weights.

    `scheme`: a name in SCHEMES, or "fp8". nf4 takes half a byte per weight, one byte per 64
    weights, and four bytes per 64 * 256 weights. int8 takes one byte per weight and four bytes per
    output. fp8 takes one byte per weight and four bytes per block, or per output if the checkpoint
    has no blocks.
    """
    return code_bytes(config, scheme, quantized_shapes(config).values())


def code_bytes(config: ModelConfig, scheme: str, shapes: Collection[tuple[int, int]]) -> int:
    """Return the bytes of the codes and scales of quantized weights of these shapes (out, in).

    `scheme`: as in `linear_bytes`.
    """
    if scheme == "nf4":
        blocks = [fan_out * fan_in // NF4_BLOCK_SIZE for fan_out, fan_in in shapes]
        return sum(NF4_BLOCK_SIZE // 2 * count + count + 4 * -(-count // 256) for count in blocks)
    block = config.fp8.block if scheme == "fp8" and config.fp8 is not None else None
    num_bytes = 0
    for fan_out, fan_in in shapes:
        block_rows, block_columns = block or (1, fan_in)
        num_bytes += fan_out * fan_in + 4 * -(-fan_out // block_rows) * -(-fan_in // block_columns)
    return num_bytes


def weight_bytes(config: ModelConfig, itemsize: int, scheme: str | None = None) -> int:
    """Return the bytes of one copy of all weights.

    `itemsize`: the bytes of an element of the model's dtype. `scheme`: a name in SCHEMES, or None
    for the weights as the checkpoint stores them.
    """
    scheme = scheme or stored_scheme(config)
    return unquantized_bytes(config, itemsize, scheme) + (
        linear_bytes(config, scheme) if scheme else 0
    )


def mxfp4_bytes(config: ModelConfig) -> int:
    """Return the bytes of the codes and scales that the checkpoint stores in mxfp4."""
    shapes = expected_shapes(config)
    return sum(prod(shape) for name, shape in shapes.items() if name.endswith(_MXFP4_SUFFIXES))


def unpacked_bytes(config: ModelConfig, itemsize: int) -> int:
    """Return the bytes of the weights that no linear multiplies by, in a model of model/hf: those of
    embeddings, such as the inputs per layer of Gemma 4 E2B, and of towers. They have a single copy.

    `itemsize`: as in `weight_bytes`.
    """
    if config.hf is None:
        return 0
    packed = (f"{config.hf.layers_name}.", f"{config.hf.head_name}.")
    head_shape = (config.vocab_size, config.hidden_size)
    return itemsize * sum(
        prod(shape)
        for name, shape in config.hf.weight_shapes
        if not name.startswith(packed) and not (config.tied_head and shape == head_shape)
    )


def unquantized_bytes(config: ModelConfig, itemsize: int, scheme: str | None) -> int:
    """Return the bytes of one copy of all weights, except those that `scheme` quantizes.

    `itemsize`: as in `weight_bytes`. Weights that the checkpoint stores in mxfp4 are included.
    """
    quantized = quantized_shapes(config) if scheme else {}
    return sum(
        prod(shape) * (1 if name.endswith(_MXFP4_SUFFIXES) else itemsize)
        for name, shape in expected_shapes(config).items()
        if name not in quantized
    )
