"""The selection of the next tokens: from the logits of a step to the tokens of its samples.

Every sample gets one token. A constrained sample gets its forced tokens too, or none if its mask is
missing. `select` computes the tokens and their logprobs on the device. `append` takes them from
there and appends them to the samples. Samples that meet a stop condition or reach `max_tokens` end.
"""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planish.engine.constraints.cache import GrammarCache
from planish.engine.constraints.grammar import GrammarState
from planish.engine.sampling.adjustments import Adjustment, sample_batch
from planish.engine.sampling.delivery import call_on_token, non_finite_error
from planish.engine.sampling.masks import allowed_tokens, has_usable_mask, wait_after_pass
from planish.engine.sampling.plan import PendingTokens, SampleRows, StepOutput
from planish.engine.sampling.requests import RunningSample
from planish.engine.sampling.sampling_head import SamplingHead
from planish.engine.sampling.token_sampling import sample_tokens, top_logprobs
from planish.model.decoder.base_decoder import BaseDecoder
from planish.model.decoder.head import token_logprobs
from planish.model.device import HostCopies, on_device
from planish.model.layers.lora import AdapterRange

_NO_TOKENS = np.zeros(0, np.int64)


@dataclass(slots=True)
class _NextToken:
    """A token to sample, or a forced token to take, in one step."""

    sample: RunningSample
    row: int
    """The batch row whose logits the token is sampled from."""
    index: int
    """The token's index within its sample."""
    adjustment: Adjustment | None = None
    """How the logits are adjusted first. None: the logits are used as they are."""


@dataclass(frozen=True, eq=False)
class _SampledValues:
    """The ids of the N next tokens of a step on the device, with their logprobs, in the order of
    `_NextToken`s. Their copies in host memory arrive asynchronously.
    """

    token_ids: Tensor
    """int64 [N]."""
    copies: HostCopies
    """"tokens" (int64 [N]) and "logprobs" (float32 [N]). If requests name tokens
    (`Sample.logprob_token_ids`): "listed_logprobs", those of these tokens, float32, one request
    after another. If a request wants the k likeliest tokens at each token, the likeliest first:
    "top_tokens" (int64 [N, k]) and "top_logprobs" (float32 [N, k]).
    """


@dataclass(frozen=True, eq=False)
class SelectedTokens:
    """The tokens of a step, which the device may still be computing."""

    next_tokens: Sequence[_NextToken]
    exhausted_samples: Sequence[RunningSample]
    """The constrained samples whose text is complete and cannot be continued."""
    values: _SampledValues | None
    """None if there are no next tokens."""

    def as_pending(self) -> PendingTokens:
        """Return the tokens on the device for the plan of the next step."""
        assert self.values is not None
        return PendingTokens(
            self.values.token_ids,
            {token.sample: index for index, token in enumerate(self.next_tokens)},
        )


class Selection:
    """The selection of tokens for the samples of one sampler."""

    def __init__(
        self, decoder: BaseDecoder, head: SamplingHead, grammars: GrammarCache | None
    ) -> None:
        """`grammars` computes the masks of constrained samples."""
        self._backend = decoder.backend
        self._vocab_size = decoder.config.vocab_size
        self._head, self._grammars = head, grammars

    def select(self, rows: SampleRows, output: StepOutput) -> SelectedTokens:
        """Select the next tokens of the samples.

        A GPU may still compute them when this method returns. It waits for adjusted tokens only.
        """
        wait_after_pass(rows.grammar_states)
        next_tokens, exhausted_samples = self._next_tokens(rows)
        values = self._sample(next_tokens, output, rows.adapters) if next_tokens else None
        return SelectedTokens(next_tokens, exhausted_samples, values)

    def append(self, selected: SelectedTokens) -> list[RunningSample]:
        """Wait for the tokens, append them to their samples, and return the samples that ended.

        A logprob that is not finite fails its request. Tokens of samples that had ended before, and
        of requests that are answered, are dropped.
        """
        ended_samples: list[RunningSample] = []
        if selected.values is not None:
            ended_samples = self._append(selected.next_tokens, selected.values.copies.wait())
        for sample in selected.exhausted_samples:
            if sample.stop_reason is None:
                sample.stop_reason = "stop"
                ended_samples.append(sample)
        return ended_samples

    def _next_tokens(self, rows: SampleRows) -> tuple[list[_NextToken], list[RunningSample]]:
        """Return the tokens to sample in this step, and the exhausted samples.

        A sample with forced tokens has several tokens. Samples whose mask is missing, and samples
        whose grammar failed, have none. The text of an exhausted sample is complete and cannot be
        continued.
        """
        next_tokens: list[_NextToken] = []
        exhausted_samples: list[RunningSample] = []
        for sample, row in zip(rows.samples, rows.first_rows, strict=True):
            index = sample.num_tokens
            if not sample.request.is_adjusted:
                next_tokens.append(_NextToken(sample, row, index))
                continue
            assert not sample.num_pending_tokens  # Its mask or its penalties depend on all tokens.
            if sample.grammar is not None and not has_usable_mask(sample, sample.grammar):
                continue
            # Each row of the sample gives the logprob of one token. If the mask was computed during
            # this step, there may be more forced tokens than rows. The sample then takes one forced
            # token per row, and later steps take the others.
            forced_tokens = sample.forced_tokens[: sample.num_rows]
            for number, token in enumerate(forced_tokens):
                adjustment = Adjustment(None, _NO_TOKENS, (), token)
                next_tokens.append(_NextToken(sample, row + number, index + number, adjustment))
            if len(forced_tokens) == sample.num_rows:
                continue
            row, index = row + len(forced_tokens), index + len(forced_tokens)
            allowed_bits = allowed_tokens(sample, index, self._vocab_size)
            if allowed_bits is None and sample.grammar is not None:
                exhausted_samples.append(sample)
                continue
            penalty = sample.request.op.sampling_params.repetition_penalty
            prompt_tokens = sample.prompt.distinct_tokens if penalty != 1 else _NO_TOKENS
            previous_tokens = [*sample.tokens, *forced_tokens] if forced_tokens else sample.tokens
            adjustment = Adjustment(allowed_bits, prompt_tokens, previous_tokens)
            next_tokens.append(_NextToken(sample, row, index, adjustment))
        return next_tokens, exhausted_samples

    def _sample(
        self,
        next_tokens: Sequence[_NextToken],
        output: StepOutput,
        adapters: Sequence[AdapterRange],
    ) -> _SampledValues:
        """Sample the tokens and compute their logprobs."""
        logits = output.logits
        assert logits is not None
        params = [token.sample.request.op.sampling_params for token in next_tokens]
        uniforms = [token.sample.uniform_stream.at(token.index) for token in next_tokens]
        rows = [token.row for token in next_tokens]
        adjustments = {
            i: token.adjustment
            for i, token in enumerate(next_tokens)
            if token.adjustment is not None
        }
        if adjustments:
            sampled = sample_batch(self._backend, logits, params, uniforms, rows, adjustments)
        else:
            sampled = sample_tokens(self._backend, logits, params, uniforms, rows)
        sampled_logits = self._head.sampled_logits(
            output.hidden, logits, rows, sampled.tokens, adapters
        )
        temperature = on_device(
            [p.temperature or 1.0 for p in params], torch.float32, logits.device
        )
        logprobs = token_logprobs(sampled_logits / temperature, sampled.log_normalizer)
        values = {"tokens": sampled.tokens, "logprobs": logprobs}
        listed_ids = [token.sample.request.op.logprob_token_ids for token in next_tokens]
        if any(listed_ids):
            values["listed_logprobs"] = self._head.listed_logprobs(
                output.hidden,
                logits,
                rows,
                listed_ids,
                sampled.log_normalizer,
                temperature,
                adapters,
            )
        max_topk = max(token.sample.request.op.topk_sample_logprobs for token in next_tokens)
        if max_topk:
            if rows != list(range(logits.shape[0])):
                logits = logits[on_device(rows, torch.int64, logits.device)]
            values["top_tokens"], values["top_logprobs"] = top_logprobs(
                logits, sampled.log_normalizer, temperature, max_topk
            )
        return _SampledValues(sampled.tokens, HostCopies(values, self._backend.device))

    def _append(
        self, next_tokens: Sequence[_NextToken], values: Mapping[str, Tensor]
    ) -> list[RunningSample]:
        """Append the tokens to their samples. Return the samples that stop.

        `values`: see `_SampledValues.copies`.
        """
        arrays = {name: values[name].numpy() for name in values}
        stopped_samples: list[RunningSample] = []
        grammar_tokens: list[tuple[GrammarState, int]] = []
        num_listed = 0
        for i, (token, token_id, logprob) in enumerate(
            zip(next_tokens, arrays["tokens"].tolist(), arrays["logprobs"].tolist(), strict=True)
        ):
            sample = token.sample
            request = sample.request
            listed_ids, first_listed = request.op.logprob_token_ids, num_listed
            num_listed += len(listed_ids)
            if sample.stop_reason is not None or request.is_answered:
                # The sample stopped at a forced token before this one, or the step before this one
                # stopped it, or its request has failed or was cancelled.
                continue
            if not math.isfinite(logprob):
                # Only this request fails: the rows of a batch are independent, so the NaN or inf
                # cannot have reached the other rows.
                request.fail(non_finite_error(request.op.sampler_id))
                continue
            sample.tokens.append(token_id)
            sample.logprobs.append(logprob)
            k = request.op.topk_sample_logprobs
            # Arrays are invisible to the garbage collector, lists are not. A step with many samples
            # would otherwise make thousands of lists for it to examine.
            if listed_ids:
                sample.top_tokens.append(np.array(listed_ids, np.int32))
                listed_logprobs = arrays["listed_logprobs"][first_listed:num_listed]
                sample.top_logprobs.append(listed_logprobs.copy())
            elif k:
                sample.top_tokens.append(arrays["top_tokens"][i, :k].astype(np.int32))
                sample.top_logprobs.append(arrays["top_logprobs"][i, :k].copy())
            try:
                text_end = sample.stop_matcher.text_end(sample.tokens)
            except Exception as error:
                # The tokenizer failed on these tokens, which belong to this request alone.
                request.fail(error)
                continue
            if text_end is not None:
                sample.stop_reason = "stop"
            elif len(sample.tokens) == request.max_tokens:
                sample.stop_reason = "length"
            if request.op.on_token is not None:
                call_on_token(sample, text_end, request.op.on_token)
            if sample.stop_reason is not None:
                stopped_samples.append(sample)
            elif sample.grammar is not None and token.adjustment is not None:
                if token.adjustment.forced_token is None:
                    grammar_tokens.append((sample.grammar, token_id))
                else:
                    del sample.grammar.forced_tokens[0]
        if grammar_tokens and self._grammars is not None:
            self._grammars.advance(grammar_tokens)
        return stopped_samples
