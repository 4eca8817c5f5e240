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
from planish.server.openai.models import OpenAIModels, ServedModel, TokenTexts
from planish.server.openai.protocol import (
    Envelope,
    PromptFinishedEvent,
    TokenEvent,
    Usage,
    answer,
    check_text,
)
from planish.server.openai.requests import ChatRequest, TokenizeRequest, Tool
from planish.server.results import Tenant
from planish.service import Sample
from planish.types import ModelInput, SampledSequence, SampleResponse
from planish.wire.pacing import pause_if_due

TopTokens = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class ParsedChat:
    """A parsed chat request."""

    model: ServedModel
    options: ChatRequest
    renderer: Renderer
    stop_ids: frozenset[int]
    operations: list[Sample]
    """The one sample request."""
    constrains_calls: bool

    def new_sample_parser(self) -> StreamedSample:
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
    return await answer(
        models, tenant, request, options, _parse_chat, _stream_chunks, _response_body
    )


def _parse_chat(model: ServedModel, options: ChatRequest) -> ParsedChat:
    renderer = renderer_of(model, options)
    tools = [] if options.tool_choice == "none" else options.tools
    stop_sequences = renderer.get_stop_sequences()
    stop_ids = model.tokenization.eos_token_ids | {
        mark for mark in stop_sequences if isinstance(mark, int)
    }
    stop_strings = [mark for mark in stop_sequences if isinstance(mark, str)]
    prompt = build_prompt(model, renderer, options.messages, tools)
    constraint = chat_constraint(options, tools, renderer)
    operation = Sample(
        sampler_id="",
        prompt=prompt,
        num_samples=options.n,
        sampling_params=options.sampling_params(stop_ids, stop_strings, constraint),
        topk_sample_logprobs=options.num_top_logprobs or 0,
    )
    return ParsedChat(
        model=model,
        options=options,
        renderer=renderer,
        stop_ids=stop_ids.union(options.stop_token_ids),
        operations=[operation],
        constrains_calls=constrains_calls(options, tools),
    )


def renderer_of(model: ServedModel, options: ChatRequest | TokenizeRequest) -> Renderer:
    """Return the renderer of a request, with its reasoning effort, or with or without thinking.
    Raise WrongParameterError if the model's chat format does not support what the request asks for.
    """
    renderer = model.tokenization.renderer(model.renderer_name)
    enable_thinking = options.chat_template_kwargs.enable_thinking
    effort = options.reasoning_effort if isinstance(options, ChatRequest) else None
    parameter = "chat_template_kwargs" if effort is None else "reasoning_effort"
    if effort is not None and enable_thinking not in (None, effort != "none"):
        raise WrongParameterError(
            parameter,
            f"reasoning_effort={effort!r} contradicts chat_template_kwargs.enable_thinking="
            f"{str(enable_thinking).lower()}; leave one of them out",
        )
    try:
        if effort is not None:
            return model.tokenization.renderer(with_effort(renderer.name, effort))
        return (
            renderer
            if enable_thinking is None
            else model.tokenization.renderer(with_thinking(renderer.name, enable_thinking))
        )
    except UserError as error:
        raise WrongParameterError(parameter, f"{parameter}: {error}") from None


def _response_body(chat: ParsedChat, responses: Sequence[SampleResponse]) -> dict[str, Any]:
    [response] = responses
    choices = [_choice(chat, index, sequence) for index, sequence in enumerate(response.sequences)]
    envelope = Envelope.new("chatcmpl", "chat.completion", chat.model.name)
    body = envelope.body(choices, Usage.from_responses(chat.operations, responses))
    return {**body, **_prompt_token_ids(chat)}


def _prompt_token_ids(chat: ParsedChat) -> dict[str, Any]:
    if not chat.options.return_token_ids:
        return {}
    return {"prompt_token_ids": chat.operations[0].prompt.to_ints()}


def _choice(chat: ParsedChat, index: int, sequence: SampledSequence) -> dict[str, Any]:
    parser = chat.new_sample_parser()
    parser.tokens = sequence.tokens
    reading = parser.whole()
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
        "logprobs": _logprobs(chat, _scored_tokens(sequence)),
        "finish_reason": _finish_reason(sequence, bool(calls)),
        **ids,
    }


@dataclass
class _ChoiceStream:
    """The state of one sample while its answer is streamed."""

    chat: ParsedChat
    index: int
    parser: StreamedSample
    unsent_tokens: list[ScoredToken] = field(default_factory=list)
    """The sampled tokens that no chunk contains yet."""
    num_sent_calls: int = 0
    """The number of complete tool calls sent so far. It is also the index of the open call."""
    sent_arguments: str | None = None
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
            self.num_sent_calls, self.sent_arguments = self.num_sent_calls + 1, None
        if reading.open_call is not None:
            yield from self._call_chunks(reading.open_call["function"])

    def _call_chunks(self, function: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Yield the choices for the part of a call that was not sent yet. `function` is the name of
        the function and the arguments that were sampled so far.
        """
        if self.sent_arguments is None:
            first_part = _call({"function": {**function, "arguments": ""}})
            yield self.choice({"tool_calls": [{"index": self.num_sent_calls, **first_part}]})
            self.sent_arguments = ""
        arguments = function["arguments"]
        if len(arguments) > len(self.sent_arguments) and arguments.startswith(self.sent_arguments):
            unsent_arguments = arguments[len(self.sent_arguments) :]
            part = {"index": self.num_sent_calls, "function": {"arguments": unsent_arguments}}
            yield self.choice({"tool_calls": [part]})
            self.sent_arguments += unsent_arguments

    def choice(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        """Return a choice with `delta`, and with the tokens that no earlier chunk contains."""
        tokens, self.unsent_tokens = self.unsent_tokens, []
        ids = (
            {"token_ids": [one.token for one in tokens]}
            if self.chat.options.return_token_ids
            else {}
        )
        return {
            "index": self.index,
            "delta": delta,
            "logprobs": _logprobs(self.chat, tokens),
            "finish_reason": reason,
            **ids,
        }


async def _stream_chunks(
    chat: ParsedChat, events: AsyncIterator[TokenEvent | PromptFinishedEvent]
) -> AsyncIterator[dict[str, Any]]:
    envelope = Envelope.new("chatcmpl", "chat.completion.chunk", chat.model.name)
    choice_streams = [
        _ChoiceStream(chat, index, chat.new_sample_parser()) for index in range(chat.options.n)
    ]
    for stream in choice_streams:
        yield {
            **envelope.body([stream.choice({"role": "assistant", "content": ""})]),
            **_prompt_token_ids(chat),
        }
    async for event in events:
        if isinstance(event, TokenEvent):
            stream = choice_streams[event.token.sample]
            stream.parser.add(event.token.token)
            stream.unsent_tokens.append(
                ScoredToken(event.token.token, event.token.logprob, event.token.topk)
            )
            if stream.parser.is_due:
                for choice in stream.chunks(stream.parser.delta()):
                    yield envelope.body([choice])
            continue
        for stream, sequence in zip(choice_streams, event.response.sequences, strict=True):
            for choice in stream.chunks(stream.parser.rest()):
                yield envelope.body([choice])
            has_calls = stream.num_sent_calls > 0 or stream.sent_arguments is not None
            reason = _finish_reason(sequence, has_calls)
            yield envelope.body([stream.choice({}, reason)])
        if chat.options.include_usage:
            yield envelope.body([], Usage.from_responses(chat.operations, [event.response]))


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
class ScoredToken:
    """A sampled token with its logprob, and the top tokens at its position."""

    token: int
    logprob: float
    top: TopTokens


def _scored_tokens(sequence: SampledSequence) -> list[ScoredToken]:
    top_tokens = sequence.topk_logprobs or [()] * len(sequence.tokens)
    return [
        ScoredToken(token, logprob, top or ())
        for token, logprob, top in zip(sequence.tokens, sequence.logprobs, top_tokens, strict=True)
    ]


def _logprobs(chat: ParsedChat, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
    """Return the `logprobs` object for `tokens`, without stop tokens. Return None if the request
    did not ask for logprobs.
    """
    if chat.options.num_top_logprobs is None:
        return None
    token_texts = chat.model.tokenization.token_texts
    entries = [
        {
            **_token_entry(token_texts, one.token, one.logprob),
            "top_logprobs": [_token_entry(token_texts, *other) for other in one.top],
        }
        for one in tokens
        if one.token not in chat.stop_ids
    ]
    return {"content": entries, "refusal": None}


def _token_entry(token_texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    text, token_bytes = token_texts.decode_token(token)
    return {"token": text, "logprob": logprob, "bytes": list(token_bytes)}


# Clients copy earlier answers into the conversation, including these fields. planish ignores them
# if they are empty or null.
_ANSWER_FIELDS = ("refusal", "audio", "annotations", "function_call")


def build_prompt(
    model: ServedModel,
    renderer: Renderer,
    request_messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
) -> ModelInput:
    """Return the prompt for `request_messages`. If there are `tools`, the system message of the
    prompt describes them. Raise WrongParameterError, which names the field, if the renderer
    cannot express a message or tool.
    """
    functions = [tool.function.model_dump(exclude={"strict"}, exclude_none=True) for tool in tools]
    for name, value in (("messages", request_messages), ("tools", functions)):
        check_text(name, value, model.tokenization.max_characters)
    messages = [_normalize_message(one) for one in request_messages]
    if functions and not renderer.format.capabilities.tools:
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
                *renderer.create_conversation_prefix_with_tools(functions, _system_text(system)),
                *messages,
            ]
        return renderer.build_generation_prompt(messages)
    except ValueError as error:
        raise WrongParameterError(
            "tools" if functions and "tool" in str(error) else "messages", str(error)
        ) from None


def _normalize_message(original: Mapping[str, Any]) -> dict[str, Any]:
    pause_if_due()
    message = {
        key: value
        for key, value in original.items()
        if not (key in _ANSWER_FIELDS and not value) and value is not None
    }
    if message.get("role") == "developer":
        message["role"] = "system"
    if message.get("role") != "tool":
        # This name identifies a participant of the chat. No chat format here writes such a name.
        message.pop("name", None)
    # vLLM and its clients also use the name `reasoning` for reasoning_content.
    reasoning_texts = [message.pop(name, None) for name in ("reasoning_content", "reasoning")]
    reasoning = reasoning_texts[0] or reasoning_texts[1]
    if reasoning:
        message["content"] = [
            {"type": "thinking", "thinking": reasoning},
            *_content_parts(message.get("content", "")),
        ]
    return message


def _content_parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _system_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        raise UserError("the system message before tools must be text")
    return "".join(str(part.get("text")) for part in content)
