"""Triton kernels for matmuls with quantized weights.

For up to MAX_ROWS rows, as in decoding steps, a kernel reads the codes and dequantizes one tile of
the weights at a time, in registers. Products are accumulated in float32. For more rows, and in the
backward pass, another kernel writes all weights to a buffer in the model's dtype, and torch
multiplies by the buffer. That moves 3 bytes per int8 or fp8 weight, and about 2.5 per nf4 or mxfp4
weight. Each dequantized weight is bitwise equal to that of `QuantizedWeight.dequantize`.

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

from planish.model.kernels.triton.common import bound, dot, rounded
from planish.model.layers.linear import DequantizedWeights
from planish.model.layers.quantization import (
    Fp8Weight,
    Int8Weight,
    Mxfp4Weight,
    Nf4Weight,
    QuantizedWeight,
    dynamic_values,
    four_bit_values,
    mxfp4_scales,
)

MAX_ROWS = 512
"""The maximum number of rows for which a kernel dequantizes in registers.

This kernel decodes each weight once per tile of rows. With more rows, it takes longer than writing
all weights to the buffer and reading them again. The limit is computed from the bandwidth and the
matmul rate of GPUs. It has not been measured.
"""
_BLOCK_IN = 128
_DEQUANTIZED_TILE = 4096
"""The weights of a program that writes to the buffer: 32 for each of 128 threads."""


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
def eight_bit_values(codes, FP8: tl.constexpr):
    """Return the float32 values of codes in int8, or in fp8 as bytes."""
    return _decoded_fp8(codes.to(tl.int32)) if FP8 else codes.to(tl.float32)


@triton.jit
def block_scales(scale_codes, scale_values, scale_scales, offset, index, inside, NF4: tl.constexpr):
    """Return the scales of blocks of four-bit codes. `index`: the number of each block."""
    scale_code = tl.load(scale_codes + index, inside, other=0).to(tl.int32)
    scale = tl.load(scale_values + scale_code)
    if NF4:
        group_scale = tl.load(scale_scales + index // 256, inside, other=0.0)
        scale = scale * group_scale + tl.load(offset)
    return scale


@triton.jit
def four_bit_pairs(values, byte, scale, NF4: tl.constexpr):
    """Return the weights of the even and of the odd inputs. `scale`: the scale of each row."""
    even_code, odd_code = (byte >> 4, byte & 15) if NF4 else (byte & 15, byte >> 4)
    return tl.load(values + even_code) * scale[:, None], tl.load(values + odd_code) * scale[:, None]


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
        weights = eight_bit_values(code, FP8)
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
        index = n * blocks + block
        scale = block_scales(
            scale_codes, scale_values, scale_scales, offset, index, has_column, NF4
        )
        even_weights, odd_weights = four_bit_pairs(values, byte, scale, NF4)
        total += dot(even, tl.trans(rounded(even_weights, even.dtype)))
        total += dot(odd, tl.trans(rounded(odd_weights, odd.dtype)))
    _store(total, bias, out, out_stride, m, n, rows, fan_out, HAS_BIAS)


@triton.jit
def dequantize_eight_bit_kernel(
    codes,
    scales,
    scale_stride,
    out,
    fan_out,
    fan_in,
    row_block,
    column_block,
    FP8: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Write codes * scales to `out` [out, in], which is contiguous.

    The arguments are those of `eight_bit_kernel`, but any `column_block` is supported.
    """
    n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    k = tl.program_id(1) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    inside = (n < fan_out)[:, None] & (k < fan_in)[None, :]
    at = n.to(tl.int64)[:, None] * fan_in + k[None, :]
    weights = eight_bit_values(tl.load(codes + at, inside, other=0), FP8)
    scale = scales + (n // row_block * scale_stride)[:, None] + (k // column_block)[None, :]
    weights *= tl.load(scale, inside, other=0.0)
    tl.store(out + at, rounded(weights, out.dtype.element_ty), inside)


@triton.jit
def dequantize_four_bit_kernel(
    codes,
    values,
    scale_codes,
    scale_values,
    scale_scales,
    offset,
    out,
    blocks,
    NF4: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """Write a weight in nf4 or mxfp4 to `out` [out, in], which is contiguous.

    `blocks`: the number of blocks of 2 * BLOCK_BYTES weights that share a scale.
    """
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    j = tl.arange(0, BLOCK_BYTES)
    at = block.to(tl.int64)[:, None] * BLOCK_BYTES + j[None, :]
    byte = tl.load(codes + at, inside[:, None], other=0).to(tl.int32)
    scale = block_scales(scale_codes, scale_values, scale_scales, offset, block, inside, NF4)
    even, odd = four_bit_pairs(values, byte, scale, NF4)
    weights = rounded(tl.interleave(even, odd), out.dtype.element_ty)
    to = block.to(tl.int64)[:, None] * (2 * BLOCK_BYTES) + tl.arange(0, 2 * BLOCK_BYTES)[None, :]
    tl.store(out + to, weights, inside[:, None])


class WeightBuffer:
    """The memory of one dequantized fused linear, shared by all quantized linears of a base model.

    CUDA graphs contain the address of the buffer. So the buffer has the size of the largest linear
    when it is first used, and is never replaced. One linear at a time uses the buffer, because the
    matmuls of a base model run one after the other on one stream.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: the dtype of the dequantized weights."""
        self._dtype, self._size = dtype, 0
        self._memory: Tensor | None = None

    def reserve(self, size: int) -> None:
        """Make the buffer large enough for `size` weights. Call this before `weight`."""
        assert self._memory is None or size <= self._size, "the buffer is already in use"
        self._size = max(self._size, size)

    def weight(self, fan_out: int, fan_in: int, device: torch.device) -> Tensor:
        """Return a weight [out, in] in the buffer, valid until the next call."""
        if self._memory is None:
            self._memory = torch.empty(self._size, dtype=self._dtype, device=device)
        return self._memory[: fan_out * fan_in].view(fan_out, fan_in)


class QuantizedCodes(DequantizedWeights):
    """Quantized weights [out, in] of linears that read the same input."""

    def __init__(
        self,
        weights: Sequence[QuantizedWeight],
        dtype: torch.dtype,
        buffer: WeightBuffer,
        max_rows: int = MAX_ROWS,
        **options: Any,
    ) -> None:
        """`weights`, `dtype`, `options`: as in DequantizedWeights. `buffer`: of the base model.

        `max_rows`: the maximum number of rows for which a kernel dequantizes in registers; 0 if the
        result for a row must not depend on the number of rows.
        """
        super().__init__(weights, dtype, **options)
        self._sizes = [weight.shape[0] for weight in weights]
        self._max_rows = max_rows if can_multiply(weights) else 0
        self._buffer = buffer
        self.kernel_weights = self._weights
        buffer.reserve(sum(self._sizes) * weights[0].shape[1])

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T plus the bias [out]: [T, out]. `x`: [T, in]."""
        if len(x) > self._max_rows:
            return super().matmul(x, bias)
        out = x.new_empty(len(x), sum(self._sizes))
        x = x.contiguous()
        biases = [None] * len(self._sizes) if bias is None else bias.split(self._sizes)
        if len(x):
            columns = out.split(self._sizes, 1)
            for weight, own_bias, part in zip(self._weights, biases, columns, strict=True):
                _matmul(x, weight, own_bias, part)
        return out

    def _dequantized(self) -> Tensor:
        fan_in, device = self._weights[0].shape[1], self._weights[0].codes.device
        whole = self._buffer.weight(sum(self._sizes), fan_in, device)
        for weight, part in zip(self._weights, whole.split(self._sizes), strict=True):
            _dequantize(weight, part)
        return whole


def can_multiply(weights: Sequence[QuantizedWeight]) -> bool:
    """Return whether a kernel can multiply by these weights without the buffer.

    Blocks of fp8 must contain whole tiles.
    """
    return all(
        not isinstance(weight, Fp8Weight)
        or weight.block[1] >= weight.shape[1]
        or weight.block[1] % _BLOCK_IN == 0
        for weight in weights
    )


def _tile(rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the tile of a matmul of this many rows: rows, outputs, inputs, warps.

    Larger float32 tiles would not fit into the registers.
    """
    if dtype == torch.float32:
        return {"BLOCK_ROWS": 16, "BLOCK_OUT": 32, "BLOCK_IN": 32, "num_warps": 4}
    if rows <= 32:
        block_rows = 16 if rows <= 16 else 32
        return {"BLOCK_ROWS": block_rows, "BLOCK_OUT": 32, "BLOCK_IN": _BLOCK_IN, "num_warps": 4}
    if rows <= 64:
        return {"BLOCK_ROWS": 64, "BLOCK_OUT": 64, "BLOCK_IN": 64, "num_warps": 4}
    return {"BLOCK_ROWS": 128, "BLOCK_OUT": 64, "BLOCK_IN": 64, "num_warps": 8}


def _matmul(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor) -> None:
    """Write x @ weight.T + bias to `out` [T, out]. Each row of `out` must be contiguous."""
    fan_out, fan_in = weight.shape
    options: dict[str, Any] = {**_tile(len(x), x.dtype), "HAS_BIAS": bias is not None}
    grid = (
        triton.cdiv(fan_out, options["BLOCK_OUT"]),
        triton.cdiv(len(x), options["BLOCK_ROWS"]),
    )
    shape = (bias, out, out.stride(0), len(x), fan_out, fan_in)
    # Fused multiply-add is off, because it rounds once where the reference implementation rounds
    # twice.
    if isinstance(weight, Int8Weight | Fp8Weight):
        codes, blocks, is_fp8 = _eight_bit_operands(weight)
        given = (x, *codes, *shape, *blocks)
        eight_bit_kernel[grid](*given, **options, FP8=is_fp8, enable_fp_fusion=False)
        return
    operands, constants = _four_bit_operands(weight)
    del options["BLOCK_IN"]
    four_bit_kernel[grid](x, *operands, *shape, **options, **constants, enable_fp_fusion=False)


def _dequantize(weight: QuantizedWeight, out: Tensor) -> None:
    """Write the weight to `out` [out, in], which is contiguous."""
    fan_out, fan_in = weight.shape
    if isinstance(weight, Int8Weight | Fp8Weight):
        codes, blocks, is_fp8 = _eight_bit_operands(weight)
        block_out = _DEQUANTIZED_TILE // _BLOCK_IN
        grid = (triton.cdiv(fan_out, block_out), triton.cdiv(fan_in, _BLOCK_IN))
        dequantize_eight_bit_kernel[grid](
            *codes, out, fan_out, fan_in, *blocks, FP8=is_fp8, BLOCK_OUT=block_out,
            BLOCK_IN=_BLOCK_IN, enable_fp_fusion=False,
        )  # fmt: skip
        return
    operands, constants = _four_bit_operands(weight)
    block_size = 2 * constants["BLOCK_BYTES"]
    blocks_per_program = _DEQUANTIZED_TILE // block_size
    blocks = fan_out * fan_in // block_size
    dequantize_four_bit_kernel[(triton.cdiv(blocks, blocks_per_program),)](
        *operands, out, blocks, **constants, BLOCKS=blocks_per_program, enable_fp_fusion=False
    )


def _eight_bit_operands(
    weight: Int8Weight | Fp8Weight,
) -> tuple[tuple[Tensor, Tensor, int], tuple[int, int], bool]:
    """Return (codes, scales, stride of the scales), the block of a scale, and whether it is fp8."""
    stride = weight.scales.stride(0)
    if isinstance(weight, Int8Weight):
        return (weight.codes, weight.scales, stride), (1, weight.shape[1]), False
    return (weight.codes.view(torch.uint8), weight.scales, stride), weight.block, True


def _four_bit_operands(
    weight: QuantizedWeight,
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """Return the tensors of a weight with four-bit codes for a kernel, and its constants."""
    device = weight.codes.device
    tensors: tuple[Tensor | None, ...] = (weight.codes, four_bit_values(type(weight), device))
    if isinstance(weight, Nf4Weight):
        tensors += (weight.scale_codes, dynamic_values(device), weight.scale_scales, weight.offset)
        return tensors, {"NF4": True, "BLOCK_BYTES": 32}
    assert isinstance(weight, Mxfp4Weight)
    tensors += (weight.exponents, mxfp4_scales(device), None, None)
    return tensors, {"NF4": False, "BLOCK_BYTES": 16}
