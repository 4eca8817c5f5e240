"""Flash attention over a prefix forest in Triton.

Query row i attends to key row j if and only if `j <= i < subtree_end[j]`
(sequences/prefix_tree.py). In a layer with an attention window, the positions of the two rows must
also differ by less than the window.

A query tile has M // G consecutive rows, with all G query heads of a key head. So a key or value is
loaded once for all heads that use it. A tile spans few rows, and adjacent short segments share a
tile. The host computes which query tiles attend to which key tiles (`Table`). The kernels skip
pairs of tiles without a visible pair of rows, and compute no mask if all pairs are visible. The
online softmax, and the gradients from the stored log-sum-exp, follow FlashAttention-2 (Dao 2023).
Sums are float32. Weights are rounded to the inputs' dtype before their matmuls, because tensor
cores require it.

Results are bit-identical in every run, because there are no atomic additions. Exactly one program
writes each result. If a sum is divided among programs, its parts are added in a fixed order.

Shapes: T rows, Hq query heads, Hkv key heads, G = Hq / Hkv, E head_dim, EP the smallest power of
two that is at least E (and 16), M queries and N keys of a tile.
"""

# pyright: reportGeneralTypeIssues=false
# pyright assumes that a Triton function never returns, so it rejects the unpacking of results.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from planish.model.kernels.triton.common import (
    HOPPER_SHARED,
    SHARED_MARGIN,
    bound,
    dot,
    power_of_two,
    rounded,
)

LOG2_E = tl.constexpr(1.4426950408889634)
_SUM_ROWS = 16


@dataclass(frozen=True)
class Launch:
    """The tile sizes and launch options of a kernel."""

    queries: int
    """M, the queries of a tile (rows times heads of a group): a power of two."""
    keys: int
    """N, the keys of a tile: a power of two."""
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the launch."""
        return {
            "M": self.queries,
            "N": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


@dataclass(frozen=True)
class Tiles:
    """The launch of each kernel.

    M and N of `forward` and `backward_queries` are equal, because both use the same lists of tiles.
    """

    forward: Launch
    backward_queries: Launch
    backward_keys: Launch


@dataclass(frozen=True, eq=False)
class Table:
    """The plan of one micro-batch on the device: which query tiles attend to which key tiles.

    All tensors are int32. The items with the most work come first, so that the last programs to
    start are short.
    """

    tiles: Tiles
    subtree_end: Tensor
    """[T]: the end of the subtree of each row."""
    query_items: Tensor
    """[n, 4]: (query tile, a, b, c).

    lists[a:b] are the key tiles that need no mask, and lists[b:c] are those that need one.
    """
    lists: Tensor
    """The key tiles of all query tiles."""
    key_items: Tensor
    """[n, 6]: (key tile, a, b, c, d, place).

    The query tiles are a .. d - 1, of which b .. c - 1 need no mask. `place`: the place in the
    scratch memory where the sums are stored. It is -1 if the item has all query tiles of the key
    tile, because its sums are then the whole gradient.
    """
    sums: Tensor
    """[n, 3]: (key tile, first place, number of places) of each gradient in the scratch memory."""
    places: int
    """The number of places in the scratch memory."""
    positions: Tensor
    """[T]: the position of each row in its sequences."""
    window: int | None = None
    """The attention window, or None."""


def tiles_for(dtype: torch.dtype, head_dim: int, group: int, shared: int = HOPPER_SHARED) -> Tiles:
    """Return the largest tiles that fit in `shared` bytes of shared memory.

    If none fit, return the smallest. On Hopper the tiles are about the largest without register
    spills.
    """
    width = _width(head_dim)
    least = power_of_two(group)  # A tile has at least one row.
    if dtype == torch.float32:
        # Matmuls without tensor cores keep whole rows of their operands in registers.
        forward, queries, keys = (
            ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)) if width <= 32
            else ((32, 16, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1)) if width == 64
            else ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1))
        )  # fmt: skip
        return _tiles(least, forward, queries, keys)
    candidates = _CUTS[max(64, width)]
    if width <= 128 and shared < HOPPER_SHARED:
        candidates = candidates[1:]  # An A100 has the memory for these, but spills registers.
    tried = (_tiles(least, *cuts) for cuts in candidates)
    fitting = (
        tiles
        for tiles in tried
        if _most_shared(tiles, width, dtype.itemsize) <= shared - SHARED_MARGIN
    )
    return next(fitting, _tiles(least, *candidates[-1]))


_Cut = tuple[int, int, int, int]
_CUTS: dict[int, tuple[tuple[_Cut, _Cut, _Cut], ...]] = {
    64: (
        ((128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 8, 2)),
        ((128, 64, 4, 3), (128, 64, 8, 3), (32, 128, 8, 2)),
        ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    ),
    128: (
        ((128, 64, 8, 3), (128, 64, 8, 2), (64, 128, 8, 2)),
        ((128, 32, 8, 3), (128, 32, 8, 3), (64, 64, 8, 2)),
        ((64, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2)),
        ((64, 32, 4, 2), (64, 32, 4, 1), (32, 64, 4, 1)),
    ),
    256: (
        ((128, 32, 8, 2), (128, 32, 8, 2), (16, 64, 8, 2)),
        ((64, 32, 8, 1), (64, 32, 8, 1), (16, 64, 8, 2)),
        ((32, 16, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1)),
    ),
}
"""The candidate tiles for bf16 by head width EP, the largest first.

Each candidate gives (queries, keys, warps, stages) of `forward`, `backward_queries` and
`backward_keys`. The candidates are for 227 KiB of shared memory (H100), 163 KiB (A100, if its best
tiles differ), 99 KiB (RTX 3090, 4090, 5090) and 64 KiB (MI300). With 99 KiB, one program fits on a
multiprocessor, so from a width of 128 it has 8 warps: two for each scheduler, without spills.
"""


def _tiles(least: int, *cuts: _Cut) -> Tiles:
    return Tiles(*(Launch(max(m, least), n, warps, stages) for m, n, warps, stages in cuts))


def _most_shared(tiles: Tiles, width: int, itemsize: int) -> int:
    """Return the maximum shared memory of the three kernels in bytes.

    Each kernel keeps one operand in shared memory (queries and their gradients, or keys and
    values). It streams the other operand, which needs memory for each stage.
    """
    first, second, third = tiles.forward, tiles.backward_queries, tiles.backward_keys
    rows = (
        first.queries + 2 * first.keys * first.stages,
        2 * second.queries + 2 * second.keys * second.stages,
        2 * third.keys + 2 * third.queries * third.stages,
    )
    return max(rows) * width * itemsize


def attend(
    q: Tensor, k: Tensor, v: Tensor, table: Table, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output [T, Hq, E] and the log-sum-exp of the scaled scores, float32 [T, Hq].

    `q`: [T, Hq, E]. `k`, `v`: [T, Hkv, E]. The output has the dtype of `q`. `sinks`: float32 [Hq]
    (see `Attend`). The log-sum-exp includes them, so the backward pass needs no sinks.
    """
    q, k, v = _by_rows(q), _by_rows(k), _by_rows(v)
    out, lse = (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        q.new_empty(q.shape[:2], dtype=torch.float32),
    )
    shape = _Shape.of(q, k)
    windowed: Any = table.window is not None  # a constexpr
    forward[(len(table.query_items), shape.heads)](
        q, k, v, out, lse, sinks, table.subtree_end, table.positions, table.query_items, table.lists,
        q.stride(0), k.stride(0), v.stride(0), len(q), table.window or 0, shape.factor,
        WINDOWED=windowed, **shape.constants, **table.tiles.forward.options,
    )  # fmt: skip
    return out, lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Table
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, contiguous and in their dtypes.

    `grad`: the gradient of `out`. `out`, `lse`: the results of `attend`.
    """
    grad, q, k, v = (_by_rows(x) for x in (grad, q, k, v))
    shape = _Shape.of(q, k)
    grad_q, grad_k, grad_v = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)
    )
    delta = torch.empty_like(lse)
    strides = (grad.stride(0), q.stride(0), k.stride(0), v.stride(0))
    windowed: Any = table.window is not None  # a constexpr
    backward_queries[(len(table.query_items), shape.heads)](
        grad, q, k, v, out, lse, delta, grad_q, table.subtree_end, table.positions, table.query_items,
        table.lists, *strides, len(q), table.window or 0, shape.factor, shape.scale,
        WINDOWED=windowed, **shape.constants, **table.tiles.backward_queries.options,
    )  # fmt: skip
    cut = table.tiles.backward_keys
    parts = lse.new_empty((max(table.places, 1), shape.heads, 2, cut.keys, shape.width))
    backward_keys[(len(table.key_items), shape.heads)](
        grad, q, k, v, lse, delta, grad_k, grad_v, parts, table.subtree_end, table.positions, table.key_items,
        *strides, len(q), table.window or 0, shape.factor, shape.scale,
        WINDOWED=windowed, **shape.constants, **cut.options,
    )  # fmt: skip
    if len(table.sums):
        constants: dict[str, Any] = {"N": cut.keys, "ROWS": _SUM_ROWS, **shape.constants}
        add_parts[(len(table.sums), shape.heads, cut.keys // _SUM_ROWS)](
            parts, grad_k, grad_v, table.sums, len(q), shape.scale, **constants
        )
    return grad_q, grad_k, grad_v


@dataclass(frozen=True)
class _Shape:
    """The sizes of one attention call, and the scale of its scores."""

    heads: int
    """The number of key heads."""
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
        """The factor that scales scores for exp2."""
        return self.scale * LOG2_E.value

    @property
    def scale(self) -> float:
        return self.size**-0.5


def _width(head_dim: int) -> int:
    return max(16, power_of_two(head_dim))


def _by_rows(x: Tensor) -> Tensor:
    """Return x [T, H, E] with contiguous rows, which may have any stride between them.

    A slice of a fused matmul's output has such rows and is not copied.
    """
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@triton.jit
def _load(base, at, E: tl.constexpr, EP: tl.constexpr):
    """Load rows of E entries at the offsets `at` [n], padded with zeros: [n, EP]."""
    entry = tl.arange(0, EP)
    if EP == E:
        x = tl.load(base + at[:, None] + entry[None, :])
    else:
        x = tl.load(base + at[:, None] + entry[None, :], mask=(entry < E)[None, :], other=0.0)
    return x


@triton.jit
def _store(base, at, x, there, E: tl.constexpr, EP: tl.constexpr):
    entry = tl.arange(0, EP)
    x = rounded(x, base.dtype.element_ty)
    tl.store(base + at[:, None] + entry[None, :], x, mask=there[:, None] & (entry < E)[None, :])


@triton.jit
def _queries(tile, rows, G: tl.constexpr, M: tl.constexpr):
    """Return (row, head within the group, whether it is real) of the M queries of a tile: [M] each.

    A query is real unless it is padding. Padding repeats a real row, so that sums stay finite.
    """
    place = tl.arange(0, M)
    # Add the tile's offset before the division, not after it. The quotient of `place` alone would
    # be constant in a loop over tiles, so the compiler would keep it in registers.
    number = tile * (M // G * G) + tl.minimum(place, M // G * G - 1)
    row = number // G
    there = (place < M // G * G) & (row < rows)
    return tl.minimum(row, rows - 1), number - row * G, there


@triton.jit
def _meet(
    tile, query, k, v, i, subtree_end, positions, window, k_row, v_row, head, rows, factor,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return the keys and values of a tile, and the scores of the queries of rows `i` [M].

    The scores [M, N] are scaled for exp2, and -inf for invisible pairs.
    """
    j = tile * N + tl.arange(0, N)
    near = j
    if MASKED:  # The last tile may extend past the last row.
        near = tl.minimum(j, rows - 1)
    key = _load(k, near.to(tl.int64) * k_row + head * E, E, EP)
    value = _load(v, near.to(tl.int64) * v_row + head * E, E, EP)
    scores = dot(query, tl.trans(key)) * factor
    if MASKED:
        ends = tl.load(subtree_end + near)
        scores = tl.where(
            (j[None, :] <= i[:, None]) & (i[:, None] < ends[None, :]), scores, float("-inf")
        )
        if WINDOWED:
            hidden = tl.load(positions + i) - window
            seen = tl.load(positions + near)[None, :] > hidden[:, None]
            scores = tl.where(seen, scores, float("-inf"))
    return key, value, scores


@triton.jit
def _forward_step(
    tile, best, total, acc, query, k, v, i, subtree_end, positions, window, k_row, v_row, head, rows, factor,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    _, value, scores = _meet(
        tile, query, k, v, i, subtree_end, positions, window, k_row, v_row, head, rows, factor,
        MASKED, WINDOWED, E, EP, N,
    )  # fmt: skip
    found = tl.maximum(best, tl.max(scores, 1))
    shift = found
    if MASKED:  # A row may attend to no key of the tiles so far.
        shift = tl.where(found == float("-inf"), 0.0, found)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(best - shift)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None] + dot(rounded(weights, value.dtype), value)
    return found, total, acc


@triton.jit(do_not_specialize=["rows"])
def forward(
    q, k, v, out, lse, sinks, subtree_end, positions, items, lists, q_row, k_row, v_row, rows, window, factor,
    HEADS: tl.constexpr, G: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Compute the output and the log-sum-exp of one query tile for one key head."""
    item = items + tl.program_id(0) * 4
    head = tl.program_id(1)
    i, inner, there = _queries(tl.load(item), rows, G, M)
    own = head * G + inner
    query = _load(q, i.to(tl.int64) * q_row + own * E, E, EP)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if sinks is not None:
        best, total = tl.load(sinks + own) * LOG2_E, tl.full([M], 1.0, tl.float32)
    acc = tl.zeros([M, EP], tl.float32)
    for part in tl.static_range(2):
        for n in range(bound(tl.load(item + 1 + part)), bound(tl.load(item + 2 + part))):
            best, total, acc = _forward_step(
                tl.load(lists + n), best, total, acc, query, k, v, i, subtree_end, positions, window, k_row, v_row, head, rows, factor,
                part == 1, WINDOWED, E, EP, N,
            )  # fmt: skip
    at = i.to(tl.int64) * (HEADS * G) + own
    tl.store(lse + at, (best + tl.log2(total)) / LOG2_E, mask=there)
    _store(out, at * E, acc / total[:, None], there, E, EP)


@triton.jit
def _queries_step(
    tile, acc, query, grads, k, v, i, log_total, delta, subtree_end, positions, window, k_row, v_row, head, rows, factor,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    key, value, scores = _meet(
        tile, query, k, v, i, subtree_end, positions, window, k_row, v_row, head, rows, factor,
        MASKED, WINDOWED, E, EP, N,
    )  # fmt: skip
    weights = tl.exp2(scores - log_total[:, None])
    grad_scores = weights * (dot(grads, tl.trans(value)) - delta[:, None])
    return acc + dot(rounded(grad_scores, key.dtype), key)


@triton.jit(do_not_specialize=["rows"])
def backward_queries(
    grad, q, k, v, out, lse, delta, grad_q, subtree_end, positions, items, lists, grad_row, q_row, k_row, v_row, rows, window,
    factor, scale,
    HEADS: tl.constexpr, G: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one query tile for one key head.

    The kernel also writes `delta`, sum(grad * out) of each row and head, for `backward_keys`.
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
                tl.load(lists + n), acc, query, grads, k, v, i, log_total, inner_product, subtree_end, positions, window, k_row, v_row,
                head, rows, factor, part == 1, WINDOWED, E, EP, N,
            )  # fmt: skip
    _store(grad_q, at * E, acc * scale, there, E, EP)


@triton.jit
def _keys_step(
    tile, sum_k, sum_v, key, value, grad, q, lse, delta, j, ends, key_positions, positions, window, grad_row, q_row, head, rows,
    factor,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    i, inner, there = _queries(tile, rows, G, M)
    own = head * G + inner
    at = i.to(tl.int64) * (HEADS * G) + own
    query = _load(q, i.to(tl.int64) * q_row + own * E, E, EP)
    grads = _load(grad, i.to(tl.int64) * grad_row + own * E, E, EP)
    scores = dot(key, tl.trans(query)) * factor
    if MASKED:
        visible = (j[:, None] <= i[None, :]) & (i[None, :] < ends[:, None])
        if WINDOWED:
            visible &= key_positions[:, None] > (tl.load(positions + i) - window)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    log_total = tl.load(lse + at, mask=there, other=float("inf"))
    weights = tl.exp2(scores - (log_total * LOG2_E)[None, :])
    sum_v += dot(rounded(weights, grads.dtype), grads)
    grad_scores = weights * (dot(value, tl.trans(grads)) - tl.load(delta + at)[None, :])
    sum_k += dot(rounded(grad_scores, query.dtype), query)
    return sum_k, sum_v


@triton.jit(do_not_specialize=["rows"])
def backward_keys(
    grad, q, k, v, lse, delta, grad_k, grad_v, parts, subtree_end, positions, items, grad_row, q_row, k_row, v_row, rows, window, factor,
    scale,
    HEADS: tl.constexpr, G: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one key tile for one key head, from one run of query tiles.

    If several programs share the query tiles of a key tile, each program writes its sums to
    `parts`. The kernel `add_parts` then adds them.
    """
    item = items + tl.program_id(0) * 6
    tile, first, end, place = tl.load(item), tl.load(item + 1), tl.load(item + 4), tl.load(item + 5)
    full, full_end = tl.load(item + 2), tl.load(item + 3)
    head = tl.program_id(1)
    j = tile * N + tl.arange(0, N)
    near = tl.minimum(j, rows - 1)
    ends = tl.load(subtree_end + near)
    key_positions = tl.load(positions + near) if WINDOWED else ends
    key = _load(k, near.to(tl.int64) * k_row + head * E, E, EP)
    value = _load(v, near.to(tl.int64) * v_row + head * E, E, EP)
    sum_k = tl.zeros([N, EP], tl.float32)
    sum_v = tl.zeros([N, EP], tl.float32)
    for n in range(bound(full), bound(full_end)):
        sum_k, sum_v = _keys_step(
            n, sum_k, sum_v, key, value, grad, q, lse, delta, j, ends, key_positions, positions, window, grad_row, q_row,
            head, rows, factor, False, WINDOWED, HEADS, G, E, EP, M,
        )  # fmt: skip
    for n in range(bound(first), bound(end - (full_end - full))):
        query_tile = tl.where(n < full, n, n + (full_end - full))
        sum_k, sum_v = _keys_step(
            query_tile, sum_k, sum_v, key, value, grad, q, lse, delta, j, ends, key_positions, positions, window, grad_row, q_row,
            head, rows, factor, True, WINDOWED, HEADS, G, E, EP, M,
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
    """Add the parts of the gradients of ROWS keys, if several programs computed their tile."""
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
