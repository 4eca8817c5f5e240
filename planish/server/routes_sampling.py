"""Samplers and samples."""

from __future__ import annotations

from starlette.responses import Response

from planish.server.errors import stopping
from planish.server.exchange import SAMPLE_BODY, Exchange, answered, endpoint
from planish.server.routes_training import accepted
from planish.wire.fields import Fields
from planish.wire.models import create_sampler_from_json
from planish.wire.records import sampler_info_to_json
from planish.wire.sampling import sample_request_from_json


async def create_sampling_session(exchange: Exchange) -> Response:
    async with exchange.fields() as fields:
        operation = create_sampler_from_json(fields)
    sampler_id = await exchange.unless_stopping(
        exchange.core.create_sampler(exchange.tenant, operation)
    )
    if sampler_id is None:  # it waited for room in memory, where a repetition finds it
        raise stopping()
    return answered({"type": "create_sampling_session", "sampling_session_id": sampler_id})


async def sampler(exchange: Exchange) -> Response:
    return answered(
        sampler_info_to_json(
            await exchange.core.sampler_info(exchange.tenant, exchange.path("sampler_id"))
        )
    )


async def asample(exchange: Exchange) -> Response:
    async with exchange.body(SAMPLE_BODY) as body:
        request = await exchange.compute(body, lambda: sample_request_from_json(Fields.of(body)))
        return accepted(
            await exchange.core.submit_sample(exchange.tenant, request.seq_id, request.operation)
        )


ROUTES = [
    endpoint("/create_sampling_session", create_sampling_session),
    endpoint("/samplers/{sampler_id}", sampler, "GET"),
    endpoint("/asample", asample),
]
