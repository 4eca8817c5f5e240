"""LoRA matmuls for batches with many adapters, after SGMV (Punica, Chen et al. 2023, arXiv
2310.18547).

The rows of a batch are divided into tiles of at most TILE rows with the same adapter. The kernel
`shrink` multiplies each tile by its adapter's A. The kernel `expand` multiplies the LoRA hidden
states by the Bs and adds the result to the base model's output. Tables on the device contain the
rows and the adapter of each tile, and the addresses of the adapters' matrices. The kernels read the
matrices in place. Grids and arguments do not depend on the batch, because a fixed number of
programs share the tiles of the tables. So a captured CUDA graph serves any later batch once the
tables have changed.

The kernels are batch-invariant: a row's result depends only on the row and its adapter. A sum over
`in` is divided into a few parts, whose number depends only on `in`. Each part is summed in float32,
and the parts are then added in order. One program may compute all parts, or each part may have its
own program; the order is the same. There are no atomic additions.

Shapes: T rows, `in` and `out` columns, n linears that read one input, r rank.
"""

# Launches take additional options, which the static types do not know:
# pyright: reportCallIssue=false

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from planish.model.kernels.triton.common import bound, dot, multiprocessors

TILE = 16
"""The maximum number of rows of a tile. Matmuls on tensor cores need at least this many rows."""
MAX_FUSED_LINEARS = 3
"""The maximum number of linears that read the same input: q, k and v."""

_MOST_PARTS = 8
"""The maximum number of parts of a sum over `in`.

More parts would occupy more programs per tile, but each program of `expand` must add all parts.
"""
_SPREAD_ROWS = 512
"""The maximum number of rows of a batch for which different programs compute the parts of a sum.

Larger batches have enough tiles to occupy all programs.
"""
_BLOCK_LOW = 32
_BLOCK_IN = 128
_BLOCK_OUT = 128
_BLOCK_RANK = 32
_SHRINKS, _EXPANDS = 4, 8
"""The numbers of programs per multiprocessor.

`shrink` needs fewer, because each of its programs has more loads in flight.
"""


@triton.jit
def _segment(x_rows, a_rows, has_row, has_column, first, segment, inner, BLOCK_IN: tl.constexpr):
    """Return one part of x @ A.T: [TILE, BLOCK_LOW].

    The part is the sum over the columns first .. first + segment - 1 of `in`. The last part may
    have fewer columns.
    """
    total = tl.zeros((has_row.shape[0], has_column.shape[0]), tl.float32)
    for begin in range(bound(first), bound(tl.minimum(first + segment, inner)), BLOCK_IN):
        k = begin + tl.arange(0, BLOCK_IN)
        mine = tl.load(
            x_rows[:, None] + k[None, :], has_row[:, None] & (k < inner)[None, :], other=0.0
        )
        theirs = tl.load(
            a_rows[:, None] + k[None, :], has_column[:, None] & (k < inner)[None, :], other=0.0
        )
        total += dot(mine, tl.trans(theirs))
    return total


@triton.jit
def _matrix(pointers, number, like, ALIGNED: tl.constexpr):
    """Return the pointer to a matrix of the table, with the dtype of the pointer `like`.

    ALIGNED: the addresses are multiples of 16, so the compiler may use loads of 16 bytes.
    """
    matrix = tl.load(pointers + number).to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        matrix = tl.multiple_of(matrix, 16)
    return matrix


@triton.jit(do_not_specialize=["module"])
def shrink_kernel(
    x,
    x_stride,
    tiles,
    pointers,
    slot_stride,
    module,
    parts,
    part_stride,
    low_stride,
    inner,
    segment,
    LINEARS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SPREAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_LOW: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Write the LoRA hidden states x @ A.T to `parts`.

    If SPREAD, parts[p] receives segment p of each sum. Otherwise parts[0] receives the whole sums.
    """
    blocks = tl.cdiv(LINEARS * tl.load(tiles + 1), BLOCK_LOW)
    each = SEGMENTS if SPREAD else 1
    for item in range(
        bound(tl.program_id(0)), bound(tl.load(tiles) * blocks * each), bound(tl.num_programs(0))
    ):
        tile = tiles + 4 + item // (blocks * each) * 4
        column = item // each % blocks * BLOCK_LOW
        width = LINEARS * tl.load(tile + 3)
        module_pointers = pointers + tl.load(tile + 2).to(tl.int64) * slot_stride + module * 4
        if (tl.load(module_pointers) != 0) & (column < width):
            a = _matrix(module_pointers, 0, x, ALIGNED)
            index = tl.arange(0, TILE)
            has_row = index < tl.load(tile + 1)
            rows = (tl.load(tile) + index).to(tl.int64)
            columns = column + tl.arange(0, BLOCK_LOW)
            has_column = columns < width
            x_rows, a_rows = x + rows * x_stride, a + columns * inner
            if SPREAD:
                first = item % each * segment
                low = _segment(x_rows, a_rows, has_row, has_column, first, segment, inner, BLOCK_IN)
            else:
                low = tl.zeros((TILE, BLOCK_LOW), tl.float32)
                for part in range(SEGMENTS):
                    first = part * segment
                    low += _segment(
                        x_rows, a_rows, has_row, has_column, first, segment, inner, BLOCK_IN
                    )
            target = (
                parts + item % each * part_stride + rows[:, None] * low_stride + columns[None, :]
            )
            tl.store(target, low, has_row[:, None] & has_column[None, :])


@triton.jit
def _lora_hidden_times_b(
    low,
    part_stride,
    has_row,
    b,
    rank,
    columns,
    has_column,
    PARTS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """Return hidden @ B.T, where hidden is the sum of the parts in B's dtype: [TILE, BLOCK_OUT]."""
    total = tl.zeros((has_row.shape[0], has_column.shape[0]), tl.float32)
    for begin in range(0, bound(rank), BLOCK_RANK):
        r = begin + tl.arange(0, BLOCK_RANK)
        there = has_row[:, None] & (r < rank)[None, :]
        lora_hidden = tl.zeros((has_row.shape[0], BLOCK_RANK), tl.float32)
        for part in tl.static_range(PARTS):
            lora_hidden += tl.load(low + part * part_stride + r[None, :], there, other=0.0)
        weights = tl.load(
            b + columns[:, None] * rank + r[None, :],
            has_column[:, None] & (r < rank)[None, :],
            other=0.0,
        )
        total += dot(lora_hidden.to(weights.dtype), tl.trans(weights))
    return total


@triton.jit(do_not_specialize=["module"])
def expand_kernel(
    x,
    tiles,
    pointers,
    slot_stride,
    module,
    parts,
    part_stride,
    low_stride,
    out,
    out_stride,
    size_0,
    size_1,
    size_2,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """Add the LoRA outputs of all linears, which are adjacent columns of `out`.

    `x` only gives the dtype of the weights; its contents are not used.
    """
    blocks_0 = tl.cdiv(size_0, BLOCK_OUT)
    blocks_1 = tl.cdiv(size_1, BLOCK_OUT)
    blocks = blocks_0 + blocks_1 + tl.cdiv(size_2, BLOCK_OUT)
    for item in range(
        bound(tl.program_id(0)), bound(tl.load(tiles) * blocks), bound(tl.num_programs(0))
    ):
        tile = tiles + 4 + item // blocks * 4
        block = item % blocks
        module_pointers = pointers + tl.load(tile + 2).to(tl.int64) * slot_stride + module * 4
        if tl.load(module_pointers) != 0:
            linear = (block >= blocks_0).to(tl.int32) + (block >= blocks_0 + blocks_1).to(tl.int32)
            size = tl.where(linear == 0, size_0, tl.where(linear == 1, size_1, size_2))
            before = tl.where(linear == 0, 0, tl.where(linear == 1, size_0, size_0 + size_1))
            block -= tl.where(linear == 0, 0, tl.where(linear == 1, blocks_0, blocks_0 + blocks_1))
            b = _matrix(module_pointers, 1 + linear, x, ALIGNED)
            index = tl.arange(0, TILE)
            has_row = index < tl.load(tile + 1)
            rows = (tl.load(tile) + index).to(tl.int64)
            columns = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
            has_column = columns < size
            target = out + rows[:, None] * out_stride + (before + columns)[None, :]
            there = has_row[:, None] & has_column[None, :]
            found = tl.load(target, there, other=0.0).to(tl.float32)
            rank = tl.load(tile + 3)
            low = parts + rows[:, None] * low_stride
            if rank % 8 == 0:
                # With this expression the compiler can prove that 8 divides the rank, so it loads
                # 16 bytes at once.
                rank = rank // 8 * 8
                found += _lora_hidden_times_b(
                    low + linear * rank,
                    part_stride,
                    has_row,
                    b,
                    rank,
                    columns,
                    has_column,
                    PARTS,
                    BLOCK_RANK,
                )
            else:
                found += _lora_hidden_times_b(
                    low + linear * rank,
                    part_stride,
                    has_row,
                    b,
                    rank,
                    columns,
                    has_column,
                    PARTS,
                    16,
                )
            tl.store(target, found.to(out.dtype.element_ty), there)


def scratch(max_rows: int, columns: int, device: torch.device) -> Tensor:
    """Return the scratch memory `parts` of `add_`.

    `max_rows`: the maximum number of rows of a batch. `columns`: the maximum n * r of a target
    module.
    """
    parts = _MOST_PARTS if max_rows <= _SPREAD_ROWS else 1
    return torch.empty(parts, max_rows, columns, dtype=torch.float32, device=device)


def add_(
    x: Tensor,
    out: Tensor,
    sizes: Sequence[int],
    module: int,
    tiles: Tensor,
    pointers: Tensor,
    parts: Tensor,
    *,
    aligned: bool,
) -> None:
    """Add the LoRA outputs of one target module for x [T, in] to `out` [T, sum(sizes)].

    Rows without an adapter do not change. Each row of `x` and `out` must be contiguous, with any
    stride between rows.

    `tiles`: int32 [1 + tiles, 4]. The first entry is (number of tiles, largest rank, 0, 0). The
    others are (first row, number of rows, slot, rank) of each tile. `pointers`: int64 [slots,
    modules, 4], the addresses of A [n * r, in] and of the n Bs [out_i, r]. The matrices are
    contiguous and in x's dtype. The addresses are 0 if the slot's adapter does not train it.
    `parts`: from `scratch`. `aligned`: whether all addresses are multiples of 16.
    """
    assert x.stride(1) == 1
    assert out.stride(1) == 1
    assert len(x) == len(out) <= parts.shape[1]
    assert sum(sizes) == out.shape[1]
    assert len(sizes) <= MAX_FUSED_LINEARS
    is_float32 = x.dtype == torch.float32
    count, length = _segments(x.shape[1])
    spread = parts.shape[0] > 1
    shared = (tiles, pointers, pointers.stride(0), module, parts, parts.stride(0), parts.stride(1))
    processors = multiprocessors(x.device)
    shrink_kernel[(processors * _SHRINKS,)](
        x,
        x.stride(0),
        *shared,
        x.shape[1],
        length,
        LINEARS=len(sizes),
        SEGMENTS=count,
        SPREAD=spread,
        ALIGNED=aligned,
        TILE=TILE,
        BLOCK_LOW=_BLOCK_LOW,
        BLOCK_IN=_BLOCK_IN // 4 if is_float32 else _BLOCK_IN,
        num_warps=4,
        num_stages=2 if is_float32 else 4,
    )
    expand_kernel[(processors * _EXPANDS,)](
        x,
        *shared,
        out,
        out.stride(0),
        *sizes,
        *(0 for _ in range(MAX_FUSED_LINEARS - len(sizes))),
        PARTS=count if spread else 1,
        ALIGNED=aligned,
        TILE=TILE,
        BLOCK_OUT=_BLOCK_OUT,
        BLOCK_RANK=_BLOCK_RANK,
        num_warps=4,
        num_stages=2 if is_float32 else 1,
    )


def _segments(inner: int) -> tuple[int, int]:
    """Return the number of parts of a sum over `in`, and the length of all parts but the last."""
    length = math.ceil(inner / min(max(inner // 1024, 4), _MOST_PARTS))
    length = max(length + -length % _BLOCK_IN, 2 * _BLOCK_IN)
    return math.ceil(inner / length), length
