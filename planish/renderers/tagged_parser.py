"""Parses messages with `<think>` blocks and tagged tool calls while they are sampled.

The rules are those of `Renderer.parse_response`, with one difference: text cannot be taken back
after it was returned. So `</think>` without `<think>` before it is text here, unless the prompt has
begun the reasoning. `parse_response` reads all text before it as reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from planish.renderers.codec import Control
from planish.renderers.forms import THINK, THINK_END
from planish.renderers.message_parts import HeldText, MessageParser, ParseOptions, PartList
from planish.renderers.tool_calls import CALL, CALL_END, ReadCall, read_json_call

ReadList = Callable[[str], tuple[list[dict[str, Any]] | None, str | None]]
"""Reads the text of several calls. Returns (calls, None) or (None, error)."""
OpenCall = tuple[str, str, str | None]
"""The name of a function, the begin of its arguments, and the id of the call if there is one."""
_JSON_HEAD = re.compile(r'\s*\{"name": "([^"\\]+)", "arguments": (\{.*)', re.DOTALL)
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_QUOTE_OR_BRACKET = re.compile(r'["{}\[\]]')


def open_json_call(inner: str) -> OpenCall | None:
    """Read the text of an unfinished JSON call. Return None if its arguments have not begun."""
    found = _JSON_HEAD.match(inner)
    return None if found is None else (found.group(1), found.group(2), None)


@dataclass(frozen=True)
class CallTags:
    """How a format writes a tool call, or a list of calls, between two tags."""

    begin: Control = CALL
    end: Control | None = CALL_END
    """None if the calls end at the next `begin` or at the end of the message."""
    read: ReadCall = read_json_call
    """Reads the text of a complete call."""
    open: Callable[[str], OpenCall | None] | None = open_json_call
    """Reads the text of an unfinished call. None if the arguments of an unfinished call are not a
    part of a JSON object.
    """
    inner_tags: tuple[Control, ...] = ()
    """Tags within a call."""
    section_tags: tuple[Control, ...] = ()
    """Tags around all calls of a message. They are no part of the text."""
    read_list: ReadList | None = None
    """Reads the text between two tags that contain several calls, instead of `read`."""

    def read_all(self, inner: str) -> list[dict[str, Any]] | None:
        """Return the calls between two tags, or None if they cannot be read."""
        if self.read_list is not None:
            return self.read_list(inner)[0]
        call, _ = self.read(inner)
        return None if call is None else [call]


@dataclass(frozen=True)
class TextRules:
    """Which white space of a message belongs to the format. It is left out of the parts.

    The values are characters; None means any white space.
    """

    around_reasoning: str | None = ""
    after_reasoning: str | None = ""
    """The characters that are left out at the start of the text after reasoning."""
    around_text: str | None = ""
    """The characters that are left out at the start and the end of the text."""


class JsonEnd:
    """Finds the end of a JSON object whose text arrives in pieces."""

    def __init__(self) -> None:
        """Start before the first brace."""
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Add text. Return the position in `text` after the object's last brace, or None if the
        object goes on.
        """
        at = 0
        if self._is_escaped and text:
            at, self._is_escaped = 1, False
        while True:
            pattern = _QUOTE_OR_ESCAPE if self._in_string else _QUOTE_OR_BRACKET
            found = pattern.search(text, at)
            if found is None:
                return None
            at, character = found.end(), found.group()
            if character == "\\":
                self._is_escaped = at == len(text)
                at += 1
            elif character == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if character in "{[" else -1
                if self._depth <= 0:
                    return at


_State = Literal["undecided", "reasoning", "text", "call", "arguments", "rest of call"]


@dataclass
class TaggedParser:
    """Parses messages with `<think>` blocks and with tool calls between tags."""

    options: ParseOptions
    calls: CallTags | None
    """None if the format has no calls."""
    rules: TextRules = TextRules()
    reads_reasoning: bool = True
    """Whether the format has `<think>` blocks."""
    begins_in_reasoning: bool = False
    """Whether the prompt ends with `<think>`."""
    think_tags: tuple[Control, Control] = (THINK, THINK_END)
    """The tags that begin and end reasoning."""
    parts: PartList = field(default_factory=PartList)
    has_begun_answer: bool = False

    def __post_init__(self) -> None:
        rules = self.rules
        self._reads_calls = self.calls is not None and self.options.reads_calls
        self._reasoning = HeldText(
            lambda text: self.parts.add("reasoning", text),
            rules.around_reasoning,
            skips_start=self.options.continues is None,
        )
        self._text = HeldText(self._emit_text, skips_start=False)
        self._start_characters: str | None = rules.around_text
        """White space that is left out at the start of the text; "" after its start."""
        self._lead: list[str] = []
        """White space at the start of a message that may have a think block."""
        self._call_pieces: list[str] = []
        self._call_opening = ""
        """The white space before an unfinished call."""
        self._json_end = JsonEnd()
        self._follows_call = False
        self._state: _State = "text"
        if self.options.continues == "reasoning":
            self._state = "reasoning"
        elif self.options.continues == "text":
            self._start_characters = ""
        elif self.reads_reasoning and self.options.reads_reasoning:
            self._state = "reasoning" if self.begins_in_reasoning else "undecided"
        self._may_open_reasoning = self._state == "reasoning" and not self.options.continues

    @property
    def tags(self) -> Sequence[str]:
        """The tags that this parser interprets."""
        tags: list[Control] = []
        if self.reads_reasoning:
            tags += self.think_tags
        if self._reads_calls and self.calls is not None:
            calls = self.calls
            tags += [calls.begin, *calls.inner_tags, *calls.section_tags]
            tags += [] if calls.end is None else [calls.end]
        return [tag.text for tag in tags]

    def feed(self, piece: str | Control) -> None:
        """Add text, or one of `tags`."""
        match self._state:
            case "undecided":
                self._feed_start(piece)
            case "reasoning":
                self._feed_reasoning(piece)
            case "text":
                self._feed_text(piece)
            case "call":
                self._feed_call(piece)
            case "arguments":
                self._feed_arguments(piece)
            case "rest of call":
                if self.calls is not None and piece == self.calls.end:
                    self._end_call()

    def finish(self, stop: int | str | None) -> None:
        """End the message. Text that looked like the begin of a call turns out to be text."""
        if self._state == "undecided":
            self._begin_text()
        if self._state == "call" and self.calls is not None and self.calls.end is None:
            self._close_call()
        if self._state == "call":
            self._reject_call(closing="")
        held = self._text.take_held()
        if self._state == "text" and self.parts.num_calls == 0 and self.rules.around_text == "":
            self._emit_text(held)

    def _feed_start(self, piece: str | Control) -> None:
        """Add a piece to a message that so far consists of white space."""
        if isinstance(piece, str) and not piece.strip():
            self._lead.append(piece)
        elif piece == self.think_tags[0]:
            self._lead.clear()
            self._state = "reasoning"
        elif piece == self.think_tags[1]:
            self._lead.clear()
            self._end_reasoning()
        else:
            self._begin_text()
            self._feed_text(piece)

    def _begin_text(self) -> None:
        self._state = "text"
        lead, self._lead = "".join(self._lead), []
        if lead:
            self._feed_text(lead)

    def _feed_reasoning(self, piece: str | Control) -> None:
        if piece == self.think_tags[1]:
            self._end_reasoning()
        elif piece != self.think_tags[0] or not self._may_open_reasoning:
            self._reasoning.feed(piece.text if isinstance(piece, Control) else piece)
        self._may_open_reasoning = False

    def _end_reasoning(self) -> None:
        self._reasoning.take_held()
        self._state = "text"
        if self._start_characters == "":
            self._start_characters = self.rules.after_reasoning

    def _feed_text(self, piece: str | Control) -> None:
        if self._reads_calls and self.calls is not None and isinstance(piece, Control):
            if piece == self.calls.begin:
                self._state, self._call_pieces = "call", []
                self._call_opening = self._text.take_held()
                self.has_begun_answer = True
                return
            if piece in self.calls.section_tags:
                return
        self._text.feed(piece.text if isinstance(piece, Control) else piece)

    def _emit_text(self, text: str) -> None:
        """Add text of the answer, without the white space that belongs to the format."""
        if self._follows_call:
            text = text.lstrip()
            if not text:
                return
            text = f"\n{text}"
            self._follows_call = False
        if self._start_characters != "":
            text = text.lstrip(self._start_characters)
            if not text:
                return
            self._start_characters = ""
        self.has_begun_answer = True
        self.parts.add("text", text)

    def _feed_call(self, piece: str | Control) -> None:
        assert self.calls is not None
        if piece == self.calls.end:
            self._close_call()
            return
        if piece == self.calls.begin:
            if self.calls.end is None:
                self._close_call()
            else:
                self._reject_call(closing="")
            self._feed_text(piece)
            return
        self._call_pieces.append(piece.text if isinstance(piece, Control) else piece)
        if self.options.has_valid_calls and self.calls.open is not None:
            self._call_pieces = ["".join(self._call_pieces)]
            opened = self.calls.open(self._call_pieces[0])
            if opened is not None:
                name, arguments, call_id = opened
                self._emit_before_call()
                self.parts.begin_call(name, call_id)
                self._state, self._json_end = "arguments", JsonEnd()
                self._feed_arguments(arguments)

    def _close_call(self) -> None:
        """Read a call that is complete. If it cannot be read, it is text."""
        assert self.calls is not None
        calls = self.calls.read_all("".join(self._call_pieces))
        if calls is None:
            self._reject_call(closing="" if self.calls.end is None else self.calls.end.text)
            return
        self._emit_before_call()
        for call in calls:
            self.parts.add_call(call)
        self._end_call()

    def _reject_call(self, closing: str) -> None:
        assert self.calls is not None
        text = "".join((self._call_opening, self.calls.begin.text, *self._call_pieces, closing))
        self._state, self._call_pieces, self._call_opening = "text", [], ""
        self._text.feed(text)

    def _emit_before_call(self) -> None:
        """Add the white space before a call, without the line break that belongs to the call."""
        opening, self._call_opening = self._call_opening, ""
        if self.parts.num_calls == 0 and self.rules.around_text == "":
            self._emit_text(opening.removesuffix("\n"))

    def _feed_arguments(self, piece: str | Control) -> None:
        """Add a piece of a call whose arguments are returned while they grow. The arguments end
        where their JSON object ends, so a tag within the object is text.
        """
        text = piece.text if isinstance(piece, Control) else piece
        end = self._json_end.find(text)
        self.parts.add("arguments", text[:end])
        if end is not None:
            self._state = "rest of call"

    def _end_call(self) -> None:
        self._state, self._call_pieces = "text", []
        self._follows_call = True


class BareCallParser:
    """Parses messages whose text is either an answer or tool calls without tags.

    The text is held back while it may be calls: if it begins as calls do, to the end of the
    message.
    """

    def __init__(
        self, inner: MessageParser, options: ParseOptions, read: ReadList, starts: tuple[str, ...]
    ) -> None:
        """`inner` parses the reasoning, if there is any. `read` reads calls, which begin with one
        of `starts`.
        """
        self.parts = PartList()
        self._inner = inner
        self._read = read
        self._starts = starts
        may_call = options.reads_calls and options.continues != "text"
        self._held: str | None = "" if may_call else None
        """The text that may be calls; None after text that is an answer."""

    @property
    def tags(self) -> Sequence[str]:
        """The tags of reasoning."""
        return self._inner.tags

    @property
    def has_begun_answer(self) -> bool:
        """Whether the text of the answer or a call has begun."""
        return self._inner.has_begun_answer

    def feed(self, piece: str | Control) -> None:
        """Add text, or one of `tags`."""
        self._inner.feed(piece)
        self._take()

    def finish(self, stop: int | str | None) -> None:
        """End the message, and read the text that was held back."""
        self._inner.finish(stop)
        self._take()
        held, self._held = self._held or "", None
        calls = self._read(held.strip())[0] if held.strip() else None
        if calls is None:
            self.parts.add("text", held)
        for call in calls or ():
            self.parts.add_call(call)

    def _take(self) -> None:
        for part in self._inner.parts.take():
            if part.kind != "text" or self._held is None:
                self.parts.add(part.kind, part.text)
                continue
            self._held += part.text
            begin = self._held.lstrip()
            may_begin = any(start.startswith(begin) for start in self._starts)
            if not may_begin and not begin.startswith(self._starts):
                held, self._held = self._held, None
                self.parts.add("text", held)
