"""Sampling of tokens from logits: temperature, filters (top_k, top_p, min_p), one token per row.

A token is sampled by inverting the cumulative distribution at a uniform number. This number depends
only on (seed, sample index, position), so the sampled token does not depend on the batch.
`torch.multinomial` is not used. It generates a random number per vocabulary entry, which takes
longer than the rest of a decoding step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from planish.model.decoder.head import token_logprobs
from planish.model.device import on_device
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.reference.token_sampling import is_filtered
from planish.types import SamplingParams


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens and the log normalizers of their rows.

    `tokens` is int64 [B], or [R, K] from `sample_many`. `log_normalizer` is float32, one per row:
    the log of the sum of exp(logits / temperature).
    """

    tokens: Tensor
    log_normalizer: Tensor


def sample_tokens(
    backend: Backend,
    logits: Tensor,
    params: list[SamplingParams],
    uniforms: list[float],
    rows: list[int] | None = None,
) -> SampledTokens:
    """Sample one token from each row of float32 logits [R, V], or from each row in `rows`.

    `params` and `uniforms` have one entry per sampled token. With temperature 0 the likeliest token
    is sampled, and the normalizer is that of the unscaled logits. Normalizers are computed before
    top_k, top_p and min_p. If a row has a logit that is not finite, its normalizer is not finite
    either, and its token is undefined.
    """
    device = logits.device
    temperatures = on_device([p.temperature or 1.0 for p in params], torch.float32, device)
    uniforms_tensor = on_device(uniforms, torch.float64, device)
    row_index = None if rows is None else on_device(rows, torch.int64, device)
    if any(map(is_filtered, params)):
        weights = logits.clone() if row_index is None else logits[row_index]
        normalizer = backend.log_sum_exp(weights, temperatures, weights=weights)
        backend.filter_(weights, params)
        tokens = backend.sample_from_weights(weights, uniforms_tensor.unsqueeze(1)).squeeze(1)
    else:
        tokens, normalizer = backend.sample(logits, row_index, temperatures, uniforms_tensor)
    if any(p.temperature == 0 for p in params):
        greedy = on_device([p.temperature == 0 for p in params], torch.bool, device)
        best = logits.argmax(-1) if row_index is None else logits.argmax(-1)[row_index]
        tokens = torch.where(greedy, best, tokens)
    return SampledTokens(tokens, normalizer)


def sample_many(
    backend: Backend, logits: Tensor, params: SamplingParams, uniforms: Tensor
) -> SampledTokens:
    """Sample K tokens from each row of float32 logits [R, V].

    `uniforms` is float64 [R, K], and the sampled tokens are [R, K]. Token [i, j] is the token that
    `sample_tokens` samples from row i with the uniform number [i, j].
    """
    weights = logits.clone()
    temperatures = logits.new_full(logits.shape[:1], params.temperature or 1.0)
    normalizer = backend.log_sum_exp(weights, temperatures, weights=weights)
    if params.temperature == 0:
        return SampledTokens(
            logits.argmax(-1, keepdim=True).expand(-1, uniforms.shape[1]), normalizer
        )
    backend.filter_(weights, [params] * len(logits))
    return SampledTokens(backend.sample_from_weights(weights, uniforms), normalizer)


def top_logprobs(
    logits: Tensor, normalizer: Tensor, temperature: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Return the k likeliest tokens of each row and their logprobs, the likeliest first.

    Both results are [B, k], int64 and float32. `normalizer` and `temperature` are [B].
    """
    values, tokens = logits.topk(k, dim=-1)
    return tokens, token_logprobs(values / temperature.unsqueeze(1), normalizer.unsqueeze(1))
