"""POST /v1/chat/completions: the renderer of the model writes the prompt and reads what is drawn.

Reasoning goes into `reasoning_content`, as other open servers have it. Tool calls are told when
they are whole.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from planish.renderers import Renderer
from planish.server.answers import Tenant
from planish.server.exchange import answered
from planish.server.openai_answers import (
    Drawn,
    Envelope,
    Usage,
    Whole,
    draw_all,
    draw_events,
    stream_response,
    while_connected,
)
from planish.server.openai_messages import build_prompt
from planish.server.openai_models import OpenAIModels, Served
from planish.server.openai_options import Options, read_chat_options
from planish.server.openai_reading import Growing, Reading, marks_of, read_message
from planish.server.openai_texts import TokenTexts
from planish.service import Sample
from planish.types import SampledSequence, SampleResponse
from planish.wire.fields import Fields

TopTokens = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Chat:
    """A request that was understood."""

    model: Served
    options: Options
    renderer: Renderer
    stop_ids: frozenset[int]
    operation: Sample

    def growing(self) -> Growing:
        return Growing(read_message(self.renderer), self.options.stop, marks_of(self.renderer))


async def chat_completions(
    models: OpenAIModels, tenant: Tenant, request: Request, fields: Fields
) -> Response:
    options = read_chat_options(fields)
    chat = await asyncio.to_thread(
        _understood, await models.find(tenant, options.model), options, fields
    )
    sampler_id = await models.sampler(tenant, chat.model, [chat.operation])
    if options.stream:
        return stream_response(
            _stream(chat, draw_events(models, tenant, sampler_id, [chat.operation]))
        )
    [response] = await while_connected(
        request, draw_all(models, tenant, sampler_id, [chat.operation])
    )
    return answered(await asyncio.to_thread(_whole, chat, response))


def _understood(model: Served, options: Options, fields: Fields) -> Chat:
    texts = model.texts
    renderer = texts.renderer(model.renderer_name)
    marks = renderer.get_stop_sequences()
    stop_ids = texts.end_ids | {mark for mark in marks if isinstance(mark, int)}
    strings = (*(mark for mark in marks if isinstance(mark, str)), *options.stop)
    operation = Sample(
        sampler_id="",
        prompt=build_prompt(fields, renderer),
        num_samples=options.n,
        sampling_params=options.sampling_params(texts.stop(stop_ids, strings)),
        topk_sample_logprobs=options.top_logprobs or 0,
    )
    return Chat(model, options, renderer, stop_ids, operation)


def _whole(chat: Chat, response: SampleResponse) -> dict[str, Any]:
    choices = [_choice(chat, index, sequence) for index, sequence in enumerate(response.sequences)]
    envelope = Envelope.of("chatcmpl", "chat.completion", chat.model.name)
    return envelope.body(choices, Usage.of([chat.operation], [response]))


def _choice(chat: Chat, index: int, sequence: SampledSequence) -> dict[str, Any]:
    growing = chat.growing()
    growing.tokens = sequence.tokens
    reading = growing.whole()
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reading.content or (None if reading.calls else ""),
    }
    if reading.reasoning:
        message["reasoning_content"] = reading.reasoning
    if reading.calls:
        message["tool_calls"] = _calls(reading)
    return {
        "index": index,
        "message": {**message, "refusal": None},
        "logprobs": _logprobs(chat, _scored(sequence)),
        "finish_reason": _finish_reason(sequence, reading),
    }


async def _stream(
    chat: Chat, events: AsyncIterator[Drawn | Whole]
) -> AsyncIterator[dict[str, Any]]:
    envelope = Envelope.of("chatcmpl", "chat.completion.chunk", chat.model.name)
    growing = [chat.growing() for _ in range(chat.options.n)]
    scored: list[list[Scored]] = [[] for _ in growing]
    for index in range(chat.options.n):
        yield envelope.body([_chunk(index, {"role": "assistant", "content": ""})])
    async for event in events:
        if isinstance(event, Drawn):
            index, one = event.token.sample, growing[event.token.sample]
            one.add(event.token.token)
            scored[index].append(Scored(event.token.token, event.token.logprob, event.token.topk))
            if not one.is_due:
                continue
            delta = _delta(one.delta())
            if delta:
                yield envelope.body([_chunk(index, delta, logprobs=_logprobs(chat, scored[index]))])
                scored[index] = []
            continue
        for index, sequence in enumerate(event.response.sequences):
            reading = growing[index].rest()
            reason = _finish_reason(sequence, reading)
            yield envelope.body(
                [_chunk(index, _delta(reading), reason, _logprobs(chat, scored[index]))]
            )
        if chat.options.include_usage:
            yield envelope.body([], Usage.of([chat.operation], [event.response]))


def _chunk(
    index: int,
    delta: dict[str, Any],
    reason: str | None = None,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _delta(reading: Reading) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if reading.reasoning:
        delta["reasoning_content"] = reading.reasoning
    if reading.content:
        delta["content"] = reading.content
    if reading.calls:
        delta["tool_calls"] = [
            {"index": index, **call} for index, call in enumerate(_calls(reading))
        ]
    return delta


def _calls(reading: Reading) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            },
        }
        for call in reading.calls
    ]


def _finish_reason(sequence: SampledSequence, reading: Reading) -> str:
    if sequence.stop_reason == "length":
        return "length"
    return "tool_calls" if reading.calls else "stop"


@dataclass(frozen=True)
class Scored:
    """A token with its logprob, and the likeliest ones in its place."""

    token: int
    logprob: float
    top: TopTokens


def _scored(sequence: SampledSequence) -> list[Scored]:
    tops = sequence.topk_logprobs or [()] * len(sequence.tokens)
    return [
        Scored(token, logprob, top or ())
        for token, logprob, top in zip(sequence.tokens, sequence.logprobs, tops, strict=True)
    ]


def _logprobs(chat: Chat, scored: Sequence[Scored]) -> dict[str, Any] | None:
    """Of every token but the one that ended the sample."""
    if chat.options.top_logprobs is None:
        return None
    texts = chat.model.texts.tokens
    rows = [
        {
            **_token(texts, one.token, one.logprob),
            "top_logprobs": [_token(texts, *other) for other in one.top],
        }
        for one in scored
        if one.token not in chat.stop_ids
    ]
    return {"content": rows, "refusal": None}


def _token(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    text, data = texts.of(token)
    return {"token": text, "logprob": logprob, "bytes": list(data)}
