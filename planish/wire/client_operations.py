"""The client's side of the protocol: the path and body of each operation, and how its result is
read.

Operations have the ids that the server uses: `{session}:train:{n}` for a model, and
`{session}:sample:{n}` for a sampler. A client builds the body of a request once and keeps it,
because a repeated request must have the same body.
"""

from __future__ import annotations

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
from planish.types import LoadWeightsResponse, SaveWeightsForSamplerResponse, SaveWeightsResponse
from planish.wire.fields import Fields
from planish.wire.messages import PROTOBUF
from planish.wire.models import (
    create_from_weights_to_json,
    create_model_to_json,
    create_sampler_to_json,
    load_weights_to_json,
    place_of,
    publish_to_json,
    save_to_json,
)
from planish.wire.sampling import SampleRequest, sample_request_to_json
from planish.wire.training import (
    forward_backward_to_message,
    optim_step_response_from_json,
    optim_step_to_json,
    output_from_message,
)

JSON = "application/json"


@dataclass(frozen=True)
class Posted:
    """A request as it is sent."""

    path: str
    """The path after /api/v1."""
    content: bytes
    media: str = JSON

    @classmethod
    def json(cls, path: str, fields: dict[str, Any]) -> Posted:
        """Return a request with a JSON body."""
        return cls(path, orjson.dumps(fields))


def create_model_request(operation: CreateModel) -> Posted:
    """Return the request that creates a model, fresh or from a checkpoint."""
    place = place_of(operation.model_id)
    if operation.from_path is None:
        return Posted.json("/create_model", create_model_to_json(operation, place))
    return Posted.json("/load_weights", create_from_weights_to_json(operation, place))


def create_sampler_request(operation: CreateSampler) -> Posted:
    """Return the request that creates a sampler."""
    return Posted.json(
        "/create_sampling_session",
        create_sampler_to_json(operation, place_of(operation.sampler_id)),
    )


def sample_request(operation: Sample, seq_id: int) -> Posted:
    """Return a sample request."""
    return Posted.json("/asample", sample_request_to_json(SampleRequest(seq_id, operation)))


def training_request(operation: Operation[Any], seq_id: int) -> Posted:
    """Return the request for an operation of a model. `seq_id` is its number in the model, starting
    at 1.
    """
    match operation:
        case ForwardBackward():
            return Posted(
                "/forward_backward", forward_backward_to_message(operation, seq_id), PROTOBUF
            )
        case OptimStep():
            return Posted.json("/optim_step", optim_step_to_json(operation, seq_id))
        case SaveWeights():
            return Posted.json("/save_weights", save_to_json(operation, seq_id))
        case SaveWeightsForSampler():
            return Posted.json("/save_weights_for_sampler", save_to_json(operation, seq_id))
        case PublishSampler():
            number = place_of(operation.sampler_id).seq_id
            return Posted.json(
                "/save_weights_for_sampler", publish_to_json(operation, number, seq_id)
            )
        case LoadWeights():
            return Posted.json("/load_weights", load_weights_to_json(operation, seq_id))
        case UnloadModel():
            return Posted.json(
                "/unload_model", {"model_id": operation.model_id, "type": "unload_model"}
            )
    raise TypeError(f"{type(operation).__name__} is not an operation of a model")


def training_result(operation: Operation[Any], content: bytes) -> Any:
    """Read the result of an operation from the body of the answer. Raise UserError if the body is
    invalid.
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
    raise TypeError(f"{type(operation).__name__} is not an operation of a model")
