"""Sampling of tokens from logits: temperature, filters (top_k, top_p, min_p), one token per row.

A token is sampled by inverting the cumulative distribution at a uniform number. This number depends
only on (seed, sample index, position), so the sampled token does not depend on the batch.
`torch.multinomial` is not used. It generates a random number per vocabulary entry, which takes
longer than the rest of a decoding step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.model.head import log_normalizer
from planish.model.kernels import choose
from planish.model.kernels.cpp import cpu, cpu_head
from planish.model.transfer import on_device
from planish.types import SamplingParams

_CHUNK = 128
"""The vocabulary entries of one run in the two-step search of `_invert`."""
_ENTRIES = 1 << 22
"""The maximum number of entries that `_invert` gathers at a time."""
_SORTED_ENTRIES = 1 << 21
"""The maximum number of weights that a GPU sorts at a time."""
SORTING_BYTES = 64 * _SORTED_ENTRIES
"""The bytes needed to sort `_SORTED_ENTRIES` weights: values and indices before and after the sort,
float64 sums, and temporaries.
"""


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens and the log normalizers of their rows.

    `tokens` is int64 [B], or [R, K] from `sample_many`. `log_normalizer` is float32, one per row:
    the log of the sum of exp(logits / temperature).
    """

    tokens: Tensor
    log_normalizer: Tensor


def sample_tokens(
    logits: Tensor,
    params: list[SamplingParams],
    uniforms: list[float],
    rows: list[int] | None = None,
) -> SampledTokens:
    """Sample one token from each row of float32 logits [R, V], or from each row in `rows`.

    `params` and `uniforms` have one entry per sampled token. Temperature 0 takes the likeliest
    token and the normalizer of the unscaled logits. Normalizers are computed before top_k, top_p
    and min_p. If a row has a logit that is not finite, its normalizer is not finite either, and
    its token is undefined.
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
    return SampledTokens(drawn, normalizer)


def sample_many(logits: Tensor, params: SamplingParams, uniforms: Tensor) -> SampledTokens:
    """Sample K tokens from each row of float32 logits [R, V].

    `uniforms` is float64 [R, K], and the sampled tokens are [R, K]. `draw` would return the same
    token for each of the uniform numbers.
    """
    weights = logits.clone()
    normalizer = log_normalizer(
        weights, logits.new_full(logits.shape[:1], params.temperature or 1.0)
    )
    if params.temperature == 0:
        return SampledTokens(
            logits.argmax(-1, keepdim=True).expand(-1, uniforms.shape[1]), normalizer
        )
    _filter(weights, [params] * len(logits))
    return SampledTokens(_inverted(weights, uniforms), normalizer)


def _is_filtered(params: SamplingParams) -> bool:
    return params.temperature != 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def top_logprobs(
    logits: Tensor, normalizer: Tensor, temperature: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Return the k likeliest tokens of each row and their logprobs, the likeliest first.

    Both results are [B, k], int64 and float32. `normalizer` and `temperature` are [B].
    """
    values, tokens = logits.topk(k, dim=-1)
    return tokens, values / temperature.unsqueeze(1) - normalizer.unsqueeze(1)


def _padded(weights: Tensor) -> Tensor:
    missing = -weights.shape[-1] % _CHUNK
    return F.pad(weights, (0, missing)) if missing else weights


def _inverted(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Sample tokens [B, K] from weights [B, V] at uniform numbers [B, K].

    The tokens of a row that is not finite are undefined.
    """
    own = cpu.usable(weights, "sampling") and weights.is_contiguous()
    if uniforms.shape[1] == 1 and not own:
        found = choose.sample(weights, uniforms.squeeze(1))
        if found is not None:
            return found.unsqueeze(1)
    drawn = cpu_head.invert(weights, uniforms) if own else _invert(weights, uniforms)
    return drawn.clamp_(max=weights.shape[1] - 1)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first entries at which the cumulative sum exceeds uniform * total: [B, K].

    `weights` [B, V] are non-negative and `uniforms` is [B, K]. The search first finds a run of 128
    entries and then the entry within the run. A cumulative sum over the whole vocabulary would
    cost as much as the softmax.
    """
    runs = _padded(weights).unflatten(-1, (-1, _CHUNK))
    ends = runs.sum(-1).double().cumsum(-1)
    # Rounding may select a run whose weights are all 0, or an entry after the run's last positive
    # weight. So the index is limited to the last positive one.
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
    """Return the index of the last positive entry of each row: [B, 1]."""
    last = weights.shape[-1] - 1
    return last - (weights.flip(-1) > 0).int().argmax(-1, keepdim=True)


def _filter(weights: Tensor, params: list[SamplingParams]) -> None:
    """Zero, in place, the weights that top_k, then top_p, then min_p exclude.

    The largest weight of each row must be 1.
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
    """Return a filtered copy of weights [B, V], computed with one sort and no device sync.

    On a GPU, filtering row by row would take as long as a decoding step for each row.
    """
    vocab, device = weights.shape[1], weights.device
    bounds = [[p.top_k if p.top_k > 0 else vocab, p.top_p, p.min_p] for p in params]
    top_k, top_p, min_p = on_device(bounds, torch.float64, device).unsqueeze(2).unbind(1)
    ordered = weights.sort(dim=1, descending=True, stable=True)
    kept = ordered.values.masked_fill(torch.arange(vocab, device=device) >= top_k, 0.0)
    mass = kept.double().cumsum(1)
    # A token stays if the likelier tokens together have less than top_p of the mass. At top_p = 1
    # all tokens stay, whatever the rounding.
    dropped = (mass - kept >= top_p * mass[:, -1:]) & (top_p < 1)
    kept.masked_fill_(dropped | (kept < min_p), 0.0)
    return torch.empty_like(weights).scatter_(1, ordered.indices, kept)


def _filter_each(weights: Tensor, params: list[SamplingParams]) -> None:
    """Do the same as `_filter` on a CPU, row by row."""
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
            # A token stays if the likelier tokens together have less than top_p of the mass. So
            # the likeliest token always stays.
            before = mass - ordered.values
            dropped = ordered.indices[before >= p.top_p * mass[-1]]
            weights[row, dropped] = 0
        if p.min_p > 0:
            weights[row][weights[row] < p.min_p] = 0
