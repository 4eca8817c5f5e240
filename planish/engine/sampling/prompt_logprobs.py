"""Prompt scores: the logprobs and alternative tokens that a request asks for.

There are four kinds: the prompt's logprobs, the top-k logprobs, the logprobs of given target
tokens, and alternative tokens sampled at every position. The alternative tokens use the request's
sampling parameters. All other scores are at temperature 1.

Scores are computed block by block while the prompt is prefilled. So even a long prompt has at most
one block of logits in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planish.engine.sampling.randomness import uniforms
from planish.engine.sampling.token_sampling import sample_many, top_logprobs
from planish.model.kernels.backend import Backend
from planish.service import Sample
from planish.types import PromptAltTokens, TensorData, TopkLogprobs

SCORED_ROWS = 128
"""The maximum number of prompt positions whose logits are in memory at a time."""
_ALT_STREAM = 1
"""The `purpose` of `uniforms` for alternative tokens. Samples have purpose 0."""

ExactLogits = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function (hidden [R, D], rows [P], tokens [P]) -> float32 logits [P].

It computes the logit of tokens[i] at row rows[i] of `hidden` with a float32 dot product.
"""


def wants_prompt_logprobs(op: Sample) -> bool:
    """Return whether the request wants any prompt scores."""
    return (
        op.prompt_logprobs
        or op.topk_prompt_logprobs > 0
        or op.target_prompt_logprobs is not None
        or op.prompt_alt_tokens_k > 0
    )


@dataclass
class PromptLogprobs:
    """The prompt scores of one request, filled by calls of `add`.

    Entry i of `logprobs` and `top` belongs to prompt token i. Entry 0 stays undefined, because no
    position predicts the first token. Entry i of `targets` and `alternatives` belongs to prompt
    token i + 1.
    """

    op: Sample
    tokens: list[int]
    seed: int
    backend: Backend

    def __post_init__(self) -> None:
        """Allocate the arrays of the scores that the request wants."""
        n, op = len(self.tokens), self.op
        self._first = (
            1 if op.prompt_logprobs_last_n is None else max(1, n - op.prompt_logprobs_last_n)
        )
        self.logprobs = np.full(n, np.nan, np.float32) if op.prompt_logprobs else None
        """The logprobs of the prompt tokens, float32 [n], NaN where none was requested."""
        k = op.topk_prompt_logprobs
        self.top = (
            TopkLogprobs(np.zeros((n, k), np.int32), np.full((n, k), np.nan, np.float32))
            if k
            else None
        )
        """The k likeliest tokens at each prompt token and their logprobs: [n, k]."""
        self._targets = (
            op.target_prompt_logprobs.to_numpy() if op.target_prompt_logprobs is not None else None
        )
        self._target_logprobs = (
            np.zeros(self._targets.shape, np.float32) if self._targets is not None else None
        )
        alt = op.prompt_alt_tokens_k
        self._alt = (
            (np.zeros((n - 1, alt), np.int64), np.zeros((n - 1, alt), np.float32)) if alt else None
        )

    @property
    def first_position(self) -> int:
        """The first position whose hidden state is needed for a score.

        Cached positions before this position need neither a prefill nor scoring.
        """
        if self._alt is not None:
            return 0
        least = [self._first - 1] if self.logprobs is not None or self.top is not None else []
        if self._targets is not None:
            asked_for = np.any(self._targets >= 0, axis=tuple(range(1, self._targets.ndim)))
            least.append(int(asked_for.argmax()) if asked_for.any() else len(self.tokens) - 1)
        return min(least)

    def add(
        self, start: int, hidden: Tensor, logits: Callable[[Tensor], Tensor], exact: ExactLogits
    ) -> None:
        """Score prompt positions start .. start + R - 1 from their hidden states [R, D].

        The hidden state of position i predicts token i + 1. `logits` turns hidden states into
        float32 logits [R, V].
        """
        stop = min(start + hidden.shape[0], len(self.tokens) - 1)
        for first in range(max(start, self.first_position), stop, SCORED_ROWS):
            last = min(first + SCORED_ROWS, stop)
            block = hidden[first - start : last - start]
            self._add_block(first + 1, block, logits(block), exact)

    def _add_block(self, token: int, hidden: Tensor, logits: Tensor, exact: ExactLogits) -> None:
        """Score one block. Row r of `hidden` and `logits` predicts prompt token `token` + r."""
        span = range(token, token + logits.shape[0])
        scratch, ones = logits.clone(), logits.new_ones(logits.shape[:1])
        normalizer = self.backend.log_sum_exp(scratch, ones, weights=scratch)
        device = logits.device
        rows = torch.arange(len(span), device=device)
        if self.logprobs is not None:
            ids = torch.tensor([self.tokens[i] for i in span], device=device)
            values = (exact(hidden, rows, ids) - normalizer).cpu().numpy()
            asked_for = np.array([i >= self._first for i in span])
            self.logprobs[span.start : span.stop][asked_for] = values[asked_for]
        if self.top is not None:
            ids, values = top_logprobs(
                logits,
                normalizer,
                torch.ones(len(span), device=device),
                self.top.token_ids.shape[1],
            )
            keep = slice(max(span.start, self._first), span.stop)
            skip = keep.start - span.start
            self.top.token_ids[keep] = ids[skip:].cpu().numpy()
            self.top.logprobs[keep] = values[skip:].cpu().numpy()
        if self._targets is not None and self._target_logprobs is not None:
            wanted = torch.from_numpy(self._targets[span.start - 1 : span.stop - 1]).to(device)
            indices = (wanted >= 0).nonzero(as_tuple=True)
            if len(indices[0]):
                values = exact(hidden, indices[0], wanted[indices]) - normalizer[indices[0]]
                at = (indices[0].cpu().numpy() + span.start - 1, indices[1].cpu().numpy())
                self._target_logprobs[at] = values.cpu().numpy()
        if self._alt is not None:
            self._sample_alternatives(span, hidden, logits, exact)

    def _sample_alternatives(
        self, span: range, hidden: Tensor, logits: Tensor, exact: ExactLogits
    ) -> None:
        """Sample alternative tokens for the prompt tokens in `span`."""
        assert self._alt is not None
        params, k = self.op.sampling_params, self.op.prompt_alt_tokens_k
        numbers = torch.from_numpy(uniforms(self.seed, _ALT_STREAM, span, range(k))).to(
            logits.device
        )
        sampled = sample_many(self.backend, logits, params, numbers)
        tokens = sampled.tokens.flatten()
        rows = torch.arange(len(span), device=logits.device).repeat_interleave(k)
        logprobs = (
            exact(hidden, rows, tokens) / (params.temperature or 1.0) - sampled.log_normalizer[rows]
        )
        at = slice(span.start - 1, span.stop - 1)
        self._alt[0][at] = sampled.tokens.cpu().numpy()
        self._alt[1][at] = logprobs.view(-1, k).cpu().numpy()

    @property
    def targets(self) -> TensorData | None:
        """The logprobs of the target tokens, float32 [n - 1, K], 0 where the target is -1."""
        return (
            TensorData.from_numpy(self._target_logprobs)
            if self._target_logprobs is not None
            else None
        )

    @property
    def alternatives(self) -> PromptAltTokens | None:
        """The sampled alternative tokens and their logprobs: [n - 1, k]."""
        if self._alt is None:
            return None
        return PromptAltTokens(
            TensorData.from_numpy(self._alt[0]), TensorData.from_numpy(self._alt[1])
        )
