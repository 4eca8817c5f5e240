"""Sampling in torch: top_k, top_p and min_p filters, and tokens from uniform random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from planish.model.device import Device, on_device
from planish.model.kernels.interface.parts import MIN_WEIGHT, LogSumExp
from planish.types import SamplingParams

_CHUNK = 128
"""The vocabulary entries of one run in the two-step search of `sample_from_weights`."""
_ENTRIES = 1 << 22
"""The maximum number of entries that `sample_from_weights` gathers at a time."""
_SORTED_ENTRIES = 1 << 21
"""The maximum number of weights that a GPU sorts at a time."""
SORTING_BYTES = 64 * _SORTED_ENTRIES
"""The bytes needed to sort `_SORTED_ENTRIES` weights: values and indices before and after the sort,
float64 sums, and temporaries.
"""


WeightSampler = Callable[[Tensor, Tensor], Tensor]
"""(weights [N, V], uniforms [N, K]) -> tokens [N, K] (see `Sampling.sample_from_weights`)."""
WeightFilter = Callable[[Tensor, Sequence[SamplingParams]], None]
"""(weights [N, V], parameters of each row) -> None (see `Sampling.filter_`)."""


def sample_from_weights(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first entries at which the cumulative sum exceeds uniform * total: [B, K].

    `weights` [B, V] are non-negative and `uniforms` is [B, K]. The search first finds a run of 128
    entries and then the entry within the run. A cumulative sum over the whole vocabulary would
    cost as much as the softmax.
    """
    runs = _pad(weights).unflatten(-1, (-1, _CHUNK))
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
    # The tokens of a row that is not finite are undefined, but never outside the vocabulary.
    return torch.cat(drawn, 1).clamp_(max=weights.shape[-1] - 1)


def unpacked(allowed: Tensor, vocab_size: int) -> Tensor:
    """Return bits as bool [N, V]. `allowed`: int32 [N, (V + 31) // 32], bit 0 of word 0 first."""
    if allowed.device.type == "cpu":
        # NumPy unpacks bits ten times as fast as torch shifts them.
        octets = allowed.contiguous().numpy().view(np.uint8)
        bits = np.unpackbits(octets, axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(bool))
    shifts = torch.arange(32, dtype=torch.int32, device=allowed.device)
    return (allowed.unsqueeze(2) >> shifts & 1).flatten(1)[:, :vocab_size].bool()


def keep_allowed_(weights: Tensor, allowed: Tensor) -> None:
    """Zero the weights [N, V] whose bits in `allowed` are 0 (see `unpacked`)."""
    kept = unpacked(allowed, weights.shape[1])
    if weights.device.type == "cpu":
        # In torch, multiplying by a bool tensor and `masked_fill_` both take ten times as long.
        np.multiply(weights.numpy(), kept.numpy(), out=weights.numpy())
    else:
        weights.mul_(kept)


def _last_positive(weights: Tensor) -> Tensor:
    """Return the index of the last positive entry of each row: [B, 1]."""
    last = weights.shape[-1] - 1
    return last - (weights.flip(-1) > 0).int().argmax(-1, keepdim=True)


def is_filtered(params: SamplingParams) -> bool:
    """Return whether top_k, top_p or min_p exclude tokens."""
    return params.temperature != 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def mass_bits(vocab_size: int) -> int:
    """Return the number of bits after the binary point of a weight's mass, an int64.

    top_p compares sums of masses. Sums of integers do not depend on the order of their terms, so
    the CPU and every kernel keep the same tokens. The weights of a row are at most 1, so no sum
    overflows. Masses are rounded down to a multiple of 2 ** -44 for a vocabulary of 150,000 tokens.
    """
    return 62 - vocab_size.bit_length()


def _masses(weights: Tensor) -> Tensor:
    return (weights.double() * 2.0 ** mass_bits(weights.shape[-1])).long()


def _top_p_goal(top_p: Tensor | float, total: Tensor) -> Tensor:
    """Return the mass that the likeliest tokens must reach: int64, at least 1."""
    return (top_p * total.double()).ceil().long().clamp(min=1)


def filter_sorted_(weights: Tensor, params: Sequence[SamplingParams]) -> None:
    """Do the same as `filter_`, on a GPU: sort many rows at once and never synchronize."""
    filtered = [row for row, p in enumerate(params) if is_filtered(p)]
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
    masses = _masses(kept)
    ends = masses.cumsum(1)
    # A token stays if the likelier tokens together have less than top_p of the mass. At top_p = 1
    # all tokens stay, whatever the rounding.
    dropped = (ends - masses >= _top_p_goal(top_p, ends[:, -1:])) & (top_p < 1)
    kept.masked_fill_(dropped | (kept < min_p.float()), 0.0)
    return torch.empty_like(weights).scatter_(1, ordered.indices, kept)


def filter_(weights: Tensor, params: Sequence[SamplingParams]) -> None:
    """Zero the weights that top_k, then top_p, then min_p exclude, row by row.

    The largest weight of each row must be 1.
    """
    vocab = weights.shape[-1]
    for row, p in enumerate(params):
        if p.temperature == 0:
            continue
        if 0 < p.top_k < vocab:
            # `topk` may choose any of several equal weights. The first ones stay.
            least = weights[row].topk(p.top_k).values[-1]
            ties = (weights[row] == least).nonzero().squeeze(1)
            surplus = int((weights[row] >= least).sum()) - p.top_k
            weights[row][weights[row] < least] = 0
            if surplus > 0:
                weights[row, ties[-surplus:]] = 0
        if p.top_p < 1:
            ordered = weights[row].sort(descending=True, stable=True)
            masses = _masses(ordered.values)
            ends = masses.cumsum(0)
            # A token stays if the likelier tokens together have less than top_p of the mass. So
            # the likeliest token always stays.
            dropped = ordered.indices[ends - masses >= _top_p_goal(p.top_p, ends[-1])]
            weights[row, dropped] = 0
        if p.min_p > 0:
            # In float32, as torch compares a tensor with a number.
            weights[row][weights[row] < float(np.float32(p.min_p))] = 0


def _pad(weights: Tensor) -> Tensor:
    missing = -weights.shape[-1] % _CHUNK
    return F.pad(weights, (0, missing)) if missing else weights


class TorchSampling:
    """The choice of tokens from logits (see `Sampling`)."""

    def __init__(
        self,
        log_sum_exp: LogSumExp,
        device: torch.device,
        sample_weights: WeightSampler = sample_from_weights,
        filter_weights_: WeightFilter | None = None,
    ) -> None:
        """`sample_weights`: samples from weights; torch's own function by default.

        `filter_weights_`: does the same as `filter_`. None: torch does it.
        """
        self._log_sum_exp, self._sample_weights = log_sum_exp.log_sum_exp, sample_weights
        by_torch = filter_sorted_ if Device(device).is_gpu else filter_
        self._filter_ = filter_weights_ or by_torch

    def sample(
        self,
        logits: Tensor,
        rows: Tensor | None,
        temperatures: Tensor,
        uniforms: Tensor,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sample one token from each row, or from each row in `rows` [N]."""
        weights = logits.clone() if rows is None else logits[rows]
        normalizer = self._log_sum_exp(weights, temperatures, weights=weights)
        if allowed is None:
            return self.sample_from_weights(weights, uniforms.unsqueeze(1)).squeeze(1), normalizer
        keep_allowed_(weights, allowed)
        tokens = self.sample_from_weights(weights, uniforms.unsqueeze(1)).squeeze(1)
        return tokens.masked_fill_(weights.amax(1) < MIN_WEIGHT, -1), normalizer

    def filter_(self, weights: Tensor, params: Sequence[SamplingParams]) -> None:
        """Zero the weights [N, V] that top_k, then top_p, then min_p exclude."""
        self._filter_(weights, params)

    def sample_from_weights(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Sample K tokens from each row of unnormalized probabilities. Return them as [N, K]."""
        return self._sample_weights(weights, uniforms)
