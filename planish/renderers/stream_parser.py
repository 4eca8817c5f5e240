"""Parse a sample while its tokens arrive, and return the new text that can be sent to a client.

All tokens so far are parsed by the function that also parses the finished sample. So the pieces of
a stream add up to the answer of a request without streaming.

A piece that was sent cannot be taken back. Therefore the end of an unfinished text is held back
while later tokens may change its meaning. Such an end is white space, half a character, or the
beginning of a stop string or of a *mark*: a string that may change how the text before it is parsed
(`marks_of`). An unfinished tool call is held back too, because it may turn out to be text. If a
grammar constrains the calls, an unfinished call cannot become text, so its arguments are sent as
they grow.

Parsing always begins at the start of the text, so it takes time in proportion to the text.
Therefore a long text is parsed less often.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planish.renderers import Renderer
from planish.renderers.codec import Codec
from planish.renderers.messages import get_text_content, get_thinking_content

_PARSES_PER_DOUBLING = 256
"""A text is parsed about this many times while its length doubles."""
_HALF_CHARACTER = "\ufffd"
_MARKS = ("<think>", "</think>", "<tool_call>")
_CALL_END = "</tool_call>"
_OPEN_CALL = re.compile(r'<tool_call>\s*\{"name": "([^"\\]+)", "arguments": (\{.*)', re.DOTALL)
_END_OF_JSON = json.JSONDecoder()


@dataclass(frozen=True)
class Reading:
    """A sample parsed so far: answer, reasoning and tool calls."""

    content: str
    reasoning: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    """Tool calls in the form of the renderers: {"function": {"name", "arguments"}}."""
    unparsed: tuple[str, ...] = ()
    """Tool calls that cannot be parsed, as written. An unfinished call is one of them."""
    open_call: dict[str, Any] | None = None
    """The unfinished call after `calls`, with its arguments so far. It is None unless a grammar
    constrains the calls.
    """

    def with_unparsed(self) -> Reading:
        """Return the reading with the unparsed calls at the end of its text."""
        content = "\n".join(filter(None, (self.content, *self.unparsed)))
        return replace(self, content=content, unparsed=())

    def map_open_arguments(self, change: Callable[[str], str]) -> dict[str, Any] | None:
        """Return `open_call` with its arguments replaced by `change(arguments)`; None if there is
        no open call.
        """
        if self.open_call is None:
            return None
        function = self.open_call["function"]
        return {"function": {**function, "arguments": change(function["arguments"])}}

    def with_open_call(self) -> Reading:
        """Return the reading with the last unparsed call as `open_call`, if it has the form of a
        call and its arguments have begun.
        """
        found = _OPEN_CALL.match(self.unparsed[-1]) if self.unparsed else None
        if found is None:
            return self
        name, arguments = found.groups()
        try:
            # What follows the JSON object belongs to the call and not to its arguments.
            _, end = _END_OF_JSON.raw_decode(arguments)
            arguments = arguments[:end]
        except (ValueError, RecursionError):
            arguments = arguments.removesuffix(_CALL_END)
        call = {"function": {"name": name, "arguments": arguments}}
        return replace(self, unparsed=self.unparsed[:-1], open_call=call)


Read = Callable[[Sequence[int]], Reading]


def read_text(codec: Codec, end_ids: frozenset[int]) -> Read:
    """Return the parser of plain text, which leaves out tokens that end a sequence."""

    def read(tokens: Sequence[int]) -> Reading:
        ids = tokens[:-1] if tokens and tokens[-1] in end_ids else tokens
        return Reading(
            codec.tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    return read


def read_message(renderer: Renderer) -> Read:
    """Return the parser of the assistant's message."""

    def read(tokens: Sequence[int]) -> Reading:
        message = renderer.parse_response(tokens).message
        return Reading(
            content=get_text_content(message),
            reasoning=get_thinking_content(message),
            calls=tuple(message.get("tool_calls", ())),
            unparsed=tuple(call["raw_text"] for call in message.get("unparsed_tool_calls", ())),
        )

    return read


def marks_of(renderer: Renderer) -> tuple[str, ...]:
    """Return the strings that may change how the text before them is parsed."""
    return (*_MARKS, *(stop for stop in renderer.get_stop_sequences() if isinstance(stop, str)))


@dataclass
class StreamedSample:
    """One sample whose tokens arrive one by one."""

    read: Read
    stops: tuple[str, ...]
    """Strings at which the text ends. They are not part of it."""
    marks: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    """Further tokens that end the text. They are not part of it."""
    opens_calls: bool = False
    """Whether a grammar constrains the tool calls, so that an unfinished call is not text."""
    tokens: list[int] = field(default_factory=list)
    _sent: Reading = field(default_factory=lambda: Reading(""))
    _next_parse_length: int = 1

    def add(self, token: int) -> None:
        """Add a token."""
        self.tokens.append(token)

    @property
    def is_due(self) -> bool:
        """Whether enough tokens were added to parse the sample again."""
        return len(self.tokens) >= self._next_parse_length

    def delta(self) -> Reading:
        """Return the text and the calls that were not sent yet and that later tokens cannot change.

        `open_call` has all its arguments so far, including those that were sent.
        """
        self._next_parse_length = len(self.tokens) + max(
            1, len(self.tokens) // _PARSES_PER_DOUBLING
        )
        reading = self._cut_at_stop(self._read())
        content = self._settled_text(reading.content)
        reasoning = self._settled_text(reading.reasoning)
        open_call = reading.map_open_arguments(
            lambda arguments: self._without_unsettled_end(arguments, (*self.stops, _CALL_END))
        )
        return self._take_unsent(Reading(content, reasoning, reading.calls, open_call=open_call))

    def rest(self) -> Reading:
        """Return the rest of the finished sample, including its calls."""
        return self._take_unsent(self.whole())

    def whole(self) -> Reading:
        """Return the finished sample."""
        return self._cut_at_stop(self._read().with_unparsed())

    def _read(self) -> Reading:
        reading = self.read(self._tokens_before_stop)
        return reading.with_open_call() if self.opens_calls else reading

    @property
    def _tokens_before_stop(self) -> Sequence[int]:
        is_stopped = bool(self.tokens) and self.tokens[-1] in self.stop_ids
        return self.tokens[:-1] if is_stopped else self.tokens

    def _cut_at_stop(self, reading: Reading) -> Reading:
        """Return the reading without what follows a stop string."""
        reasoning = text_before(reading.reasoning, self.stops)
        if reasoning != reading.reasoning:
            return Reading("", reasoning)
        content = text_before(reading.content, self.stops)
        open_call = reading.map_open_arguments(lambda arguments: text_before(arguments, self.stops))
        # Calls before a stop string are complete: the sample ended at the string.
        return Reading(content, reasoning, reading.calls, open_call=open_call)

    def _settled_text(self, text: str) -> str:
        return self._without_unsettled_end(text, (*self.stops, *self.marks)).rstrip()

    def _without_unsettled_end(self, text: str, marks: Sequence[str]) -> str:
        """Return the text without the end that must wait for later tokens.

        This end is half a character, or the beginning of one of `marks`.
        """
        text = text.rstrip(_HALF_CHARACTER)
        held_back = max((_overlap(text, mark) for mark in marks), default=0)
        return text[: len(text) - held_back]

    def _take_unsent(self, reading: Reading) -> Reading:
        content = _unsent_part(reading.content, self._sent.content)
        reasoning = _unsent_part(reading.reasoning, self._sent.reasoning)
        calls = reading.calls[len(self._sent.calls) :]
        self._sent = Reading(
            self._sent.content + content, self._sent.reasoning + reasoning, reading.calls
        )
        return Reading(content, reasoning, calls, open_call=reading.open_call)


def text_before(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of the stop strings."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def _unsent_part(text: str, sent: str) -> str:
    """Return the part of a text that follows `sent`.

    Return "" if the text does not begin with `sent`. This happens if later tokens make the parser
    read the tokens of sent text in another way.
    """
    return text.removeprefix(sent) if text.startswith(sent) else ""


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
