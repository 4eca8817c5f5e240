"""Validation of sampling requests, before anything is queued."""

import math
from collections.abc import Sequence

from planish.engine.sampling.adjustments import is_adjusted
from planish.engine.sampling.prompt_scores import wants_prompt_scores
from planish.errors import ContextLengthError, UserError
from planish.model.architecture.config import ModelConfig
from planish.model.vision.image_tokens import InputTokens
from planish.service import Sample
from planish.types import MAX_SCORED_TOKENS

MAX_RESPONSE_BYTES = 512 << 20
"""The maximum size of one response in bytes, in memory and as a message to a client."""


def max_tokens_of(op: Sample, prompt_length: int, config: ModelConfig) -> int:
    """Return the maximum number of tokens that each sample of the request may have.

    `prompt_length`: the number of tokens of the prompt. The default is the remainder of the model's
    context. A prompt-only request has 0.
    """
    if op.prompt_only:
        return 0
    requested = op.sampling_params.max_tokens
    return config.max_context - prompt_length if requested is None else requested


def check_sample(op: Sample, model_input: InputTokens, config: ModelConfig) -> None:
    """Raise UserError, which names the argument and the remedy, if the request is invalid.

    `model_input`: the tokens and images of the prompt.
    """
    tokens = model_input.tokens
    if not tokens:
        raise UserError(
            "prompt is empty; give at least one token (the model's BOS token, for instance)"
        )
    if not model_input.images:
        _check_vocabulary("prompt", tokens, config.vocab_size)
    length = len(tokens)
    max_tokens = max_tokens_of(op, length, config)
    limit = f"this model's maximum context length is {config.max_context} tokens"
    if length > config.max_context:
        raise ContextLengthError(f"{limit}, but the prompt has {length} tokens; shorten the prompt")
    if not op.prompt_only and length == config.max_context:
        raise ContextLengthError(
            f"{limit}. The prompt has as many, so no token can be sampled; shorten the prompt"
        )
    if not op.prompt_only and length + max_tokens > config.max_context:
        raise ContextLengthError(
            f"{limit}. The prompt's {length} tokens leave {config.max_context - length}, but "
            f"max_tokens={max_tokens} is more; shorten the prompt or lower max_tokens"
        )
    _check_stop_ids(op.sampling_params.stop, config.vocab_size)
    _check_vocabulary(
        "SamplingParams.stop_token_ids", op.sampling_params.stop_token_ids, config.vocab_size
    )
    params = op.sampling_params
    _check_vocabulary("SamplingParams.logit_bias", [*params.logit_bias], config.vocab_size)
    _check_vocabulary(
        "SamplingParams.allowed_token_ids", params.allowed_token_ids, config.vocab_size
    )
    _check_adjusted(op)
    _check_prompt_scores(op, len(tokens), config.vocab_size)
    _check_response_size(op, len(tokens), max_tokens)


def _check_vocabulary(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raise UserError if a token id of the argument `name` is outside the vocabulary."""
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        invalid_token = next(token for token in tokens if not 0 <= token < vocab_size)
        raise UserError(
            f"{name} contains token id {invalid_token}, which is outside the vocabulary; give "
            f"token ids from 0 to {vocab_size - 1}"
        )


def _check_stop_ids(stop: str | Sequence[str] | Sequence[int] | None, vocab_size: int) -> None:
    """Raise UserError if a stop token id is outside the vocabulary."""
    if stop is not None and not isinstance(stop, str):
        _check_vocabulary(
            "SamplingParams.stop", [item for item in stop if not isinstance(item, str)], vocab_size
        )


def _check_adjusted(op: Sample) -> None:
    """Raise UserError if a request has adjustments and is prompt-only or has alternative tokens.

    Adjustments (see adjustments.py) apply to sampled continuations only.
    """
    if (op.prompt_only or op.prompt_alt_tokens_k) and is_adjusted(op.sampling_params):
        name = "prompt_only" if op.prompt_only else "prompt_alt_tokens_k"
        raise UserError(
            f"{name} cannot be used with constraint, min_tokens, logit_bias, allowed_token_ids or "
            "penalties, which apply only to sampled continuations; leave these out"
        )


def _check_prompt_scores(op: Sample, prompt_length: int, vocab_size: int) -> None:
    """Raise UserError if the request's options for logprobs or prompt scores are invalid."""
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if not 0 <= getattr(op, name) <= vocab_size:
            raise UserError(
                f"{name}={getattr(op, name)}: give a number from 0 to the vocabulary's {vocab_size}"
            )
    if len(op.logprob_token_ids) > MAX_SCORED_TOKENS:
        raise UserError(
            f"logprob_token_ids has {len(op.logprob_token_ids):,} token ids; give at most "
            f"{MAX_SCORED_TOKENS:,}"
        )
    _check_vocabulary("logprob_token_ids", op.logprob_token_ids, vocab_size)
    if op.prompt_logprobs_last_n is not None:
        if op.prompt_logprobs_last_n < 1:
            raise UserError(
                f"prompt_logprobs_last_n={op.prompt_logprobs_last_n}: give at least 1, or None for "
                "all"
            )
        if not (op.prompt_logprobs or op.topk_prompt_logprobs):
            raise UserError(
                "prompt_logprobs_last_n limits prompt logprobs, but none are requested; set "
                "include_prompt_logprobs=True"
            )
    if op.prompt_only and not wants_prompt_scores(op):
        raise UserError(
            "prompt_only samples nothing, and no logprobs of the prompt are requested; set "
            "include_prompt_logprobs=True"
        )
    if op.target_prompt_logprobs is not None:
        targets = op.target_prompt_logprobs
        if (
            targets.dtype != "int64"
            or targets.shape is None
            or len(targets.shape) != 2
            or targets.shape[0] != prompt_length - 1
            or targets.shape[1] > vocab_size
        ):
            raise UserError(
                f"target_prompt_logprobs has dtype {targets.dtype} and shape {targets.shape}; give "
                f"int64 [prompt length - 1, K] = [{prompt_length - 1}, K] with K at most "
                f"{vocab_size}, "
                "and -1 for no target"
            )
        target_ids = targets.to_numpy()
        if target_ids.size and (target_ids.min() < -1 or target_ids.max() >= vocab_size):
            raise UserError(
                f"target_prompt_logprobs contains ids outside -1 to {vocab_size - 1}; give token "
                "ids, or -1 for no target"
            )


def _check_response_size(op: Sample, prompt_length: int, max_tokens: int) -> None:
    """Raise UserError if the response could exceed MAX_RESPONSE_BYTES bytes.

    All sampled tokens stay in memory until the last sample of the request has ended.
    """
    targets = op.target_prompt_logprobs
    size = op.num_samples * max_tokens * (8 + 8 * op.num_scored_tokens)
    size += prompt_length * (4 + 8 * op.topk_prompt_logprobs + 12 * op.prompt_alt_tokens_k)
    size += 4 * math.prod(targets.shape or ()) if targets is not None else 0
    if size > MAX_RESPONSE_BYTES:
        raise UserError(
            f"the response could have {size >> 20:,} MiB, and the limit is "
            f"{MAX_RESPONSE_BYTES >> 20}; lower num_samples, max_tokens, "
            "topk_sample_logprobs, topk_prompt_logprobs or prompt_alt_tokens_k"
        )
