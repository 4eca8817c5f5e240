"""Drawing for an OpenAI-compatible endpoint: the samples of a request while they grow, and what is
told of them.

begun    every request's futures and listeners; giving the answer up, or losing the client, gives up
         what is being drawn
events   tokens as they are drawn, then the whole response
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import StreamingResponse

from planish.server.http.context import error_body
from planish.server.openai.models import OpenAIModels
from planish.server.results import Tenant
from planish.service import DrawnToken, Sample
from planish.types import SampleResponse

T = TypeVar("T")


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class Drawn:
    """A token of one prompt's samples."""

    prompt: int
    token: DrawnToken


@dataclass(frozen=True)
class Whole:
    """One prompt's samples are finished."""

    prompt: int
    response: SampleResponse


@dataclass(frozen=True)
class Usage:
    """Tokens of a request."""

    prompt: int
    drawn: int
    cached: int

    @classmethod
    def of(cls, operations: Sequence[Sample], responses: Sequence[SampleResponse]) -> Usage:
        return cls(
            prompt=sum(operation.prompt.length for operation in operations),
            drawn=sum(
                len(sequence.tokens_np) for response in responses for sequence in response.sequences
            ),
            cached=sum(response.prompt_cache_hit_tokens for response in responses),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.drawn,
            "total_tokens": self.prompt + self.drawn,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True)
class Envelope:
    """What every body of one answer begins with."""

    kind: str
    model: str
    id: str
    created: int

    @classmethod
    def of(cls, prefix: str, kind: str, model: str) -> Envelope:
        return cls(kind, model, f"{prefix}-{secrets.token_hex(12)}", int(time.time()))

    def body(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        head = {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        return head if usage is None else {**head, "usage": usage.to_json()}


async def draw_all(
    models: OpenAIModels, tenant: Tenant, sampler_id: str, operations: Sequence[Sample]
) -> list[SampleResponse]:
    """The samples of every prompt; the first error ends all of them."""
    try:
        async with asyncio.TaskGroup() as tasks:
            drawing = [
                tasks.create_task(models.draw(tenant, sampler_id, operation))
                for operation in operations
            ]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in drawing]


async def draw_events(
    models: OpenAIModels, tenant: Tenant, sampler_id: str, operations: Sequence[Sample]
) -> AsyncIterator[Drawn | Whole]:
    """Tokens as they are drawn, and each prompt's samples when they are whole. Closing it gives up
    what is left.
    """
    events: asyncio.Queue[Drawn | asyncio.Task[SampleResponse]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    order: dict[asyncio.Task[SampleResponse], int] = {}

    def listening(index: int, operation: Sample) -> Sample:
        def on_token(token: DrawnToken) -> None:
            loop.call_soon_threadsafe(events.put_nowait, Drawn(index, token))

        return replace(operation, on_token=on_token)

    for index, operation in enumerate(operations):
        task = asyncio.create_task(models.draw(tenant, sampler_id, listening(index, operation)))
        order[task] = index
        task.add_done_callback(events.put_nowait)
    try:
        left = len(order)
        while left:
            event = await events.get()
            if isinstance(event, Drawn):
                yield event
            else:
                left -= 1
                yield Whole(order[event], event.result())
    finally:
        for task in order:
            task.cancel()
        await asyncio.gather(*order, return_exceptions=True)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; when the client hangs up meanwhile, `work` is cancelled, and
    ClientGoneError raised.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def stream_response(bodies: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """Server-sent events, as OpenAI's clients read them. An error in the middle is an event too."""

    async def events() -> AsyncIterator[bytes]:
        try:
            async for body in bodies:
                yield _event(body)
        except Exception as error:
            yield _event(error_body(error))
        yield b"data: [DONE]\n\n"

    return StreamingResponse(
        events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
