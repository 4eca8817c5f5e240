"""POST /v1/chat/completions: the model's renderer builds the prompt and parses the samples.

Reasoning goes into `reasoning_content`, as in vLLM and SGLang. If a grammar constrains the tool
calls, their arguments are streamed while the model writes them. Otherwise a call is sent when it is
complete. The renderer rejects messages that its format cannot express.
"""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from planish.errors import UserError
from planish.renderers import Renderer
from planish.renderers.message_parts import MessagePart, ParseOptions
from planish.renderers.messages import get_text_content, get_thinking_content
from planish.renderers.registry import with_effort, with_thinking
from planish.renderers.stream_parser import SampleParser, message_parser, stop_gate
from planish.server.http.openai_errors import WrongParameterError
from planish.server.openai.chat_prompts import build_prompt, normalize_message
from planish.server.openai.constraints import chat_constraint, constrains_calls
from planish.server.openai.logprobs import ScoredToken, chat_logprobs, scored_tokens
from planish.server.openai.models import OpenAIModels, ServedModel
from planish.server.openai.protocol import (
    Envelope,
    SampledPrompt,
    Usage,
    answer,
    error_events,
)
from planish.server.openai.requests import ChatRequest, TokenizeRequest
from planish.server.openai.streaming import DONE_EVENT, server_sent_event
from planish.server.results import Tenant
from planish.service import Sample, SampledToken, TextEnd
from planish.types import Constraint, SampledSequence, SampleResponse


@dataclass(frozen=True)
class ParsedChat:
    """A parsed chat request."""

    model: ServedModel
    options: ChatRequest
    renderer: Renderer
    operations: list[Sample]
    """The one sample request."""
    parse_options: ParseOptions

    def new_parser(self) -> SampleParser:
        """Return the parser of one sample."""
        detokenizer = self.model.tokenization.detokenizer
        return message_parser(self.renderer, detokenizer, self.parse_options)


async def chat_completions(
    models: OpenAIModels, tenant: Tenant, request: Request, options: ChatRequest
) -> Response:
    """Answer a chat request, streamed or in one body."""
    return await answer(
        models, tenant, request, options, parse_chat, ChatStreamWriter, _response_body
    )


def parse_chat(
    model: ServedModel,
    options: ChatRequest,
    renderer: Renderer | None = None,
    unlisted_tools: Container[str] = (),
) -> ParsedChat:
    """Build the prompt of a request and the operation that samples its answers. Raise
    WrongParameterError, which names the parameter, if the model's chat format or a constraint does
    not allow the request.

    `renderer` replaces the renderer that the request selects. The model may call the tools whose
    names are in `unlisted_tools`, but the system message does not describe them.
    """
    renderer = renderer or renderer_of(model, options)
    tools = [] if options.tool_choice == "none" else options.tools
    listed_tools = [tool for tool in tools if tool.function.name not in unlisted_tools]
    stop_sequences = renderer.get_stop_sequences()
    stop_ids = model.tokenization.eos_token_ids | {
        mark for mark in stop_sequences if isinstance(mark, int)
    }
    stop_strings = [mark for mark in stop_sequences if isinstance(mark, str)]
    prompt = build_prompt(model, renderer, options, listed_tools)
    if prompt.images and options.return_token_ids:
        raise WrongParameterError(
            "return_token_ids",
            "return_token_ids cannot be combined with images, which have no token ids; leave it out",
        )
    constraint = chat_constraint(options, tools, renderer)
    continues = _continued_part(options, constraint)
    samples_thinking = renderer.format.capabilities.samples_thinking
    parse_options = ParseOptions(
        reads_calls=bool(tools),
        has_valid_calls=constrains_calls(options, tools),
        # Without reasoning, a constraint covers the whole text, which may contain any tag.
        reads_reasoning=samples_thinking or constraint is None,
        continues=continues,
    )
    chat = ParsedChat(model, options, renderer, [], parse_options)
    chat.operations.append(
        Sample(
            sampler_id="",
            prompt=prompt,
            num_samples=options.n,
            sampling_params=options.sampling_params(stop_ids, stop_strings, constraint),
            topk_sample_logprobs=options.num_top_logprobs or 0,
            logprob_token_ids=options.logprob_token_ids or (),
            # Stop strings of a request apply to the answer, not to the reasoning before it.
            stop_gate=stop_gate(chat.new_parser, stop_ids)
            if samples_thinking and continues != "text" and (options.stop or options.stop_token_ids)
            else None,
        )
    )
    return chat


def _continued_part(
    options: ChatRequest, constraint: Constraint | None
) -> Literal["reasoning", "text"] | None:
    """Return the part of the last message that the model continues, or None if it begins a new
    message.
    """
    if not options.continue_final_message:
        return None
    if constraint is not None:
        raise WrongParameterError(
            "continue_final_message",
            "continue_final_message cannot be combined with a constraint, which describes a whole "
            "message; leave response_format and the other constraints out",
        )
    message = normalize_message(options.messages[-1], len(options.messages) - 1)
    has_text = bool(get_text_content(message).strip())
    return "text" if has_text or not get_thinking_content(message) else "reasoning"


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


def _response_body(chat: ParsedChat, prompts: Sequence[SampledPrompt]) -> dict[str, Any]:
    [prompt] = prompts
    choices = [
        _choice(chat, index, sequence, prompt.text_ends.get(index))
        for index, sequence in enumerate(prompt.response.sequences)
    ]
    envelope = Envelope.new("chatcmpl", "chat.completion", chat.model.name)
    body = envelope.body(choices, Usage.from_responses(chat.operations, [prompt.response]))
    return {**body, **_prompt_token_ids(chat)}


def _prompt_token_ids(chat: ParsedChat) -> dict[str, Any]:
    if not chat.options.return_token_ids:
        return {}
    return {"prompt_token_ids": chat.operations[0].prompt.to_ints()}


def _choice(
    chat: ParsedChat, index: int, sequence: SampledSequence, text_end: TextEnd | None
) -> dict[str, Any]:
    parser = chat.new_parser()
    parser.add_all(sequence.tokens, text_end)
    parts = parser.take()
    content, reasoning = (_joined(parts, kind) for kind in ("text", "reasoning"))
    # A sample that ends early may leave a call with incomplete arguments, as in OpenAI's API.
    calls = [
        _call(part, "".join(one.text for one in parts if _continues(one, part)))
        for part in parts
        if part.kind == "call"
    ]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content or (None if calls else ""),
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    ids = {"token_ids": sequence.tokens} if chat.options.return_token_ids else {}
    return {
        "index": index,
        "message": {**message, "refusal": None},
        "logprobs": _logprobs(chat, scored_tokens(sequence)),
        "finish_reason": _finish_reason(sequence, bool(calls)),
        **ids,
    }


def _joined(parts: Sequence[MessagePart], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def _continues(part: MessagePart, call: MessagePart) -> bool:
    return part.kind == "arguments" and part.call == call.call


@dataclass
class _ChoiceStream:
    """The state of one sample while its answer is streamed."""

    chat: ParsedChat
    index: int
    parser: SampleParser
    unsent_tokens: list[ScoredToken] = field(default_factory=list[ScoredToken])
    """The sampled tokens that no chunk contains yet."""
    has_calls: bool = False

    def add(self, token: SampledToken) -> None:
        """Add a token."""
        self.parser.add(token.token, token.num_unsettled, token.text_end)
        self.unsent_tokens.append(ScoredToken.of_sample(token))

    def choices(self) -> Iterator[dict[str, Any]]:
        """Yield stream choices with the parts of the message that no chunk contains yet. As in
        OpenAI's API, the first choice of a call has the function's name, and the next choices have
        parts of the arguments.
        """
        parts = self.parser.take()
        delta = {
            "reasoning_content": _joined(parts, "reasoning"),
            "content": _joined(parts, "text"),
        }
        if delta := {name: text for name, text in delta.items() if text}:
            yield self.choice(delta)
        for part in parts:
            if part.kind == "call":
                self.has_calls = True
                yield self.choice({"tool_calls": [{"index": part.call, **_call(part, "")}]})
            elif part.kind == "arguments":
                call = {"index": part.call, "function": {"arguments": part.text}}
                yield self.choice({"tool_calls": [call]})

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


class ChatStreamWriter:
    """Writes the chunks of a streamed chat completion."""

    def __init__(self, chat: ParsedChat) -> None:
        """`chat` is the parsed request."""
        self._chat = chat
        self._envelope = Envelope.new("chatcmpl", "chat.completion.chunk", chat.model.name)
        self._choices = [
            _ChoiceStream(chat, index, chat.new_parser()) for index in range(chat.options.n)
        ]
        self._changed: dict[int, _ChoiceStream] = {}
        """The choices with new tokens."""
        self._usage: Usage | None = None

    def begin(self) -> Iterator[bytes]:
        """Yield the first chunk of each choice."""
        for choice in self._choices:
            body = self._envelope.body([choice.choice({"role": "assistant", "content": ""})])
            yield server_sent_event({**body, **_prompt_token_ids(self._chat)})

    def add(self, prompt_index: int, token: SampledToken) -> None:
        """Add a token."""
        choice = self._choices[token.sample]
        choice.add(token)
        self._changed[token.sample] = choice

    def flush(self) -> Iterator[bytes]:
        """Yield chunks with what the new tokens add."""
        changed, self._changed = self._changed, {}
        for choice in changed.values():
            for body in choice.choices():
                yield self._envelope.event([body])

    def finish_prompt(self, prompt_index: int, response: SampleResponse) -> Iterator[bytes]:
        """Yield the last chunks of all choices."""
        for choice, sequence in zip(self._choices, response.sequences, strict=True):
            choice.parser.finish()
            for body in choice.choices():
                yield self._envelope.event([body])
            reason = _finish_reason(sequence, choice.has_calls)
            yield self._envelope.event([choice.choice({}, reason)])
        self._usage = Usage.from_responses(self._chat.operations, [response])

    def end(self) -> Iterator[bytes]:
        """Yield the chunk with the token counts, if the request asks for them."""
        if self._chat.options.include_usage:
            yield self._envelope.event([], self._usage)
        yield DONE_EVENT

    def fail(self, error: Exception) -> Iterator[bytes]:
        """Yield the error as an event."""
        return error_events(error)


def id_of_call(call: MessagePart) -> str:
    """Return the id that the model wrote for a call, or else a new one."""
    return call.call_id or f"call_{secrets.token_hex(12)}"


def _call(call: MessagePart, arguments: str) -> dict[str, Any]:
    return {
        "id": id_of_call(call),
        "type": "function",
        "function": {"name": call.text, "arguments": arguments},
    }


def _finish_reason(sequence: SampledSequence, has_calls: bool) -> str:
    if sequence.stop_reason == "length":
        return "length"
    return "tool_calls" if has_calls else "stop"


def _logprobs(chat: ParsedChat, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
    """Return the `logprobs` object for `tokens`, or None if the request does not ask for it."""
    if chat.options.num_top_logprobs is None:
        return None
    return chat_logprobs(chat.model.tokenization.detokenizer, tokens)
