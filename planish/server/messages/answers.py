"""Answers of the Messages API: samples as content blocks, whole or as the events of a stream.

Both are made of the same events, so a streamed answer equals the answer that is not streamed. A
tool call becomes a block when it is complete, because its id depends on the text of its arguments.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from planish.renderers.message_parts import MessagePart
from planish.server.messages.content import SHOWN_SIGNATURE, hidden_signature
from planish.server.messages.errors import error_body
from planish.server.messages.sampling import ParsedMessages
from planish.server.messages.tool_inputs import call_id, input_json, parse_arguments
from planish.server.openai.protocol import SampledPrompt, Usage
from planish.server.openai.streaming import server_sent_event
from planish.service import SampledToken, TextEnd
from planish.types import SampledSequence, SampleResponse

Event = dict[str, Any]
PING_EVENT = server_sent_event({"type": "ping"}, "ping")


@dataclass
class BlockEvents:
    """Turns the parts of one sampled message into the events of its content blocks."""

    shows_thinking: bool
    has_calls: bool = False
    _num_blocks: int = 0
    _open: Literal["text", "reasoning", "call"] | None = None
    """The kind of the block that has begun."""
    _call: MessagePart | None = None
    _pieces: list[str] = field(default_factory=list[str])
    """The reasoning or the arguments of the block that has begun."""

    def add(self, parts: Sequence[MessagePart]) -> Iterator[Event]:
        """Yield the events of further parts."""
        for part in parts:
            match part.kind:
                case "call":
                    yield from self.finish()
                    self._open, self._call, self.has_calls = "call", part, True
                case "arguments":
                    self._pieces.append(part.text)
                case "text":
                    if self._open != "text":
                        yield from self.finish()
                        yield self._start({"type": "text", "text": ""})
                        self._open = "text"
                    yield self._delta({"type": "text_delta", "text": part.text})
                case "reasoning":
                    if self._open != "reasoning":
                        yield from self.finish()
                        yield self._start({"type": "thinking", "thinking": "", "signature": ""})
                        self._open = "reasoning"
                    self._pieces.append(part.text)
                    if self.shows_thinking:
                        yield self._delta({"type": "thinking_delta", "thinking": part.text})

    def finish(self) -> Iterator[Event]:
        """Yield the events that end the last block."""
        kind, self._open = self._open, None
        text, self._pieces = "".join(self._pieces), []
        if kind == "call":
            assert self._call is not None
            id_ = call_id(text, self._call.call_id)
            yield self._start({"type": "tool_use", "id": id_, "name": self._call.text, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": input_json(text)})
        elif kind == "reasoning":
            signature = SHOWN_SIGNATURE if self.shows_thinking else hidden_signature(text)
            yield self._delta({"type": "signature_delta", "signature": signature})
        if kind is not None:
            yield {"type": "content_block_stop", "index": self._num_blocks - 1}

    def _start(self, block: dict[str, Any]) -> Event:
        index, self._num_blocks = self._num_blocks, self._num_blocks + 1
        return {"type": "content_block_start", "index": index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}


def content_of(events: Iterator[Event]) -> list[dict[str, Any]]:
    """Return the content blocks that a client makes of these events."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"]})
        elif event["type"] == "content_block_delta":
            for key, value in event["delta"].items():
                if key == "partial_json":
                    blocks[-1]["input"] = _input(value)
                elif key != "type":
                    blocks[-1][key] += value
    return blocks


def _input(text: str) -> Any:
    """Return the JSON of arguments for a body. The text is used as it is if it is complete, because
    numbers may have more digits than this program's JSON writer supports.
    """
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return parse_arguments(text)
    return orjson.Fragment(text)


def message_body(parsed: ParsedMessages, prompts: Sequence[SampledPrompt]) -> dict[str, Any]:
    """Return the body of an answer that is not streamed."""
    [prompt] = prompts
    [sequence] = prompt.response.sequences
    text_end = prompt.text_ends.get(0)
    parser = parsed.chat.new_parser()
    parser.add_all(sequence.tokens, text_end)
    blocks = BlockEvents(parsed.conversation.shows_thinking)
    content = content_of(_all_events(blocks, parser.take()))
    return {
        **_envelope(parsed),
        "content": content,
        **_stop(parsed, sequence, text_end, blocks.has_calls),
        "usage": _usage(Usage.from_responses(parsed.operations, [prompt.response])),
        **_context_management(parsed),
    }


def _all_events(blocks: BlockEvents, parts: Sequence[MessagePart]) -> Iterator[Event]:
    yield from blocks.add(parts)
    yield from blocks.finish()


class MessageStreamWriter:
    """Writes the events of a streamed message."""

    def __init__(self, parsed: ParsedMessages) -> None:
        """`parsed` is the parsed request."""
        self._parsed = parsed
        self._parser = parsed.chat.new_parser()
        self._blocks = BlockEvents(parsed.conversation.shows_thinking)
        self._text_end: TextEnd | None = None

    def begin(self) -> Iterator[bytes]:
        """Yield the first event."""
        usage = _usage(Usage(self._parsed.num_prompt_tokens, 0, 0))
        stop = {"stop_reason": None, "stop_sequence": None}
        message: dict[str, Any] = {**_envelope(self._parsed), "content": [], **stop, "usage": usage}
        yield _encode({"type": "message_start", "message": message})

    def add(self, prompt_index: int, token: SampledToken) -> None:
        """Add a token."""
        self._parser.add(token.token, token.num_unsettled, token.text_end)
        self._text_end = token.text_end

    def flush(self) -> Iterator[bytes]:
        """Yield events with what the new tokens add."""
        yield from map(_encode, self._blocks.add(self._parser.take()))

    def finish_prompt(self, prompt_index: int, response: SampleResponse) -> Iterator[bytes]:
        """Yield the events that end the message, except the last."""
        self._parser.finish()
        yield from map(_encode, _all_events(self._blocks, self._parser.take()))
        [sequence] = response.sequences
        usage = Usage.from_responses(self._parsed.operations, [response])
        delta = _stop(self._parsed, sequence, self._text_end, self._blocks.has_calls)
        management = _context_management(self._parsed)
        yield _encode(
            {"type": "message_delta", "delta": delta, "usage": _usage(usage), **management}
        )

    def end(self) -> Iterator[bytes]:
        """Yield the last event."""
        yield _encode({"type": "message_stop"})

    def fail(self, error: Exception) -> Iterator[bytes]:
        """Yield the error as an event."""
        yield _encode(error_body(error))


def _encode(event: Event) -> bytes:
    return server_sent_event(event, event["type"])


def _envelope(parsed: ParsedMessages) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": parsed.chat.model.name,
    }


def _stop(
    parsed: ParsedMessages, sequence: SampledSequence, text_end: TextEnd | None, has_calls: bool
) -> dict[str, Any]:
    """Return why the message ended."""
    stop = None if text_end is None else text_end.stop
    is_sequence = stop in parsed.conversation.stop_sequences
    if sequence.stop_reason == "length":
        limit = parsed.conversation.chat.max_tokens
        is_limit = limit is not None and len(sequence.tokens_np) >= limit
        reason = "max_tokens" if is_limit else "model_context_window_exceeded"
    elif is_sequence:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if has_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return token counts. As in Anthropic's API, `input_tokens` are those that were not cached."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _context_management(parsed: ParsedMessages) -> dict[str, Any]:
    is_given = parsed.conversation.request.context_management is not None
    return {"context_management": {"applied_edits": []}} if is_given else {}
