"""Many samples by one request, for planish's own client.

    POST /planish/draw     {"requests": [bodies of asample]}. The answer goes on until everything is
                           drawn: a frame for each
                           request when it is accepted or refused, and one when it is done (planish/wire/client_frames.py)
    POST /planish/release  {"sampler_id"}: a sampler is not used any more

Each request of a batch is what it would be by itself: journaled, in its tenant's turn, identified
by sampler and number. So a batch whose connection breaks is sent again as it is, and nothing is
drawn twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.responses import Response, StreamingResponse

from planish.errors import PlanishError, UserError
from planish.server.answers import Accepted, Done, Failed, TryAgain
from planish.server.errors import NotFound, ServerError, status_of
from planish.server.exchange import SAMPLE_BODY, Exchange, endpoint, nothing
from planish.wire.client_errors import ERROR_CLASS, name_of
from planish.wire.client_frames import MEDIA, Frame
from planish.wire.fields import Fields
from planish.wire.sampling import SampleRequest, sample_request_from_json, targets_of
from planish.wire.tensors import check_filled

MAX_REQUESTS = 1024

_log = logging.getLogger("planish.server")


async def draw(exchange: Exchange) -> Response:
    async with exchange.body(SAMPLE_BODY) as body:
        requests = await exchange.compute(body, lambda: _requests(Fields.of(body)))
    return StreamingResponse(_frames(exchange, requests), media_type=MEDIA)


async def release(exchange: Exchange) -> Response:
    async with exchange.fields() as fields:
        sampler_id = fields.identifier("sampler_id")
    core = exchange.core
    sampler = core.samplers.get(sampler_id)
    if sampler is None or sampler.row.tenant != exchange.tenant.name:
        raise NotFound(f"sampler_id={sampler_id!r}: there is no such sampler")
    await core.samplers.close(sampler, "it was released")
    return nothing()


def _requests(fields: Fields) -> list[SampleRequest | PlanishError]:
    """A request that cannot be read is refused alone."""
    with fields:
        found: list[SampleRequest | PlanishError] = []
        asked = 0
        for one in fields.objects("requests"):
            try:
                request = sample_request_from_json(one.alone())
                asked += targets_of(request.operation)
                check_filled("requests", asked)
                found.append(request)
            except UserError as error:
                found.append(error)
    if not 0 < len(found) <= MAX_REQUESTS:
        raise UserError(f"requests has {len(found)} entries; give 1 to {MAX_REQUESTS}")
    return found


async def _frames(
    exchange: Exchange, requests: list[SampleRequest | PlanishError]
) -> AsyncIterator[bytes]:
    """Ends early when the server stops; the client sends the batch again."""
    frames: asyncio.Queue[Frame | None] = asyncio.Queue()
    tasks = [
        *(
            asyncio.create_task(_answer(exchange, index, request, frames))
            for index, request in enumerate(requests)
        ),
        asyncio.create_task(_stop(exchange, frames)),
    ]
    try:
        left = len(requests)
        while left:
            ready = [await frames.get()]
            while not frames.empty():
                ready.append(frames.get_nowait())
            whole = [frame for frame in ready if frame is not None]
            left -= sum(frame.header["last"] for frame in whole)
            yield b"".join(frame.to_bytes() for frame in whole)
            if len(whole) < len(ready):
                return
    finally:
        for task in tasks:
            task.cancel()


async def _stop(exchange: Exchange, frames: asyncio.Queue[Frame | None]) -> None:
    await exchange.state.stopping.wait()
    frames.put_nowait(None)


async def _answer(
    exchange: Exchange,
    index: int,
    request: SampleRequest | PlanishError,
    frames: asyncio.Queue[Frame | None],
) -> None:
    """The frames of one request."""
    try:
        if isinstance(request, PlanishError):
            raise request
        accepted = await exchange.core.submit_sample(
            exchange.tenant, request.seq_id, request.operation
        )
        frames.put_nowait(Frame(_acceptance(index, accepted)))
        while isinstance(
            outcome := await exchange.core.result(
                exchange.tenant, accepted.request_id, exchange.state.settings.poll_seconds
            ),
            TryAgain,
        ):
            frames.put_nowait(Frame({"index": index, "last": False}))
        frames.put_nowait(_result(index, outcome))
    except Exception as error:
        if not isinstance(error, (PlanishError, ValueError)):
            _log.error("drawing failed", exc_info=error)
        frames.put_nowait(Frame(_refusal(index, error)))


def _acceptance(index: int, accepted: Accepted) -> Mapping[str, Any]:
    ids = list(accepted.sample_sequence_ids)
    return {
        "index": index,
        "last": False,
        "request_id": accepted.request_id,
        "sample_sequence_ids": ids,
    }


def _result(index: int, outcome: Done | Failed) -> Frame:
    if isinstance(outcome, Done):
        return Frame({"index": index, "last": True}, outcome.content)
    said = {
        "error": outcome.message,
        "category": outcome.category,
        ERROR_CLASS: outcome.error_class,
    }
    return Frame({"index": index, "last": True, **said})


def _refusal(index: int, error: Exception) -> Mapping[str, Any]:
    status = status_of(error)
    return {
        "index": index,
        "last": True,
        "status": status,
        "detail": str(error)
        if status != 500
        else f"a fault of the server ({type(error).__name__})",
        "retry_after": error.retry_after if isinstance(error, ServerError) else None,
        ERROR_CLASS: name_of(error),
    }


ROUTES = [endpoint("/planish/draw", draw), endpoint("/planish/release", release)]
