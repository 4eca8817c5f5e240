"""The parts of a sampled message, in the order in which the model writes them.

A chat format has a `MessageParser`. It gets the text of a sample piece by piece, and returns the
parts that later text cannot change. Its time is proportional to the new text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from planish.renderers.codec import Control

PartKind = Literal["text", "reasoning", "call", "arguments"]


@dataclass(frozen=True)
class MessagePart:
    """A part of a message. Consecutive parts of one kind belong together."""

    kind: PartKind
    """`call` begins a tool call, and the parts of kind `arguments` that follow have its arguments.
    """
    text: str
    """The text of the part. For `call`, the name of the function."""
    call: int = 0
    """The index of the call in its message, for the kinds `call` and `arguments`."""
    call_id: str | None = None
    """The id that the model wrote for the call, if the format has ids; for the kind `call`."""


@dataclass(frozen=True)
class ParseOptions:
    """How a sampled message is parsed."""

    reads_calls: bool = True
    """Whether the model was offered tools. Otherwise the markup of tool calls is text."""
    has_valid_calls: bool = False
    """Whether a grammar constrains the tool calls. Then an unfinished call cannot turn out to be
    text, so its arguments are returned while they grow.
    """
    reads_reasoning: bool = True
    """Whether the model may write reasoning. Otherwise the markup of reasoning is text."""
    continues: Literal["reasoning", "text"] | None = None
    """What the prompt has already begun: reasoning, or the text of the answer. None if the sample
    begins the message.
    """


@dataclass
class PartList:
    """The parts that a parser has found since the last `take`."""

    _parts: list[MessagePart] = field(default_factory=list)
    _num_calls: int = 0
    _pieces: list[str] = field(default_factory=list)
    """The text of an unfinished part, whose kind is `_kind`."""
    _kind: PartKind = "text"

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun so far."""
        return self._num_calls

    def add(self, kind: PartKind, text: str) -> None:
        """Add text, which continues the last part if it has the same kind."""
        if not text:
            return
        if kind != self._kind:
            self._close()
            self._kind = kind
        self._pieces.append(text)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a tool call."""
        self._close()
        self._parts.append(MessagePart("call", name, self._num_calls, call_id))
        self._num_calls += 1

    def add_call(self, call: dict[str, Any]) -> None:
        """Add a complete tool call in the form of the renderers."""
        function = call["function"]
        self.begin_call(function["name"], call.get("id"))
        self.add("arguments", function["arguments"])

    def take(self) -> list[MessagePart]:
        """Return the parts, and remove them from the list."""
        self._close()
        parts, self._parts = self._parts, []
        return parts

    def _close(self) -> None:
        if self._pieces:
            call = self._num_calls - 1 if self._kind == "arguments" else 0
            self._parts.append(MessagePart(self._kind, "".join(self._pieces), call))
            self._pieces = []


class MessageParser(Protocol):
    """Parses one sampled message of a chat format."""

    parts: PartList
    """The parts found so far."""

    @property
    def tags(self) -> Sequence[str]:
        """The tags that this parser interprets. Other tags are text."""
        ...

    @property
    def has_begun_answer(self) -> bool:
        """Whether the text of the answer or a call has begun. False during the reasoning."""
        ...

    def feed(self, piece: str | Control) -> None:
        """Add text, or one of `tags`."""

    def finish(self, stop: int | str | None) -> None:
        """End the message. `stop` is the stop token or stop string that ended it, if any."""


@dataclass
class PlainParser:
    """Parses messages that are plain text."""

    parts: PartList = field(default_factory=PartList)
    tags: Sequence[str] = ()
    has_begun_answer: bool = True

    def feed(self, piece: str | Control) -> None:
        """Add text."""
        self.parts.add("text", piece.text if isinstance(piece, Control) else piece)

    def finish(self, stop: int | str | None) -> None:
        """End the message."""


@dataclass
class HeldText:
    """Text with an end that is held back: characters of `held_characters`, which are dropped if
    nothing follows them.
    """

    emit: Callable[[str], None]
    held_characters: str | None = None
    """None: any white space. An empty string: nothing is held back."""
    skips_start: bool = False
    """Whether these characters are dropped at the start of the text."""
    held: str = ""

    def feed(self, text: str) -> None:
        """Add text."""
        if self.skips_start:
            text = text.lstrip(self.held_characters)
            if not text:
                return
            self.skips_start = False
        body = text.rstrip(self.held_characters)
        if body:
            self.emit(self.held + body)
            self.held = text[len(body) :]
        else:
            self.held += text

    def take_held(self) -> str:
        """Return the end that is held back, and drop it."""
        held, self.held = self.held, ""
        return held
