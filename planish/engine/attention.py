"""Attention over a prefix forest, for training: exact, without a mask, in pieces that are plain rectangles and triangles.

In depth-first order (packing.py) the descendants of a segment are the rows right behind it. So a segment's keys are
seen by exactly two blocks of queries: its own rows, causally, and the rows of its descendants, all of them. Every
(query, key) pair of the forest lies in one such piece, none is computed in vain, and there are at most two pieces a segment.

A row's softmax runs over several pieces: each gives its output and its log-sum-exp, and these are merged. The backward
pass needs no merging: with the row's final output and log-sum-exp, a piece's gradients are those of ordinary attention
(Dao et al. 2022), and they add up. A shared prefix thus gets the gradients of all its continuations.

Shapes: T rows, Hq/Hkv heads, E head_dim, n queries and m keys of a piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from planish.engine.packing import Packed, mask
from planish.model.decoder import Attend

# Most rows of one batch of short segments: larger ones leave the CPU's cache, which costs more than the calls saved.
_BATCH_ROWS = 256
# Entries of a score matrix that are alive at a time on devices without the CPU's fused kernel.
_SCORE_ENTRIES = 1 << 26


@dataclass(frozen=True)
class Rectangle:
    """Queries q_start .. q_end - 1 against keys k_start .. k_end - 1, all of them."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int


@dataclass(frozen=True)
class Triangles:
    """Segments of about one length, each causal within itself; computed as one batch, padded behind to the longest."""

    spans: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        return max(end - start for start, end in self.spans)

    def rows(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The row of each place of the batch [B * length] (padding: the segment's last row), and which places are real."""
        start, end = (torch.tensor(ends, device=device).unsqueeze(1) for ends in zip(*self.spans, strict=True))
        row = start + torch.arange(self.length, device=device)
        return torch.minimum(row, end - 1).flatten(), (row < end).flatten()


class Kernel(Protocol):
    """Attention of a batch of pieces. q [B, Hq, n, E], k and v [B, Hkv, m, E]; lse [B, Hq, n]. Causal means n == m."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Output [B, Hq, n, E] in any dtype, log-sum-exp [B, Hq, n] in float32 or wider."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v, given the final `out` and `lse` of the rows."""
        ...


def rectangles(packed: Packed) -> tuple[Rectangle, ...]:
    """What the descendants of each segment see of it."""
    return tuple(Rectangle(s.end, s.until, s.start, s.end) for s in packed.segments if s.end < s.until)


def triangles(packed: Packed) -> tuple[Triangles, ...]:
    """What each segment sees of itself; every row is in one. Segments within a quarter of the longest share a batch."""
    groups: list[list[tuple[int, int]]] = []
    by_length = sorted(packed.segments, key=lambda s: (s.start - s.end, s.start))
    for span in ((s.start, s.end) for s in by_length):
        if groups:
            longest = groups[-1][0][1] - groups[-1][0][0]
            if span[1] - span[0] >= 0.75 * longest and longest * (len(groups[-1]) + 1) <= _BATCH_ROWS:
                groups[-1].append(span)
                continue
        groups.append([span])
    return tuple(Triangles(tuple(group)) for group in groups)


class ForestAttention:
    """An `Attend` of the decoder for one micro-batch."""

    def __init__(self, packed: Packed, device: torch.device, kernel: Kernel | None = None) -> None:
        batches = [(group.length, *group.rows(device)) for group in triangles(packed)]
        self._plan = _Plan(batches, rectangles(packed), kernel or default_kernel(device))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Forest.apply(q, k, v, self._plan)  # type: ignore[no-any-return]


def default_kernel(device: torch.device) -> Kernel:
    return FusedCpuKernel() if device.type == "cpu" else BlockKernel()


def dense_mask_attention(packed: Packed, device: torch.device) -> Attend:
    """The slow twin of ForestAttention: one T x T mask, float32 or wider throughout."""
    allowed = torch.from_numpy(mask(packed)).to(device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        q_h, k_h, v_h = (
            x.transpose(0, 1).to(wide) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
        )
        scores = (q_h @ k_h.transpose(1, 2)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        return (weights @ v_h).transpose(0, 1).to(q.dtype)

    return attend


@dataclass(frozen=True)
class _Plan:
    triangles: list[tuple[int, Tensor, Tensor]]
    """(length, rows, real) of each batch."""
    rectangles: tuple[Rectangle, ...]
    kernel: Kernel


class _Forest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty(q.shape, dtype=wide, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
        for length, rows, real in plan.triangles:
            part, part_lse = plan.kernel.forward(
                _batch(q[rows], length), _batch(k[rows], length), _batch(v[rows], length), True
            )
            # Padding repeats a row that is real elsewhere in the batch, so it must not be written.
            out[rows[real]] = _unbatch(part)[real].to(wide)
            lse[rows[real]] = part_lse.transpose(1, 2).flatten(0, 1)[real]
        for piece in plan.rectangles:
            rows, keys = slice(piece.q_start, piece.q_end), slice(piece.k_start, piece.k_end)
            part, part_lse = plan.kernel.forward(_heads(q[rows]), _heads(k[keys]), _heads(v[keys]), False)
            _merge(out[rows], lse[rows], part[0].transpose(0, 1), part_lse[0].transpose(0, 1))
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.plan = plan
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        plan = ctx.plan
        grads = [torch.empty(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
        for length, rows, real in plan.triangles:
            held = grad[rows].mul_(real[:, None, None])
            tensors = (_batch(x, length) for x in (held, q[rows], k[rows], v[rows], out[rows]))
            batch_lse = lse[rows].unflatten(0, (-1, length)).transpose(1, 2)
            for total, part in zip(grads, plan.kernel.backward(*tensors, batch_lse, True), strict=True):
                total[rows[real]] = _unbatch(part)[real].to(total.dtype)
        for piece in plan.rectangles:
            rows, keys = slice(piece.q_start, piece.q_end), slice(piece.k_start, piece.k_end)
            tensors = (_heads(x) for x in (grad[rows], q[rows], k[keys], v[keys], out[rows]))
            parts = plan.kernel.backward(*tensors, lse[rows].transpose(0, 1)[None], False)
            for total, part, where in zip(grads, parts, (rows, keys, keys), strict=True):
                total[where] += part[0].transpose(0, 1)
        return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype), None


def _heads(x: Tensor) -> Tensor:
    """[n, H, E] as a batch of one, [1, H, n, E]; no copy."""
    return x.transpose(0, 1)[None]


def _batch(x: Tensor, length: int) -> Tensor:
    """[B * length, H, E] as [B, H, length, E]; no copy."""
    return x.unflatten(0, (-1, length)).transpose(1, 2)


def _unbatch(x: Tensor) -> Tensor:
    """[B, H, n, E] as [B * n, H, E]."""
    return x.transpose(1, 2).flatten(0, 1)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold another piece into out [n, H, E] and lse [n, H], in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


class FusedCpuKernel:
    """torch's fused attention for CPUs: scores never leave the cache."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, _expand(k, group), _expand(v, group), 0.0, causal
        )

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        # This kernel packs bfloat16 anew for each block, which costs more than its faster products save (measured: 15 to 60%).
        wide = torch.promote_types(q.dtype, torch.float32)
        grad, q, k, v, out = (x.to(wide) for x in (grad, q, k, v, out))
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, _expand(k, group), _expand(v, group), out, lse, 0.0, causal
        )
        return grad_q, _fold(grad_k, group), _fold(grad_v, group)


class BlockKernel:
    """Plain products over blocks of queries, for any device; a block's scores are bounded, whatever the piece's length."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        k, v = _expand(k, group), _expand(v, group)
        outs, lses = [], []
        for start, stop in _blocks(q, k):
            keys = slice(0, stop if causal else k.shape[2])
            scores = _scores(q[:, :, start:stop], k[:, :, keys], start if causal else None)
            lse = scores.logsumexp(-1)
            weights = scores.sub_(lse.unsqueeze(-1)).exp_().to(q.dtype)
            outs.append(weights @ v[:, :, keys])
            lses.append(lse)
        return torch.cat(outs, 2), torch.cat(lses, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        k, v = _expand(k, group), _expand(v, group)
        delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
        grad_q = []
        grad_k, grad_v = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
        for start, stop in _blocks(q, k):
            rows, keys = slice(start, stop), slice(0, stop if causal else k.shape[2])
            scores = _scores(q[:, :, rows], k[:, :, keys], start if causal else None)
            weights = scores.sub_(lse[:, :, rows, None]).exp_()
            grad_v[:, :, keys] += weights.to(q.dtype).transpose(-1, -2) @ grad[:, :, rows]
            inner = (grad[:, :, rows] @ v[:, :, keys].transpose(-1, -2)).to(lse.dtype)
            grad_scores = inner.sub_(delta[:, :, rows]).mul_(weights).mul_(q.shape[-1] ** -0.5).to(q.dtype)
            grad_q.append(grad_scores @ k[:, :, keys])
            grad_k[:, :, keys] += grad_scores.transpose(-1, -2) @ q[:, :, rows]
        return torch.cat(grad_q, 2), _fold(grad_k, group), _fold(grad_v, group)


def _blocks(q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    size = max(16, _SCORE_ENTRIES // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [(start, min(start + size, q.shape[2])) for start in range(0, q.shape[2], size)]


def _scores(q: Tensor, k: Tensor, first_query: int | None) -> Tensor:
    """Scaled scores [B, H, n, m] in float32 or wider; causal if the position of the first query is given."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)).mul_(q.shape[-1] ** -0.5)
    if first_query is not None:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(first_query + 1)
        scores.masked_fill_(future, float("-inf"))
    return scores


def _expand(x: Tensor, group: int) -> Tensor:
    """Keys or values [B, Hkv, m, E] once for each query head: [B, Hkv * group, m, E]."""
    return x if group == 1 else x.repeat_interleave(group, 1)


def _fold(x: Tensor, group: int) -> Tensor:
    """The reverse for gradients: sums over each key head's query heads."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x if group == 1 else x.unflatten(1, (-1, group)).sum(2, dtype=wide)
