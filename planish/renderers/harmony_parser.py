"""The marks of the Harmony format, and a parser of its messages while they are sampled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from planish.renderers.codec import Control, Piece
from planish.renderers.message_parts import ParseOptions, PartList
from planish.renderers.tool_calls import as_text, find_piece, read_named_call

START, MESSAGE, END = Control("<|start|>"), Control("<|message|>"), Control("<|end|>")
CHANNEL, CONSTRAIN = Control("<|channel|>"), Control("<|constrain|>")
RETURN, CALL = Control("<|return|>"), Control("<|call|>")
TAGS = tuple(tag.text for tag in (START, MESSAGE, END, CHANNEL, CONSTRAIN, RETURN, CALL))
_RECIPIENT = re.compile(r"to=(\S+)")


@dataclass
class HarmonyParser:
    """Parses the sampled messages of an assistant's turn into one message."""

    options: ParseOptions
    parts: PartList = field(default_factory=PartList)
    tags: Sequence[str] = TAGS
    has_begun_answer: bool = False

    def __post_init__(self) -> None:
        self._header: list[Piece] = []
        self._call_name = ""
        self._arguments: list[str] = []
        self._has_body = False
        self._state: Literal["header", "reasoning", "text", "call", "arguments"] = "header"
        if self.options.continues is not None:
            self._begin_body(self.options.continues)

    def feed(self, piece: str | Control) -> None:
        """Add text or a tag."""
        if self._state == "header":
            if piece == MESSAGE:
                self._end_header()
            elif self._header and isinstance(piece, str) and isinstance(self._header[-1], str):
                self._header[-1] += piece
            else:
                self._header.append(piece)
        elif piece in (END, START):
            self._end_body()
            self._header = [piece] if piece == START else []
        else:
            self._feed_body(piece.text if isinstance(piece, Control) else piece)

    def finish(self, stop: int | str | None) -> None:
        """End the message."""
        if self._state != "header":
            self._end_body()
        elif len(self._header) == 1 and not self._has_body and not looks_like_header(self._header):
            # The model wrote plain text instead of the format, so the text is the answer.
            self.parts.add("text", as_text(self._header))

    def _end_header(self) -> None:
        name = called_function(as_text(self._header))
        if name is not None:
            self._call_name, self._arguments = name, []
            if self.options.reads_calls and self.options.has_valid_calls:
                self.parts.begin_call(name)
                self._begin_body("arguments")
            else:
                self._begin_body("call")
        else:
            self._begin_body("reasoning" if channel_of(self._header) == "analysis" else "text")

    def _begin_body(self, state: Literal["reasoning", "text", "call", "arguments"]) -> None:
        self._state, self._has_body = state, True
        self.has_begun_answer = self.has_begun_answer or state in ("call", "arguments")

    def _feed_body(self, text: str) -> None:
        match self._state:
            case "call":
                self._arguments.append(text)
            case "arguments":
                self.parts.add("arguments", text)
            case "reasoning":
                self.parts.add("reasoning", text)
            case _:
                self.has_begun_answer = self.has_begun_answer or bool(text)
                self.parts.add("text", text)

    def _end_body(self) -> None:
        """End a message of the turn. A call that cannot be read is text."""
        if self._state == "call":
            arguments = "".join(self._arguments)
            call, _ = read_named_call(self._call_name, arguments)
            if call is not None and self.options.reads_calls:
                self.parts.add_call(call)
            else:
                header = as_text(self._header).removeprefix(START.text).removeprefix("assistant")
                self.parts.add("text", header + MESSAGE.text + arguments)
        self._state = "header"


def called_function(header: str) -> str | None:
    """Return the function that the message with this header calls, or None."""
    recipient = _RECIPIENT.search(header.replace(CHANNEL.text, " "))
    if recipient is None or not recipient.group(1).startswith("functions."):
        return None
    return recipient.group(1).removeprefix("functions.")


def channel_of(header: Sequence[Piece]) -> str:
    """Return the channel that a header names, or an empty string."""
    at = find_piece(header, CHANNEL)
    words = as_text(header[at + 1 : at + 2]).split()
    return words[0] if words else ""


def looks_like_header(header: Sequence[Piece]) -> bool:
    """Return whether the pieces of an unfinished header are the beginning of one. Otherwise the
    model wrote plain text instead of the format.
    """
    return isinstance(header[0], Control) or " to=".startswith(as_text(header)[:4])
