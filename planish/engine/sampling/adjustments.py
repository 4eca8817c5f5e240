"""Sampling from adjusted logits: penalties of repeated tokens, and tokens that are not allowed.

A batch may contain both adjusted and unadjusted rows. `sample_tokens` always samples the unadjusted
rows, so their tokens do not depend on the adjusted rows. The log normalizers are always those of
the logits before all adjustments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planish.engine.sampling.token_sampling import SampledTokens, sample_tokens
from planish.model.kernels.backend import Backend
from planish.model.kernels.reference.token_sampling import is_filtered
from planish.model.transfer import on_device
from planish.types import SamplingParams

_MIN_WEIGHT = 1e-20
"""The weights of a row are relative to the likeliest token of the whole vocabulary. If the weights
of all allowed tokens are below this limit, they may underflow. So they are computed again, relative
to the likeliest allowed token.
"""


def is_adjusted(params: SamplingParams) -> bool:
    """Return whether requests with these parameters sample from adjusted logits."""
    return params.constraint is not None or params.min_tokens > 0 or _is_penalized(params)


def _is_penalized(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


@dataclass(frozen=True, eq=False)
class Adjustment:
    """How one row's logits are adjusted before a token is sampled."""

    allowed: np.ndarray | None
    """bool [V], with at least one True; None = all tokens are allowed."""
    prompt: np.ndarray
    """The distinct tokens of the prompt, for the repetition penalty. If that penalty is 1, the array
    may be empty.
    """
    tokens: Sequence[int]
    """The tokens sampled so far, for all penalties."""


def sample_batch(
    backend: Backend,
    logits: Tensor,
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
    rows: Sequence[int],
    adjustments: Mapping[int, Adjustment],
) -> SampledTokens:
    """Sample one token from each row in `rows` of float32 logits [R, V], like `sample_tokens`.

    `adjustments` maps indices of `rows` to the adjustments of these rows. `logits` is not changed.
    """
    plain = [i for i in range(len(rows)) if i not in adjustments]
    adjusted = list(adjustments)
    parts = [
        _sample_adjusted(
            backend,
            logits,
            [params[i] for i in adjusted],
            [uniforms[i] for i in adjusted],
            [rows[i] for i in adjusted],
            [adjustments[i] for i in adjusted],
        )
    ]
    if plain:
        others = sample_tokens(
            backend,
            logits,
            [params[i] for i in plain],
            [uniforms[i] for i in plain],
            [rows[i] for i in plain],
        )
        parts.append(others)
    place = {i: place for place, i in enumerate([*adjusted, *plain])}
    order = on_device([place[i] for i in range(len(rows))], torch.int64, logits.device)
    return SampledTokens(
        torch.cat([part.tokens for part in parts])[order],
        torch.cat([part.log_normalizer for part in parts])[order],
    )


def penalize_(logits: Tensor, params: SamplingParams, adjustment: Adjustment) -> None:
    """Apply the penalties to one row of logits [V], in the order of vLLM: repetition first."""
    ids, counts = np.unique(np.array(adjustment.tokens, np.int64), return_counts=True)
    if params.repetition_penalty != 1:
        seen = torch.from_numpy(np.union1d(adjustment.prompt, ids)).to(logits.device)
        values, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if len(ids):
        subtracted = counts * params.frequency_penalty + params.presence_penalty
        logits[torch.from_numpy(ids).to(logits.device)] -= torch.from_numpy(
            subtracted.astype(np.float32)
        ).to(logits.device)


def _sample_adjusted(
    backend: Backend,
    logits: Tensor,
    params: list[SamplingParams],
    uniforms: list[float],
    rows: list[int],
    adjustments: list[Adjustment],
) -> SampledTokens:
    """Sample one token from each of the rows in `rows` [N] of float32 logits [R, V]."""
    device = logits.device
    at = on_device(rows, torch.int64, device)
    temperatures = on_device([p.temperature or 1.0 for p in params], torch.float32, device)
    weights = logits[at]
    normalizer = backend.log_sum_exp(weights, temperatures, weights=weights)
    masks = _masks(adjustments, logits.shape[1])
    if masks is not None and backend.uses_main_memory:
        # NumPy applies the masks here. In torch, multiplying by a bool tensor and `masked_fill_`
        # both take ten times as long.
        np.multiply(weights.numpy(), masks, out=weights.numpy())
    elif masks is not None:
        weights.mul_(torch.from_numpy(masks).to(device))
    is_rare = (weights.amax(1) < _MIN_WEIGHT).tolist()
    slow = [
        row
        for row, p in enumerate(params)
        if is_rare[row] or is_filtered(p) or p.temperature == 0 or _is_penalized(p)
    ]
    greedy: dict[int, Tensor] = {}
    if slow:
        chosen = on_device(slow, torch.int64, device)
        some = logits[at[chosen]]
        for row, adjusted in zip(slow, some, strict=True):
            penalize_(adjusted, params[row], adjustments[row])
        if masks is not None:
            some.masked_fill_(torch.from_numpy(~masks[slow]).to(device), -torch.inf)
        best = some.argmax(1)
        greedy = {row: best[i] for i, row in enumerate(slow) if params[row].temperature == 0}
        backend.log_sum_exp(some, temperatures[chosen], weights=some)
        backend.filter_(some, [params[row] for row in slow])
        weights[chosen] = some
    numbers = on_device(uniforms, torch.float64, device)
    tokens = backend.invert(weights, numbers.unsqueeze(1)).squeeze(1)
    for row, token in greedy.items():
        tokens[row] = token
    return SampledTokens(tokens, normalizer)


def _masks(adjustments: Sequence[Adjustment], vocab: int) -> np.ndarray | None:
    """Return the masks of all rows: bool [N, V], or None if all tokens of all rows are allowed."""
    if all(adjustment.allowed is None for adjustment in adjustments):
        return None
    masks = np.ones((len(adjustments), vocab), bool)
    for row, adjustment in zip(masks, adjustments, strict=True):
        if adjustment.allowed is not None:
            row[:] = adjustment.allowed
    return masks
