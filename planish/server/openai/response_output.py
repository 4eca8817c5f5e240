"""Build the output of a response from the sampled tokens.

The same code builds streamed and complete responses. So the events of a stream add up to the
response without streaming.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planish.detokenizer import Detokenizer
from planish.renderers.message_parts import MessagePart
from planish.server.openai.chat import ParsedChat, id_of_call
from planish.server.openai.logprobs import ScoredToken, chat_logprobs
from planish.server.openai.response_input import FunctionId
from planish.server.openai.response_items import (
    MESSAGE_TEXT,
    REASONING_SUMMARY,
    REASONING_TEXT,
    Event,
    FunctionCallOutput,
    OutputItem,
    TextItem,
)
from planish.service import SampledToken, TextEnd
from planish.types import SampledSequence
from planish.wire.pacing import pause_if_due


@dataclass(frozen=True)
class OutputOptions:
    """How the output of a response is written."""

    functions: Mapping[str, FunctionId]
    """The offered functions, by the names that the model sees."""
    summarizes: bool
    """Whether reasoning is returned in the place of its summary."""
    encodes_reasoning: bool
    has_logprobs: bool


class ResponseOutput:
    """The output items of one sample, built while its tokens arrive."""

    def __init__(self, chat: ParsedChat, options: OutputOptions) -> None:
        """`chat` is the parsed request."""
        self._options = options
        self._detokenizer = chat.model.tokenization.detokenizer
        self._parser = chat.new_parser()
        self._sample = secrets.token_hex(16)
        self._items: list[OutputItem] = []
        self._parts: list[tuple[MessagePart, list[ScoredToken]]] = []
        """The parts of the message that no event contains yet, with the tokens of text."""
        self._tokens: list[ScoredToken] = []
        """The tokens since the last part."""
        self._num_before_answer = 0
        self._has_reasoning = False

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens before the answer, if there is reasoning."""
        return self._num_before_answer if self._has_reasoning else 0

    def add(self, token: SampledToken) -> None:
        """Add a token."""
        self._add(ScoredToken.of_sample(token), token.num_unsettled, token.text_end)

    def add_all(self, tokens: Sequence[ScoredToken], text_end: TextEnd | None) -> None:
        """Add the tokens of a finished sample."""
        num_whole = len(tokens) if text_end is None else text_end.token
        for index, token in enumerate(tokens):
            pause_if_due()
            is_last = index == len(tokens) - 1
            self._add(token, max(0, index + 1 - num_whole), text_end if is_last else None)

    def take_events(self) -> Iterator[Event]:
        """Yield the events for the tokens since the last call."""
        parts, self._parts = self._parts, []
        for part, tokens in _merged(parts):
            if part.kind == "call":
                yield from self._begin_call(part)
            elif part.kind == "arguments":
                yield from self._items[-1].add(part.text)
            else:
                yield from self._add_text(part, tokens)

    def finish(self, sequence: SampledSequence) -> Iterator[Event]:
        """Yield the last events of the finished sample."""
        self._parser.finish()
        self._take_parts()
        yield from self.take_events()
        is_incomplete = sequence.stop_reason == "length"
        if not is_incomplete and all(_is_reasoning(item) for item in self._items):
            # The model has ended its message without text, so the message is empty.
            yield from self._begin(TextItem(self._sample, len(self._items), MESSAGE_TEXT))
        if self._items:
            yield from self._items[-1].end("incomplete" if is_incomplete else "completed")

    def to_json(self) -> list[dict[str, Any]]:
        """Return the items."""
        return [item.to_json() for item in self._items]

    def _add(self, token: ScoredToken, num_unsettled: int, text_end: TextEnd | None) -> None:
        self._parser.add(token.token, num_unsettled, text_end)
        if self._options.has_logprobs:
            self._tokens.append(token)
        if not self._parser.has_begun_answer:
            self._num_before_answer += 1
        self._take_parts()

    def _take_parts(self) -> None:
        for part in self._parser.take():
            # Tokens before reasoning or a call are no part of the text.
            tokens, self._tokens = self._tokens, []
            self._parts.append((part, tokens if part.kind == "text" else []))
            self._has_reasoning |= part.kind == "reasoning"

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        if self._items:
            yield from self._items[-1].end("completed")
        self._items.append(item)
        yield from item.begin()

    def _begin_call(self, part: MessagePart) -> Iterator[Event]:
        function = self._options.functions.get(part.text, FunctionId(part.text))
        index, call_id = len(self._items), id_of_call(part)
        yield from self._begin(FunctionCallOutput(self._sample, index, function, call_id))

    def _add_text(self, part: MessagePart, tokens: list[ScoredToken]) -> Iterator[Event]:
        kind = MESSAGE_TEXT
        if part.kind == "reasoning":
            kind = REASONING_SUMMARY if self._options.summarizes else REASONING_TEXT
        item = self._items[-1] if self._items else None
        if not isinstance(item, TextItem) or item.kind is not kind:
            is_encoded = self._options.encodes_reasoning and kind is not MESSAGE_TEXT
            item = TextItem(self._sample, len(self._items), kind, is_encoded)
            yield from self._begin(item)
        if item.is_empty:
            tokens = _without_lead(self._detokenizer, part.text, tokens)
        logprobs: list[Any] = chat_logprobs(self._detokenizer, tokens)["content"] if tokens else []
        yield from item.add(part.text, logprobs)


def _is_reasoning(item: OutputItem) -> bool:
    return isinstance(item, TextItem) and item.kind is not MESSAGE_TEXT


def _merged(
    parts: Sequence[tuple[MessagePart, list[ScoredToken]]],
) -> Iterator[tuple[MessagePart, list[ScoredToken]]]:
    """Yield the parts with consecutive parts of one kind joined."""
    begin = 0
    for end in range(1, len(parts) + 1):
        first = parts[begin][0]
        if end < len(parts) and parts[end][0].kind == first.kind != "call":
            continue
        joined = "".join(part.text for part, _ in parts[begin:end])
        tokens = [token for _, part_tokens in parts[begin:end] for token in part_tokens]
        yield MessagePart(first.kind, joined, first.call, first.call_id), tokens
        begin = end


def _without_lead(
    detokenizer: Detokenizer, text: str, tokens: Sequence[ScoredToken]
) -> list[ScoredToken]:
    """Return the tokens of `text` without the tokens before it, such as the end of the reasoning
    and white space that belongs to the chat format.
    """
    written = text.encode()
    pieces = [detokenizer.text_bytes(one.token) for one in tokens]
    begin = 0
    while begin + 1 < len(tokens) and written in b"".join(pieces[begin + 1 :]):
        begin += 1
    return list(tokens[begin:])
