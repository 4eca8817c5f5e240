"""Prompt scores: the logprobs and alternative tokens that a request asks for.

There are four kinds: the prompt's logprobs, the top-k logprobs, the logprobs of given target
tokens, and alternative tokens sampled at every position. The alternative tokens use the request's
sampling parameters. All other scores are at temperature 1.

Scores are computed block by block while the prompt is prefilled. So even a long prompt has at most
one block of logits in memory.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planish.engine.sampling.randomness import uniforms
from planish.engine.sampling.token_sampling import sample_many, top_logprobs
from planish.model.decoder.head import token_logprobs
from planish.model.kernels.interface.backend import Backend
from planish.service import Sample
from planish.types import PromptAltTokens, TensorData, TopkLogprobs

MAX_SCORED_ROWS = 128
"""The maximum number of prompt positions whose logits are in memory at a time."""
_ALT_STREAM = 1
"""The `purpose` of `uniforms` for alternative tokens. Samples have purpose 0."""

ExactLogits = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function (hidden [R, D], rows [P], tokens [P]) -> float32 logits [P].

It computes the logit of tokens[i] at row rows[i] of `hidden` with a float32 dot product.
"""


def wants_prompt_scores(op: Sample) -> bool:
    """Return whether the request wants any prompt scores."""
    return (
        op.prompt_logprobs
        or op.topk_prompt_logprobs > 0
        or op.target_prompt_logprobs is not None
        or op.prompt_alt_tokens_k > 0
    )


@dataclass
class PromptScores:
    """The prompt scores of one request, filled by calls of `add`.

    Entry i of `logprobs` and `top_logprobs` belongs to prompt token i. Entry 0 stays undefined,
    because no position predicts the first token. Entry i of `target_logprobs` and `alternatives`
    belongs to prompt token i + 1.
    """

    op: Sample
    tokens: list[int]
    seed: int
    backend: Backend

    def __post_init__(self) -> None:
        """Allocate the arrays of the scores that the request wants."""
        n, op = len(self.tokens), self.op
        self._first_index = (
            1 if op.prompt_logprobs_last_n is None else max(1, n - op.prompt_logprobs_last_n)
        )
        self.logprobs = np.full(n, np.nan, np.float32) if op.prompt_logprobs else None
        """The logprobs of the prompt tokens, float32 [n], NaN where none was requested."""
        k = op.topk_prompt_logprobs
        self.top_logprobs = (
            TopkLogprobs(np.zeros((n, k), np.int32), np.full((n, k), np.nan, np.float32))
            if k
            else None
        )
        """The k likeliest tokens at each prompt token and their logprobs: [n, k]."""
        self._target_ids = (
            op.target_prompt_logprobs.to_numpy() if op.target_prompt_logprobs is not None else None
        )
        self._target_logprobs = (
            np.zeros(self._target_ids.shape, np.float32) if self._target_ids is not None else None
        )
        num_alt_tokens = op.prompt_alt_tokens_k
        self._alt_arrays = (
            (
                np.zeros((n - 1, num_alt_tokens), np.int64),
                np.zeros((n - 1, num_alt_tokens), np.float32),
            )
            if num_alt_tokens
            else None
        )

    @property
    def first_position(self) -> int:
        """The first position whose hidden state is needed for a score.

        Cached positions before this position need neither a prefill nor scoring.
        """
        if self._alt_arrays is not None:
            return 0
        needed_positions = (
            [self._first_index - 1]
            if self.logprobs is not None or self.top_logprobs is not None
            else []
        )
        if self._target_ids is not None:
            is_requested = np.any(
                self._target_ids >= 0, axis=tuple(range(1, self._target_ids.ndim))
            )
            needed_positions.append(
                int(is_requested.argmax()) if is_requested.any() else len(self.tokens) - 1
            )
        return min(needed_positions)

    def add(
        self,
        start: int,
        hidden: Tensor,
        logits: Callable[[Tensor], Tensor],
        exact_logits: ExactLogits,
    ) -> None:
        """Score prompt positions start .. start + R - 1 from their hidden states [R, D].

        The hidden state of position i predicts token i + 1. `logits` turns hidden states into
        float32 logits [R, V].
        """
        stop = min(start + hidden.shape[0], len(self.tokens) - 1)
        for first in range(max(start, self.first_position), stop, MAX_SCORED_ROWS):
            block = hidden[first - start : min(first + MAX_SCORED_ROWS, stop) - start]
            self._add_block(first + 1, block, logits(block), exact_logits)

    def _add_block(
        self, first_index: int, hidden: Tensor, logits: Tensor, exact_logits: ExactLogits
    ) -> None:
        """Score one block. Row r of `hidden` and `logits` predicts token `first_index` + r."""
        span = range(first_index, first_index + logits.shape[0])
        scratch, ones = logits.clone(), logits.new_ones(logits.shape[:1])
        normalizer = self.backend.log_sum_exp(scratch, ones, weights=scratch)
        device = logits.device
        rows = torch.arange(len(span), device=device)
        if self.logprobs is not None:
            ids = torch.tensor([self.tokens[i] for i in span], device=device)
            values = token_logprobs(exact_logits(hidden, rows, ids), normalizer).cpu().numpy()
            is_requested = np.array([i >= self._first_index for i in span])
            self.logprobs[span.start : span.stop][is_requested] = values[is_requested]
        if self.top_logprobs is not None:
            ids, values = top_logprobs(
                logits,
                normalizer,
                torch.ones(len(span), device=device),
                self.top_logprobs.token_ids.shape[1],
            )
            keep = slice(max(span.start, self._first_index), span.stop)
            skip = keep.start - span.start
            self.top_logprobs.token_ids[keep] = ids[skip:].cpu().numpy()
            self.top_logprobs.logprobs[keep] = values[skip:].cpu().numpy()
        if self._target_ids is not None and self._target_logprobs is not None:
            target_ids = torch.from_numpy(self._target_ids[span.start - 1 : span.stop - 1]).to(
                device
            )
            indices = (target_ids >= 0).nonzero(as_tuple=True)
            if len(indices[0]):
                target_logits = exact_logits(hidden, indices[0], target_ids[indices])
                values = token_logprobs(target_logits, normalizer[indices[0]])
                at = (indices[0].cpu().numpy() + span.start - 1, indices[1].cpu().numpy())
                self._target_logprobs[at] = values.cpu().numpy()
        if self._alt_arrays is not None:
            self._sample_alternatives(span, hidden, logits, exact_logits)

    def _sample_alternatives(
        self, span: range, hidden: Tensor, logits: Tensor, exact_logits: ExactLogits
    ) -> None:
        """Sample alternative tokens for the prompt tokens in `span`."""
        assert self._alt_arrays is not None
        params, k = self.op.sampling_params, self.op.prompt_alt_tokens_k
        uniforms_tensor = torch.from_numpy(uniforms(self.seed, _ALT_STREAM, span, range(k))).to(
            logits.device
        )
        sampled = sample_many(self.backend, logits, params, uniforms_tensor)
        tokens = sampled.tokens.flatten()
        rows = torch.arange(len(span), device=logits.device).repeat_interleave(k)
        scaled_logits = exact_logits(hidden, rows, tokens) / (params.temperature or 1.0)
        logprobs = token_logprobs(scaled_logits, sampled.log_normalizer[rows])
        positions = slice(span.start - 1, span.stop - 1)
        self._alt_arrays[0][positions] = sampled.tokens.cpu().numpy()
        self._alt_arrays[1][positions] = logprobs.view(-1, k).cpu().numpy()

    @property
    def is_finite(self) -> bool:
        """Whether all requested scores are finite. In the result, NaN stands for no request."""
        scores = [self._target_logprobs, self._alt_arrays[1] if self._alt_arrays else None]
        if self.logprobs is not None:
            scores.append(self.logprobs[self._first_index :])
        if self.top_logprobs is not None:
            scores.append(self.top_logprobs.logprobs[self._first_index :])
        return all(np.isfinite(values).all() for values in scores if values is not None)

    @property
    def target_logprobs(self) -> TensorData | None:
        """The logprobs of the target tokens, float32 [n - 1, K], 0 where the target is -1."""
        return (
            TensorData.from_numpy(self._target_logprobs)
            if self._target_logprobs is not None
            else None
        )

    @property
    def alternatives(self) -> PromptAltTokens | None:
        """The sampled alternative tokens and their logprobs: [n - 1, k]."""
        if self._alt_arrays is None:
            return None
        return PromptAltTokens(
            TensorData.from_numpy(self._alt_arrays[0]), TensorData.from_numpy(self._alt_arrays[1])
        )
