"""Sampling from adjusted logits: biases, penalties for repeated tokens, masks of allowed tokens.

A batch may contain both adjusted and unadjusted rows. The unadjusted rows are sampled by
`sample_tokens`, as in a batch without adjusted rows. So their tokens do not depend on the adjusted
rows. The log normalizers are always those of the logits before all adjustments.
"""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planish.engine.sampling.token_sampling import SampledTokens, sample_tokens
from planish.model.device import on_device
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.reference.token_sampling import is_filtered, unpacked
from planish.types import SamplingParams


def is_adjusted(params: SamplingParams) -> bool:
    """Return whether requests with these parameters sample from adjusted logits."""
    return (
        params.constraint is not None
        or params.min_tokens > 0
        or bool(params.allowed_token_ids)
        or _changes_logits(params)
    )


def _changes_logits(params: SamplingParams) -> bool:
    return (
        bool(params.logit_bias)
        or params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


@dataclass(frozen=True, eq=False)
class Adjustment:
    """How one row's logits are adjusted before a token is sampled."""

    allowed_bits: np.ndarray | None
    """The allowed tokens, at least one: uint32 [(V + 31) // 32], one bit per token, with bit 0 of
    word 0 first. None: all tokens are allowed.
    """
    prompt_tokens: np.ndarray
    """The distinct tokens of the prompt, for the repetition penalty. If that penalty is 1, the
    array may be empty.
    """
    tokens: Sequence[int]
    """The tokens sampled so far, for all penalties."""
    forced_token: int | None = None
    """The token to take, whatever the logits are."""


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
    unadjusted = [i for i in range(len(rows)) if i not in adjustments]
    adjusted = sorted(adjustments)
    adjusted_tokens = _sample_adjusted(
        backend,
        logits,
        [params[i] for i in adjusted],
        [uniforms[i] for i in adjusted],
        [rows[i] for i in adjusted],
        [adjustments[i] for i in adjusted],
    )
    if not unadjusted:
        return adjusted_tokens
    unadjusted_tokens = sample_tokens(
        backend,
        logits,
        [params[i] for i in unadjusted],
        [uniforms[i] for i in unadjusted],
        [rows[i] for i in unadjusted],
    )
    output_index = {row: index for index, row in enumerate([*adjusted, *unadjusted])}
    order = on_device([output_index[i] for i in range(len(rows))], torch.int64, logits.device)
    return SampledTokens(
        torch.cat([adjusted_tokens.tokens, unadjusted_tokens.tokens])[order],
        torch.cat([adjusted_tokens.log_normalizer, unadjusted_tokens.log_normalizer])[order],
    )


def adjust_(logits: Tensor, params: SamplingParams, adjustment: Adjustment) -> None:
    """Apply the biases and the penalties to one row of logits [V], in the order of vLLM: biases,
    repetition, frequency and presence.
    """
    if params.logit_bias:
        biased = on_device(list(params.logit_bias), torch.int64, logits.device)
        logits[biased] += on_device([*params.logit_bias.values()], torch.float32, logits.device)
    ids, counts = np.unique(np.array(adjustment.tokens, np.int64), return_counts=True)
    if params.repetition_penalty != 1:
        repeated = torch.from_numpy(np.union1d(adjustment.prompt_tokens, ids)).to(logits.device)
        values, penalty = logits[repeated], params.repetition_penalty
        logits[repeated] = torch.where(values > 0, values / penalty, values * penalty)
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
    row_index = on_device(rows, torch.int64, device)
    temperatures = on_device([p.temperature or 1.0 for p in params], torch.float32, device)
    uniforms_tensor = on_device(uniforms, torch.float64, device)
    masks = _masks(adjustments, logits.shape[1], device)
    tokens, normalizer = backend.sample(logits, row_index, temperatures, uniforms_tensor, masks)
    # `backend.sample` applies only the masks. Its token is -1 if all allowed tokens are very
    # unlikely. These rows, and rows with biases, penalties, filters or temperature 0, are sampled
    # again.
    resampled = [
        row
        for row, (p, token) in enumerate(zip(params, tokens.tolist(), strict=True))
        if adjustments[row].forced_token is None
        and (token < 0 or is_filtered(p) or p.temperature == 0 or _changes_logits(p))
    ]
    if resampled:
        resampled_index = on_device(resampled, torch.int64, device)
        resampled_logits = logits[row_index[resampled_index]]
        for row, adjusted in zip(resampled, resampled_logits, strict=True):
            adjust_(adjusted, params[row], adjustments[row])
        if masks is not None:
            resampled_logits.masked_fill_(
                ~unpacked(masks[resampled_index], logits.shape[1]), -torch.inf
            )
        best = resampled_logits.argmax(1)
        backend.log_sum_exp(
            resampled_logits, temperatures[resampled_index], weights=resampled_logits
        )
        backend.filter_(resampled_logits, [params[row] for row in resampled])
        tokens[resampled_index] = backend.sample_from_weights(
            resampled_logits, uniforms_tensor[resampled_index].unsqueeze(1)
        ).squeeze(1)
        for row, likeliest in zip(resampled, best, strict=True):
            if params[row].temperature == 0:
                tokens[row] = likeliest
    forced_by_row = {
        row: a.forced_token for row, a in enumerate(adjustments) if a.forced_token is not None
    }
    if forced_by_row:
        forced_tokens = on_device(list(forced_by_row.values()), torch.int64, device)
        tokens[on_device(list(forced_by_row), torch.int64, device)] = forced_tokens
    return SampledTokens(tokens, normalizer)


def _masks(
    adjustments: Sequence[Adjustment], vocab_size: int, device: torch.device
) -> Tensor | None:
    """Return the masks of all rows: int32 [N, (V + 31) // 32], or None if no row has a mask."""
    if all(adjustment.allowed_bits is None for adjustment in adjustments):
        return None
    masks = np.full((len(adjustments), -(-vocab_size // 32)), -1, np.int32)
    for row, adjustment in zip(masks, adjustments, strict=True):
        if adjustment.allowed_bits is not None:
            row[:] = adjustment.allowed_bits.view(np.int32)
    return torch.from_numpy(masks).to(device)
