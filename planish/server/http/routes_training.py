"""Endpoints that create, train, save and load models. They decode, submit and acknowledge requests.

An invalid request is rejected with status 400. If its model id and sequence number are valid, it
uses up the sequence number, because the client continues with the next number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.routing import Route

from planish.server.durable.checkpoints import (
    EXTERNAL_PREFIX,
    check_name_is_not_external,
    metadata_of,
)
from planish.server.durable.crash_points import crash_point
from planish.server.http.budgets import MAX_TRAINING_BODY
from planish.server.http.context import Json, RequestContext, body_endpoint, endpoint
from planish.server.results import Accepted, stopping
from planish.service import CreateModel, Operation, PublishSampler, SaveWeightsForSampler
from planish.wire.fields import Fields
from planish.wire.models import (
    create_model_from_json,
    load_weights_from_json,
    model_info_to_json,
    save_weights_for_sampler_from_json,
    save_weights_from_json,
)
from planish.wire.training import (
    RequestHead,
    forward_backward_from_body,
    forward_backward_from_json,
    head_from_json,
    head_from_message,
    optim_step_from_json,
    parse_forward_backward,
    parse_forward_backward_head,
)


def accepted_to_json(acceptance: Accepted) -> Json:
    """Return the response that acknowledges a request."""
    crash_point("before acknowledging")
    answer: dict[str, Any] = {"request_id": acceptance.request_id}
    if acceptance.model_id is not None:
        answer["model_id"] = acceptance.model_id
    if acceptance.sample_sequence_ids:
        answer["sample_sequence_ids"] = list(acceptance.sample_sequence_ids)
    return answer


@dataclass(frozen=True)
class _ParsedRequest:
    """A parsed body. `decode` returns its operation."""

    head: RequestHead
    kind: str
    """The kind of the request, as in `Done.kind`."""
    decode: Callable[[], Operation[Any]]


@dataclass(frozen=True)
class _DecodedRequest:
    """A decoded body."""

    head: RequestHead
    kind: str
    operation: Operation[Any] | ValueError
    """The operation, or why the body has no valid one."""

    @classmethod
    def of(cls, parsed: _ParsedRequest) -> _DecodedRequest:
        """Decode a parsed body, which takes many times the memory of the body or the operation."""
        try:
            return cls(parsed.head, parsed.kind, parsed.decode())
        except ValueError as error:
            return cls(parsed.head, parsed.kind, error.with_traceback(None))

    async def submit(self, context: RequestContext) -> Json:
        """Submit the operation. If there is none, use up the sequence number and raise its error."""
        models, head = context.state.server.models, self.head
        if isinstance(self.operation, ValueError):
            await models.reject(
                context.tenant, head.model_id, head.seq_id, self.operation, self.kind
            )
            raise self.operation
        return accepted_to_json(
            await models.submit(context.tenant, head.model_id, head.seq_id, self.operation)
        )


def _submit_endpoint(
    path: str,
    kind: str,
    decode: Callable[[Fields], Operation[Any]],
    decode_protobuf: Callable[[bytes], _DecodedRequest] | None = None,
) -> Route:
    """Return a route for operations of a model. `decode` returns the operation of a JSON body."""

    def decode_json(body: bytes) -> _DecodedRequest:
        fields = Fields.of(body)
        parsed = _ParsedRequest(head_from_json(fields), kind, lambda: decode(fields))
        return _DecodedRequest.of(parsed)

    async def submit(context: RequestContext, request: _DecodedRequest) -> Json:
        return await request.submit(context)

    return body_endpoint(path, MAX_TRAINING_BODY, decode_json, submit, decode_protobuf)


def _decode_protobuf(body: bytes) -> _DecodedRequest:
    """Decode a forward_backward or a forward."""
    head = parse_forward_backward_head(body)
    kind = "forward" if head.forward_only else "forward_backward"
    return _DecodedRequest.of(
        _ParsedRequest(
            head_from_message(head),
            kind,
            lambda: forward_backward_from_body(parse_forward_backward(body)),
        )
    )


async def create_model(context: RequestContext) -> Json:
    """Create a fresh model."""
    async with context.fields() as fields:
        operation = create_model_from_json(fields)
    return accepted_to_json(await context.server.models.create(context.tenant, operation))


async def load_weights(context: RequestContext) -> Json:
    """Load a checkpoint into a model, or create a model from one."""
    async with context.fields() as fields:
        if fields.has("model_id"):
            head = head_from_json(fields)
            parsed = _ParsedRequest(head, "load_weights", lambda: load_weights_from_json(fields))
            return await _DecodedRequest.of(parsed).submit(context)
        operation = load_weights_from_json(fields)
    assert isinstance(operation, CreateModel)
    return accepted_to_json(await context.server.models.create(context.tenant, operation))


def _save_for_sampler_from_json(fields: Fields) -> Operation[Any]:
    operation = save_weights_for_sampler_from_json(fields)
    if not isinstance(operation, PublishSampler):
        check_name_is_not_external(operation.name)
    return operation


def save_weights_external_from_json(fields: Fields) -> SaveWeightsForSampler:
    """Decode a request to save external weights."""
    with fields:
        head = head_from_json(fields)
        fields.skip("type")
        metadata = metadata_of(fields.optional(fields.array, "age_encryption_recipients", []))
        ttl = fields.optional(fields.integer, "ttl_seconds")
        return SaveWeightsForSampler(
            head.model_id, EXTERNAL_PREFIX + fields.text("path"), ttl, user_metadata=metadata
        )


async def unload_model(context: RequestContext) -> Json:
    """Unload a model."""
    async with context.fields() as fields:
        model_id = fields.identifier("model_id")
    return accepted_to_json(await context.server.models.unload(context.tenant, model_id))


async def get_info(context: RequestContext) -> Json:
    """Describe a model. The answer to a client on this machine contains the directory of the
    tokenizer, so that the client does not need the Hugging Face hub.
    """
    async with context.fields() as fields:
        model_id = fields.identifier("model_id")
    info = await context.cancelled_by(
        context.state.stopping, context.server.models.info(context.tenant, model_id)
    )
    if info is None:  # the wait for the creation was cancelled
        raise stopping()
    tokenizer_id = info.model_data.tokenizer_id if context.is_local else None
    # The SDK cuts the id off at a colon.
    usable = tokenizer_id is not None and ":" not in tokenizer_id
    return model_info_to_json(info, tokenizer_id if usable else None)


ROUTES = [
    endpoint("/create_model", create_model),
    endpoint("/get_info", get_info),
    _submit_endpoint(
        "/forward_backward",
        "forward_backward",
        lambda fields: forward_backward_from_json(fields, forward_only=False),
        _decode_protobuf,
    ),
    _submit_endpoint(
        "/forward",
        "forward",
        lambda fields: forward_backward_from_json(fields, forward_only=True),
    ),
    _submit_endpoint("/optim_step", "optim_step", optim_step_from_json),
    _submit_endpoint("/save_weights", "save_weights", save_weights_from_json),
    _submit_endpoint(
        "/save_weights_for_sampler", "save_weights_for_sampler", _save_for_sampler_from_json
    ),
    _submit_endpoint(
        "/save_weights_external", "save_weights_for_sampler", save_weights_external_from_json
    ),
    endpoint("/load_weights", load_weights),
    endpoint("/unload_model", unload_model),
]
