"""Attention whose bits do not depend on who computes it, with what beside it, or in how many
pieces.

Sampler and trainer see the same sequence in different shapes: one new row at a time over slots, or
whole segments of a forest. In bf16 a difference in the last bit of one attention output grows
through the layers to some hundredths of a logprob. So both take their attention from here, where
every sum has one order, given by positions within the sequence:

* scores and weighted sums are float32 products (of bf16 operands, exactly widened); a product's
  element has the same bits whatever the number of rows, from `query_rows` on (see row_tiling.py),
  so fewer rows are padded;
* weights are exp(score - peak) with the peak over all keys, which is exact in any order;
* values are summed in spans of SPAN positions, aligned at the start of the sequence, and the spans
  one after the other.

Keys that a row may not see get weight 0, which changes no sum; so padding is free of effect.

Shapes: G groups, H key-value heads, M query rows of a group (the query heads of a key-value head
are rows), L keys, E head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.engine.positions import SPAN

QUERY_ROWS = 16
"""Fewest rows of a product in the trainer, where it costs nothing; at least what any machine was
seen to need.
"""


@dataclass(frozen=True)
class Sums:
    """Weighted values and weights, summed so far: float32 [..., E] and [..., 1]."""

    values: Tensor
    weights: Tensor


def scores(q: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """Scaled scores [G, H, M, L], -inf from key `visible` on. q [G, H, M, E]; keys [G, H, L, E];
    visible [G or 1, 1, M or 1].

    At least float32. The operands may be in less; their products are exact and are summed in
    float32.
    """
    scale = q.shape[-1] ** -0.5
    wide = torch.promote_types(q.dtype, torch.float32)
    if keys.device.type == "cuda" and q.dtype != wide:
        flat = torch.bmm(q.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), out_dtype=wide)
        found = flat.unflatten(0, q.shape[:2]).mul_(scale)
    else:
        found = torch.matmul(q.to(wide) * scale, keys.to(wide).transpose(-1, -2))
    unseen = torch.arange(keys.shape[2], device=q.device) >= visible.unsqueeze(-1)
    return found.masked_fill_(unseen, -torch.inf)


def peaks(found: Tensor) -> Tensor:
    """Largest score of each row: [G, H, M, 1]; a finite number also for rows that see no key."""
    return found.amax(-1, keepdim=True).clamp_(min=torch.finfo(found.dtype).min)


def add_spans(found: Tensor, peak: Tensor, values: Tensor, sums: Sums | None) -> Sums:
    """`sums` and, behind them, the values [G, H, L, E] weighted by exp(found - peak), span by span.
    Overwrites `found`.

    Key 0 must lie at a multiple of SPAN of the sequence, and L be one: a sum's order depends on its
    length.
    """
    assert values.shape[2] % SPAN == 0
    weights = found.sub_(peak).exp_()
    for start in range(0, values.shape[2], SPAN):
        part = weights[..., start : start + SPAN]
        span = Sums(_product(part, values[:, :, start : start + SPAN]), part.sum(-1, keepdim=True))
        sums = (
            span
            if sums is None
            else Sums(sums.values.add_(span.values), sums.weights.add_(span.weights))
        )
    assert sums is not None
    return sums


def attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Output [G, H, M, E] and log-sum-exp [G, H, M] of rows that each see the first `visible` [G,
    1, M] of the keys.

    The keys are whole spans from position 0 on.
    """
    rows = q.shape[2]
    missing = max(0, QUERY_ROWS - rows)
    found = scores(F.pad(q, (0, 0, 0, missing)), keys, F.pad(visible, (0, missing), value=1))
    peak = peaks(found)
    sums = add_spans(found, peak, values, None)
    out, lse = sums.values / sums.weights, (peak + sums.weights.log()).squeeze(-1)
    return out[:, :, :rows], lse[:, :, :rows]


def _product(weights: Tensor, values: Tensor) -> Tensor:
    if values.device.type == "cuda" and values.dtype != weights.dtype:
        flat = torch.bmm(
            weights.flatten(0, 1).to(values.dtype), values.flatten(0, 1), out_dtype=weights.dtype
        )
        return flat.unflatten(0, weights.shape[:2])
    return torch.matmul(weights, values.to(weights.dtype))
