"""Samplers and samples."""

from __future__ import annotations

from starlette.responses import Response

from planish.errors import UserError
from planish.server.errors import stopping
from planish.server.exchange import MIB, SAMPLE_BODY, Exchange, answered, endpoint
from planish.server.routes_training import accepted
from planish.service import Sample
from planish.wire.fields import Fields
from planish.wire.models import create_sampler_from_json
from planish.wire.records import sampler_info_to_json
from planish.wire.sampling import sample_request_from_json, targets_of

_MAX_ANSWER = 512 * MIB


async def create_sampling_session(exchange: Exchange) -> Response:
    async with exchange.fields() as fields:
        operation = create_sampler_from_json(fields)
    sampler_id = await exchange.unless_stopping(exchange.core.create_sampler(exchange.tenant, operation))
    if sampler_id is None:  # it waited for room in memory, where a repetition finds it
        raise stopping()
    return answered({"type": "create_sampling_session", "sampling_session_id": sampler_id})


async def sampler(exchange: Exchange) -> Response:
    return answered(
        sampler_info_to_json(await exchange.core.sampler_info(exchange.tenant, exchange.path("sampler_id")))
    )


async def asample(exchange: Exchange) -> Response:
    async with exchange.body(SAMPLE_BODY) as body:
        request = await exchange.compute(body, lambda: sample_request_from_json(Fields.of(body)))
        check_answer(request.operation, exchange.state.settings.longest_context)
        return accepted(await exchange.core.submit_sample(exchange.tenant, request.seq_id, request.operation))


def check_answer(operation: Sample, context: int) -> None:
    """UserError if the answer could be larger than what one request may take of the memory."""
    params, prompt = operation.sampling_params, operation.prompt.length
    tokens = 0 if operation.prompt_only else operation.num_samples * min(params.max_tokens or context, context)
    row = 4 + 8 * operation.topk_prompt_logprobs + 12 * operation.prompt_alt_tokens_k
    size = tokens * (8 + 8 * operation.topk_sample_logprobs) + prompt * row + 4 * targets_of(operation)
    if size > _MAX_ANSWER:
        raise UserError(
            f"the answer could have {size // MIB:,} MiB, and {_MAX_ANSWER // MIB} are given at most; lower num_samples, "
            "max_tokens, topk_sample_logprobs, topk_prompt_logprobs or prompt_alt_tokens_k"
        )


ROUTES = [
    endpoint("/create_sampling_session", create_sampling_session),
    endpoint("/samplers/{sampler_id}", sampler, "GET"),
    endpoint("/asample", asample),
]
