"""Tell a chat template's own marks from the same characters in the texts of messages.

A template returns one string, in which `<|im_end|>` of a message looks like the template's own
`<|im_end|>`. So the texts are changed before they are rendered, by private-use characters that
occur in none of them (`Markers`):

* A guard within each special token that a text spells. So what looks like a special token in the
  output was written by the template.
* An opening and a closing character around the text of each message, within the white space at its
  ends. So the place of each message is known, and templates that trim texts give the same text.

The output is decoded to a `Rendering`, which has the places of the messages and none of these
characters.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Self

from planish.errors import UnsupportedError
from planish.renderers.codec import Control, Piece
from planish.renderers.template_process import template_process

_BLOCK = 0x8000
_BLOCKS = (0xF0000, 0xF8000, 0x100000, 0x108000)
"""Blocks of private-use characters. A conversation uses a block of which its texts have none."""
_GUARD, _CLOSE, _GENERATION, _GENERATION_END = range(4)
_CONTROLS, _OPENINGS, _END = 0x10, 0x1000, _BLOCK - 2
"""Offsets in a block: the first control token and the first opening character. The last two
characters of some blocks are no characters of Unicode.
"""


THINK_TAGS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
)
"""The tags that begin and end reasoning in the templates of different families."""


def _high_surrogate(base: int) -> str:
    """Return a pattern of the first three digits of the high surrogates of a block."""
    first, last = (0xD800 + ((code - 0x10000) >> 10) for code in (base, base + _BLOCK - 1))
    return f"{first >> 8:x}[{first >> 4 & 15:x}{last >> 4 & 15:x}]"


@dataclass(frozen=True)
class Markers:
    """Private-use characters that occur in none of the texts of a conversation."""

    base: int = _BLOCKS[0]

    @classmethod
    def absent_from(cls, texts: Sequence[str]) -> Self:
        """Return markers that occur in none of `texts`. Raises UnsupportedError if there are
        none.
        """
        for base in _BLOCKS:
            # Filters of templates may write a character as \U000f0000 (Python) or as a surrogate
            # pair (JSON). A text that spells such an escape excludes the block too.
            pattern = re.compile(
                f"[{chr(base)}-{chr(base + _BLOCK - 1)}]"
                f"|\\\\U{base >> 16:04x}|\\\\u{_high_surrogate(base)}",
                re.IGNORECASE,
            )
            if not any(map(pattern.search, texts)):
                return cls(base)
        raise UnsupportedError(
            "the texts of the messages have characters of all private-use planes of Unicode "
            "(U+F0000 to U+10FFFF); remove them"
        )

    def character(self, offset: int) -> str:
        """Return the character at `offset` in the block."""
        return chr(self.base + offset)

    def with_edges(self, text: str, number: int) -> str:
        """Return `text` with marks around it, within the white space at its ends. A text of white
        space is unchanged.
        """
        core = text.strip()
        if not core:
            return text
        if _OPENINGS + number >= _END:
            raise UnsupportedError(
                f"a conversation has more than {_END - _OPENINGS:,} texts; split it"
            )
        before, after = text[: -len(text.lstrip())], text[len(text.rstrip()) :]
        opening, closing = self.character(_OPENINGS + number), self.character(_CLOSE)
        return f"{before}{opening}{core}{closing}{after}"

    def unescape(self, text: str) -> str:
        """Return `text` with each escaped character of the block as the character itself."""
        return self._escapes.sub(self._unescaped, text) if "\\" in text else text

    def _unescaped(self, found: re.Match[str]) -> str:
        code = (
            int(found[1], 16)
            if found[1]
            else 0x10000 + ((int(found[2], 16) - 0xD800) << 10) + int(found[3], 16) - 0xDC00
        )
        return chr(code) if self.base <= code < self.base + _BLOCK else found[0]

    @cached_property
    def _escapes(self) -> re.Pattern[str]:
        return re.compile(
            f"\\\\U({self.base >> 16:04x}[0-9a-f]{{4}})"
            f"|\\\\u({_high_surrogate(self.base)}[0-9a-f])\\\\u(d[c-f][0-9a-f]{{2}})"
        )


@dataclass(frozen=True)
class Rendering:
    """The output of a template, as a text in which each control token is one character."""

    code: str
    places: Mapping[int, list[tuple[int, int]]]
    """The start and end in `code` of each text with edges, by its number."""
    generations: Sequence[tuple[int, int]]
    """The start and end in `code` of each `{% generation %}` block."""
    marks: Sequence[str] = field(repr=False)
    """The control tokens."""
    markers: Markers = field(repr=False)

    def pieces(self, start: int, end: int | None = None) -> tuple[Piece, ...]:
        """Return a part of the output as pieces."""
        return self.pieces_of(self.code[start:end])

    def pieces_of(self, code: str) -> tuple[Piece, ...]:
        """Return a text in the form of `code` as pieces."""
        return tuple(
            Control(self.marks[ord(part) - self.markers.base - _CONTROLS]) if number % 2 else part
            for number, part in enumerate(self._controls.split(code))
            if part
        )

    def code_of(self, pieces: Sequence[Piece]) -> str:
        """Return pieces in the form of `code`."""
        return "".join(
            self.markers.character(_CONTROLS + self.marks.index(piece.text))
            if isinstance(piece, Control)
            else piece
            for piece in pieces
        )

    def next_control(self, start: int, among: Sequence[str] | None = None) -> int | None:
        """Return the position of the first control token, from `start` on, that is one of `among`
        (None = of all), or None if there is none.
        """
        for found in self._controls.finditer(self.code, start):
            if among is None or self.control_at(found.start()) in among:
                return found.start()
        return None

    def control_at(self, position: int) -> str | None:
        """Return the control token at a position; None if there is ordinary text."""
        found = self._controls.match(self.code, position)
        return self.marks[ord(found[0]) - self.markers.base - _CONTROLS] if found else None

    def end_of_markup(self, end: int) -> int:
        """Return the position before the white space that ends at `end`."""
        return len(self.code[:end].rstrip())

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        first = self.markers.character(_CONTROLS)
        return re.compile(f"([{first}-{self.markers.character(_OPENINGS - 1)}])")


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the special tokens of its tokenizer."""

    source: str = field(repr=False)
    special_tokens: tuple[tuple[str, str], ...] = ()
    """The special tokens that the template may name, by role, such as ("eos_token", "</s>")."""
    marks: tuple[str, ...] = ()
    """The texts of the tokenizer's control tokens."""
    left_stripping: frozenset[str] = frozenset()
    """The control tokens that take up the white space before them."""
    right_stripping: frozenset[str] = frozenset()
    """The control tokens that take up the white space after them."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further variables, such as ("enable_thinking", False)."""
    now: str = ""
    """The time that the template gets if it asks for it, in ISO format."""
    tool_source: str | None = field(default=None, repr=False)
    """The template for conversations with tools, if it is another one."""

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Return the template with further variables."""
        return replace(self, options=tuple(options.items()))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        markers: Markers,
        *,
        prompt: bool,
        tools: Sequence[Any] = (),
    ) -> Rendering:
        """Return the output for messages whose texts are guarded. `prompt`: whether to append the
        header of the assistant's next message. Raises as `render_template`.
        """
        names = self._names(messages, markers, prompt, tools)
        text = template_process.render(self._source_for(tools), names, self.now)
        return self._decode(text, markers)

    def render_all(
        self,
        variants: Sequence[Sequence[Mapping[str, Any]]],
        markers: Markers,
        *,
        prompt: bool,
        tools: Sequence[Any] = (),
    ) -> list[Rendering]:
        """Return the output of `render` for each list of messages. Recent outputs are kept."""
        names = [self._names(messages, markers, prompt, tools) for messages in variants]
        texts = _render_cached(self._source_for(tools), json.dumps(names), self.now)
        return [self._decode(text, markers) for text in texts]

    def _source_for(self, tools: Sequence[Any]) -> str:
        return self.tool_source if tools and self.tool_source is not None else self.source

    def _names(
        self,
        messages: Sequence[Mapping[str, Any]],
        markers: Markers,
        prompt: bool,
        tools: Sequence[Any],
    ) -> dict[str, Any]:
        """Return the variables of the template."""
        return {
            **dict(self.special_tokens),
            **dict(self.options),
            "messages": [dict(message) for message in messages],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": prompt,
            "planish_generation": markers.character(_GENERATION),
            "planish_endgeneration": markers.character(_GENERATION_END),
        }

    def guard(self, text: str, markers: Markers) -> str:
        """Return `text` with a guard in each control token that it spells."""
        if self._guarded is None:
            return text
        guard = markers.character(_GUARD)
        return self._guarded.sub(lambda found: found[0] + guard, text)

    def guard_all(self, value: Any, markers: Markers) -> Any:
        """Return a JSON value whose strings are guarded, keys included."""
        if isinstance(value, str):
            return self.guard(value, markers)
        if isinstance(value, Mapping):
            return {
                self.guard(key, markers): self.guard_all(one, markers) for key, one in value.items()
            }
        return [self.guard_all(one, markers) for one in value] if isinstance(value, list) else value

    @cached_property
    def _guarded(self) -> re.Pattern[str] | None:
        """Matches the first character of each control token and of each tag of reasoning.
        Templates look for these tags in texts.
        """
        marks = {*self.marks, *(tag for tags in THINK_TAGS for tag in tags)}
        return re.compile(f"(?={_any_of(marks)}).", re.DOTALL)

    def _decode(self, output: str, markers: Markers) -> Rendering:
        output = markers.unescape(output)
        block = f"[{chr(markers.base)}-{chr(markers.base + _BLOCK - 1)}]"
        # A control token of one character has its guard after it.
        marks = f"{_any_of(self.marks)}(?!{markers.character(_GUARD)})" if self.marks else "(?!)"
        parts = re.split(f"({marks}|{block})", output)
        self._strip_around_controls(parts, markers)
        code: list[str] = []
        length = 0
        places: dict[int, list[tuple[int, int]]] = {}
        generations: list[tuple[int, int]] = []
        open_places: list[tuple[int, int]] = []
        for number, part in enumerate(parts):
            offset = ord(part) - markers.base if number % 2 and len(part) == 1 else -1
            if number % 2 and not 0 <= offset < _BLOCK:
                code.append(markers.character(_CONTROLS + self.marks.index(part)))
            elif offset in (_CLOSE, _GENERATION_END):
                is_text = offset == _CLOSE
                if open_places:
                    opened, start = open_places.pop()
                    if is_text:
                        places.setdefault(opened - _OPENINGS, []).append((start, length))
                    else:
                        generations.append((start, length))
                continue
            elif offset in (_GUARD,):
                continue
            elif offset >= 0:
                open_places.append((offset, length))
                continue
            else:
                code.append(part)
            length += len(code[-1])
        return Rendering("".join(code), places, tuple(generations), self.marks, markers)

    def _strip_around_controls(self, parts: list[str], markers: Markers) -> None:
        """Strip the white space that control tokens take up. Odd `parts` are controls or
        characters of `markers`.
        """
        if not self.left_stripping and not self.right_stripping:
            return
        for number in range(1, len(parts), 2):
            for marks, step in ((self.left_stripping, -1), (self.right_stripping, 1)):
                if parts[number] not in marks:
                    continue
                at = number + step
                while 0 <= at < len(parts):
                    is_marker = len(parts[at]) == 1 and ord(parts[at]) >= markers.base
                    if at % 2 and not is_marker:
                        break
                    if not at % 2:
                        parts[at] = parts[at].lstrip() if step > 0 else parts[at].rstrip()
                        if parts[at]:
                            break
                    at += step


@lru_cache(maxsize=128)
def _render_cached(source: str, names: str, now: str) -> list[str]:
    """Return the outputs of a template. `names` is the JSON text of a list of variables. The
    prompts of a conversation are rendered again with each of its answers.
    """
    return template_process.render_all(source, json.loads(names), now)


def _any_of(marks: Iterable[str]) -> str:
    """Return a regular expression that matches one of `marks`, the longest at its place."""
    return f"(?:{'|'.join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))})"
