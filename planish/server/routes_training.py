"""Requests that make, train, save and load models. Each is decoded, handed to the core, and
acknowledged.

A body whose model and number can be read, but not the rest, is refused with 400 and has used up its
number: the client counts on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from planish.server.answers import Accepted
from planish.server.errors import stopping
from planish.server.exchange import TRAINING_BODY, Exchange, Handler, answered, endpoint
from planish.server.external_weights import check_name_is_free, save_weights_external_from_json
from planish.service import CreateModel, Operation, PublishSampler
from planish.wire.fields import Fields
from planish.wire.models import (
    create_model_from_json,
    info_to_json,
    load_weights_from_json,
    save_weights_for_sampler_from_json,
    save_weights_from_json,
)
from planish.wire.training import (
    Place,
    forward_backward_from_json,
    forward_backward_from_message,
    optim_step_from_json,
    parse_forward_backward,
    parse_forward_backward_head,
    place_from_json,
    place_from_message,
)


def accepted(acceptance: Accepted) -> Response:
    answer: dict[str, Any] = {"request_id": acceptance.request_id}
    if acceptance.model_id is not None:
        answer["model_id"] = acceptance.model_id
    if acceptance.sample_sequence_ids:
        answer["sample_sequence_ids"] = list(acceptance.sample_sequence_ids)
    return answered(answer)


@dataclass(frozen=True)
class _Parsed:
    """A body, of which the operation is still to be read."""

    place: Place
    kind: str
    """As in `Done`."""
    decode: Callable[[], Operation[Any]]


async def submit(exchange: Exchange, body: bytes, parse: Callable[[], _Parsed]) -> Response:
    """Read an operation, and queue it. In one go: what is parsed takes many times the memory of the
    body and of what comes of it.
    """

    def read() -> tuple[Place, str, Operation[Any] | ValueError]:
        parsed = parse()
        try:
            return parsed.place, parsed.kind, parsed.decode()
        except ValueError as error:
            return parsed.place, parsed.kind, error.with_traceback(None)

    place, kind, found = await exchange.compute(body, read)
    if isinstance(found, ValueError):
        await exchange.core.reject(exchange.tenant, place.model_id, place.seq_id, found, kind)
        raise found
    return accepted(await exchange.core.submit_training(exchange.tenant, place.seq_id, found))


def submitting(kind: str, decode: Callable[[Fields], Operation[Any]]) -> Handler:
    """The handler of a JSON body that `decode` reads."""

    def parse(body: bytes) -> _Parsed:
        fields = Fields.of(body)
        return _Parsed(place_from_json(fields), kind, lambda: decode(fields))

    async def handler(exchange: Exchange) -> Response:
        async with exchange.body(TRAINING_BODY) as body:
            return await submit(exchange, body, lambda: parse(body))

    return handler


async def forward_backward(exchange: Exchange) -> Response:
    if not exchange.is_protobuf:
        return await _json_forward_backward(exchange)
    async with exchange.body(TRAINING_BODY) as body:
        return await submit(exchange, body, lambda: _parsed_message(body))


def _parsed_message(body: bytes) -> _Parsed:
    head = parse_forward_backward_head(body)
    kind = "forward" if head.forward_only else "forward_backward"
    return _Parsed(
        place_from_message(head),
        kind,
        lambda: forward_backward_from_message(parse_forward_backward(body)),
    )


_json_forward_backward = submitting(
    "forward_backward", lambda fields: forward_backward_from_json(fields, forward_only=False)
)
_forward = submitting(
    "forward", lambda fields: forward_backward_from_json(fields, forward_only=True)
)


async def create_model(exchange: Exchange) -> Response:
    async with exchange.fields() as fields:
        operation = create_model_from_json(fields)
    return accepted(await exchange.core.create_model(exchange.tenant, operation))


async def load_weights(exchange: Exchange) -> Response:
    async with exchange.fields() as fields:
        if fields.has("model_id"):
            place = place_from_json(fields)
            parsed = _Parsed(place, "load_weights", lambda: load_weights_from_json(fields))
            return await submit(exchange, b"", lambda: parsed)
        operation = load_weights_from_json(fields)
    assert isinstance(operation, CreateModel)
    return accepted(await exchange.core.create_model(exchange.tenant, operation))


def _save_for_sampler(fields: Fields) -> Operation[Any]:
    operation = save_weights_for_sampler_from_json(fields)
    if not isinstance(operation, PublishSampler):
        check_name_is_free(operation.name)
    return operation


async def unload_model(exchange: Exchange) -> Response:
    async with exchange.fields() as fields:
        model_id = fields.identifier("model_id")
    return accepted(await exchange.core.unload_model(exchange.tenant, model_id))


async def get_info(exchange: Exchange) -> Response:
    """A client on this machine is told where the tokenizer lies, so that it needs no hub; to others
    the path means nothing.
    """
    async with exchange.fields() as fields:
        model_id = fields.identifier("model_id")
    info = await exchange.unless_stopping(exchange.core.model_info(exchange.tenant, model_id))
    if info is None:  # it waited for the model's creation
        raise stopping()
    tokenizer_id = info.model_data.tokenizer_id if exchange.is_local else None
    # The SDK cuts the id off at a colon.
    usable = tokenizer_id is not None and ":" not in tokenizer_id
    return answered(info_to_json(info, tokenizer_id if usable else None))


ROUTES = [
    endpoint("/create_model", create_model),
    endpoint("/get_info", get_info),
    endpoint("/forward_backward", forward_backward),
    endpoint("/forward", _forward),
    endpoint("/optim_step", submitting("optim_step", optim_step_from_json)),
    endpoint("/save_weights", submitting("save_weights", save_weights_from_json)),
    endpoint(
        "/save_weights_for_sampler", submitting("save_weights_for_sampler", _save_for_sampler)
    ),
    endpoint(
        "/save_weights_external",
        submitting("save_weights_for_sampler", save_weights_external_from_json),
    ),
    endpoint("/load_weights", load_weights),
    endpoint("/unload_model", unload_model),
]
