"""POST /v1/chat/completions: the model's renderer builds the prompt and parses the samples.

Reasoning goes into `reasoning_content`, as in other open servers. Tool calls are sent once they are
complete. The renderer rejects messages that its format cannot express.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from planish.errors import UserError
from planish.renderers import Renderer
from planish.renderers.stream_parser import Growing, Reading, marks_of, read_message
from planish.server.http.context import UnsupportedParameterError, WrongParameterError, answered
from planish.server.openai.models import OpenAIModels, Served, TokenTexts
from planish.server.openai.protocol import (
    Envelope,
    Finished,
    Options,
    Sampled,
    Usage,
    check_size,
    check_text,
    optional,
    read_chat_options,
    sample_all,
    sample_events,
    stream_response,
    while_connected,
)
from planish.server.results import Tenant
from planish.service import Sample
from planish.types import ModelInput, SampledSequence, SampleResponse
from planish.wire.fields import Fields

TopTokens = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Chat:
    """A parsed request."""

    model: Served
    options: Options
    renderer: Renderer
    stop_ids: frozenset[int]
    operation: Sample

    def growing(self) -> Growing:
        """Return the parser of one sample."""
        return Growing(read_message(self.renderer), self.options.stop, marks_of(self.renderer))


async def chat_completions(
    models: OpenAIModels, tenant: Tenant, request: Request, fields: Fields
) -> Response:
    """Answer a chat request, streamed or in one body."""
    options = read_chat_options(fields)
    chat = await asyncio.to_thread(
        _parsed, await models.find(tenant, options.model), options, fields
    )
    check_size([chat.operation], chat.model.texts.max_context)
    sampler_id = await models.sampler(tenant, chat.model, [chat.operation])
    if options.stream:
        return stream_response(
            _stream(chat, sample_events(models, tenant, sampler_id, [chat.operation]))
        )
    [response] = await while_connected(
        request, sample_all(models, tenant, sampler_id, [chat.operation])
    )
    return answered(await asyncio.to_thread(_whole, chat, response))


def _parsed(model: Served, options: Options, fields: Fields) -> Chat:
    texts = model.texts
    for name in ("messages", "tools"):
        check_text(name, fields.raw(name), texts.max_characters)
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
    chat: Chat, events: AsyncIterator[Sampled | Finished]
) -> AsyncIterator[dict[str, Any]]:
    envelope = Envelope.of("chatcmpl", "chat.completion.chunk", chat.model.name)
    growing = [chat.growing() for _ in range(chat.options.n)]
    scored: list[list[Scored]] = [[] for _ in growing]
    for index in range(chat.options.n):
        yield envelope.body([_chunk(index, {"role": "assistant", "content": ""})])
    async for event in events:
        if isinstance(event, Sampled):
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
    """A token with its logprob, and the top tokens at its position."""

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
    """Return the logprobs of every token except the one that ended the sample."""
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


# Fields of earlier answers that clients send back in the conversation, empty or null.
_ANSWER_FIELDS = ("refusal", "audio", "annotations", "function_call")


def build_prompt(fields: Fields, renderer: Renderer) -> ModelInput:
    """Return the prompt for `messages` and `tools`. Raise WrongParameterError, which names the
    field, if the renderer cannot express a message or tool.
    """
    messages = [
        _message(one, f"messages[{index}]") for index, one in enumerate(_list(fields, "messages"))
    ]
    if not messages:
        raise WrongParameterError("messages", "messages is empty; give at least one")
    tools = _tools(fields)
    try:
        if tools:
            has_system = messages[0].get("role") == "system"
            system = messages.pop(0).get("content") if has_system else ""
            messages = [
                *renderer.create_conversation_prefix_with_tools(tools, _text(system)),
                *messages,
            ]
        return renderer.build_generation_prompt(messages)
    except ValueError as error:
        raise WrongParameterError(
            "tools" if tools and "tool" in str(error) else "messages", str(error)
        ) from None


def _message(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise WrongParameterError(
            "messages", f"{where} is not an object; give {{'role': ..., 'content': ...}}"
        )
    message = {
        key: value
        for key, value in given.items()
        if not (key in _ANSWER_FIELDS and not value) and value is not None
    }
    if message.get("role") == "developer":
        message["role"] = "system"
    if message.get("role") != "tool":
        message.pop("name", None)  # the name of a participant; no format here writes it
    thought = message.pop("reasoning_content", None)
    if thought:
        message["content"] = [
            {"type": "thinking", "thinking": thought},
            *_parts(message.get("content", "")),
        ]
    return message


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _tools(fields: Fields) -> list[dict[str, Any]]:
    """Return the tools that are offered; none if `tool_choice` says so."""
    choice = fields.raw("tool_choice")
    tools = [_tool(one, f"tools[{index}]") for index, one in enumerate(_list(fields, "tools"))]
    if choice not in (None, "auto", "none"):
        raise UnsupportedParameterError(
            "tool_choice", "the model decides itself; give 'auto' or 'none'"
        )
    return [] if choice == "none" else tools


def _tool(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or given.get("type") != "function":
        raise WrongParameterError(
            "tools", f"{where}: give {{'type': 'function', 'function': {{'name': ...}}}}"
        )
    if function.get("strict"):
        raise UnsupportedParameterError(
            "strict", f"calls are not constrained; leave it out of {where}"
        )
    return {key: value for key, value in function.items() if key != "strict"}


def _list(fields: Fields, name: str) -> list[Any]:
    return optional(fields, fields.array, name, [])


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        raise UserError("the system message before tools must be text")
    return "".join(str(part.get("text")) for part in content)
