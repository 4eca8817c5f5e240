"""Which requests for samples vLLM can answer, how they are sent, and where their samples end."""

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from planish.engine.sampling.stopping import StopCondition, StopMatcher
from planish.errors import ContextLengthError, UserError
from planish.fleet.vllm.server import Completion, VllmServer
from planish.model.architecture.config import ModelConfig
from planish.service import Sample
from planish.types import SampledSequence, SamplingParams

_MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one."""
_VLLM_PARAMS = ("max_tokens", "seed", "stop", "temperature", "stop_token_ids")
"""The fields of SamplingParams with the same meaning in vLLM."""
_VLLM_FIELDS = (
    "sampler_id", "prompt", "num_samples", "sampling_params", "owner",
    "record_stability_info", "prompt_logprobs_last_n",
)  # fmt: skip
"""The fields of Sample that need nothing of vLLM, or that vLLM has."""


def engine_options(operation: Sample) -> list[str]:
    """Return the options of a request for which vLLM would not give planish's results."""
    params, defaults = operation.sampling_params, SamplingParams()
    names = [
        name.name
        for name in fields(params)
        if name.name not in _VLLM_PARAMS
        and getattr(params, name.name) != getattr(defaults, name.name)
    ]
    names += [
        name.name
        for name in fields(operation)
        if name.name not in _VLLM_FIELDS
        and getattr(operation, name.name) not in (None, False, 0, ())
    ]
    if operation.prompt.images:
        names.append("images")
    if 0 < params.temperature < _MIN_TEMPERATURE:
        names.append(f"temperature below {_MIN_TEMPERATURE:g}")
    if params.temperature == 0 and operation.num_samples > 1:
        names.append("num_samples above 1 at temperature 0")
    return names


def request_options(operation: Sample, config: ModelConfig, server: VllmServer) -> dict[str, Any]:
    """Return the options of a request to a server. Raise ContextLengthError if the prompt and the
    sample are too long for the server.
    """
    params = operation.sampling_params
    room = min(config.max_context, server.max_context) - operation.prompt.length
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if not 0 < max_tokens <= room:
        raise ContextLengthError(
            f"This model's maximum context length is {server.max_context} tokens on the vLLM "
            f"server {server.url}. The prompt's {operation.prompt.length} tokens leave {room}, but "
            f"max_tokens is {max_tokens}"
        )
    stop = config.eos_token_ids if params.stop is None else params.stop
    items = (stop,) if isinstance(stop, str) else stop
    ids = [item for item in items if not isinstance(item, str)]
    options = {
        "n": operation.num_samples,
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "seed": None if params.seed is None else _vllm_seed(params.seed),
        "stop_token_ids": [*ids, *params.stop_token_ids],
        "ignore_eos": True,  # only the stop tokens and stop strings end a sample
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    strings = [item for item in items if isinstance(item, str)]
    return {**options, "stop": strings} if strings else options


async def ended_sample(
    server: VllmServer,
    name: str,
    prompt: list[int],
    options: Mapping[str, Any],
    completion: Completion,
    stop: StopCondition,
) -> Completion:
    """Return a sample of a request with stop strings, up to where planish ends it. vLLM decodes
    text otherwise, so it may end a sample where planish finds no stop string. Then the sample is
    continued.
    """
    max_tokens = options["max_tokens"]
    while (ended := _up_to_stop(completion, stop, max_tokens)) is None:
        _check_reason(completion)
        num_tokens = len(completion.tokens)
        seed = options["seed"]
        rest = {
            "n": 1,
            "max_tokens": max_tokens - num_tokens,
            "seed": None if seed is None else _vllm_seed(seed + num_tokens),
            "stop": [],
        }
        (more,) = await server.complete(
            name, [*prompt, *completion.tokens.tolist()], **{**options, **rest}
        )
        completion = Completion(
            np.concatenate([completion.tokens, more.tokens]),
            np.concatenate([completion.logprobs, more.logprobs]),
            more.finish_reason,
        )
    return ended


def sampled_sequence(completion: Completion, sequence_id: str) -> SampledSequence:
    """Return a sample as planish's type."""
    _check_reason(completion)
    return SampledSequence(
        "stop" if completion.finish_reason == "stop" else "length",
        sequence_id,
        completion.tokens,
        completion.logprobs,
    )


def _up_to_stop(completion: Completion, stop: StopCondition, max_tokens: int) -> Completion | None:
    """Return a sample up to its first stop token or stop string, or None if it ends before."""
    matcher, tokens = StopMatcher(stop), list[int]()
    for token in completion.tokens.tolist():
        tokens.append(token)
        if matcher.text_end(tokens) is not None:
            end = len(tokens)
            return Completion(completion.tokens[:end], completion.logprobs[:end], "stop")
    if len(tokens) < max_tokens:
        return None
    return Completion(completion.tokens, completion.logprobs, "length")


def _check_reason(completion: Completion) -> None:
    if completion.finish_reason not in ("stop", "length"):
        raise UserError(f"vLLM has ended a sample with {completion.finish_reason!r}")


def _vllm_seed(seed: int) -> int:
    """Return a seed for vLLM, which adds the index of a sample to it. So seeds that follow each
    other must not remain neighbours.
    """
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:7])
