"""POST /v1/chat/completions: the model's renderer builds the prompt and parses the samples.

Reasoning goes into `reasoning_content`, as in vLLM and SGLang. If a grammar constrains the tool
calls, their arguments are streamed while the model writes them. Otherwise a call is sent when it is
complete. The renderer rejects messages that its format cannot express.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from planish.errors import UserError
from planish.renderers import Renderer
from planish.renderers.messages import RENDERERS_WITH_TOOLS
from planish.renderers.registry import with_effort, with_thinking
from planish.renderers.stream_parser import Reading, StreamedSample, marks_of, read_message
from planish.server.http.context import WrongParameterError
from planish.server.openai.constraints import chat_constraint, constrains_calls
from planish.server.openai.models import OpenAIModels, Served, TokenTexts
from planish.server.openai.protocol import (
    Envelope,
    Finished,
    Sampled,
    Usage,
    answer,
    check_text,
)
from planish.server.openai.requests import ChatRequest, TokenizeRequest, Tool
from planish.server.results import Tenant
from planish.service import Sample
from planish.types import ModelInput, SampledSequence, SampleResponse

TopTokens = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Chat:
    """A parsed chat request."""

    model: Served
    options: ChatRequest
    renderer: Renderer
    stop_ids: frozenset[int]
    operations: list[Sample]
    """The one sample request."""
    constrains_calls: bool

    def growing(self) -> StreamedSample:
        """Return the parser of one sample."""
        return StreamedSample(
            read_message(self.renderer),
            self.options.stop_strings,
            marks_of(self.renderer),
            frozenset(self.options.stop_token_ids),
            self.constrains_calls,
        )


async def chat_completions(
    models: OpenAIModels, tenant: Tenant, request: Request, options: ChatRequest
) -> Response:
    """Answer a chat request, streamed or in one body."""
    return await answer(models, tenant, request, options, _parsed, _stream, _whole)


def _parsed(model: Served, options: ChatRequest) -> Chat:
    renderer = renderer_of(model, options)
    tools = [] if options.tool_choice == "none" else options.tools
    marks = renderer.get_stop_sequences()
    stop_ids = model.texts.end_ids | {mark for mark in marks if isinstance(mark, int)}
    strings = [mark for mark in marks if isinstance(mark, str)]
    prompt = build_prompt(model, renderer, options.messages, tools)
    constraint = chat_constraint(options, tools, renderer)
    operation = Sample(
        sampler_id="",
        prompt=prompt,
        num_samples=options.n,
        sampling_params=options.sampling_params(stop_ids, strings, constraint),
        topk_sample_logprobs=options.wanted_logprobs or 0,
    )
    return Chat(
        model=model,
        options=options,
        renderer=renderer,
        stop_ids=stop_ids.union(options.stop_token_ids),
        operations=[operation],
        constrains_calls=constrains_calls(options, tools),
    )


def renderer_of(model: Served, options: ChatRequest | TokenizeRequest) -> Renderer:
    """Return the renderer of a request, with its reasoning effort, or with or without thinking.
    Raise WrongParameterError if the model's chat format does not support what the request asks for.
    """
    renderer = model.texts.renderer(model.renderer_name)
    thinks = options.chat_template_kwargs.enable_thinking
    effort = options.reasoning_effort if isinstance(options, ChatRequest) else None
    name = "chat_template_kwargs" if effort is None else "reasoning_effort"
    if effort is not None and thinks not in (None, effort != "none"):
        raise WrongParameterError(
            name,
            f"reasoning_effort={effort!r} contradicts chat_template_kwargs.enable_thinking="
            f"{str(thinks).lower()}; leave one of them out",
        )
    try:
        if effort is not None:
            return model.texts.renderer(with_effort(renderer.name, effort))
        return (
            renderer
            if thinks is None
            else model.texts.renderer(with_thinking(renderer.name, thinks))
        )
    except UserError as error:
        raise WrongParameterError(name, f"{name}: {error}") from None


def _whole(chat: Chat, responses: Sequence[SampleResponse]) -> dict[str, Any]:
    [response] = responses
    choices = [_choice(chat, index, sequence) for index, sequence in enumerate(response.sequences)]
    envelope = Envelope.of("chatcmpl", "chat.completion", chat.model.name)
    body = envelope.body(choices, Usage.of(chat.operations, responses))
    return {**body, **_prompt_ids(chat)}


def _prompt_ids(chat: Chat) -> dict[str, Any]:
    if not chat.options.return_token_ids:
        return {}
    return {"prompt_token_ids": chat.operations[0].prompt.to_ints()}


def _choice(chat: Chat, index: int, sequence: SampledSequence) -> dict[str, Any]:
    growing = chat.growing()
    growing.tokens = sequence.tokens
    reading = growing.whole()
    # A sample that ends early may leave a call with incomplete arguments, as in OpenAI's API.
    calls = [*reading.calls, *([reading.open_call] if reading.open_call else [])]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reading.content or (None if calls else ""),
    }
    if reading.reasoning:
        message["reasoning_content"] = reading.reasoning
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    ids = {"token_ids": sequence.tokens} if chat.options.return_token_ids else {}
    return {
        "index": index,
        "message": {**message, "refusal": None},
        "logprobs": _logprobs(chat, _scored(sequence)),
        "finish_reason": _finish_reason(sequence, bool(calls)),
        **ids,
    }


@dataclass
class _Streamed:
    """The state of one sample while its answer is streamed."""

    chat: Chat
    index: int
    growing: StreamedSample
    scored: list[Scored] = field(default_factory=list)
    """The sampled tokens that no chunk contains yet."""
    calls: int = 0
    """The number of complete tool calls sent so far. It is also the index of the open call."""
    open_arguments: str | None = None
    """The part of the open call's arguments that was sent. None if there is no open call."""

    def chunks(self, reading: Reading) -> Iterator[dict[str, Any]]:
        """Yield stream choices with the text and the tool calls that `reading` adds. As in OpenAI's
        API, the first choice of a call has the function's name, and the next choices have parts of
        the arguments.
        """
        delta = {"reasoning_content": reading.reasoning, "content": reading.content}
        if delta := {name: text for name, text in delta.items() if text}:
            yield self.choice(delta)
        for call in reading.calls:
            yield from self._call_chunks(call["function"])
            self.calls, self.open_arguments = self.calls + 1, None
        if reading.open_call is not None:
            yield from self._call_chunks(reading.open_call["function"])

    def _call_chunks(self, function: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Yield the choices for the part of a call that was not sent yet. `function` is the name of
        the function and the arguments that were sampled so far.
        """
        if self.open_arguments is None:
            head = _call({"function": {**function, "arguments": ""}})
            yield self.choice({"tool_calls": [{"index": self.calls, **head}]})
            self.open_arguments = ""
        arguments = function["arguments"]
        if len(arguments) > len(self.open_arguments) and arguments.startswith(self.open_arguments):
            new = arguments[len(self.open_arguments) :]
            part = {"index": self.calls, "function": {"arguments": new}}
            yield self.choice({"tool_calls": [part]})
            self.open_arguments += new

    def choice(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        """Return a choice with `delta`, and with the tokens that no earlier chunk contains."""
        scored, self.scored = self.scored, []
        ids = (
            {"token_ids": [one.token for one in scored]}
            if self.chat.options.return_token_ids
            else {}
        )
        return {
            "index": self.index,
            "delta": delta,
            "logprobs": _logprobs(self.chat, scored),
            "finish_reason": reason,
            **ids,
        }


async def _stream(
    chat: Chat, events: AsyncIterator[Sampled | Finished]
) -> AsyncIterator[dict[str, Any]]:
    envelope = Envelope.of("chatcmpl", "chat.completion.chunk", chat.model.name)
    streamed = [_Streamed(chat, index, chat.growing()) for index in range(chat.options.n)]
    for one in streamed:
        yield {
            **envelope.body([one.choice({"role": "assistant", "content": ""})]),
            **_prompt_ids(chat),
        }
    async for event in events:
        if isinstance(event, Sampled):
            one = streamed[event.token.sample]
            one.growing.add(event.token.token)
            one.scored.append(Scored(event.token.token, event.token.logprob, event.token.topk))
            if one.growing.is_due:
                for choice in one.chunks(one.growing.delta()):
                    yield envelope.body([choice])
            continue
        for one, sequence in zip(streamed, event.response.sequences, strict=True):
            for choice in one.chunks(one.growing.rest()):
                yield envelope.body([choice])
            has_calls = one.calls > 0 or one.open_arguments is not None
            reason = _finish_reason(sequence, has_calls)
            yield envelope.body([one.choice({}, reason)])
        if chat.options.include_usage:
            yield envelope.body([], Usage.of(chat.operations, [event.response]))


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": function["name"], "arguments": function["arguments"]},
    }


def _finish_reason(sequence: SampledSequence, has_calls: bool) -> str:
    if sequence.stop_reason == "length":
        return "length"
    return "tool_calls" if has_calls else "stop"


@dataclass(frozen=True)
class Scored:
    """A sampled token with its logprob, and the top tokens at its position."""

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
    """Return the `logprobs` object for the tokens in `scored`, without stop tokens. Return None if
    the request did not ask for logprobs.
    """
    if chat.options.wanted_logprobs is None:
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


# Clients copy earlier answers into the conversation, including these fields. planish ignores them
# if they are empty or null.
_ANSWER_FIELDS = ("refusal", "audio", "annotations", "function_call")


def build_prompt(
    model: Served,
    renderer: Renderer,
    given: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
) -> ModelInput:
    """Return the prompt for the messages in `given`. If there are `tools`, the system message of
    the prompt describes them. Raise WrongParameterError, which names the field, if the renderer
    cannot express a message or tool.
    """
    functions = [tool.function.model_dump(exclude={"strict"}, exclude_none=True) for tool in tools]
    for name, value in (("messages", given), ("tools", functions)):
        check_text(name, value, model.texts.max_characters)
    messages = [_message(one) for one in given]
    if functions and not renderer.format.abilities.tools:
        raise WrongParameterError(
            "tools",
            f"renderer {renderer.name} of {model.name} has no form for tools; leave tools out, or "
            f"use a model with renderer {RENDERERS_WITH_TOOLS}",
        )
    try:
        if functions:
            has_system = messages[0].get("role") == "system"
            system = messages.pop(0).get("content") if has_system else ""
            messages = [
                *renderer.create_conversation_prefix_with_tools(functions, _text(system)),
                *messages,
            ]
        return renderer.build_generation_prompt(messages)
    except ValueError as error:
        raise WrongParameterError(
            "tools" if functions and "tool" in str(error) else "messages", str(error)
        ) from None


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    message = {
        key: value
        for key, value in given.items()
        if not (key in _ANSWER_FIELDS and not value) and value is not None
    }
    if message.get("role") == "developer":
        message["role"] = "system"
    if message.get("role") != "tool":
        # This name identifies a participant of the chat. No chat format here writes such a name.
        message.pop("name", None)
    # vLLM and its clients also use the name `reasoning` for reasoning_content.
    thoughts = [message.pop(name, None) for name in ("reasoning_content", "reasoning")]
    thought = thoughts[0] or thoughts[1]
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


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        raise UserError("the system message before tools must be text")
    return "".join(str(part.get("text")) for part in content)
