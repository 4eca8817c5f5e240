"""From logits to tokens: temperature, filters, and one uniform number a row.

A token is drawn by inverting the cumulative distribution at a uniform number that depends on (seed,
sample index, position) and on nothing else: not on the batch, not on the request's place in it.
`torch.multinomial` draws one random number for each vocabulary entry and takes longer than the rest
of a decoding step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.engine.sending import on_device
from planish.model.head import log_normalizer
from planish.native import cpu, cpu_head, kernels
from planish.types import SamplingParams

_CHUNK = 128
_ENTRIES = 1 << 22
"""Of runs that are looked at together."""
_SORTED_ENTRIES = 1 << 21
"""Sorted at a time on a GPU."""
SORTING_BYTES = 64 * _SORTED_ENTRIES
"""What that takes: values and places before and after, sums in float64, and what is made on the
way.
"""


@dataclass(frozen=True)
class Draw:
    """tokens int64 [B]; log_normalizer float32 [B]: log of the sum of exp(logits / temperature)."""

    tokens: Tensor
    log_normalizer: Tensor


def draw(
    logits: Tensor,
    params: list[SamplingParams],
    uniforms: list[float],
    rows: list[int] | None = None,
) -> Draw:
    """One token for each row of float32 logits [R, V], or for each of these rows.

    Temperature 0 takes the likeliest token, and its normalizer is that of the unscaled logits. The
    normalizer is taken before top_k, top_p and min_p. Of a row with a logit that is not finite, the
    normalizer is not finite either, and its token means nothing.
    """
    device = logits.device
    temperatures = on_device([p.temperature or 1.0 for p in params], torch.float32, device)
    chosen = on_device(uniforms, torch.float64, device)
    own = cpu.usable(logits, "sampling") and logits.is_contiguous()
    if own and not any(map(_is_filtered, params)):
        at = torch.arange(len(params)) if rows is None else torch.tensor(rows)
        drawn, normalizer = cpu_head.draw(logits, at, temperatures, chosen)
    else:
        weights = logits.clone() if rows is None else logits[on_device(rows, torch.int64, device)]
        normalizer = log_normalizer(weights, temperatures)
        _filter(weights, params)
        drawn = _inverted(weights, chosen.unsqueeze(1)).squeeze(1)
    if any(p.temperature == 0 for p in params):
        greedy = on_device([p.temperature == 0 for p in params], torch.bool, device)
        best = (
            logits.argmax(-1)
            if rows is None
            else logits.argmax(-1)[on_device(rows, torch.int64, device)]
        )
        drawn = torch.where(greedy, best, drawn)
    return Draw(drawn, normalizer)


def draw_several(logits: Tensor, params: SamplingParams, uniforms: Tensor) -> Draw:
    """K tokens for each row of float32 logits [R, V], by uniforms, float64 [R, K]: those that
    `draw` finds one by one. Tokens are [R, K].
    """
    weights = logits.clone()
    normalizer = log_normalizer(
        weights, logits.new_full(logits.shape[:1], params.temperature or 1.0)
    )
    if params.temperature == 0:
        return Draw(logits.argmax(-1, keepdim=True).expand(-1, uniforms.shape[1]), normalizer)
    _filter(weights, [params] * len(logits))
    return Draw(_inverted(weights, uniforms), normalizer)


def _is_filtered(params: SamplingParams) -> bool:
    return params.temperature != 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def top_logprobs(
    logits: Tensor, normalizer: Tensor, temperature: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of each row and their logprobs, likeliest first: int64 and float32 [B,
    k].
    """
    values, tokens = logits.topk(k, dim=-1)
    return tokens, values / temperature.unsqueeze(1) - normalizer.unsqueeze(1)


def _padded(weights: Tensor) -> Tensor:
    missing = -weights.shape[-1] % _CHUNK
    return F.pad(weights, (0, missing)) if missing else weights


def _inverted(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens [B, K] for weights [B, V]; of a row that is not finite, any."""
    own = cpu.usable(weights, "sampling") and weights.is_contiguous()
    if uniforms.shape[1] == 1 and not own:
        found = kernels.sample(weights, uniforms.squeeze(1))
        if found is not None:
            return found.unsqueeze(1)
    drawn = cpu_head.invert(weights, uniforms) if own else _invert(weights, uniforms)
    return drawn.clamp_(max=weights.shape[1] - 1)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first entry at which the running sum of non-negative weights [B, V] exceeds uniform [B,
    K] times their total.

    In two steps, over runs of 128 and then within one, as a running sum over the whole vocabulary
    costs as much as the softmax.
    """
    runs = _padded(weights).unflatten(-1, (-1, _CHUNK))
    ends = runs.sum(-1).double().cumsum(-1)
    # Rounding may point at a run without weight, or past the last entry with weight in a run; step
    # back to one that has some.
    last = _last_positive(ends.diff(dim=-1, prepend=torch.zeros_like(ends[:, :1])))
    drawn = []
    for some in uniforms.split(max(1, _ENTRIES // (_CHUNK * len(weights))), 1):
        goal = some * ends[:, -1:]
        run = torch.searchsorted(ends, goal, right=True).clamp_(max=ends.shape[1] - 1)
        run = torch.minimum(run, last)
        before = torch.where(
            run > 0, ends.gather(1, (run - 1).clamp(min=0)), torch.zeros_like(goal)
        )
        within = runs.gather(1, run.unsqueeze(-1).expand(-1, -1, _CHUNK)).double()
        entry = torch.searchsorted(
            within.cumsum(-1), (goal - before).unsqueeze(-1), right=True
        ).squeeze(-1)
        entry = torch.minimum(entry, _last_positive(within).squeeze(-1))
        drawn.append(run * _CHUNK + entry)
    return torch.cat(drawn, 1)


def _last_positive(weights: Tensor) -> Tensor:
    """Index of the last positive entry of each row: [B, 1]."""
    last = weights.shape[-1] - 1
    return last - (weights.flip(-1) > 0).int().argmax(-1, keepdim=True)


def _filter(weights: Tensor, params: list[SamplingParams]) -> None:
    """Zero, in place, what top_k, then top_p, then min_p leave out. `weights` are 1 at the peak of
    each row.
    """
    if weights.device.type == "cpu":
        _filter_each(weights, params)
        return
    filtered = [row for row, p in enumerate(params) if _is_filtered(p)]
    size = max(1, _SORTED_ENTRIES // weights.shape[1])
    for start in range(0, len(filtered), size):
        some = filtered[start : start + size]
        rows = on_device(some, torch.int64, weights.device)
        weights[rows] = _filtered(weights[rows], [params[row] for row in some])


def _filtered(weights: Tensor, params: list[SamplingParams]) -> Tensor:
    """All rows by one sort, without waiting for the device: row by row, each would take as long
    there as a decoding step.
    """
    vocab, device = weights.shape[1], weights.device
    bounds = [[p.top_k if p.top_k > 0 else vocab, p.top_p, p.min_p] for p in params]
    top_k, top_p, min_p = on_device(bounds, torch.float64, device).unsqueeze(2).unbind(1)
    ordered = weights.sort(dim=1, descending=True, stable=True)
    kept = ordered.values.masked_fill(torch.arange(vocab, device=device) >= top_k, 0.0)
    mass = kept.double().cumsum(1)
    # As below: a token stays if those before it hold less than top_p; at 1 all stay.
    dropped = (mass - kept >= top_p * mass[:, -1:]) & (top_p < 1)
    kept.masked_fill_(dropped | (kept < min_p), 0.0)
    return torch.empty_like(weights).scatter_(1, ordered.indices, kept)


def _filter_each(weights: Tensor, params: list[SamplingParams]) -> None:
    vocab = weights.shape[-1]
    for row, p in enumerate(params):
        if p.temperature == 0:
            continue
        if 0 < p.top_k < vocab:
            kept = weights[row].topk(p.top_k)
            weights[row] = torch.zeros_like(weights[row]).scatter_(0, kept.indices, kept.values)
        if p.top_p < 1:
            ordered = weights[row].sort(descending=True, stable=True)
            mass = ordered.values.double().cumsum(0)
            # A token stays if those before it hold less than top_p: the likeliest always does.
            before = mass - ordered.values
            dropped = ordered.indices[before >= p.top_p * mass[-1]]
            weights[row, dropped] = 0
        if p.min_p > 0:
            weights[row][weights[row] < p.min_p] = 0
