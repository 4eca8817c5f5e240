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

# Below this many queries the CPU kernel's packing of bfloat16 costs more in the backward pass than float32 products do.
_SHORT = 128
# Entries of a score matrix that are alive at a time on devices without the CPU's fused kernel.
_SCORE_ENTRIES = 1 << 26


@dataclass(frozen=True)
class Piece:
    """Queries q_start .. q_end - 1 against keys k_start .. k_end - 1, causally (then both ranges are one) or fully."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    causal: bool
    first: bool
    """No earlier piece holds these queries."""


class Kernel(Protocol):
    """Attention of one piece. Heads first: q [Hq, n, E], k and v [Hkv, m, E]; lse [Hq, n]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Output [Hq, n, E] in any dtype, log-sum-exp [Hq, n] float32."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v, given the final `out` and `lse` of the rows."""
        ...


def pieces(packed: Packed) -> tuple[Piece, ...]:
    """The pieces that cover the forest, a row's root before the rest."""
    found = []
    for s in packed.segments:
        found.append(Piece(s.start, s.end, s.start, s.end, causal=True, first=s.is_root))
        if s.end < s.until:
            found.append(Piece(s.end, s.until, s.start, s.end, causal=False, first=s.is_root))
    return tuple(found)


class ForestAttention:
    """An `Attend` of the decoder for one micro-batch."""

    def __init__(self, packed: Packed, device: torch.device, kernel: Kernel | None = None) -> None:
        self._pieces = pieces(packed)
        self._kernel = kernel or (FusedCpuKernel() if device.type == "cpu" else BlockKernel())

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Forest.apply(q, k, v, self._pieces, self._kernel)  # type: ignore[no-any-return]


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


class _Forest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, plan: tuple[Piece, ...], kernel: Kernel) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty(q.shape, dtype=wide, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
        for piece in plan:
            rows, keys = slice(piece.q_start, piece.q_end), slice(piece.k_start, piece.k_end)
            part, part_lse = kernel.forward(_heads(q[rows]), _heads(k[keys]), _heads(v[keys]), piece.causal)
            part, part_lse = _heads(part), part_lse.transpose(0, 1)
            if piece.first:
                out[rows], lse[rows] = part, part_lse
            else:
                _merge(out[rows], lse[rows], part, part_lse)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.plan, ctx.kernel = plan, kernel
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        wide = lse.dtype
        grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        for piece in ctx.plan:
            rows, keys = slice(piece.q_start, piece.q_end), slice(piece.k_start, piece.k_end)
            part_q, part_k, part_v = ctx.kernel.backward(
                _heads(grad[rows]),
                _heads(q[rows]),
                _heads(k[keys]),
                _heads(v[keys]),
                _heads(out[rows]),
                lse[rows].transpose(0, 1),
                piece.causal,
            )
            grad_q[rows] += _heads(part_q)
            grad_k[keys] += _heads(part_k)
            grad_v[keys] += _heads(part_v)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _heads(x: Tensor) -> Tensor:
    """[n, H, E] as [H, n, E], or back; no copy."""
    return x.transpose(0, 1)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold another piece into out [n, H, E] and lse [n, H], in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


class FusedCpuKernel:
    """torch's fused attention for CPUs: scores never leave the cache."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        group = q.shape[0] // k.shape[0]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None], _expand(k, group)[None], _expand(v, group)[None], 0.0, causal
        )
        return out[0], lse[0]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[0] // k.shape[0]
        if q.shape[1] <= _SHORT and q.dtype == torch.bfloat16:
            grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad[None], q[None], _expand(k, group)[None], _expand(v, group)[None], out[None], lse[None], 0.0, causal
        )
        return grads[0][0], _fold(grads[1][0], group), _fold(grads[2][0], group)


class BlockKernel:
    """Plain products over blocks of queries, for any device; a block's scores are bounded, whatever the piece's length."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        group = q.shape[0] // k.shape[0]
        k, v = _expand(k, group), _expand(v, group)
        outs, lses = [], []
        for start, stop in _blocks(q, k):
            keys = slice(0, stop if causal else k.shape[1])
            scores = _scores(q[:, start:stop], k[:, keys], start if causal else None)
            lse = scores.logsumexp(-1)
            weights = scores.sub_(lse.unsqueeze(-1)).exp_().to(q.dtype)
            outs.append(weights @ v[:, keys])
            lses.append(lse)
        return torch.cat(outs, 1), torch.cat(lses, 1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[0] // k.shape[0]
        k, v = _expand(k, group), _expand(v, group)
        delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
        grad_q = []
        grad_k, grad_v = torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
        for start, stop in _blocks(q, k):
            rows, keys = slice(start, stop), slice(0, stop if causal else k.shape[1])
            weights = _scores(q[:, rows], k[:, keys], start if causal else None).sub_(lse[:, rows, None]).exp_()
            grad_v[:, keys] += weights.to(q.dtype).transpose(1, 2) @ grad[:, rows]
            inner = (grad[:, rows] @ v[:, keys].transpose(1, 2)).to(lse.dtype)
            grad_scores = inner.sub_(delta[:, rows]).mul_(weights).mul_(q.shape[-1] ** -0.5).to(q.dtype)
            grad_q.append(grad_scores @ k[:, keys])
            grad_k[:, keys] += grad_scores.transpose(1, 2) @ q[:, rows]
        return torch.cat(grad_q, 1), _fold(grad_k, group), _fold(grad_v, group)


def _blocks(q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    size = max(16, _SCORE_ENTRIES // (q.shape[0] * k.shape[1]))
    return [(start, min(start + size, q.shape[1])) for start in range(0, q.shape[1], size)]


def _scores(q: Tensor, k: Tensor, first_query: int | None) -> Tensor:
    """Scaled scores [H, n, m] in float32 or wider; causal if the position of the first query is given."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(1, 2)).mul_(q.shape[-1] ** -0.5)
    if first_query is not None:
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu_(first_query + 1)
        scores.masked_fill_(future, float("-inf"))
    return scores


def _expand(x: Tensor, group: int) -> Tensor:
    """Keys or values [Hkv, m, E] once for each query head: [Hkv * group, m, E]."""
    return x if group == 1 else x.repeat_interleave(group, 0)


def _fold(x: Tensor, group: int) -> Tensor:
    """The reverse for gradients: sums over each key head's query heads."""
    return x if group == 1 else x.unflatten(0, (-1, group)).sum(1, dtype=torch.promote_types(x.dtype, torch.float32))
