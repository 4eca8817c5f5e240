"""Exact attention over a forest of prefix trees for training, without a T x T mask.

Forward pass: the rows of each segment attend to the path from the root to themselves. The keys of
the path are gathered into one contiguous sequence. The batch-invariant attention of
ordered_attention.py then reproduces the sampler's output for each row bit for bit.

Backward pass: the (query, key) pairs are divided into pieces, plain rectangles and triangles. In
depth-first order (sequences/prefix_tree.py) the descendants of a segment are the rows directly
after the segment. So exactly two blocks of queries attend to the keys of a segment: its own rows,
causally, and all rows of its descendants. Each block is one piece, a triangle or a rectangle. Every
pair lies in exactly one piece, and only the triangles mask pairs.

Given the final output and log-sum-exp of each row, the gradients of a piece are those of ordinary
attention (Dao et al. 2022). The gradients of all pieces are summed, so a shared prefix gets the
gradients of all its continuations.

Shapes: T rows, Hq/Hkv heads, E head_dim, n queries and m keys of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from planish.model.kernels.reference import ordered_attention
from planish.model.sequences.positions import round_up_to_spans
from planish.model.sequences.prefix_tree import MicroBatch

# Maximum number of rows per batch of short segments. Larger batches would save calls, but they do
# not fit into the CPU's cache and are slower.
_BATCH_ROWS = 256
# Maximum number of query rows per block of a segment in the forward pass.
_QUERY_BLOCK = 256
# Blocks of at most this many rows share a batch even if their numbers of rows differ.
_FEW_ROWS = 8
SCORE_ENTRIES = 1 << 26
"""Maximum number of score entries in memory at a time, in `block_backward`."""


@dataclass(frozen=True)
class Rectangle:
    """A piece in which each query q_start .. q_end - 1 attends to all keys k_start .. k_end - 1."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int


@dataclass(frozen=True)
class Triangles:
    """A batch of segments of similar length, each with causal attention within itself.

    Shorter segments are padded at the end to the longest one.
    """

    spans: tuple[tuple[int, int], ...]
    """The row range [start, end) of each segment."""

    @property
    def length(self) -> int:
        """The number of rows of the longest segment."""
        return max(end - start for start, end in self.spans)

    def rows(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the row of each batch entry, int64 [B * length], and a bool mask of real entries.

        Padding entries repeat the last row of their segment and are False in the mask.
        """
        start, end = (
            torch.tensor(ends, device=device).unsqueeze(1) for ends in zip(*self.spans, strict=True)
        )
        row = start + torch.arange(self.length, device=device)
        return torch.minimum(row, end - 1).flatten(), (row < end).flatten()


@dataclass(frozen=True)
class Window:
    """The attention window of a layer, and the positions of the rows of a piece."""

    size: int
    queries: Tensor
    """int64 [n]: the position of each query in its sequence."""
    keys: Tensor
    """int64 [m]: the position of each key in its sequence."""

    def hides(self, rows: slice, keys: slice) -> Tensor:
        """Return whether each of these keys lies before the window of each query: bool [n, m]."""
        return self.keys[None, keys] <= self.queries[rows, None] - self.size


@dataclass(frozen=True)
class LaterKeys:
    """The mask of a piece in which each query attends only to keys after its own position."""

    numbers: Tensor
    """int64 [n]: the numbers of the rows."""

    def hides(self, rows: slice, keys: slice) -> Tensor:
        """Return whether each of these keys is hidden from each query: bool [n, m]."""
        return self.numbers[None, keys] <= self.numbers[rows, None]


PieceBackward = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""A function that computes the backward pass of a batch of pieces:
(grad, q, k, v, out, lse, causal, window) -> gradients of q, k and v.

Shapes: q, grad and out [B, Hq, n, E]; k and v [B, Hkv, m, E]; lse [B, Hq, n]. `out` and `lse` are
the final output and log-sum-exp of the rows, over all their pieces. `causal`: query i attends only
to the keys 0 .. i, and n equals m. `window`: the keys that are hidden from each query, or None.
"""


def rectangles(micro_batch: MicroBatch) -> tuple[Rectangle, ...]:
    """Return one rectangle per segment with descendants. It has the segment's rows as keys, and the
    descendants' rows as queries.
    """
    return tuple(
        Rectangle(s.end, s.subtree_end, s.start, s.end)
        for s in micro_batch.segments
        if s.end < s.subtree_end
    )


def triangles(micro_batch: MicroBatch) -> tuple[Triangles, ...]:
    """Return the causal triangles of all segments in batches; every row is in exactly one.

    Segments share a batch if the shortest has at least 3/4 of the length of the longest.
    """
    groups: list[list[tuple[int, int]]] = []
    by_length = sorted(micro_batch.segments, key=lambda s: (s.start - s.end, s.start))
    for span in ((s.start, s.end) for s in by_length):
        if groups:
            longest = groups[-1][0][1] - groups[-1][0][0]
            if (
                span[1] - span[0] >= 0.75 * longest
                and longest * (len(groups[-1]) + 1) <= _BATCH_ROWS
            ):
                groups[-1].append(span)
                continue
        groups.append([span])
    return tuple(Triangles(tuple(group)) for group in groups)


def _paths(micro_batch: MicroBatch, device: torch.device) -> list[_Path]:
    """Return batches of query blocks for the forward pass; every row is a query in exactly one.

    A block has rows of one segment. Blocks of similar shape share a batch.
    """
    blocks = []
    for segment in micro_batch.segments:
        before = np.concatenate(
            [np.arange(*span) for span in (*segment.ancestors, (segment.start, segment.end))]
        )
        first = len(before) - (segment.end - segment.start)
        start = first
        while start < len(before):
            # A block of rows ends with the last key that one of its rows attends to.
            stop = int(micro_batch.visible[before[min(start + _QUERY_BLOCK, len(before)) - 1]])
            blocks.append((before[:stop], start))
            start = stop
    blocks.sort(key=lambda block: (len(block[0]), len(block[0]) - block[1]))
    batches: list[list[tuple[np.ndarray, int]]] = []
    for keys, start in blocks:
        if batches and _fits(batches[-1], keys, start):
            batches[-1].append((keys, start))
        else:
            batches.append([(keys, start)])
    return [_path(batch, micro_batch.visible, device) for batch in batches]


def _fits(batch: list[tuple[np.ndarray, int]], keys: np.ndarray, start: int) -> bool:
    """Return whether a block can join a batch with little padding and within `_BATCH_ROWS`."""
    rows = [len(k) - s for k, s in batch] + [len(keys) - start]
    alike = min(rows) >= 0.75 * max(rows) or max(rows) <= _FEW_ROWS
    return alike and len(batch[0][0]) >= 0.75 * len(keys) and len(rows) * max(rows) <= _BATCH_ROWS


def _path(batch: list[tuple[np.ndarray, int]], visible: np.ndarray, device: torch.device) -> _Path:
    n = max(len(keys) - start for keys, start in batch)
    width = round_up_to_spans(max(len(keys) for keys, _ in batch))
    places = [np.minimum(start + np.arange(n), len(keys) - 1) for keys, start in batch]
    real = [start + np.arange(n) < len(keys) for keys, start in batch]
    rows = [keys[place] for (keys, _), place in zip(batch, places, strict=True)]
    padded = [np.pad(keys, (0, width - len(keys)), mode="edge") for keys, _ in batch]
    stacked = (
        torch.from_numpy(np.stack(arrays)).to(device)
        for arrays in (rows, real, places, padded, [visible[of_block] for of_block in rows])
    )
    return _Path(*stacked)


class TorchTreeAttention:
    """The decoder's attention function (`Attend`) for one micro-batch."""

    def __init__(
        self,
        micro_batch: MicroBatch,
        device: torch.device,
        piece_backward: PieceBackward | None = None,
        windows: Sequence[int | None] = (),
        cap: float | None = None,
    ) -> None:
        """`piece_backward`: the backward pass of a piece; by default the fastest for the device.

        `windows`: the attention window of each layer (see `ModelConfig.attention_windows`). `cap`: the limit
        of scores (see `ModelConfig.score_cap`).
        """
        fastest = fused_cpu_backward if device.type == "cpu" else block_backward
        if cap is not None:
            fastest = partial(block_backward, cap=cap)
        batches = [(group.length, *group.rows(device)) for group in triangles(micro_batch)]
        self._plan = _Plan(
            _paths(micro_batch, device),
            batches,
            rectangles(micro_batch),
            torch.from_numpy(micro_batch.positions).to(device),
            piece_backward or fastest,
            micro_batch.blocks,
        )
        self._windows, self._cap = windows, cap

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Return the attention output [T, Hq, E], with gradients (see `Attend`)."""
        window = self._windows[layer] if self._windows else None
        return _TreeAttention.apply(q, k, v, self._plan, window, sinks, self._cap)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Path:
    """A batch of B query blocks, each with the path of keys that it attends to.

    A shorter path is padded with keys that no query attends to.
    """

    rows: Tensor
    """[B, n]: rows of the queries."""
    real: Tensor
    """[B, n]: False where a shorter block is padded with its last row."""
    positions: Tensor
    """[B, n]: positions of the queries in their sequence."""
    keys: Tensor
    """[B, L]: rows of the keys, from position 0 of the sequence."""
    visible: Tensor
    """[B, n]: the number of keys that each query attends to."""


@dataclass(frozen=True)
class _Plan:
    """The forward batches and backward pieces of one micro-batch."""

    paths: list[_Path]
    triangles: list[tuple[int, Tensor, Tensor]]
    """(length, rows, real) of each batch of triangles."""
    rectangles: tuple[Rectangle, ...]
    positions: Tensor
    """int64 [T]: position of each row in its sequences."""
    piece_backward: PieceBackward
    blocks: tuple[tuple[int, int], ...]
    """The ranges of rows that attend to one another (see `MicroBatch.blocks`)."""


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: _Plan,
        window: int | None,
        sinks: Tensor | None,
        cap: float | None,
    ) -> Tensor:
        accum_dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=accum_dtype, device=q.device)
        for path in plan.paths:
            part, part_lse = _attend_path(q, k, v, path, window, sinks, cap)
            out[path.rows[path.real]] = part[path.real].to(q.dtype)
            lse[path.rows[path.real]] = part_lse[path.real]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.window = plan, window
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        plan = ctx.plan
        grads = [torch.empty(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
        for length, rows, real in plan.triangles:
            held = grad[rows].mul_(real[:, None, None])
            tensors = (_batch(x, length) for x in (held, q[rows], k[rows], v[rows], out[rows]))
            batch_lse = lse[rows].unflatten(0, (-1, length)).transpose(1, 2)
            # The rows of a segment are at consecutive positions. A window needs only differences
            # of positions, so row numbers can replace the positions.
            number = torch.arange(length, device=q.device)
            window = None if ctx.window is None else Window(ctx.window, number, number)
            parts = plan.piece_backward(*tensors, batch_lse, True, window)
            for total, part in zip(grads, parts, strict=True):
                by_row = part.transpose(1, 2).flatten(0, 1)  # [B, H, n, E] to [B * n, H, E]
                total[rows[real]] = by_row[real].to(total.dtype)
        for piece in plan.rectangles:
            rows, keys = slice(piece.q_start, piece.q_end), slice(piece.k_start, piece.k_end)
            tensors = (_heads(x) for x in (grad[rows], q[rows], k[keys], v[keys], out[rows]))
            window = None
            if ctx.window is not None:
                window = Window(ctx.window, plan.positions[rows], plan.positions[keys])
            parts = plan.piece_backward(*tensors, lse[rows].transpose(0, 1)[None], False, window)
            for total, part, where in zip(grads, parts, (rows, keys, keys), strict=True):
                total[where] += part[0].transpose(0, 1)
        for start, stop in plan.blocks:
            rows = slice(start, stop)
            tensors = (_heads(x) for x in (grad[rows], q[rows], k[rows], v[rows], out[rows]))
            later = LaterKeys(torch.arange(stop - start, device=q.device))
            parts = plan.piece_backward(*tensors, lse[rows].transpose(0, 1)[None], False, later)
            for total, part in zip(grads, parts, strict=True):
                total[rows] += part[0].transpose(0, 1)
        # The softmax's gradient of the scores is a function of `out` and `lse`, which contain the
        # sinks. The sinks themselves are frozen.
        grads = [grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True)]
        return *grads, None, None, None, None


def _heads(x: Tensor) -> Tensor:
    """View [n, H, E] as a batch of one: [1, H, n, E]."""
    return x.transpose(0, 1)[None]


def _batch(x: Tensor, length: int) -> Tensor:
    """View [B * length, H, E] as [B, H, length, E]."""
    return x.unflatten(0, (-1, length)).transpose(1, 2)


def _attend_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    path: _Path,
    window: int | None,
    sinks: Tensor | None,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, n, Hq, E] and the log-sum-exp [B, n, Hq] of one batch of queries."""
    batch, n = path.rows.shape
    group = q.shape[1] // k.shape[1]
    # [B, Hkv, group * n, E]: all query heads of a key head are rows of the same matmul.
    queries = q[path.rows].unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    keys, values = (x[path.keys].transpose(1, 2) for x in (k, v))
    visible, ends = (x.repeat(1, group).unsqueeze(1) for x in (path.visible, path.positions + 1))
    if sinks is not None:
        sinks = sinks.view(-1, group).repeat_interleave(n, 1)
    out, lse = ordered_attention.attend(queries, keys, values, visible, window, sinks, cap, ends)
    return (
        out.unflatten(2, (group, n)).permute(0, 3, 1, 2, 4).reshape(batch, n, q.shape[1], -1),
        lse.unflatten(2, (group, n)).permute(0, 3, 1, 2).reshape(batch, n, -1),
    )


def fused_cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    window: Window | LaterKeys | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v in float32 or wider (see `PieceBackward`).

    torch's fused flash attention for CPUs computes them. It keeps the scores in the cache.
    """
    if window is not None:
        return block_backward(grad, q, k, v, out, lse, causal, window)
    group = q.shape[1] // k.shape[1]
    # Compute in float32: for bfloat16 this kernel repacks the operands of each block, which
    # costs more than its faster matmuls save (measured: 15 to 60%).
    accum_dtype = torch.promote_types(q.dtype, torch.float32)
    grad, q, k, v, out = (x.to(accum_dtype) for x in (grad, q, k, v, out))
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, _expand(k, group), _expand(v, group), out, lse, 0.0, causal
    )
    return grad_q, _fold(grad_k, group), _fold(grad_v, group)


def block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    window: Window | LaterKeys | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v (see `PieceBackward`), computed on any device.

    Plain matmuls over blocks of queries compute them. The number of scores per block is bounded for
    any length of the piece. `cap`: the limit of scores (see `ModelConfig.score_cap`).
    """
    group = q.shape[1] // k.shape[1]
    k, v = _expand(k, group), _expand(v, group)
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
    grad_q = []
    grad_k, grad_v = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    for start, stop in _blocks(q, k):
        rows, keys = slice(start, stop), slice(0, stop if causal else k.shape[2])
        scores = _scores(q[:, :, rows], k[:, :, keys], start if causal else None)
        slopes = None
        if cap is not None:
            # tanh(-inf) is -1, so masked scores must be masked again.
            masked = scores == float("-inf")
            capped = scores.div_(cap).tanh_()
            slopes = 1 - capped.square()
            scores = capped.mul_(cap).masked_fill_(masked, float("-inf"))
        if window is not None:
            scores.masked_fill_(window.hides(rows, keys), float("-inf"))
        weights = scores.sub_(lse[:, :, rows, None]).exp_()
        grad_v[:, :, keys] += weights.to(q.dtype).transpose(-1, -2) @ grad[:, :, rows]
        inner = (grad[:, :, rows] @ v[:, :, keys].transpose(-1, -2)).to(lse.dtype)
        grad_scores = inner.sub_(delta[:, :, rows]).mul_(weights).mul_(q.shape[-1] ** -0.5)
        if slopes is not None:
            grad_scores.mul_(slopes)
        grad_scores = grad_scores.to(q.dtype)
        grad_q.append(grad_scores @ k[:, :, keys])
        grad_k[:, :, keys] += grad_scores.transpose(-1, -2) @ q[:, :, rows]
    return torch.cat(grad_q, 2), _fold(grad_k, group), _fold(grad_v, group)


def _blocks(q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    """Return the query ranges [start, stop) with at most about `SCORE_ENTRIES` scores each."""
    size = max(16, SCORE_ENTRIES // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [(start, min(start + size, q.shape[2])) for start in range(0, q.shape[2], size)]


def _scores(q: Tensor, k: Tensor, first_query: int | None) -> Tensor:
    """Return the scaled scores [B, H, n, m] in float32 or wider.

    `first_query`: position of the first query for causal attention, or None for full attention.
    """
    accum_dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(accum_dtype) @ k.to(accum_dtype).transpose(-1, -2)).mul_(q.shape[-1] ** -0.5)
    if first_query is not None:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(
            first_query + 1
        )
        scores.masked_fill_(future, float("-inf"))
    return scores


def _expand(x: Tensor, group: int) -> Tensor:
    """Repeat keys or values [B, Hkv, m, E] for each query head: [B, Hkv * group, m, E]."""
    return x if group == 1 else x.repeat_interleave(group, 1)


def _fold(x: Tensor, group: int) -> Tensor:
    """Sum gradients over the query heads of each key head: the backward pass of `_expand`."""
    accum_dtype = torch.promote_types(x.dtype, torch.float32)
    return x if group == 1 else x.unflatten(1, (-1, group)).sum(2, dtype=accum_dtype)
