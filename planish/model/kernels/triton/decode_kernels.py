"""The sampler's attention in Triton: decoding and prefill, with keys and values in KV cache slots.

A slot is [heads, capacity, E] within its pool's tensor [slots, heads, capacity, E]. `bases`
[pools, 2] contains the addresses of the pools' keys and values in one layer. Tables on the device
describe the work; their records are defined below. Grids and arguments do not depend on the
contents of the tables. So the launches can be captured in a CUDA graph and replayed with other
contents.

Decoding (flash decoding): a piece is a range of positions of one slot, together with the rows that
attend to all of them. A piece of a sample's slot has one row. A piece of a prompt's slot has the
rows of several samples of that prompt. For each of its rows, a piece writes one part: the max
score, the sum of weights and the weighted sum of values, in float32. A second kernel combines the
parts of a row in the order of positions. All query heads of a key head are rows of one matmul.

Layers with an attention window have tables of their own. Their pieces begin at the first position
that one of their rows attends to. A row may attend to none of the keys of a piece; the max score of
its part is then -inf. An attention sink is the first term of a row's sum of weights.

Scores are scaled for exp2, which GPUs compute directly. Weights are rounded to the values' dtype
before they multiply the values; sums are float32.

Shapes: T rows, H key heads, G query heads per key head, E head_dim.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# Static types do not describe Triton functions: constants are plain numbers, and launches take
# additional options.

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from planish.model.kernels.triton.common import (
    HOPPER_SHARED,
    SHARED_MARGIN,
    SHARED_RESERVE,
    bound,
    dot,
    power_of_two,
    rounded,
)


def _record(*names: str) -> np.dtype:
    return np.dtype([(name, np.int32) for name in names])


# The kernels read the fields by index, so their order must not change.
Row = _record("pool", "slot", "capacity", "position", "part", "parts")
"""One row of the batch: where its key and value are stored, its first part and number of parts.

A row with capacity 0 stores nothing.
"""
Entry = _record("row", "part", "first")
"""One row of a piece: its batch row, the index of that row's first part, and the first position of
its prompt's slot that the row attends to.

The parts of a batch row are consecutive.
"""
Piece = _record("pool", "slot", "capacity", "first", "stop", "entry", "entries", "number")
"""A piece: positions first .. stop - 1 of a slot, and the rows that attend to them.

The rows are those of entries entry .. entry + entries - 1. `number`: the piece writes part `number`
of each of its rows.
"""
Block = _record("pool", "slot", "capacity", "position", "row", "rows")
"""A block of a prefill: batch rows row .. row + rows - 1, at consecutive positions of a slot.

`position`: the position of the first row.
"""

_ROW, _ENTRY, _PIECE, _BLOCK = (
    tl.constexpr(len(record.fields or ())) for record in (Row, Entry, Piece, Block)
)
LOG2_E = tl.constexpr(math.log2(math.e))
_WIDE_ROWS = 32
"""The number of rows of a matmul for a prompt's piece.

All these rows share one read of the keys. At this size the tensor cores are still fast enough.
"""
_PARTS = 8
"""The number of parts that are combined at a time."""
_PREFILL_CUTS = (
    *((128, 64, 8, 3), (128, 32, 8, 5), (64, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
    (16, 16, 4, 1),
)
"""The rows, keys, warps and stages of a prefill block in bf16, the largest first.

Two warp groups share a block of 128 rows. An A100 has the memory for the first candidate, but would
spill registers with head_dim 128, as 4 warps do with head_dim 256. With 99 KiB of shared memory (RTX 3090, 4090, 5090), one
program fits on a multiprocessor, and the second candidate gives each scheduler two warps.
"""


@triton.jit
def _keep_kernel(
    k,
    v,
    rows,
    bases,
    k_stride,
    v_stride,
    H: tl.constexpr,
    E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    row = tl.program_id(0)
    record = rows + row * _ROW
    capacity = tl.load(record + 2)
    if capacity > 0:
        head, e = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_E)[None, :]
        mask = (head < H) & (e < E)
        key = tl.load(k + row.to(tl.int64) * k_stride + head * E + e, mask=mask)
        value = tl.load(v + row.to(tl.int64) * v_stride + head * E + e, mask=mask)
        place = (
            (tl.load(record + 1).to(tl.int64) * H + head) * capacity + tl.load(record + 3)
        ) * E + e
        base = bases + 2 * tl.load(record)
        tl.store(tl.load(base).to(tl.pointer_type(k.dtype.element_ty)) + place, key, mask=mask)
        tl.store(
            tl.load(base + 1).to(tl.pointer_type(v.dtype.element_ty)) + place, value, mask=mask
        )


@triton.jit
def _slot(bases, record, head, dtype: tl.constexpr, H: tl.constexpr, E: tl.constexpr):
    """Return the pointers to the keys and the values of one head of a slot.

    `record`: a piece or a block, which begins with the pool, the slot and its capacity.
    """
    pool, slot, capacity = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    offset = (slot.to(tl.int64) * H + head) * capacity * E
    keys = tl.load(bases + 2 * pool).to(tl.pointer_type(dtype)) + offset
    values = tl.load(bases + 2 * pool + 1).to(tl.pointer_type(dtype)) + offset
    # E is a multiple of 16, so every slot begins at a multiple of 16 bytes.
    return tl.multiple_of(keys, 16), tl.multiple_of(values, 16)


@triton.jit
def _attend(
    q, row_max, weights, sums, keys, values, first, stop, hidden, visible,
    SCALE: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Add the keys first .. stop - 1 to the online softmax of M rows and return its new state.

    The state is the max `row_max` [M], the sum of weights `weights` [M] and the weighted sum of
    values `sums` [M, BLOCK_E].

    MASKED: each row attends only to the keys before its `visible` [M]. Without MASKED, all rows
    attend to all keys, and stop - first is a multiple of BLOCK_N. WINDOWED, together with MASKED:
    each row attends only to the keys from its `hidden` [M] on. Without WINDOWED, every row must
    attend to at least one key of the first block.
    """
    e = tl.arange(0, BLOCK_E)
    for block in range(bound(tl.cdiv(stop - first, BLOCK_N))):
        n = first + block * BLOCK_N + tl.arange(0, BLOCK_N)
        places = n[:, None] * E + e[None, :]
        if MASKED or E < BLOCK_E:
            mask = (n < stop)[:, None]
            if E < BLOCK_E:
                mask = mask & (e < E)[None, :]
            key, value = (
                tl.load(keys + places, mask=mask, other=0.0),
                tl.load(values + places, mask=mask, other=0.0),
            )
        else:
            key, value = tl.load(keys + places), tl.load(values + places)
        scores = dot(q, tl.trans(key)) * SCALE
        if MASKED:
            scores = tl.where(n[None, :] < visible[:, None], scores, float("-inf"))
        if WINDOWED:
            scores = tl.where(n[None, :] >= hidden[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = new_max
        if WINDOWED:  # A row may attend to no key of the blocks so far.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        shrunk = tl.exp2(row_max - shift)
        found = tl.exp2(scores - shift[:, None])
        weights = weights * shrunk + tl.sum(found, 1)
        sums = sums * shrunk[:, None] + dot(rounded(found, value.dtype), value)
        row_max = new_max
    return row_max, weights, sums


@triton.jit
def _piece(
    index, head, q, pieces, entries, bases, values, stats,
    SCALE: tl.constexpr, H: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Compute one piece for one key head.

    WINDOWED: the rows attend to the positions from the `first` of their entries on.

    The matmul has BLOCK_M rows: the query heads of the piece's entries, and padding.
    """
    record = pieces + index * _PIECE
    first, stop, entry = tl.load(record + 3), tl.load(record + 4), tl.load(record + 5)
    m, e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    real = m // G < tl.load(record + 6)
    places = entries + (entry + m // G) * _ENTRY
    heads = head * G + m % G
    row = tl.load(places, mask=real, other=0).to(tl.int64) * (H * G) + heads
    part = (tl.load(places + 1, mask=real, other=0) + tl.load(record + 7)).to(tl.int64) * (
        H * G
    ) + heads
    mask = real[:, None] & (e < E)[None, :]
    query = tl.load(q + row[:, None] * E + e[None, :], mask=mask, other=0.0)
    hidden = tl.load(places + 2, mask=real, other=0) if WINDOWED else tl.zeros((BLOCK_M,), tl.int32)
    key_base, value_base = _slot(bases, record, head, q.dtype.element_ty, H, E)
    row_max, weights, sums = _attend(
        query, tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32),
        tl.zeros((BLOCK_M, BLOCK_E), tl.float32), key_base, value_base, first, stop,
        hidden, tl.zeros((BLOCK_M,), tl.int32) + stop, SCALE, E, BLOCK_E, BLOCK_N, True, WINDOWED,
    )  # fmt: skip
    tl.store(values + part[:, None] * E + e[None, :], sums, mask=mask)
    tl.store(stats + part * 2, row_max, mask=real)
    tl.store(stats + part * 2 + 1, weights, mask=real)


@triton.jit
def _pieces_kernel(
    q, counts, pieces, entries, bases, values, stats,
    SCALE: tl.constexpr, H: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    WIDE_M: tl.constexpr, NARROW_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Compute all pieces, which the programs divide among themselves.

    `counts`: the number of pieces of prompts, which come first, and the number of all pieces.
    WINDOWED: the layer has an attention window. A sample's piece has one row, so its range is the
    row's window.
    """
    program, step = tl.program_id(0), tl.num_programs(0)
    wide, every = tl.load(counts) * H, tl.load(counts + 1) * H
    for kind in tl.static_range(2):
        turns = tl.cdiv(tl.maximum((wide if kind == 0 else every) - program, 0), step)
        for turn in range(bound(turns)):
            work = program + turn * step
            _piece(
                work // H, work % H, q, pieces, entries, bases, values, stats,
                SCALE, H, G, E, WIDE_M if kind == 0 else NARROW_M, BLOCK_N, BLOCK_E,
                WINDOWED if kind == 0 else False,
            )  # fmt: skip
        # The pieces of prompts may not divide evenly among the programs. The programs that computed
        # one piece less get the first of the remaining pieces.
        program += turns * step


@triton.jit
def _combine_kernel(
    out, rows, values, stats, sinks, E: tl.constexpr, BLOCK_E: tl.constexpr, PARTS: tl.constexpr
):
    """Combine the parts of one row and query head. `sinks`: float32 [H * G], or None."""
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first, parts = tl.load(rows + row * _ROW + 4), tl.load(rows + row * _ROW + 5)
    e = tl.arange(0, BLOCK_E)
    row_max, weights = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    if sinks is not None:
        row_max, weights = tl.load(sinks + head) * LOG2_E, tl.full((), 1.0, tl.float32)
    sums = tl.zeros((BLOCK_E,), tl.float32)
    for block in range(bound(tl.cdiv(parts, PARTS))):
        number = block * PARTS + tl.arange(0, PARTS)
        real = number < parts
        part = (first + number).to(tl.int64) * heads + head
        part_maxima = tl.load(stats + part * 2, mask=real, other=float("-inf"))
        new_max = tl.maximum(row_max, tl.max(part_maxima, 0))
        # With a window, the row may attend to no key of the parts so far.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        factors = tl.exp2(part_maxima - shift)
        shrunk = tl.exp2(row_max - shift)
        mask = real[:, None] & (e < E)[None, :]
        found = tl.load(values + part[:, None] * E + e[None, :], mask=mask, other=0.0)
        weights = weights * shrunk + tl.sum(
            factors * tl.load(stats + part * 2 + 1, mask=real, other=0.0), 0
        )
        sums = sums * shrunk + tl.sum(factors[:, None] * found, 0)
        row_max = new_max
    # A row without a sample has no parts.
    result = sums / tl.where(parts > 0, weights, 1.0)
    place = (row.to(tl.int64) * heads + head) * E + e
    tl.store(out + place, rounded(result, out.dtype.element_ty), mask=e < E)


@triton.jit
def _prefill_kernel(
    q, out, blocks, bases, sinks, window,
    SCALE: tl.constexpr, H: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Compute one block for one key head. `sinks`: float32 [H * G], or None.

    WINDOWED: each row attends to the last `window` positions up to its own.
    """
    record, head = blocks + tl.program_id(0) * _BLOCK, tl.program_id(1)
    position, rows = tl.load(record + 3), tl.load(record + 5)
    m, e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    place = (tl.load(record + 4) + m // G).to(tl.int64) * (H * G) + head * G + m % G
    places = place[:, None] * E + e[None, :]
    mask = (m // G < rows)[:, None] & (e < E)[None, :]
    query = tl.load(q + places, mask=mask, other=0.0)
    keys, values = _slot(bases, record, head, q.dtype.element_ty, H, E)
    row_max, weights = (
        tl.full((BLOCK_M,), float("-inf"), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
    )
    if sinks is not None:
        row_max = tl.load(sinks + head * G + m % G) * LOG2_E
        weights = tl.full((BLOCK_M,), 1.0, tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    visible = position + 1 + tl.minimum(m // G, rows - 1)
    hidden = tl.maximum(visible - window, 0)
    first = tl.maximum(position + 1 - window, 0)
    if not WINDOWED:
        first = (position + 1) // BLOCK_N * BLOCK_N
        row_max, weights, sums = _attend(
            query, row_max, weights, sums, keys, values, 0, first, hidden, visible, SCALE, E, BLOCK_E, BLOCK_N, False, False
        )  # fmt: skip
    row_max, weights, sums = _attend(
        query, row_max, weights, sums, keys, values, first, position + rows, hidden, visible, SCALE, E, BLOCK_E, BLOCK_N, True,
        WINDOWED,
    )  # fmt: skip
    tl.store(out + places, rounded(sums / weights[:, None], out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Heads:
    """The attention heads for which the kernels are compiled, and their block sizes."""

    keys: int
    group: int
    """The number of query heads per key head."""
    size: int
    dtype: torch.dtype
    shared: int = HOPPER_SHARED
    """The bytes of shared memory that a program may use."""

    @property
    def lane(self) -> int:
        """The maximum number of batch rows in a piece."""
        return max(1, _WIDE_ROWS // self.group)

    @property
    def block_rows(self) -> int:
        """The maximum number of batch rows in a prefill block."""
        return max(1, self._prefill_cut[0] // self.group)

    @property
    def block_e(self) -> int:
        """The head_dim, rounded up to a power of two."""
        return power_of_two(self.size)

    @cached_property
    def _prefill_cut(self) -> tuple[int, int, int, int]:
        """The rows, keys, warps and stages of a block: the largest of _PREFILL_CUTS that fits."""
        if self._is_wide:
            return 32, 16, 8, 2
        cuts = [
            cut for cut in _PREFILL_CUTS if self.block_e <= 128 or (cut[0] <= 64 and cut[1] <= 32)
        ]
        if self.shared < HOPPER_SHARED:
            cuts = {128: cuts[1:], 256: [(64, 32, 8, 2), *cuts]}.get(self.block_e, cuts)
        fitting = (cut for cut in cuts if self._fits(_tile(cut[0]), cut[1], cut[3]))
        return next(fitting, cuts[-1])

    def _fits(self, num_rows: int, keys: int, stages: int) -> bool:
        """Return whether these rows, with keys and values in these stages, fit in shared memory."""
        numbers = (num_rows + 2 * keys * stages) * self.block_e
        return numbers * self.dtype.itemsize <= self.shared - SHARED_MARGIN

    @property
    def _is_wide(self) -> bool:
        """Whether the dtype is float32.

        Tensor cores do not support float32, so all operands are in registers and blocks must be
        small.
        """
        return self.dtype == torch.float32

    @cached_property
    def decode_options(self) -> dict[str, Any]:
        """The compile-time constants and launch options of the decoding kernel."""
        wide, narrow = (_tile(rows * self.group) for rows in (self.lane, 1))
        block_n, warps, stages = 16, 8, 2
        if not self._is_wide:
            # Many small blocks in flight hide the memory latency.
            block_n, warps = 64 if self.block_e <= 64 else 32, 4
            stages = self._decode_stages(wide, block_n, programs=2)
            if stages < 2:
                # A multiprocessor runs one program, which then has the warps of two.
                warps, stages = 8, max(1, self._decode_stages(wide, block_n, programs=1))
        options = {
            "WIDE_M": wide,
            "NARROW_M": narrow,
            "BLOCK_N": block_n,
            "num_warps": warps,
            "num_stages": stages,
        }
        return {**self._shape, **options}

    def _decode_stages(self, num_rows: int, keys: int, programs: int) -> int:
        """Return the stages with which so many programs of the decoding kernel run at the same time.

        The result is 0 if they do not fit in the shared memory of a multiprocessor, which is that
        of a program and the reserve of one. One stage less than that is in shared memory, beside
        the queries and the weights.
        """
        limit = (self.shared + SHARED_RESERVE) // programs - SHARED_RESERVE
        most = 3 if self.block_e > 128 else 4
        for stages in range(most, 0, -1):
            numbers = (num_rows + 2 * keys * (stages - 1)) * self.block_e + num_rows * keys
            if numbers * self.dtype.itemsize <= limit - SHARED_MARGIN:
                return stages
        return 0

    @cached_property
    def prefill_options(self) -> dict[str, Any]:
        """The compile-time constants and launch options of the prefill kernel."""
        block_m = _tile(self.block_rows * self.group)
        _, block_n, warps, stages = self._prefill_cut
        options = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}
        return {**self._shape, **options}

    @property
    def _shape(self) -> dict[str, Any]:
        scale = self.size**-0.5 * math.log2(math.e)
        return {
            "SCALE": scale,
            "H": self.keys,
            "G": self.group,
            "E": self.size,
            "BLOCK_E": self.block_e,
        }


def _tile(num_rows: int) -> int:
    """Return the rows of a matmul with `num_rows` useful rows: a power of two, at least 16."""
    return max(16, power_of_two(num_rows))


def keep(heads: Heads, rows: Tensor, bases: Tensor, k: Tensor, v: Tensor) -> None:
    """Store keys and values [T, H, E] in the slots that the records `rows` name.

    If there are fewer than T records, only the first rows are stored.
    """
    assert k.dtype == v.dtype == heads.dtype
    assert k.stride()[1:] == v.stride()[1:] == (heads.size, 1)
    options = {"H": heads.keys, "E": heads.size, "BLOCK_E": heads.block_e}
    block_h = power_of_two(heads.keys)
    grid = (min(len(rows), len(k)),)
    _keep_kernel[grid](k, v, rows, bases, k.stride(0), v.stride(0), **options, BLOCK_H=block_h)


@dataclass(frozen=True)
class DecodeWork:
    """The tables of a decoding step for the layers with one window, and scratch memory for the
    parts of its rows.
    """

    window: int | None
    """The attention window of the layers. None: their rows attend to all positions."""

    counts: Tensor
    rows: Tensor
    entries: Tensor
    pieces: Tensor
    values: Tensor
    """float32 [parts, H * G, E]."""
    stats: Tensor
    """float32 [parts, H * G, 2]: max score and sum of weights."""


def decode(
    heads: Heads,
    work: DecodeWork,
    bases: Tensor,
    q: Tensor,
    programs: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention output of the rows q: [T, H * G, E].

    `q`: [T, H * G, E], where T is at most the number of records in `work.rows`. `programs`: the
    number of programs that share the pieces. `sinks`: float32 [H * G] (see `Attend`).
    """
    q, out = q.contiguous(), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts = (work.values, work.stats)
    _pieces_kernel[(programs,)](
        q, work.counts, work.pieces, work.entries, bases, *parts, **heads.decode_options,
        WINDOWED=work.window is not None,
    )  # fmt: skip
    shape = {"E": heads.size, "BLOCK_E": heads.block_e, "PARTS": _PARTS}
    _combine_kernel[(len(q), q.shape[1])](out, work.rows, *parts, sinks, **shape, num_warps=2)
    return out


def prefill(
    heads: Heads,
    blocks: Tensor,
    bases: Tensor,
    q: Tensor,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the causal attention output of the rows in `blocks`: [T, H * G, E].

    Each row of q [T, H * G, E] attends to the positions of its slot up to its own, or to the last
    `window` of them. The output of rows that are not in `blocks` is 0. `sinks`: float32 [H * G].
    """
    q, out = q.contiguous(), torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    _prefill_kernel[(len(blocks), heads.keys)](
        q, out, blocks, bases, sinks, window or 0, **heads.prefill_options,
        WINDOWED=window is not None,
    )  # fmt: skip
    return out
