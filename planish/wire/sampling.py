"""The request and the response of asample. The response has two encodings: protobuf and JSON.

Undefined logprobs are NaN in planish's arrays. On the wire, an undefined prompt logprob is NaN in
protobuf and null in JSON. An undefined entry of the top tokens has token 0 and logprob -99999.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from planish.errors import UserError
from planish.service import MAX_SAMPLES, Sample
from planish.types import (
    Constraint,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    StopReason,
    TensorData,
    TopkLogprobs,
)
from planish.wire.fields import Fields, shown
from planish.wire.json_pieces import JsonValue
from planish.wire.messages import LENGTH, STOP, SampleResponseMessage, parse_message
from planish.wire.tensors import (
    array_from_bytes,
    check_dense_elements,
    dense_element_count,
    model_input_from_json,
    model_input_to_json,
    tensor_from_json,
    tensor_from_message,
    tensor_to_json,
    tensor_to_message,
)

UNDEFINED_LOGPROB = -99999.0
_MAX_TARGETS = 1 << 22
"""Limit of elements in a CSR tensor of targets, which is journaled in dense form."""

_STOP_REASONS: dict[StopReason, int] = {"stop": STOP, "length": LENGTH}
_STOP_NAMES: dict[int, StopReason] = {number: name for name, number in _STOP_REASONS.items()}


@dataclass(frozen=True)
class SampleRequest:
    """The body of asample."""

    seq_id: int
    """The number of the request in its sampling session. Several copies of one client share a
    session, and each copy uses its own range of numbers.
    """
    operation: Sample


def sample_request_from_json(fields: Fields) -> SampleRequest:
    """Read a sample request.

    Some fields are additions of planish: `prompt_only`, and in `sampling_params` the fields
    `min_p`, `stop_token_ids`, `min_tokens`, the penalties, `constraint`, `logit_bias` and
    `allowed_token_ids`.
    """
    with fields:
        fields.skip("type")
        if not fields.has("sampling_session_id"):
            raise UserError(
                "sampling_session_id is missing; create a sampling session of base_model or "
                "model_path first"
            )
        targets = fields.optional(fields.object, "target_prompt_logprobs")
        operation = Sample(
            sampler_id=fields.identifier("sampling_session_id"),
            prompt=model_input_from_json(fields.object("prompt")),
            num_samples=fields.optional(
                lambda name: fields.integer(name, 1, MAX_SAMPLES), "num_samples", 1
            ),
            sampling_params=_params_from_json(fields.object("sampling_params")),
            prompt_logprobs=fields.optional(fields.boolean, "prompt_logprobs", False),
            topk_prompt_logprobs=_optional_count(fields, "topk_prompt_logprobs"),
            topk_sample_logprobs=_optional_count(fields, "topk_sample_logprobs"),
            target_prompt_logprobs=_dense_targets(tensor_from_json(targets))
            if targets is not None
            else None,
            prompt_alt_tokens_k=_optional_count(fields, "prompt_alt_tokens_k"),
            prompt_logprobs_last_n=fields.optional(fields.integer, "prompt_logprobs_last_n"),
            record_stability_info=fields.optional(fields.boolean, "record_stability_info", False),
            prompt_only=fields.optional(fields.boolean, "prompt_only", False),
        )
        return SampleRequest(fields.integer("seq_id", low=0), operation)


def sample_request_to_json(request: SampleRequest) -> dict[str, Any]:
    """Write a sample request."""
    operation = request.operation
    fields = {
        "type": "sample",
        "sampling_session_id": operation.sampler_id,
        "seq_id": request.seq_id,
        "prompt": model_input_to_json(operation.prompt),
        "num_samples": operation.num_samples,
        "sampling_params": _params_to_json(operation.sampling_params),
        "prompt_logprobs": operation.prompt_logprobs,
        "topk_prompt_logprobs": operation.topk_prompt_logprobs,
        "topk_sample_logprobs": operation.topk_sample_logprobs,
        "prompt_alt_tokens_k": operation.prompt_alt_tokens_k,
        "prompt_only": operation.prompt_only,
    }
    if operation.target_prompt_logprobs is not None:
        fields["target_prompt_logprobs"] = tensor_to_json(operation.target_prompt_logprobs)
    if operation.prompt_logprobs_last_n is not None:
        fields["prompt_logprobs_last_n"] = operation.prompt_logprobs_last_n
    if operation.record_stability_info:
        fields["record_stability_info"] = True
    return fields


def target_count(operation: Sample) -> int:
    """Return the number of logprobs that `target_prompt_logprobs` asks for."""
    targets = operation.target_prompt_logprobs
    return 0 if targets is None else math.prod(targets.shape or ())


def sample_response_to_message(response: SampleResponse) -> bytes:
    """Write a response as protobuf."""
    message = SampleResponseMessage(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        sequence_message = message.sequences.add(stop_reason=_STOP_REASONS[sequence.stop_reason])
        sequence_message.tokens = sequence.tokens_np.astype("<i4", copy=False).tobytes()
        sequence_message.logprobs = sequence.logprobs_np.astype("<f4", copy=False).tobytes()
        if sequence.topk_logprobs_np is not None:
            _write_topk(sequence_message.topk_sampled_logprobs, sequence.topk_logprobs_np)
    if response.prompt_logprobs_np is not None:
        message.prompt_logprobs = response.prompt_logprobs_np.astype("<f4", copy=False).tobytes()
    if response.topk_prompt_logprobs_np is not None:
        _write_topk(message.topk_prompt_logprobs, response.topk_prompt_logprobs_np)
    if response.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(tensor_to_message(response.target_prompt_logprobs))
    if response.prompt_alt_tokens is not None:
        message.prompt_alt_tokens.tokens.CopyFrom(
            tensor_to_message(response.prompt_alt_tokens.tokens)
        )
        message.prompt_alt_tokens.logprobs.CopyFrom(
            tensor_to_message(response.prompt_alt_tokens.logprobs)
        )
    return message.SerializeToString()


def sample_response_from_message(
    body: bytes, sequence_ids: Sequence[str] | None = None
) -> SampleResponse:
    """Read a response from protobuf. `sequence_ids` are the ids that the server sent when it
    accepted the request. Without them, the sequences have empty ids.
    """
    message = parse_message(SampleResponseMessage(), body)
    ids = [""] * len(message.sequences) if sequence_ids is None else sequence_ids
    if len(message.sequences) != len(ids):
        raise UserError(
            f"the answer has {len(message.sequences)} sequences, and {len(ids)} were accepted"
        )
    alt = message.prompt_alt_tokens
    return SampleResponse(
        sequences=[
            _sequence_from_message(sequence, name)
            for sequence, name in zip(message.sequences, ids, strict=True)
        ],
        prompt_logprobs_np=_logprobs_from_bytes(message.prompt_logprobs)
        if message.prompt_logprobs
        else None,
        topk_prompt_logprobs_np=_topk_from_message(message, "topk_prompt_logprobs"),
        target_prompt_logprobs=(
            tensor_from_message(message.target_prompt_logprobs, "target_prompt_logprobs")
            if message.HasField("target_prompt_logprobs")
            else None
        ),
        prompt_alt_tokens=(
            PromptAltTokens(
                tensor_from_message(alt.tokens, "prompt_alt_tokens.tokens"),
                tensor_from_message(alt.logprobs, "prompt_alt_tokens.logprobs"),
            )
            if message.HasField("prompt_alt_tokens")
            else None
        ),
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
    )


def sample_response_to_json(response: SampleResponse) -> dict[str, Any]:
    """Write a response as JSON."""
    fields: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "tokens": sequence.tokens,
                "logprobs": sequence.logprobs,
                "stop_reason": sequence.stop_reason,
            }
            for sequence in response.sequences
        ],
    }
    if response.prompt_logprobs is not None:
        fields["prompt_logprobs"] = response.prompt_logprobs
    if response.topk_prompt_logprobs is not None:
        fields["topk_prompt_logprobs"] = response.topk_prompt_logprobs
    return fields


def _params_from_json(fields: Fields) -> SamplingParams:
    with fields:
        try:
            return SamplingParams(
                max_tokens=fields.optional(fields.integer, "max_tokens"),
                seed=fields.optional(lambda name: fields.integer(name, high=2**64 - 1), "seed"),
                stop=_stop_from_json(fields),
                temperature=fields.optional(fields.number, "temperature", 1.0),
                top_k=fields.optional(fields.integer, "top_k", -1),
                top_p=fields.optional(fields.number, "top_p", 1.0),
                min_p=fields.optional(fields.number, "min_p", 0.0),
                stop_token_ids=fields.optional(fields.array, "stop_token_ids", ()),
                min_tokens=fields.optional(fields.integer, "min_tokens", 0),
                repetition_penalty=fields.optional(fields.number, "repetition_penalty", 1.0),
                frequency_penalty=fields.optional(fields.number, "frequency_penalty", 0.0),
                presence_penalty=fields.optional(fields.number, "presence_penalty", 0.0),
                constraint=fields.optional(
                    lambda name: _constraint_from_json(fields.object(name)), "constraint"
                ),
                logit_bias=fields.optional(
                    lambda name: _biases_from_json(fields.object(name)), "logit_bias", {}
                ),
                allowed_token_ids=fields.optional(fields.array, "allowed_token_ids", ()),
            )
        except (UserError, TypeError) as error:
            raise UserError(str(error).replace("SamplingParams.", "sampling_params.")) from None


def _constraint_from_json(fields: Fields) -> Constraint:
    with fields:
        kind: Any = fields.text("kind")  # Constraint checks that it is one of its kinds.
        text = fields.optional(fields.text, "text", "")
        choices = fields.optional(fields.array, "choices", [])
        try:
            return Constraint(kind, text, choices)
        except UserError as error:
            raise UserError(
                str(error).replace("Constraint", "sampling_params.constraint", 1)
            ) from None


def _biases_from_json(fields: Fields) -> dict[Any, float]:
    """Read biases. JSON has only strings as keys. SamplingParams rejects other keys than ids."""
    with fields:
        return {
            int(name) if name.isascii() and name.isdigit() and len(name) < 11 else name: (
                fields.number(name)
            )
            for name in fields
        }


def _stop_from_json(fields: Fields) -> Any:
    stop: JsonValue = fields.raw("stop")
    if stop is not None and not isinstance(stop, (str, list)):
        raise UserError(
            f"{fields.path('stop')}={shown(stop)}: give a string, a list of strings or a list of "
            "token ids"
        )
    return stop


def _params_to_json(params: SamplingParams) -> dict[str, Any]:
    # The SDK does not know most of the options, so they are sent only where they are set.
    defaults = SamplingParams()
    return {
        option.name: _option_to_json(value)
        for option in dataclasses.fields(params)
        if (value := getattr(params, option.name)) != getattr(defaults, option.name)
        or option.name in ("temperature", "top_k", "top_p")
    }


def _option_to_json(value: Any) -> Any:
    match value:
        case Constraint(kind, text, choices):
            return {"kind": kind, "text": text} | ({"choices": list(choices)} if choices else {})
        case Mapping():
            return {str(key): number for key, number in cast("Mapping[Any, Any]", value).items()}
        case tuple():
            return list(cast("tuple[Any, ...]", value))
        case _:
            return value


def _optional_count(fields: Fields, name: str) -> int:
    return fields.optional(lambda name: fields.integer(name, 0, 2**31 - 1), name, 0)


def _dense_targets(tensor: TensorData) -> TensorData:
    """Return the targets in dense form. Entries that a CSR tensor does not list become -1, which
    means no token.
    """
    if tensor.sparse_crow_indices is None:
        return tensor
    check_dense_elements("target_prompt_logprobs", dense_element_count(tensor), _MAX_TARGETS)
    return TensorData(tensor.to_numpy(pad_value=-1), tensor.dtype, tensor.shape)


def _sequence_from_message(message: Any, sequence_id: str) -> SampledSequence:
    if message.stop_reason not in _STOP_NAMES:
        raise UserError(f"stop_reason {message.stop_reason} is unknown")
    return SampledSequence(
        stop_reason=_STOP_NAMES[message.stop_reason],
        sequence_id=sequence_id,
        tokens_np=array_from_bytes(message.tokens, "<i4", "tokens").copy(),
        logprobs_np=_logprobs_from_bytes(message.logprobs),
        topk_logprobs_np=_topk_from_message(message, "topk_sampled_logprobs"),
    )


def _logprobs_from_bytes(data: bytes) -> np.ndarray:
    return array_from_bytes(data, "<f4", "logprobs").copy()


def _write_topk(message: Any, topk: TopkLogprobs) -> None:
    undefined = np.isnan(topk.logprobs)
    message.length, message.k = topk.logprobs.shape
    message.token_ids = np.where(undefined, 0, topk.token_ids).astype("<i4").tobytes()
    message.logprobs = np.where(undefined, UNDEFINED_LOGPROB, topk.logprobs).astype("<f4").tobytes()


def _topk_from_message(message: Any, name: str) -> TopkLogprobs | None:
    if not message.HasField(name):
        return None
    topk = getattr(message, name)
    ids = array_from_bytes(topk.token_ids, "<i4", f"{name}.token_ids")
    logprobs = _logprobs_from_bytes(topk.logprobs)
    if ids.size != topk.length * topk.k or logprobs.size != ids.size:
        raise UserError(
            f"{name}: {ids.size} token ids and {logprobs.size} logprobs are not {topk.length} x "
            f"{topk.k}"
        )
    logprobs[logprobs == UNDEFINED_LOGPROB] = np.nan
    shape = (topk.length, topk.k)
    return TopkLogprobs(ids.reshape(shape).copy(), logprobs.reshape(shape))
