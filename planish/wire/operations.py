"""Operations and their results as requests and responses: kinds, paths and bodies.

The client sends these requests, and the server's journal stores the same bodies. An operation names
a model by the server's id, `{session}:train:{n}`, and a sampler by the server's id,
`{session}:sample:{n}`. The same operation always has the same body, because the server recognizes a
repeated request by its body.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from planish.service import (
    CreateModel,
    CreateSampler,
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
from planish.types import (
    ForwardBackwardOutput,
    LoadWeightsResponse,
    OptimStepResponse,
    SampleResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from planish.wire.fields import Fields
from planish.wire.messages import PROTOBUF
from planish.wire.models import (
    create_model_from_json,
    create_model_to_json,
    create_sampler_to_json,
    load_weights_from_json,
    load_weights_to_json,
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
    forward_backward_from_body,
    forward_backward_to_message,
    optim_step_from_json,
    optim_step_response_from_json,
    optim_step_to_json,
    output_from_message,
    output_to_message,
    parse_forward_backward,
)

JSON_MEDIA_TYPE = "application/json"

_KIND_NAMES: dict[type[Operation[Any]], str] = {
    ForwardBackward: "forward_backward",
    OptimStep: "optim_step",
    CreateModel: "create_model",
    LoadWeights: "load_weights",
    SaveWeights: "save_weights",
    SaveWeightsForSampler: "save_weights_for_sampler",
    PublishSampler: "publish_sampler",
    UnloadModel: "unload_model",
    CreateSampler: "create_sampling_session",
    Sample: "sample",
}
_PATHS_BY_KIND = {
    "forward": "/forward_backward",
    "publish_sampler": "/save_weights_for_sampler",
    "sample": "/asample",
}
"""The paths of the kinds whose path is not `/{kind}`."""


@dataclass(frozen=True)
class PostRequest:
    """A POST request: path, body and media type."""

    path: str
    """The path after /api/v1."""
    content: bytes
    media_type: str = JSON_MEDIA_TYPE

    @classmethod
    def json(cls, path: str, fields: dict[str, Any]) -> PostRequest:
        """Return a request with a JSON body."""
        return cls(path, orjson.dumps(fields))


def post_request_for(operation: Operation[Any], seq_id: int = 0) -> PostRequest:
    """Return the request for an operation. `seq_id` is the sequence number of the operation. It
    starts at 1 for each model, and at 0 for each sampler. The creation of a model or a sampler has
    no sequence number.
    """
    kind = operation_kind(operation)
    media = PROTOBUF if isinstance(operation, ForwardBackward) else JSON_MEDIA_TYPE
    return PostRequest(
        _PATHS_BY_KIND.get(kind, f"/{kind}"), operation_to_bytes(operation, seq_id), media
    )


def operation_kind(operation: Operation[Any]) -> str:
    """Return the kind of an operation, such as "optim_step". Raise TypeError if there is no request
    for the operation.
    """
    match operation:
        case ForwardBackward(forward_only=True):
            return "forward"
        case CreateModel(from_path=str()):
            return "load_weights"
        case _ if type(operation) in _KIND_NAMES:
            return _KIND_NAMES[type(operation)]
        case _:
            raise TypeError(f"there is no request for a {type(operation).__name__}")


def operation_to_bytes(operation: Operation[Any], seq_id: int) -> bytes:
    """Return the body of the request for an operation. Raise TypeError if there is none."""
    match operation:
        case ForwardBackward():
            return forward_backward_to_message(operation, seq_id)
        case OptimStep():
            fields = optim_step_to_json(operation, seq_id)
        case CreateModel():
            fields = create_model_to_json(operation)
        case LoadWeights():
            fields = load_weights_to_json(operation, seq_id)
        case SaveWeights() | SaveWeightsForSampler():
            fields = save_to_json(operation, seq_id)
        case PublishSampler():
            fields = publish_to_json(operation, seq_id)
        case UnloadModel():
            fields = {"model_id": operation.model_id}
        case CreateSampler():
            fields = create_sampler_to_json(operation)
        case Sample():
            fields = sample_request_to_json(SampleRequest(seq_id, operation))
        case _:
            raise TypeError(f"there is no request for a {type(operation).__name__}")
    return _to_sorted_json(fields)


_DECODERS: dict[str, Callable[[Fields], Operation[Any]]] = {
    "optim_step": optim_step_from_json,
    "create_model": create_model_from_json,
    "load_weights": load_weights_from_json,
    "save_weights": save_weights_from_json,
    "save_weights_for_sampler": save_weights_for_sampler_from_json,
    "publish_sampler": save_weights_for_sampler_from_json,
    "unload_model": lambda fields: UnloadModel(fields.text("model_id")),
    "sample": lambda fields: sample_request_from_json(fields).operation,
}


def operation_from_bytes(kind: str, body: bytes) -> Operation[Any]:
    """Return the operation of a request with this body. `kind` is the operation's kind."""
    if kind in ("forward", "forward_backward"):
        return forward_backward_from_body(parse_forward_backward(body))
    return _DECODERS[kind](Fields.of(body))


def result_to_bytes(operation: Operation[Any], result: Any) -> bytes:
    """Return the body of the response with the result of an operation. Raise TypeError if
    clients cannot receive a result of this operation.
    """
    match result:
        case ForwardBackwardOutput():
            return output_to_message(result)
        case SampleResponse():
            return sample_response_to_message(result)
        case OptimStepResponse():
            return _to_sorted_json({"metrics": result.metrics})
        case _:
            pass
    match operation:
        case (
            CreateModel(model_id=model_id, from_path=path)
            | LoadWeights(model_id=model_id, path=path)
        ):
            fields = (
                {"model_id": model_id} if path is None else {"model_id": model_id, "path": path}
            )
        case SaveWeights() | SaveWeightsForSampler():
            fields = {"path": result.path}
        case PublishSampler():
            sampler = {"sampling_session_id": operation.sampler_id}
            return _to_sorted_json({"type": "save_weights_for_sampler", **sampler})
        case UnloadModel():
            fields = {"model_id": operation.model_id}
        case _:
            raise TypeError(f"{type(operation).__name__} has no answer for clients")
    return _to_sorted_json({"type": operation_kind(operation), **fields})


def result_from_bytes(operation: Operation[Any], content: bytes) -> Any:
    """Return the result of a training operation from the body of the response. Raise UserError if
    the body is invalid.
    """
    match operation:
        case ForwardBackward():
            return output_from_message(content)
        case OptimStep():
            return optim_step_response_from_json(Fields.of(content))
        case SaveWeights():
            return SaveWeightsResponse(Fields.of(content).text("path"))
        case SaveWeightsForSampler():
            return SaveWeightsForSamplerResponse(Fields.of(content).text("path"))
        case PublishSampler():
            return Fields.of(content).text("sampling_session_id")
        case LoadWeights():
            return LoadWeightsResponse(operation.path)
        case UnloadModel() | CreateModel():
            return None
        case _:
            raise TypeError(f"{type(operation).__name__} is not an operation of a model")


def _to_sorted_json(fields: dict[str, Any]) -> bytes:
    return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)
