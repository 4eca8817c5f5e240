"""Endpoints for samplers and for samples.

The SDK sends one sample request per HTTP request (/asample). planish's own client sends many in one
HTTP request:

    POST /planish/draw     {"requests": [bodies of asample]}. The response is a stream of frames
                           (planish/wire/client_frames.py). Each accepted request has a first frame
                           with its id, and a last frame with its result or error. A rejected
                           request has only a last frame.
    POST /planish/release  {"sampler_id"}: closes the sampler

Each request of a batch is treated like a single one: it is journaled, waits for its tenant's turn,
and is identified by its sampler and number. So if the connection breaks, the client can send the
same batch again, and nothing is sampled twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.responses import Response, StreamingResponse

from planish.errors import PlanishError, UserError
from planish.server.http.budgets import MAX_SAMPLE_BODY
from planish.server.http.context import (
    Json,
    RequestContext,
    body_endpoint,
    endpoint,
)
from planish.server.http.routes_training import accepted_to_json
from planish.server.results import (
    Accepted,
    Done,
    Failed,
    NotFound,
    ServerError,
    TryAgain,
    client_error,
    status_of,
    stopping,
)
from planish.wire.client_errors import ERROR_CLASS, error_class_name
from planish.wire.client_frames import MEDIA_TYPE, Frame
from planish.wire.fields import Fields
from planish.wire.models import create_sampler_from_json
from planish.wire.records import sampler_info_to_json
from planish.wire.sampling import (
    SampleRequest,
    sample_request_from_json,
    target_count,
)
from planish.wire.tensors import check_dense_elements

_log = logging.getLogger("planish.server")


async def create_sampling_session(context: RequestContext) -> Json:
    """Create a sampler."""
    async with context.fields() as fields:
        operation = create_sampler_from_json(fields)
    sampler_id = await context.cancelled_by(
        context.state.stopping, context.open_server.samplers.create(context.tenant, operation)
    )
    if sampler_id is None:  # the wait for memory was cancelled; a repeated request resumes it
        raise stopping()
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


async def sampler(context: RequestContext) -> Json:
    """Describe a sampler."""
    return sampler_info_to_json(
        await context.server.samplers.info(context.tenant, context.path_parameter("sampler_id"))
    )


def _sample_request(body: bytes) -> SampleRequest:
    return sample_request_from_json(Fields.of(body))


async def asample(context: RequestContext, request: SampleRequest) -> Json:
    """Accept a sample request."""
    sampling = context.open_server.sampling
    return accepted_to_json(
        await sampling.submit(context.tenant, request.seq_id, request.operation)
    )


MAX_BATCH_REQUESTS = 1024


async def sample_batch(context: RequestContext) -> Response:
    """Accept many sample requests, and stream their results."""
    async with context.body(MAX_SAMPLE_BODY) as body:
        requests = await context.compute(len(body), lambda: _sample_requests(Fields.of(body)))
    return StreamingResponse(_response_frames(context, requests), media_type=MEDIA_TYPE)


async def release(context: RequestContext) -> None:
    """Close a sampler."""
    async with context.fields() as fields:
        sampler_id = fields.identifier("sampler_id")
    server = context.server
    sampler = server.samplers.get(sampler_id)
    if sampler is None or sampler.row.tenant != context.tenant.name:
        raise NotFound(f"sampler_id={sampler_id!r}: there is no such sampler")
    await server.samplers.close(sampler, "it was released")


def _sample_requests(fields: Fields) -> list[SampleRequest | PlanishError]:
    """Decode the requests of a batch. For a request that cannot be read, return its error."""
    with fields:
        requests: list[SampleRequest | PlanishError] = []
        num_targets = 0
        for body in fields.objects("requests"):
            try:
                request = sample_request_from_json(body.as_body())
                num_targets += target_count(request.operation)
                check_dense_elements("requests", num_targets)
                requests.append(request)
            except UserError as error:
                requests.append(error)
    if not 0 < len(requests) <= MAX_BATCH_REQUESTS:
        raise UserError(f"requests has {len(requests)} entries; give 1 to {MAX_BATCH_REQUESTS}")
    return requests


async def _response_frames(
    context: RequestContext, requests: list[SampleRequest | PlanishError]
) -> AsyncIterator[bytes]:
    """Yield the frames of a batch. The frames end early if the server stops. The client then sends
    the batch again.
    """
    frames: asyncio.Queue[Frame | None] = asyncio.Queue()
    tasks = [
        *(
            asyncio.create_task(_answer_one(context, index, request, frames))
            for index, request in enumerate(requests)
        ),
        asyncio.create_task(_end_frames_at_the_end(context, frames)),
    ]
    try:
        num_unfinished = len(requests)
        while num_unfinished:
            queued_frames = [await frames.get()]
            while not frames.empty():
                queued_frames.append(frames.get_nowait())
            response_frames = [frame for frame in queued_frames if frame is not None]
            num_unfinished -= sum(frame.header["last"] for frame in response_frames)
            yield b"".join(frame.to_bytes() for frame in response_frames)
            if len(response_frames) < len(queued_frames):
                return
    finally:
        for task in tasks:
            task.cancel()


async def _end_frames_at_the_end(
    context: RequestContext, frames: asyncio.Queue[Frame | None]
) -> None:
    await context.state.ending.wait()
    frames.put_nowait(None)


async def _answer_one(
    context: RequestContext,
    index: int,
    request: SampleRequest | PlanishError,
    frames: asyncio.Queue[Frame | None],
) -> None:
    """Put the frames of one request into the queue."""
    try:
        if isinstance(request, PlanishError):
            raise request
        accepted = await context.open_server.sampling.submit(
            context.tenant, request.seq_id, request.operation
        )
        frames.put_nowait(Frame(_accepted_header(index, accepted)))
        while isinstance(
            outcome := await context.server.settlement.outcome(
                context.tenant, accepted.request_id, context.state.settings.poll_seconds
            ),
            TryAgain,
        ):
            frames.put_nowait(Frame({"index": index, "last": False}))
        frames.put_nowait(_result_frame(index, outcome))
    except Exception as error:
        if not isinstance(error, (PlanishError, ValueError)):
            _log.error("a sample of a batch failed", exc_info=error)
        frames.put_nowait(Frame(_rejected_header(index, error)))


def _accepted_header(index: int, accepted: Accepted) -> Mapping[str, Any]:
    ids = list(accepted.sample_sequence_ids)
    return {
        "index": index,
        "last": False,
        "request_id": accepted.request_id,
        "sample_sequence_ids": ids,
    }


def _result_frame(index: int, outcome: Done | Failed) -> Frame:
    if isinstance(outcome, Done):
        return Frame({"index": index, "last": True}, outcome.content)
    error_fields = {
        "error": outcome.message,
        "category": outcome.category,
        ERROR_CLASS: outcome.error_class,
    }
    return Frame({"index": index, "last": True, **error_fields})


def _rejected_header(index: int, error: Exception) -> Mapping[str, Any]:
    error = client_error(error)
    status = status_of(error)
    return {
        "index": index,
        "last": True,
        "status": status,
        "detail": str(error)
        if status != 500
        else f"internal error of the server ({type(error).__name__})",
        "retry_after": error.retry_after if isinstance(error, ServerError) else None,
        ERROR_CLASS: error_class_name(error),
    }


async def cancel_future(context: RequestContext) -> None:
    """Cancel a sample request."""
    async with context.fields() as fields:
        request_id = fields.identifier("request_id")
    context.server.sampling.cancel(context.tenant, request_id)


ROUTES = [
    endpoint("/create_sampling_session", create_sampling_session),
    endpoint("/samplers/{sampler_id}", sampler, "GET"),
    body_endpoint("/asample", MAX_SAMPLE_BODY, _sample_request, asample),
    endpoint("/cancel_future", cancel_future),
]
PLANISH_ROUTES = [endpoint("/planish/draw", sample_batch), endpoint("/planish/release", release)]
