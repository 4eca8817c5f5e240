"""A Triton kernel for matmuls with the quantized experts of a layer.

One launch multiplies the rows of all experts, forward and backward. Each program reads the codes of
one expert, and dequantizes a tile of its weight at a time, in registers. So no expert is ever
dequantized as a whole. Each dequantized weight is bitwise equal to that of
`QuantizedWeight.dequantize`, and products are accumulated in float32.

Shapes: N experts, P pairs of a row and an expert, sorted by expert (see expert_kernels.py).
"""

# Launches take additional options, which the static types do not know:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from planish.model.kernels.triton.common import (
    PAIRS_OF_LARGE_TILE,
    bound,
    dot,
    power_of_two,
    rounded,
    tile_of_expert,
)
from planish.model.kernels.triton.quantized_kernels import (
    block_scales,
    eight_bit_values,
    four_bit_pairs,
)
from planish.model.layers.quantization import (
    Fp8Weight,
    Int8Weight,
    Nf4Weight,
    dynamic_values,
    four_bit_values,
    mxfp4_scales,
)
from planish.model.layers.quantized_experts import FIELDS, QuantizedExperts


@triton.jit
def _weight_tile(
    table,
    o,
    begin,
    fan_out,
    fan_in,
    values,
    scale_values,
    scale_stride,
    row_block,
    column_block,
    SCHEME: tl.constexpr,
    IS_EIGHT_BIT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Return the float32 weights of the outputs `o` and the inputs begin .. begin + BLOCK_IN - 1.

    `table`: the addresses of the tensors of one weight. Inputs outside of the weight are 0. All
    inputs of a tile must share one scale for each output.
    """
    has_output = o < fan_out
    if IS_EIGHT_BIT:
        code_type = tl.uint8 if SCHEME == "fp8" else tl.int8
        codes = tl.multiple_of(tl.load(table).to(tl.pointer_type(code_type)), 16)
        i = begin + tl.arange(0, BLOCK_IN)
        inside = has_output[:, None] & (i < fan_in)[None, :]
        code = tl.load(codes + o[:, None] * fan_in + i[None, :], inside, other=0)
        scales = tl.load(table + 1).to(tl.pointer_type(tl.float32))
        at = o // row_block * scale_stride + begin // column_block
        scale = tl.load(scales + at, has_output, other=0.0)
        weights = eight_bit_values(code, SCHEME == "fp8") * scale[:, None]
    else:
        codes = tl.multiple_of(tl.load(table).to(tl.pointer_type(tl.uint8)), 16)
        j = begin // 2 + tl.arange(0, BLOCK_IN // 2)
        at = o[:, None] * (fan_in // 2) + j[None, :]
        byte = tl.load(codes + at, has_output[:, None], other=0).to(tl.int32)
        scale_codes = tl.load(table + 1).to(tl.pointer_type(tl.uint8))
        scale_scales = tl.load(table + 2).to(tl.pointer_type(tl.float32))
        offset = tl.load(table + 3).to(tl.pointer_type(tl.float32))
        index = o * (fan_in // BLOCK_IN) + begin // BLOCK_IN
        scale = block_scales(
            scale_codes, scale_values, scale_scales, offset, index, has_output, SCHEME == "nf4"
        )
        even, odd = four_bit_pairs(values, byte, scale, SCHEME == "nf4")
        weights = tl.interleave(even, odd)
    return weights


@triton.jit
def grouped_quantized_kernel(
    x,
    x_stride,
    starts,
    stops,
    num_experts,
    tables,
    values,
    scale_values,
    scale_stride,
    row_block,
    column_block,
    bias,
    out,
    out_stride,
    fan_out,
    fan_in,
    SCHEME: tl.constexpr,
    IS_EIGHT_BIT: tl.constexpr,
    PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Write x @ W.T + bias to `out`, or x @ W if TRANSPOSED, with the W of each pair's expert.

    W is PARTS weights [fan_out, fan_in], one below the other. `tables`: the addresses of their
    tensors, int64 [N, PARTS, FIELDS].
    """
    expert, first, stop = tile_of_expert(
        starts, stops, tl.program_id(0), num_experts, EXPERTS, ROWS
    )
    if first < stop:
        table = tables + expert * (PARTS * FIELDS)
        m = (first + tl.arange(0, ROWS)).to(tl.int64)
        has_row = (m < stop)[:, None]
        x_rows = x + m[:, None] * x_stride
        out_rows = out + m[:, None] * out_stride
        if TRANSPOSED:
            begin = tl.program_id(1) * BLOCK_IN
            total = tl.zeros((ROWS, BLOCK_IN), tl.float32)
            for part in tl.static_range(PARTS):
                for first_output in range(0, bound(fan_out), BLOCK_OUT):
                    o = first_output + tl.arange(0, BLOCK_OUT)
                    inside = has_row & (o < fan_out)[None, :]
                    mine = tl.load(x_rows + part * fan_out + o[None, :], inside, other=0.0)
                    weights = _weight_tile(
                        table + part * FIELDS, o, begin, fan_out, fan_in, values, scale_values,
                        scale_stride, row_block, column_block, SCHEME, IS_EIGHT_BIT, BLOCK_IN,
                    )  # fmt: skip
                    total += dot(mine, rounded(weights, mine.dtype))
            column = begin + tl.arange(0, BLOCK_IN)
            has_column = column < fan_in
        else:
            blocks = tl.cdiv(fan_out, BLOCK_OUT)
            part = tl.program_id(1) // blocks
            o = tl.program_id(1) % blocks * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
            total = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
            for begin in range(0, bound(fan_in), BLOCK_IN):
                i = begin + tl.arange(0, BLOCK_IN)
                mine = tl.load(x_rows + i[None, :], has_row & (i < fan_in)[None, :], other=0.0)
                weights = _weight_tile(
                    table + part * FIELDS, o, begin, fan_out, fan_in, values, scale_values,
                    scale_stride, row_block, column_block, SCHEME, IS_EIGHT_BIT, BLOCK_IN,
                )  # fmt: skip
                total += dot(mine, tl.trans(rounded(weights, mine.dtype)))
            column, has_column = part * fan_out + o, o < fan_out
            if bias is not None:
                own_bias = tl.load(
                    bias + expert * (PARTS * fan_out) + column, has_column, other=0.0
                )
                total += own_bias.to(tl.float32)[None, :]
        total = rounded(total, out.dtype.element_ty)
        tl.store(out_rows + column[None, :], total, has_row & has_column[None, :])


def matmul(
    x: Tensor,
    experts: QuantizedExperts,
    ranges: Tensor,
    *,
    bias: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """Return x @ W.T + bias, or x @ W if `transposed`, with the W [out, in] of each pair's expert.

    `x`: [P, in], or [P, out] if `transposed`; each row must be contiguous. `ranges`: from
    `expert_kernels.sort`. `bias`: [N, out].
    """
    assert x.stride(1) == 1
    fan_out, fan_in = experts.weight.shape
    out = x.new_empty(len(x), fan_in if transposed else experts.parts * fan_out)
    num_experts = ranges.shape[1]
    options = _tile(experts, len(x), num_experts, x.dtype)
    num_tiles = len(x) // options["ROWS"] + min(num_experts, len(x))
    if transposed:
        num_blocks = triton.cdiv(fan_in, options["BLOCK_IN"])
    else:
        num_blocks = experts.parts * triton.cdiv(fan_out, options["BLOCK_OUT"])
    if num_tiles:
        # Fused multiply-add is off, because it rounds once where the reference implementation
        # rounds twice.
        grouped_quantized_kernel[(num_tiles, num_blocks)](
            x, x.stride(0), ranges[0], ranges[1], num_experts, experts.addresses,
            *_operands(experts), bias, out, out.stride(0), fan_out, fan_in, SCHEME=experts.scheme,
            IS_EIGHT_BIT=experts.scheme in ("int8", "fp8"), PARTS=experts.parts, FIELDS=FIELDS,
            TRANSPOSED=transposed, EXPERTS=power_of_two(num_experts), **options,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _tile(
    experts: QuantizedExperts, pairs: int, num_experts: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the tile of a matmul: its pairs, outputs and inputs, warps and stages.

    The inputs of a tile share a scale. With few pairs for each expert, the tiles are small. Larger
    float32 tiles would not fit into the registers.
    """
    block_in = {"nf4": 64, "mxfp4": 32}.get(experts.scheme, 32 if dtype == torch.float32 else 64)
    if dtype == torch.float32:
        return _options(16, 32, block_in, warps=4, stages=2)
    if pairs <= PAIRS_OF_LARGE_TILE * num_experts:
        return _options(16, 64, block_in, warps=4, stages=4)
    return _options(128, 64, block_in, warps=8, stages=3)


def _options(
    rows: int, block_out: int, block_in: int, *, warps: int, stages: int
) -> dict[str, Any]:
    return {
        **{"ROWS": rows, "BLOCK_OUT": block_out, "BLOCK_IN": block_in},
        **{"num_warps": warps, "num_stages": stages},
    }


def _operands(experts: QuantizedExperts) -> tuple[Tensor | int | None, ...]:
    """Return the values of the codes and of the scale codes, and the layout of the scales."""
    weight, device = experts.weight, experts.addresses.device
    if isinstance(weight, Int8Weight):
        return None, None, weight.scales.stride(0), 1, weight.shape[1]
    if isinstance(weight, Fp8Weight):
        return None, None, weight.scales.stride(0), *weight.block
    is_nf4 = isinstance(weight, Nf4Weight)
    scale_values = dynamic_values(device) if is_nf4 else mxfp4_scales(device)
    return four_bit_values(type(weight), device), scale_values, 0, 1, 1
