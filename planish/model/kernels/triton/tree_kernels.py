"""Flash attention over a prefix forest in Triton: query row i sees key row j iff `j <= i <
subtree_end[j]` (model/prefix_tree.py says why).

A tile of queries is M // G consecutive rows times the G query heads of a key head, so a key or
value is loaded once for all heads that use it, a tile spans few rows, and segments of one row share
a tile with their neighbours. The host says which tiles meet (`Table`): where all pairs of two tiles
are visible no mask is computed, where none is, nothing. Online softmax and gradients from the kept
log-sum-exp are those of FlashAttention-2 (Dao 2023). Sums are float32; weights are rounded to the
inputs' dtype before their products, as tensor cores want.

Each number is written by one program, and a sum that was divided among programs is added up in a
fixed order: no atomics, equal bits in each run.

Shapes: T rows, Hq query heads, Hkv key heads, G = Hq / Hkv, E head_dim, EP the power of two that
holds it; M queries and N keys of a tile.
"""

# pyright: reportGeneralTypeIssues=false
# (To it, a kernel that another one calls never returns, so what it returns cannot be taken apart.)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from planish.model.kernels.triton.common import HOPPER_SHARED, SHARED_MARGIN, bound, dot

LOG2_E = tl.constexpr(1.4426950408889634)
_SUM_ROWS = 16


@dataclass(frozen=True)
class Launch:
    """How a kernel is cut and run."""

    queries: int
    """M, rows times heads: powers of two, as N is."""
    keys: int
    """N."""
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        return {
            "M": self.queries,
            "N": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


@dataclass(frozen=True)
class Tiles:
    """The cut of each kernel. The first two go over the same lists: M and N are the same in both."""

    forward: Launch
    backward_queries: Launch
    backward_keys: Launch


@dataclass(frozen=True, eq=False)
class Table:
    """What meets what in one micro-batch, on the device; int32 throughout. Costly entries come
    first, so that the last to run are short.
    """

    tiles: Tiles
    until: Tensor
    """[T]"""
    query_items: Tensor
    """[n, 4]: query tile, then places in `lists`: from the first to before the second, key tiles
    that need no mask; to before the third, others.
    """
    lists: Tensor
    key_items: Tensor
    """[n, 6]: key tile, then query tiles: from the first to before the fourth, without a mask from
    the second to before the third; then the place of the sums in the scratch memory, or -1: they
    are the whole gradient.
    """
    sums: Tensor
    """[n, 3]: key tile, first place and number of its parts in the scratch memory."""
    places: int
    """Of the scratch memory."""


def tiles_for(dtype: torch.dtype, head_dim: int, group: int, shared: int = HOPPER_SHARED) -> Tiles:
    """The largest tiles that fit in `shared` bytes of shared memory; on Hopper about the largest
    with which nothing spills. The smallest there are, if none fit.
    """
    width = _width(head_dim)
    least = _power_of_two(group)  # a tile has at least one row
    if dtype == torch.float32:
        # products without tensor cores hold whole rows of their operands in registers
        forward, queries, keys = (
            ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)) if width <= 32
            else ((32, 16, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1)) if width == 64
            else ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1))
        )  # fmt: skip
        return _tiles(least, forward, queries, keys)
    tried = (_tiles(least, *cuts) for cuts in _CUTS[max(64, width)])
    fitting = (
        tiles
        for tiles in tried
        if _most_shared(tiles, width, dtype.itemsize) <= shared - SHARED_MARGIN
    )
    return next(fitting, _tiles(least, *_CUTS[max(64, width)][-1]))


_Cut = tuple[int, int, int, int]
_CUTS: dict[int, tuple[tuple[_Cut, _Cut, _Cut], ...]] = {
    64: (
        ((128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 8, 2)),
        ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    ),
    128: (
        ((128, 64, 8, 3), (128, 64, 8, 2), (64, 128, 8, 2)),
        ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
        ((64, 32, 4, 2), (64, 32, 4, 1), (32, 64, 4, 1)),
    ),
    256: (
        ((128, 32, 8, 2), (128, 32, 8, 2), (16, 64, 8, 2)),
        ((64, 32, 4, 1), (64, 32, 4, 1), (16, 64, 8, 2)),
        ((32, 16, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1)),
    ),
}
"""Queries, keys, warps and stages of the forward, the queries' and the keys' backward kernel for
bf16, by the width of heads: for 227 KiB of shared memory (H100; A100 up to a width of 128), 99 KiB
(RTX 3090, 4090, 5090) and 64 KiB (MI300).
"""


def _tiles(least: int, *cuts: _Cut) -> Tiles:
    return Tiles(*(Launch(max(m, least), n, warps, stages) for m, n, warps, stages in cuts))


def _most_shared(tiles: Tiles, width: int, itemsize: int) -> int:
    """Bytes of shared memory of the three kernels at most: what stays (queries and their gradients,
    or keys and values), and of what is streamed, each stage.
    """
    first, second, third = tiles.forward, tiles.backward_queries, tiles.backward_keys
    rows = (
        first.queries + 2 * first.keys * first.stages,
        2 * second.queries + 2 * second.keys * second.stages,
        2 * third.keys + 2 * third.queries * third.stages,
    )
    return max(rows) * width * itemsize


def attend(q: Tensor, k: Tensor, v: Tensor, table: Table) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, E] in q's dtype, and log-sum-exp of the scaled scores, float32 [T, Hq]."""
    q, k, v = _by_rows(q), _by_rows(k), _by_rows(v)
    out, lse = (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        q.new_empty(q.shape[:2], dtype=torch.float32),
    )
    shape = _Shape.of(q, k)
    forward[(len(table.query_items), shape.heads)](
        q, k, v, out, lse, table.until, table.query_items, table.lists,
        q.stride(0), k.stride(0), v.stride(0), len(q), shape.factor,
        **shape.constants, **table.tiles.forward.options,
    )  # fmt: skip
    return out, lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Table
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, contiguous and in their dtypes, given the gradient of `out`."""
    grad, q, k, v = (_by_rows(x) for x in (grad, q, k, v))
    shape = _Shape.of(q, k)
    grad_q, grad_k, grad_v = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)
    )
    delta = torch.empty_like(lse)
    strides = (grad.stride(0), q.stride(0), k.stride(0), v.stride(0))
    backward_queries[(len(table.query_items), shape.heads)](
        grad, q, k, v, out, lse, delta, grad_q, table.until, table.query_items, table.lists,
        *strides, len(q), shape.factor, shape.scale,
        **shape.constants, **table.tiles.backward_queries.options,
    )  # fmt: skip
    cut = table.tiles.backward_keys
    parts = lse.new_empty((max(table.places, 1), shape.heads, 2, cut.keys, shape.width))
    backward_keys[(len(table.key_items), shape.heads)](
        grad, q, k, v, lse, delta, grad_k, grad_v, parts, table.until, table.key_items,
        *strides, len(q), shape.factor, shape.scale,
        **shape.constants, **cut.options,
    )  # fmt: skip
    if len(table.sums):
        constants: dict[str, Any] = {"N": cut.keys, "ROWS": _SUM_ROWS, **shape.constants}
        add_parts[(len(table.sums), shape.heads, cut.keys // _SUM_ROWS)](
            parts, grad_k, grad_v, table.sums, len(q), shape.scale, **constants
        )
    return grad_q, grad_k, grad_v


@dataclass(frozen=True)
class _Shape:
    heads: int
    """Of the keys."""
    group: int
    size: int
    width: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> _Shape:
        heads, size = k.shape[1:]
        return cls(heads, q.shape[1] // heads, size, _width(size))

    @property
    def constants(self) -> dict[str, Any]:
        return {"HEADS": self.heads, "G": self.group, "E": self.size, "EP": self.width}

    @property
    def factor(self) -> float:
        """Of scores that exp2 takes."""
        return self.scale * LOG2_E.value

    @property
    def scale(self) -> float:
        return self.size**-0.5


def _width(head_dim: int) -> int:
    return max(16, _power_of_two(head_dim))


def _power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()


def _by_rows(x: Tensor) -> Tensor:
    """[T, H, E]: rows may lie apart, as those of a part of a joint product do; a copy if more than
    that.
    """
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@triton.jit
def _load(base, at, E: tl.constexpr, EP: tl.constexpr):
    """Rows of E entries from their places `at` [n], padded with zeros: [n, EP]."""
    entry = tl.arange(0, EP)
    if EP == E:
        x = tl.load(base + at[:, None] + entry[None, :])
    else:
        x = tl.load(base + at[:, None] + entry[None, :], mask=(entry < E)[None, :], other=0.0)
    return x


@triton.jit
def _store(base, at, x, there, E: tl.constexpr, EP: tl.constexpr):
    entry = tl.arange(0, EP)
    x = x.to(base.dtype.element_ty)
    tl.store(base + at[:, None] + entry[None, :], x, mask=there[:, None] & (entry < E)[None, :])


@triton.jit
def _queries(tile, rows, G: tl.constexpr, M: tl.constexpr):
    """Row and head within the group of each place of a query tile, and which are real; the others
    repeat a real row, so that sums stay finite.
    """
    place = tl.arange(0, M)
    # Counted from the first row of all: in a loop over tiles, quotients that do not change would be
    # kept in registers.
    number = tile * (M // G * G) + tl.minimum(place, M // G * G - 1)
    row = number // G
    there = (place < M // G * G) & (row < rows)
    return tl.minimum(row, rows - 1), number - row * G, there


@triton.jit
def _meet(
    tile, query, k, v, i, until, k_row, v_row, head, rows, factor,
    MASKED: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Keys and values of a tile, and the scores of queries of rows `i` for them: those of exp2,
    -inf where nothing is visible.
    """
    j = tile * N + tl.arange(0, N)
    near = j
    if MASKED:  # the last tile may pass the end
        near = tl.minimum(j, rows - 1)
    key = _load(k, near.to(tl.int64) * k_row + head * E, E, EP)
    value = _load(v, near.to(tl.int64) * v_row + head * E, E, EP)
    scores = dot(query, tl.trans(key)) * factor
    if MASKED:
        ends = tl.load(until + near)
        scores = tl.where(
            (j[None, :] <= i[:, None]) & (i[:, None] < ends[None, :]), scores, float("-inf")
        )
    return key, value, scores


@triton.jit
def _forward_step(
    tile, best, total, acc, query, k, v, i, until, k_row, v_row, head, rows, factor,
    MASKED: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    _, value, scores = _meet(
        tile, query, k, v, i, until, k_row, v_row, head, rows, factor, MASKED, E, EP, N
    )
    found = tl.maximum(best, tl.max(scores, 1))
    shift = found
    if MASKED:  # a row may see nothing of the tiles so far
        shift = tl.where(found == float("-inf"), 0.0, found)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(best - shift)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None] + dot(weights.to(value.dtype), value)
    return found, total, acc


@triton.jit(do_not_specialize=["rows"])
def forward(
    q, k, v, out, lse, until, items, lists, q_row, k_row, v_row, rows, factor,
    HEADS: tl.constexpr, G: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A program has one query tile and one key head."""
    item = items + tl.program_id(0) * 4
    head = tl.program_id(1)
    i, inner, there = _queries(tl.load(item), rows, G, M)
    own = head * G + inner
    query = _load(q, i.to(tl.int64) * q_row + own * E, E, EP)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, EP], tl.float32)
    for part in tl.static_range(2):
        for n in range(bound(tl.load(item + 1 + part)), bound(tl.load(item + 2 + part))):
            best, total, acc = _forward_step(
                tl.load(lists + n), best, total, acc, query, k, v, i, until, k_row, v_row, head, rows, factor,
                part == 1, E, EP, N,
            )  # fmt: skip
    at = i.to(tl.int64) * (HEADS * G) + own
    tl.store(lse + at, (best + tl.log2(total)) / LOG2_E, mask=there)
    _store(out, at * E, acc / total[:, None], there, E, EP)


@triton.jit
def _queries_step(
    tile, acc, query, grads, k, v, i, log_total, delta, until, k_row, v_row, head, rows, factor,
    MASKED: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    key, value, scores = _meet(
        tile, query, k, v, i, until, k_row, v_row, head, rows, factor, MASKED, E, EP, N
    )
    weights = tl.exp2(scores - log_total[:, None])
    grad_scores = weights * (dot(grads, tl.trans(value)) - delta[:, None])
    return acc + dot(grad_scores.to(key.dtype), key)


@triton.jit(do_not_specialize=["rows"])
def backward_queries(
    grad, q, k, v, out, lse, delta, grad_q, until, items, lists, grad_row, q_row, k_row, v_row, rows, factor, scale,
    HEADS: tl.constexpr, G: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A program has one query tile and one key head; it writes `delta` too, sum(grad * out) of each
    row and head, for backward_keys.
    """
    item = items + tl.program_id(0) * 4
    head = tl.program_id(1)
    i, inner, there = _queries(tl.load(item), rows, G, M)
    own = head * G + inner
    at = i.to(tl.int64) * (HEADS * G) + own
    query = _load(q, i.to(tl.int64) * q_row + own * E, E, EP)
    grads = _load(grad, i.to(tl.int64) * grad_row + own * E, E, EP)
    inner_product = tl.sum(grads.to(tl.float32) * _load(out, at * E, E, EP).to(tl.float32), 1)
    tl.store(delta + at, inner_product, mask=there)
    log_total = tl.load(lse + at) * LOG2_E
    acc = tl.zeros([M, EP], tl.float32)
    for part in tl.static_range(2):
        for n in range(bound(tl.load(item + 1 + part)), bound(tl.load(item + 2 + part))):
            acc = _queries_step(
                tl.load(lists + n), acc, query, grads, k, v, i, log_total, inner_product, until, k_row, v_row, head, rows,
                factor, part == 1, E, EP, N,
            )  # fmt: skip
    _store(grad_q, at * E, acc * scale, there, E, EP)


@triton.jit
def _keys_step(
    tile, sum_k, sum_v, key, value, grad, q, lse, delta, j, ends, grad_row, q_row, head, rows, factor,
    MASKED: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    i, inner, there = _queries(tile, rows, G, M)
    own = head * G + inner
    at = i.to(tl.int64) * (HEADS * G) + own
    query = _load(q, i.to(tl.int64) * q_row + own * E, E, EP)
    grads = _load(grad, i.to(tl.int64) * grad_row + own * E, E, EP)
    scores = dot(key, tl.trans(query)) * factor
    if MASKED:
        visible = (j[:, None] <= i[None, :]) & (i[None, :] < ends[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    log_total = tl.load(lse + at, mask=there, other=float("inf"))
    weights = tl.exp2(scores - (log_total * LOG2_E)[None, :])
    sum_v += dot(weights.to(grads.dtype), grads)
    grad_scores = weights * (dot(value, tl.trans(grads)) - tl.load(delta + at)[None, :])
    sum_k += dot(grad_scores.to(query.dtype), query)
    return sum_k, sum_v


@triton.jit(do_not_specialize=["rows"])
def backward_keys(
    grad, q, k, v, lse, delta, grad_k, grad_v, parts, until, items, grad_row, q_row, k_row, v_row, rows, factor, scale,
    HEADS: tl.constexpr, G: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A program has one key tile, one key head and some of the query tiles that see it, in all
    heads of the group.
    """
    item = items + tl.program_id(0) * 6
    tile, first, end, place = tl.load(item), tl.load(item + 1), tl.load(item + 4), tl.load(item + 5)
    full, full_end = tl.load(item + 2), tl.load(item + 3)
    head = tl.program_id(1)
    j = tile * N + tl.arange(0, N)
    near = tl.minimum(j, rows - 1)
    ends = tl.load(until + near)
    key = _load(k, near.to(tl.int64) * k_row + head * E, E, EP)
    value = _load(v, near.to(tl.int64) * v_row + head * E, E, EP)
    sum_k = tl.zeros([N, EP], tl.float32)
    sum_v = tl.zeros([N, EP], tl.float32)
    for n in range(bound(full), bound(full_end)):
        sum_k, sum_v = _keys_step(
            n, sum_k, sum_v, key, value, grad, q, lse, delta, j, ends, grad_row, q_row, head, rows, factor,
            False, HEADS, G, E, EP, M,
        )  # fmt: skip
    for n in range(bound(first), bound(end - (full_end - full))):
        query_tile = tl.where(n < full, n, n + (full_end - full))
        sum_k, sum_v = _keys_step(
            query_tile, sum_k, sum_v, key, value, grad, q, lse, delta, j, ends, grad_row, q_row, head, rows, factor,
            True, HEADS, G, E, EP, M,
        )  # fmt: skip
    if place < 0:
        at = (j.to(tl.int64) * HEADS + head) * E
        _store(grad_k, at, sum_k * scale, j < rows, E, EP)
        _store(grad_v, at, sum_v, j < rows, E, EP)
    else:
        at = ((place.to(tl.int64) * HEADS + head) * 2 * N + tl.arange(0, N)) * EP
        whole = tl.arange(0, N) < N
        _store(parts, at, sum_k, whole, EP, EP)
        _store(parts, at + N * EP, sum_v, whole, EP, EP)


@triton.jit(do_not_specialize=["rows"])
def add_parts(
    parts, grad_k, grad_v, sums, rows, scale,
    HEADS: tl.constexpr, G: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of `ROWS` keys of a tile whose queries were divided among programs."""
    item = sums + tl.program_id(0) * 3
    tile, place, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    head = tl.program_id(1)
    own = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    sum_k = tl.zeros([ROWS, EP], tl.float32)
    sum_v = tl.zeros([ROWS, EP], tl.float32)
    for n in range(bound(count)):
        at = (((place + n).to(tl.int64) * HEADS + head) * 2 * N + own) * EP
        sum_k += _load(parts, at, EP, EP)
        sum_v += _load(parts, at + N * EP, EP, EP)
    j = tile * N + own
    at = (j.to(tl.int64) * HEADS + head) * E
    _store(grad_k, at, sum_k * scale, j < rows, E, EP)
    _store(grad_v, at, sum_v, j < rows, E, EP)
