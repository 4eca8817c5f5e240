"""Triton kernels for a mixture of experts, whose launches do not depend on the number of experts.

Each kernel computes one operation for all experts of a layer. So a layer needs about as many
launches as a dense MLP, and the host never waits for the number of rows of an expert. The grid has
enough programs for any division of the pairs among experts. Each program finds its tile itself.

No kernel uses atomic additions, and the order of each sum is fixed, so the same batch always gives
the same bits.

Shapes: T rows of a batch, N experts, k experts per token, P = T * k pairs of a row and an expert,
sorted by expert, `in` inputs and `out` outputs of a linear, r rank. The pairs of expert e are
starts[e] .. stops[e] - 1; both tables are int32 [N].
"""

# Launches take additional options, which the static types do not know:
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from planish.model.kernels.triton import quantized_expert_kernels
from planish.model.kernels.triton.common import (
    PAIRS_OF_LARGE_TILE,
    bound,
    dot,
    power_of_two,
    rounded,
    tile_of_expert,
)
from planish.model.layers.quantized_experts import QuantizedExperts

_SORT_BLOCK = 1024
"""The number of pairs that a program of `sort_kernel` reads at once."""
_SUM_BLOCK = 1024
"""The number of columns of a program of `weighted_sum_kernel`."""


@triton.jit
def choose_kernel(
    logits,
    weights,
    chosen,
    num_experts,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    NORMALIZES: tl.constexpr,
):
    """Write the K largest probabilities of one row to `weights`, and their experts to `chosen`.

    Of equal probabilities, the one of the first expert comes first. A NaN in the logits makes all
    weights NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    slot = tl.arange(0, SLOTS)
    score = tl.load(logits + row * num_experts + expert, expert < num_experts, other=-float("inf"))
    num_nan = tl.sum((score != score).to(tl.int32), 0)
    score = tl.where(score == score, score, 0.0)
    exps = tl.exp(score - tl.max(score, 0))
    exps = tl.where(expert < num_experts, exps, 0.0)
    total = tl.sum(exps, 0)
    probabilities = tl.where(expert < num_experts, exps / total, -1.0)
    largest = tl.zeros((SLOTS,), tl.float32)
    experts = tl.zeros((SLOTS,), tl.int32)
    chosen_total = 0.0
    for number in range(K):
        best = tl.max(probabilities, 0)
        index = tl.min(tl.where(probabilities == best, expert, EXPERTS), 0)
        # After an infinite logit, no probability equals the largest one. Any distinct experts will do.
        index = tl.where(index < num_experts, index, number)
        probabilities = tl.where(expert == index, -1.0, probabilities)
        chosen_total += best
        largest = tl.where(slot == number, best, largest)
        experts = tl.where(slot == number, index, experts)
    if NORMALIZES:
        largest = largest / chosen_total
    largest = tl.where((total == total) & (num_nan == 0), largest, float("nan"))
    tl.store(weights + row * K + slot, largest, slot < K)
    tl.store(chosen + row * K + slot, experts.to(tl.int64), slot < K)


@triton.jit
def sort_kernel(chosen, order, rows, places, starts, stops, pairs, K, BLOCK: tl.constexpr):
    """Sort the pairs by expert, then by row. Each program writes the pairs of one expert.

    `chosen`: int64 [P], the expert of each pair. Sorted pair i is pair order[i], of row rows[i].
    Pair j is sorted pair places[j].
    """
    expert = tl.program_id(0)
    before = 0
    for begin in range(0, bound(pairs), BLOCK):
        j = begin + tl.arange(0, BLOCK)
        theirs = tl.load(chosen + j, j < pairs, other=1 << 30)
        before += tl.sum((theirs < expert).to(tl.int32), 0)
    tl.store(starts + expert, before)
    for begin in range(0, bound(pairs), BLOCK):
        j = begin + tl.arange(0, BLOCK)
        is_own = tl.load(chosen + j, j < pairs, other=1 << 30) == expert
        count = is_own.to(tl.int32)
        place = before + tl.cumsum(count, 0) - 1
        tl.store(order + place, j.to(tl.int64), is_own)
        tl.store(rows + place, (j // K).to(tl.int64), is_own)
        tl.store(places + j, place.to(tl.int64), is_own)
        before += tl.sum(count, 0)
    tl.store(stops + expert, before)


@triton.jit
def grouped_matmul_kernel(
    x,
    x_stride,
    starts,
    stops,
    num_experts,
    weights,
    expert_stride,
    bias,
    out,
    out_stride,
    inner,
    columns,
    IS_TABLE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ADDS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Write x @ W.T + bias to `out` [P, columns], with the W [columns, inner] of each expert.

    IS_TABLE: `weights` has the addresses of the Ws, which are multiples of 16. Otherwise the Ws
    follow one another, `expert_stride` elements apart. TRANSPOSED: each W is stored as [inner,
    columns]. ADDS: add to `out`.
    """
    expert, first, stop = tile_of_expert(
        starts, stops, tl.program_id(0), num_experts, EXPERTS, ROWS
    )
    if first < stop:
        if IS_TABLE:
            weight = tl.load(weights + expert).to(tl.pointer_type(x.dtype.element_ty))
            weight = tl.multiple_of(weight, 16)
        else:
            weight = weights + expert.to(tl.int64) * expert_stride
        m = (first + tl.arange(0, ROWS)).to(tl.int64)
        n = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        has_row, has_column = m < stop, n < columns
        total = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
        for begin in range(0, bound(inner), BLOCK_IN):
            k = begin + tl.arange(0, BLOCK_IN)
            inside = k < inner
            mine = tl.load(
                x + m[:, None] * x_stride + k[None, :],
                has_row[:, None] & inside[None, :],
                other=0.0,
            )
            if TRANSPOSED:
                theirs = tl.load(
                    weight + k[:, None] * columns + n[None, :],
                    inside[:, None] & has_column[None, :],
                    other=0.0,
                )
                total += dot(mine, theirs)
            else:
                theirs = tl.load(
                    weight + n[:, None] * inner + k[None, :],
                    has_column[:, None] & inside[None, :],
                    other=0.0,
                )
                total += dot(mine, tl.trans(theirs))
        if bias is not None:
            own_bias = tl.load(bias + expert * columns + n, has_column, other=0.0)
            total += own_bias.to(tl.float32)[None, :]
        target = out + m[:, None] * out_stride + n[None, :]
        inside_out = has_row[:, None] & has_column[None, :]
        if ADDS:
            total += tl.load(target, inside_out, other=0.0).to(tl.float32)
        tl.store(target, rounded(total, out.dtype.element_ty), inside_out)


@triton.jit
def grouped_gradient_kernel(
    left,
    left_stride,
    right,
    right_stride,
    starts,
    stops,
    out,
    left_size,
    right_size,
    BLOCK_LEFT: tl.constexpr,
    BLOCK_RIGHT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write left.T @ right over the pairs of each expert to `out` [N, left_size, right_size]."""
    expert = tl.program_id(2)
    i = tl.program_id(0) * BLOCK_LEFT + tl.arange(0, BLOCK_LEFT)
    j = tl.program_id(1) * BLOCK_RIGHT + tl.arange(0, BLOCK_RIGHT)
    stop = tl.load(stops + expert)
    total = tl.zeros((BLOCK_LEFT, BLOCK_RIGHT), tl.float32)
    for begin in range(bound(tl.load(starts + expert)), bound(stop), ROWS):
        m = (begin + tl.arange(0, ROWS)).to(tl.int64)
        has_row = m < stop
        a = tl.load(
            left + m[:, None] * left_stride + i[None, :],
            has_row[:, None] & (i < left_size)[None, :],
            other=0.0,
        )
        b = tl.load(
            right + m[:, None] * right_stride + j[None, :],
            has_row[:, None] & (j < right_size)[None, :],
            other=0.0,
        )
        total += dot(tl.trans(a), b)
    target = out + expert.to(tl.int64) * left_size * right_size
    target += i[:, None] * right_size + j[None, :]
    tl.store(target, total, (i < left_size)[:, None] & (j < right_size)[None, :])


@triton.jit
def weighted_sum_kernel(values, weights, places, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """Write the weighted sum of the K pairs of each row to `out` [T, width].

    `values`: [P, width] of the sorted pairs. `weights`: float32 [T, K], or None for 1.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(K):
        place = tl.load(places + row * K + number)
        value = tl.load(values + place * width + column, column < width, other=0.0).to(tl.float32)
        if weights is not None:
            value *= tl.load(weights + row * K + number)
        total += value
    tl.store(out + row * width + column, rounded(total, out.dtype.element_ty), column < width)


def choose(logits: Tensor, k: int, *, normalizes: bool) -> tuple[Tensor, Tensor]:
    """Return the k largest probabilities of each row, float32 [T, k], and their experts, int64.

    `logits`: float32 [T, N]. `normalizes`: divide the probabilities by their sum.
    """
    num_rows, num_experts = logits.shape
    weights = logits.new_empty(num_rows, k)
    chosen = torch.empty(num_rows, k, dtype=torch.int64, device=logits.device)
    if num_rows:
        choose_kernel[(num_rows,)](
            logits.contiguous(), weights, chosen, num_experts, K=k, SLOTS=power_of_two(k),
            EXPERTS=power_of_two(num_experts), NORMALIZES=normalizes, num_warps=1,
        )  # fmt: skip
    return weights, chosen


def sort(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort pairs by expert, then by row. Return their order, rows, places and ranges.

    `chosen`: int64 [T, k], distinct experts in each row. Sorted pair i is entry order[i] of
    chosen.flatten(), of row rows[i]; both are int64 [P]. Entry j is sorted pair places[j]. The
    ranges are the starts and the stops of the experts' pairs: int32 [2, N].
    """
    order, rows, places = (chosen.new_empty(chosen.numel()) for _ in range(3))
    ranges = torch.empty(2, num_experts, dtype=torch.int32, device=chosen.device)
    sort_kernel[(num_experts,)](
        chosen, order, rows, places, ranges[0], ranges[1], chosen.numel(), chosen.shape[1],
        BLOCK=_SORT_BLOCK,
    )  # fmt: skip
    return order, rows, places, ranges


def _tile(pairs: int, num_experts: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the tile of a grouped matmul: its pairs, outputs and inputs, warps and stages.

    With few pairs for each expert, the weights are read once and the tiles are small. Larger
    float32 tiles would not fit into the registers.
    """
    if dtype == torch.float32:
        return {"ROWS": 16, "BLOCK_OUT": 32, "BLOCK_IN": 32, "num_warps": 4, "num_stages": 2}
    if pairs <= PAIRS_OF_LARGE_TILE * num_experts:
        return {"ROWS": 16, "BLOCK_OUT": 64, "BLOCK_IN": 64, "num_warps": 4, "num_stages": 4}
    return {"ROWS": 128, "BLOCK_OUT": 128, "BLOCK_IN": 64, "num_warps": 8, "num_stages": 3}


def matmul(
    x: Tensor,
    weights: Tensor | QuantizedExperts,
    ranges: Tensor,
    columns: int,
    *,
    bias: Tensor | None = None,
    transposed: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return x @ W.T + bias with the W [columns, in] of each pair's expert: [P, columns].

    `x`: [P, in]; each row must be contiguous. `weights`: the contiguous Ws [N, columns, in], or
    their addresses, int64 [N], or quantized experts. `ranges`: from `sort`. `bias`: [N, columns].
    `transposed`: each W is stored as [in, columns]. `out`: add the result to this tensor, and return
    it; rows outside of the ranges do not change. It must be None for quantized experts.
    """
    if isinstance(weights, QuantizedExperts):
        assert out is None
        return quantized_expert_kernels.matmul(x, weights, ranges, bias=bias, transposed=transposed)
    assert x.stride(1) == 1
    adds, num_experts = out is not None, ranges.shape[1]
    if out is None:
        out = x.new_empty(len(x), columns)
    assert out.stride(1) == 1
    is_table = weights.dim() == 1
    options: dict[str, Any] = _tile(len(x), num_experts, x.dtype)
    num_tiles = len(x) // options["ROWS"] + min(num_experts, len(x))
    if num_tiles:
        grouped_matmul_kernel[(num_tiles, triton.cdiv(columns, options["BLOCK_OUT"]))](
            x, x.stride(0), ranges[0], ranges[1], num_experts, weights,
            0 if is_table else weights.stride(0), bias, out, out.stride(0), x.shape[1], columns,
            IS_TABLE=is_table, TRANSPOSED=transposed, ADDS=adds,
            EXPERTS=power_of_two(num_experts), **options,
        )  # fmt: skip
    return out


def gradient(left: Tensor, right: Tensor, ranges: Tensor) -> Tensor:
    """Return left.T @ right over the pairs of each expert, float32 [N, L, R].

    `left`: [P, L]. `right`: [P, R]. Each row of both must be contiguous.
    """
    assert left.stride(1) == right.stride(1) == 1
    sizes, num_experts = (left.shape[1], right.shape[1]), ranges.shape[1]
    out = torch.empty(num_experts, *sizes, dtype=torch.float32, device=left.device)
    block = 32 if left.dtype == torch.float32 else 64
    grouped_gradient_kernel[(*(triton.cdiv(size, block) for size in sizes), num_experts)](
        left, left.stride(0), right, right.stride(0), ranges[0], ranges[1], out, *sizes,
        BLOCK_LEFT=block, BLOCK_RIGHT=block, ROWS=32, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def add_lora_(x: Tensor, out: Tensor, a: Tensor, b: Tensor, ranges: Tensor) -> Tensor:
    """Add x @ A.T @ B.T, with A and B of each pair's expert, to `out` [P, out].

    Return x @ A.T [P, r], whose rows outside of the ranges are undefined. `a`: [N, r, in]. `b`:
    [N, out, r].
    """
    hidden = matmul(x, a, ranges, a.shape[1])
    matmul(hidden, b, ranges, b.shape[1], out=out)
    return hidden


def lora_backward_(
    grad: Tensor, x: Tensor, hidden: Tensor, grad_x: Tensor, a: Tensor, b: Tensor, ranges: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of A and B in float32, and add the gradient of the input to `grad_x`.

    `grad`: [P, out]. `x`, `hidden`: input and result of `add_lora_`. `grad_x`: [P, in].
    """
    grad_hidden = matmul(grad, b, ranges, b.shape[2], transposed=True)
    matmul(grad_hidden, a, ranges, a.shape[2], transposed=True, out=grad_x)
    return gradient(grad_hidden, x, ranges), gradient(grad, hidden, ranges)


def weighted_sum(values: Tensor, places: Tensor, k: int, weights: Tensor | None = None) -> Tensor:
    """Return the weighted sum over the k pairs of each row, [T, width], in the dtype of `values`.

    `values`: [P, width] of the sorted pairs. `places`: from `sort`. `weights`: float32 [T, k]; None
    stands for 1. The terms are added in float32, one column of `weights` after another.
    """
    width = values.shape[1]
    out = values.new_empty(len(values) // k, width)
    if len(out):
        weighted_sum_kernel[(len(out), triton.cdiv(width, _SUM_BLOCK))](
            values.contiguous(), weights, places, out, width, K=k, BLOCK=_SUM_BLOCK
        )
    return out
