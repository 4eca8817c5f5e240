"""Triton matmuls with quantized weights for few rows, as in decoding steps.

For each matmul, torch would write a dequantized copy of the weights to memory. These kernels read
the codes and dequantize one tile of the weights at a time, in registers. Each tile is bitwise equal
to the same part of the weights that torch would dequantize. Products are accumulated in float32.

Shapes: T rows, `in` inputs and `out` outputs of a linear.
"""

# Launches take additional options, which the static types do not know:
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from planish.model.kernels.linear import DequantizedWeights
from planish.model.kernels.triton.common import bound, dot, rounded
from planish.model.quantization import (
    Fp8Weight,
    Int8Weight,
    Mxfp4Weight,
    Nf4Weight,
    QuantizedWeight,
    dynamic_values,
    four_bit_values,
    mxfp4_scales,
)

MAX_ROWS = 64
"""The maximum number of rows for which the kernels are used.

With more rows, torch dequantizes all weights and then multiplies by them.
"""
_BLOCK_OUT = 32
_BLOCK_IN = 128


@triton.jit
def _decoded_fp8(codes):
    """Return the float32 values of `codes`, which are bytes in the format float8_e4m3fn.

    The conversion uses integer operations, because GPUs before Ada have no instruction for it.
    """
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = ((exponent + 120) << 23 | mantissa << 20).to(tl.float32, bitcast=True)
    value = tl.where(exponent > 0, normal, mantissa.to(tl.float32) * 0.001953125)
    value = tl.where((codes & 127) == 127, float("nan"), value)
    return tl.where(codes > 127, -value, value)


@triton.jit
def _store(total, bias, out, out_stride, m, n, rows, fan_out, HAS_BIAS: tl.constexpr):
    """Write total + bias to the rows `m` and the columns `n` of `out`."""
    if HAS_BIAS:
        total += tl.load(bias + n, n < fan_out, other=0.0).to(tl.float32)[None, :]
    target = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    total = rounded(total, out.dtype.element_ty)
    tl.store(target, total, (m < rows)[:, None] & (n < fan_out)[None, :])


@triton.jit
def eight_bit_kernel(
    x,
    codes,
    scales,
    scale_stride,
    bias,
    out,
    out_stride,
    rows,
    fan_out,
    fan_in,
    row_block,
    column_block,
    FP8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Write x @ W.T + bias to `out`, where W = codes * scales.

    The element (n, k) of W has the scale (n // row_block, k // column_block). BLOCK_IN must divide
    `column_block`, unless `column_block` is at least `fan_in`. FP8: the codes are bytes in the
    format float8_e4m3fn. Otherwise the codes are int8.
    """
    m = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    for begin in range(0, bound(fan_in), BLOCK_IN):
        k = begin + tl.arange(0, BLOCK_IN)
        inputs = tl.load(
            x + m[:, None] * fan_in + k[None, :],
            (m < rows)[:, None] & (k < fan_in)[None, :],
            other=0.0,
        )
        inside = (n < fan_out)[:, None] & (k < fan_in)[None, :]
        code = tl.load(codes + n[:, None] * fan_in + k[None, :], inside, other=0)
        weights = _decoded_fp8(code.to(tl.int32)) if FP8 else code.to(tl.float32)
        scale = scales + n // row_block * scale_stride + begin // column_block
        weights *= tl.load(scale, n < fan_out, other=0.0)[:, None]
        total += dot(inputs, tl.trans(rounded(weights, inputs.dtype)))
    _store(total, bias, out, out_stride, m, n, rows, fan_out, HAS_BIAS)


@triton.jit
def four_bit_kernel(
    x,
    codes,
    values,
    scale_codes,
    scale_values,
    scale_scales,
    offset,
    bias,
    out,
    out_stride,
    rows,
    fan_out,
    fan_in,
    NF4: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """Write x @ W.T + bias to `out` for a weight W in nf4 or mxfp4.

    Each iteration multiplies one block of 2 * BLOCK_BYTES inputs, which share a scale. One byte has
    the codes of an even input and of the next odd input. So a first matmul multiplies the even
    inputs, and a second one the odd inputs.
    """
    m = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    has_row, has_column = m < rows, n < fan_out
    blocks = fan_in // (2 * BLOCK_BYTES)
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    for block in range(0, bound(blocks)):
        j = block * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
        inputs = x + m[:, None] * fan_in + 2 * j[None, :]
        even = tl.load(inputs, has_row[:, None], other=0.0)
        odd = tl.load(inputs + 1, has_row[:, None], other=0.0)
        byte = tl.load(
            codes + n[:, None] * (fan_in // 2) + j[None, :], has_column[:, None], other=0
        ).to(tl.int32)
        even_code, odd_code = (byte >> 4, byte & 15) if NF4 else (byte & 15, byte >> 4)
        scale_index = n * blocks + block
        scale_code = tl.load(scale_codes + scale_index, has_column, other=0).to(tl.int32)
        scale = tl.load(scale_values + scale_code)
        if NF4:
            group_scale = tl.load(scale_scales + scale_index // 256, has_column, other=0.0)
            scale = scale * group_scale + tl.load(offset)
        even_weights = tl.load(values + even_code) * scale[:, None]
        odd_weights = tl.load(values + odd_code) * scale[:, None]
        total += dot(even, tl.trans(rounded(even_weights, even.dtype)))
        total += dot(odd, tl.trans(rounded(odd_weights, odd.dtype)))
    _store(total, bias, out, out_stride, m, n, rows, fan_out, HAS_BIAS)


class QuantizedCodes(DequantizedWeights):
    """Quantized weights [out, in] of linears that read the same input.

    The kernels multiply up to MAX_ROWS rows. For more rows, and in the backward pass, torch
    dequantizes the weights.
    """

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T plus the bias [out]: [T, out]. `x`: [T, in]."""
        if len(x) > MAX_ROWS:
            return super().matmul(x, bias)
        sizes = [weight.shape[0] for weight in self._weights]
        out = x.new_empty(len(x), sum(sizes))
        x = x.contiguous()
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        if len(x):
            columns = out.split(sizes, 1)
            for weight, own_bias, part in zip(self._weights, biases, columns, strict=True):
                _matmul(x, weight, own_bias, part)
        return out


def supports(weights: Sequence[QuantizedWeight]) -> bool:
    """Return whether the kernels support these weights.

    Blocks of fp8 are supported if they contain whole tiles.
    """
    return all(
        not isinstance(weight, Fp8Weight)
        or weight.block[1] >= weight.shape[1]
        or weight.block[1] % _BLOCK_IN == 0
        for weight in weights
    )


def _matmul(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor) -> None:
    """Write x @ weight.T + bias to `out` [T, out]. Each row of `out` must be contiguous."""
    fan_out, fan_in = weight.shape
    rows = len(x)
    # Larger float32 tiles would not fit into the registers.
    is_float32 = x.dtype == torch.float32
    block_rows = 16 if rows <= 16 or is_float32 else 32
    grid = (triton.cdiv(fan_out, _BLOCK_OUT), triton.cdiv(rows, block_rows))
    # Fused multiply-add is off, because it rounds once where the reference implementation rounds
    # twice.
    options: dict[str, Any] = {
        "BLOCK_ROWS": block_rows,
        "BLOCK_OUT": _BLOCK_OUT,
        "enable_fp_fusion": False,
    }
    options["HAS_BIAS"] = bias is not None
    shape = (bias, out, out.stride(0), rows, fan_out, fan_in)
    if isinstance(weight, Int8Weight | Fp8Weight):
        is_fp8 = isinstance(weight, Fp8Weight)
        codes = weight.codes.view(torch.uint8) if is_fp8 else weight.codes
        stride = weight.scales.stride(0)
        block = weight.block if is_fp8 else (1, fan_in)
        given = (x, codes, weight.scales, stride, *shape, *block)
        options |= {"FP8": is_fp8, "BLOCK_IN": _BLOCK_IN // 4 if is_float32 else _BLOCK_IN}
        eight_bit_kernel[grid](*given, **options)
        return
    values = four_bit_values(type(weight), x.device)
    if isinstance(weight, Nf4Weight):
        scales = (weight.scale_codes, dynamic_values(x.device), weight.scale_scales, weight.offset)
    else:
        assert isinstance(weight, Mxfp4Weight)
        scales = (weight.exponents, mxfp4_scales(x.device), None, None)
    is_nf4 = isinstance(weight, Nf4Weight)
    options |= {"NF4": is_nf4, "BLOCK_BYTES": 32 if is_nf4 else 16}
    four_bit_kernel[grid](x, weight.codes, values, *scales, *shape, **options)
