"""Operations as the journal keeps them, and results as clients get them: the bodies of the wire.

One operation has one encoding, whatever way it came by, so that a repetition is known by its
digest. What the server chose itself (seeds) is part of what is kept, and not of the digest.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from planish.server.answers import Done
from planish.service import (
    CreateModel,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    PublishSampler,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
    UnloadModel,
)
from planish.types import ForwardBackwardOutput, OptimStepResponse, SampleResponse
from planish.wire.fields import Fields
from planish.wire.messages import ForwardBackwardRequestMessage
from planish.wire.models import (
    create_from_weights_to_json,
    create_model_from_json,
    create_model_to_json,
    load_weights_from_json,
    load_weights_to_json,
    place_of,
    publish_to_json,
    save_to_json,
    save_weights_for_sampler_from_json,
    save_weights_from_json,
)
from planish.wire.sampling import (
    SampleRequest,
    sample_request_from_json,
    sample_request_to_json,
    sample_response_to_message,
)
from planish.wire.training import (
    forward_backward_from_message,
    forward_backward_to_message,
    optim_step_from_json,
    optim_step_to_json,
    output_to_message,
    parse_forward_backward,
)

_SEED_BITS = 62
_SEEDED = ("create_model", "sample")
"""Kinds whose bodies may have a seed that their digests have not."""


@dataclass(frozen=True)
class Entry:
    """One request as it goes into the journal."""

    kind: str
    body: bytes
    digest: bytes
    operation: Operation[Any]
    """With the seed that it will run with."""


def entry(operation: Operation[Any], seq_id: int) -> Entry:
    """Encode a request. Takes time in proportion to its size; for a thread if it is large."""
    kind, body = kind_of(operation), _encoded(operation, seq_id)
    digest = _digest(kind, body)
    seeded = _seeded(operation)
    if seeded is not operation:
        body = _encoded(seeded, seq_id)
    return Entry(kind, body, digest, seeded)


def is_as_written(kind: str, body: bytes, digest: bytes | None) -> bool:
    """Whether a body is the one whose `entry` had this digest. Of those that may have been given a
    seed that is not known.
    """
    return kind in _SEEDED or digest is None or _digest(kind, body) == digest


def _digest(kind: str, body: bytes) -> bytes:
    return hashlib.blake2b(kind.encode() + body, digest_size=16).digest()


def kind_of(operation: Operation[Any]) -> str:
    """The kind of its row."""
    match operation:
        case ForwardBackward(forward_only=True):
            return "forward"
        case CreateModel(from_path=None):
            return "create_model"
        case CreateModel():
            return "load_weights"
    return _KINDS[type(operation)]


def operation_of(kind: str, body: bytes) -> Operation[Any]:
    """What `entry` encoded."""
    return _DECODERS[kind](body)


def _seeded(operation: Operation[Any]) -> Operation[Any]:
    """With a seed, if it draws: what is drawn again after a crash must be the same."""
    match operation:
        case Sample(sampling_params=params) if params.seed is None:
            return replace(
                operation, sampling_params=replace(params, seed=secrets.randbits(_SEED_BITS))
            )
        case CreateModel(lora=lora, from_path=None) if lora.seed is None:
            return replace(operation, lora=replace(lora, seed=secrets.randbits(_SEED_BITS)))
    return operation


def _encoded(operation: Operation[Any], seq_id: int) -> bytes:
    match operation:
        case ForwardBackward():
            # The number of the request is its row's; here it would have to fit into 32 bits.
            message = ForwardBackwardRequestMessage.FromString(
                forward_backward_to_message(operation, 1)
            )
            return message.SerializeToString(deterministic=True)
        case OptimStep():
            return _json(optim_step_to_json(operation, seq_id))
        case CreateModel(from_path=None):
            return _json(create_model_to_json(operation, place_of(operation.model_id)))
        case CreateModel():
            return _json(create_from_weights_to_json(operation, place_of(operation.model_id)))
        case LoadWeights():
            return _json(load_weights_to_json(operation, seq_id))
        case SaveWeights() | SaveWeightsForSampler():
            return _json(save_to_json(operation, seq_id))
        case PublishSampler():
            return _json(publish_to_json(operation, place_of(operation.sampler_id).seq_id, seq_id))
        case UnloadModel():
            return _json({"model_id": operation.model_id})
        case Sample():
            return _json(sample_request_to_json(SampleRequest(seq_id, operation)))
    raise TypeError(f"{type(operation).__name__} is not journaled")


_KINDS: dict[type[Operation[Any]], str] = {
    ForwardBackward: "forward_backward",
    OptimStep: "optim_step",
    LoadWeights: "load_weights",
    SaveWeights: "save_weights",
    SaveWeightsForSampler: "save_weights_for_sampler",
    PublishSampler: "publish_sampler",
    UnloadModel: "unload_model",
    Sample: "sample",
}
_DECODERS: dict[str, Callable[[bytes], Operation[Any]]] = {
    "forward": lambda body: forward_backward_from_message(parse_forward_backward(body)),
    "forward_backward": lambda body: forward_backward_from_message(parse_forward_backward(body)),
    "optim_step": lambda body: optim_step_from_json(Fields.of(body)),
    "create_model": lambda body: create_model_from_json(Fields.of(body)),
    "load_weights": lambda body: load_weights_from_json(Fields.of(body)),
    "save_weights": lambda body: save_weights_from_json(Fields.of(body)),
    "save_weights_for_sampler": lambda body: save_weights_for_sampler_from_json(Fields.of(body)),
    "publish_sampler": lambda body: save_weights_for_sampler_from_json(Fields.of(body)),
    "unload_model": lambda body: UnloadModel(orjson.loads(body)["model_id"]),
    "sample": lambda body: sample_request_from_json(Fields.of(body)).operation,
}


def result_of(kind: str, operation: Operation[Any], result: Any) -> Done:
    """The answer of a request that was done."""
    return done_of(kind, _result(operation, result))


def done_of(kind: str, content: bytes) -> Done:
    """The same, of a journal's `kind` and what is stored."""
    media = "protobuf" if kind in ("forward", "forward_backward", "sample") else "json"
    return Done("save_weights_for_sampler" if kind == "publish_sampler" else kind, media, content)


def _result(operation: Operation[Any], result: Any) -> bytes:
    match result:
        case ForwardBackwardOutput():
            return output_to_message(result)
        case SampleResponse():
            return sample_response_to_message(result)
        case OptimStepResponse():
            return _json({"metrics": result.metrics})
    match operation:
        case CreateModel(from_path=None):
            return _json({"type": "create_model", "model_id": operation.model_id})
        case CreateModel() as op:
            return _json({"type": "load_weights", "model_id": op.model_id, "path": op.from_path})
        case LoadWeights():
            return _json(
                {"type": "load_weights", "model_id": operation.model_id, "path": operation.path}
            )
        case SaveWeights():
            return _json({"type": "save_weights", "path": result.path})
        case SaveWeightsForSampler():
            return _json({"type": "save_weights_for_sampler", "path": result.path})
        case PublishSampler():
            return _json(
                {"type": "save_weights_for_sampler", "sampling_session_id": operation.sampler_id}
            )
        case UnloadModel():
            return _json({"type": "unload_model", "model_id": operation.model_id})
    raise TypeError(f"{type(operation).__name__} has no answer for clients")


def _json(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
