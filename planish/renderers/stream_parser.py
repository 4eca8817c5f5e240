"""What a sample says, while it grows: the difference between two readings is what a stream sends.

The tokens so far are read as a whole by the same function that reads them at the end, so a stream
adds up to the answer that is not streamed. What is sent cannot be taken back. Therefore an
unfinished reading holds back its end as long as that may become something else: blanks, half a
character, calls, and the beginning of a stop string or of a mark. Reading from the start each time
costs time that grows with the text, so in a long text it is done less often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.renderers import Renderer
from planish.renderers.codec import Codec

_READINGS = 256
"""In a text that doubles its length."""
_HALF_CHARACTER = "\ufffd"
_MARKS = ("<think>", "</think>", "<tool_call>")


@dataclass(frozen=True)
class Reading:
    """A sample as text."""

    content: str
    reasoning: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    """Of tools, as renderers have them: {"function": {"name", "arguments"}}."""
    spoiled: tuple[str, ...] = ()
    """Calls that cannot be read, as they were written. One that is not closed yet is among them."""

    def with_spoiled(self) -> Reading:
        """Calls that are none are text, at its end."""
        return Reading(
            "\n".join(filter(None, (self.content, *self.spoiled))), self.reasoning, self.calls
        )


Read = Callable[[Sequence[int]], Reading]


def read_text(codec: Codec, end_ids: frozenset[int]) -> Read:
    """Plain text; tokens that end a sequence are no part of it."""

    def read(tokens: Sequence[int]) -> Reading:
        ids = tokens[:-1] if tokens and tokens[-1] in end_ids else tokens
        return Reading(
            codec.tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    return read


def read_message(renderer: Renderer) -> Read:
    """The assistant's message, as the renderer parses it."""

    def read(tokens: Sequence[int]) -> Reading:
        message = renderer.parse_response(tokens).message
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        return Reading(
            content="".join(part["text"] for part in parts if part["type"] == "text"),
            reasoning="".join(part["thinking"] for part in parts if part["type"] == "thinking"),
            calls=tuple(message.get("tool_calls", ())),
            spoiled=tuple(call["raw_text"] for call in message.get("unparsed_tool_calls", ())),
        )

    return read


def marks_of(renderer: Renderer) -> tuple[str, ...]:
    """Strings by which the reading may change its mind about what comes before them."""
    return (*_MARKS, *(stop for stop in renderer.get_stop_sequences() if isinstance(stop, str)))


@dataclass
class Growing:
    """One sample whose tokens come one by one."""

    read: Read
    stops: tuple[str, ...]
    """Strings at which the text ends; they are no part of it."""
    marks: tuple[str, ...] = ()
    tokens: list[int] = field(default_factory=list)
    _sent: Reading = field(default_factory=lambda: Reading(""))
    _next_reading: int = 1

    def add(self, token: int) -> None:
        self.tokens.append(token)

    @property
    def is_due(self) -> bool:
        """Whether so much was added that it should be read again."""
        return len(self.tokens) >= self._next_reading

    def delta(self) -> Reading:
        """What is certain and was not sent yet."""
        self._next_reading = len(self.tokens) + max(1, len(self.tokens) // _READINGS)
        reading = self._cut(self.read(self.tokens))
        return self._new(Reading(self._certain(reading.content), self._certain(reading.reasoning)))

    def rest(self) -> Reading:
        """What is left when the sample is whole, its calls included."""
        return self._new(self.whole())

    def whole(self) -> Reading:
        """All of it."""
        return self._cut(self.read(self.tokens).with_spoiled())

    def _cut(self, reading: Reading) -> Reading:
        """Without what follows a stop."""
        reasoning = _before(reading.reasoning, self.stops)
        if reasoning != reading.reasoning:
            return Reading("", reasoning)
        content = _before(reading.content, self.stops)
        return reading if content == reading.content else Reading(content, reasoning)

    def _certain(self, text: str) -> str:
        text = text.rstrip(_HALF_CHARACTER)
        held = max((_overlap(text, mark) for mark in (*self.stops, *self.marks)), default=0)
        return text[: len(text) - held].rstrip()

    def _new(self, reading: Reading) -> Reading:
        content = _after(reading.content, self._sent.content)
        reasoning = _after(reading.reasoning, self._sent.reasoning)
        self._sent = Reading(self._sent.content + content, self._sent.reasoning + reasoning)
        return Reading(content, reasoning, reading.calls)


def _before(text: str, stops: Sequence[str]) -> str:
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def _after(text: str, sent: str) -> str:
    """Nothing where a model wrote what nobody expects, and the reading changed its mind about what
    was sent.
    """
    return text.removeprefix(sent) if text.startswith(sent) else ""


def _overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that is a beginning of `mark`, and not the whole of
    it.
    """
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
