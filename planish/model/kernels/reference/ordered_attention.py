"""Batch-invariant attention: a row's output is bit-identical for any batch and any chunking.

Sampler and trainer compute the same sequence in different shapes. The sampler adds one row at a
time to the slots of its KV cache; the trainer computes whole segments of a forest. In bf16 a
difference in the last bit of one attention output grows through the layers to some hundredths of a
logprob. So both use this module, in which every sum has one order, determined by the positions in
the sequence:

* Scores and weighted sums are float32 matmuls; bf16 operands are converted exactly. If a matmul has
  at least a minimum number of rows (`query_rows`, see layers/row_tiling.py), each element is
  bitwise independent of the number of rows. Fewer rows are padded to that minimum.
* Weights are exp(score - max). The max over all keys is exact in any order.
* Values are summed within spans of SPAN positions, aligned at the start of the sequence. The spans
  are then added in order.

Keys that a row must not attend to get weight 0, which changes no sum. So padding has no effect.

Shapes: G groups, H key-value heads, M query rows of a group (one per query and query head of a
key-value head), L keys, E head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.model.layers.row_tiling import QUERY_ROWS
from planish.model.sequences.positions import SPAN


@dataclass(frozen=True)
class Sums:
    """Running sums over the keys: weighted values, float32 [..., E], and weights [..., 1]."""

    values: Tensor
    weights: Tensor


def attention_scores(
    q: Tensor,
    keys: Tensor,
    visible: Tensor,
    first: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return the scaled scores [G, H, M, L] in float32 or wider.

    `q`: [G, H, M, E]. `keys`: [G, H, L, E]. `visible`: [G or 1, 1, M or 1], the number of leading
    keys that a row attends to; the scores of later keys are -inf. `first`: [G or 1, 1, M or 1], the
    first key that a row attends to, in a layer with a window. `cap`: the limit of scores (see
    `ModelConfig.score_cap`). Products of bf16 operands are
    exact in float32, and they are accumulated in float32.
    """
    scale = q.shape[-1] ** -0.5
    accum_dtype = torch.promote_types(q.dtype, torch.float32)
    if keys.device.type == "cuda" and q.dtype != accum_dtype:
        flat = torch.bmm(q.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), out_dtype=accum_dtype)
        scores = flat.unflatten(0, q.shape[:2]).mul_(scale)
    else:
        scores = torch.matmul(q.to(accum_dtype) * scale, keys.to(accum_dtype).transpose(-1, -2))
    if cap is not None:
        scores = scores.div_(cap).tanh_().mul_(cap)
    numbers = torch.arange(keys.shape[2], device=q.device)
    unseen = numbers >= visible.unsqueeze(-1)
    if first is not None:
        unseen = unseen | (numbers < first.unsqueeze(-1))
    return scores.masked_fill_(unseen, -torch.inf)


def row_max(scores: Tensor) -> Tensor:
    """Return the max score of each row: [G, H, M, 1].

    The max is finite even for a row that attends to no key.
    """
    return scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)


def add_spans(scores: Tensor, maxima: Tensor, values: Tensor, sums: Sums | None) -> Sums:
    """Add the values [G, H, L, E], weighted by exp(scores - maxima), to `sums` span by span.

    `scores`: [G, H, M, L]. They are overwritten. `maxima`: the max score of each row, [G, H, M, 1].
    `sums` None: start at zero. `sums` may be modified in place.

    L and the position of key 0 in the sequence must be multiples of SPAN. The order of additions
    in a matmul depends on the length of its sums. With whole spans, this length is SPAN in every
    batch.
    """
    assert values.shape[2] % SPAN == 0
    weights = scores.sub_(maxima).exp_()
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


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
    window_ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output [G, H, M, E] and the log-sum-exp [G, H, M] of the rows `q`.

    Each row attends to the first `visible` [G, 1, M] keys, or to the last `window` of these. With
    `window_ends` [G, 1, M], it attends to the keys from window_ends - window on. The
    keys start at position 0, and their number must be a multiple of SPAN. `sinks`: the sink of each
    row, [H, M], or None (see `Attend`). `cap`: as in `attention_scores`. The log-sum-exp contains
    the sink.
    """
    rows = q.shape[2]
    missing = max(0, QUERY_ROWS - rows)
    ends = visible if window_ends is None else window_ends
    visible, ends = (F.pad(x, (0, missing), value=1) for x in (visible, ends))
    first = None if window is None else ends - window
    scores = attention_scores(F.pad(q, (0, 0, 0, missing)), keys, visible, first, cap)
    maxima = row_max(scores)
    if sinks is not None:
        sinks = F.pad(sinks, (0, missing)).unsqueeze(-1)
        maxima = torch.maximum(maxima, sinks)
    sums = add_spans(scores, maxima, values, None)
    if sinks is not None:
        sums.weights.add_((sinks - maxima).exp_())
    out, lse = sums.values / sums.weights, (maxima + sums.weights.log()).squeeze(-1)
    return out[:, :, :rows], lse[:, :, :rows]


def _product(weights: Tensor, values: Tensor) -> Tensor:
    if values.device.type == "cuda" and values.dtype != weights.dtype:
        flat = torch.bmm(
            weights.flatten(0, 1).to(values.dtype), values.flatten(0, 1), out_dtype=weights.dtype
        )
        return flat.unflatten(0, weights.shape[:2])
    return torch.matmul(weights, values.to(weights.dtype))
