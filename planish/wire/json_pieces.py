"""Parsing a large JSON text in pieces, so that other threads run in between.

A parser written in C holds Python's interpreter lock until it returns: for 8 MiB of small values,
80 to 250 ms. All other threads wait, and so does the event loop of a server. `parse_in_pieces` cuts
the text at commas, into pieces of about 16 KiB. It completes each piece with the brackets that are
open at its ends, parses it, and merges the result into the value of the pieces before it.

A search for the commas must know which of them are within strings. It runs in numpy functions,
which release the interpreter lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import uuid4

import numpy as np
import orjson

from planish.wire.pacing import pause_if_due

JsonContainer: TypeAlias = dict[str, Any] | list[Any]
"""A JSON object or list."""
JsonValue: TypeAlias = JsonContainer | str | int | float | bool | None
"""The value of a JSON text."""

PIECE_BYTES = 1 << 14
"""The size of the pieces, in bytes. orjson parses a piece in at most 0.5 ms, during which other
threads wait.
"""
_OPENING_BRACKETS, _CLOSING_BRACKETS = (
    {ord("["): b"[", ord("{"): b"{"},
    {ord("["): b"]", ord("{"): b"}"},
)
_WHITESPACE = b" \t\n\r"


class InvalidJsonError(ValueError):
    """The text is not JSON."""


class TooDeepError(ValueError):
    """Objects and lists of the text are nested too deep."""


class TooManyContainersError(ValueError):
    """The text has too many objects and lists."""


class TooManyItemsError(ValueError):
    """An object or a list has too many items. A list whose last item is a number is exempt, because
    requests may contain long lists of numbers.
    """


@dataclass(frozen=True)
class JsonLimits:
    """Limits of a text. `parse_in_pieces` stops at the first piece that exceeds one of them."""

    max_depth: int
    """The maximum nesting depth of objects and lists. Above it, TooDeepError is raised."""
    max_containers: int
    """The maximum number of objects and lists. Above it, TooManyContainersError is raised."""
    max_items: int
    """The maximum number of entries of an object, and of items of a list that does not end with a
    number. Above it, TooManyItemsError is raised.
    """


def parse_in_pieces(text: bytes, limits: JsonLimits, piece_bytes: int = PIECE_BYTES) -> Any:
    """Return the value of a JSON text, as `orjson.loads` does. `piece_bytes` is the size of the
    pieces, in bytes. Raise InvalidJsonError if the text is not JSON, the error that `limits` names
    if the text exceeds a limit, and MemoryError if memory is short.
    """
    value = _PartialValue(limits.max_items)
    splitter = _PieceSplitter(text, limits, piece_bytes)
    begin, open_before = 0, b""
    while (cut := splitter.next_cut()) is not None:
        value.add(
            text[begin:cut], begin, open_before, splitter.open_brackets, splitter.num_kept_open
        )
        begin, open_before = cut + 1, splitter.open_brackets
    value.add(text[begin:], begin, open_before, b"", 0)
    return value.root


class _PieceSplitter:
    """Finds the commas at which a text is cut, and the brackets that are open there."""

    def __init__(self, text: bytes, limits: JsonLimits, piece_bytes: int) -> None:
        self._text, self._limits, self._piece_bytes = text, limits, piece_bytes
        self._num_containers = 0
        self._byte_array = np.frombuffer(text, np.uint8)
        self._position = 0
        self._in_string = self._is_escaped = False
        self.open_brackets = b""
        """The opening brackets that are not closed yet, the outermost first."""
        self.num_kept_open = 0
        """The number of brackets that were open at the previous cut and have stayed open since."""

    def next_cut(self) -> int | None:
        """Return the position of the next comma to cut at; None if there is none."""
        self.num_kept_open = len(self.open_brackets)
        while self._position < len(self._text):
            pause_if_due()
            begin = self._position
            end = min(begin + self._piece_bytes, len(self._text))
            outside = self._outside_strings(begin, end)
            block = self._byte_array[begin:end]
            commas = np.flatnonzero((block == ord(",")) & outside)
            if commas.size:
                end = begin + int(commas[-1])
                block, outside = block[: commas[-1]], outside[: commas[-1]]
            self._track_brackets(block, outside)
            if commas.size:
                self._position, self._in_string, self._is_escaped = end + 1, False, False
                if not self.open_brackets:
                    raise InvalidJsonError(f"a comma outside of objects and lists, byte {end}")
                return end
            self._position = end
        return None

    def _outside_strings(self, begin: int, end: int) -> np.ndarray:
        """Return which bytes are outside of strings. An opening quote counts as inside, and a
        closing quote as outside.
        """
        block = self._byte_array[begin:end]
        quotes = block == ord('"')
        if self._is_escaped or self._text.find(b"\\", begin, end) >= 0:
            slashes = block == ord("\\")
            if self._is_escaped:
                slashes[0] = quotes[0] = False
            positions = np.flatnonzero(slashes)
            is_start = np.diff(positions, prepend=-2) > 1
            starts = positions[is_start]
            stops = positions[np.append(is_start[1:], True)] + 1 if positions.size else positions
            escaped = stops[(stops - starts) % 2 == 1]
            self._is_escaped = bool(escaped.size) and int(escaped[-1]) == len(block)
            quotes[escaped[escaped < len(block)]] = False
        inside = np.cumsum(quotes, dtype=np.uint8) & 1
        if self._in_string:
            inside ^= 1
        self._in_string = bool(inside[-1])
        return inside == 0

    def _track_brackets(self, block: np.ndarray, outside: np.ndarray) -> None:
        """Update `open_brackets` and `num_kept_open` for the brackets of a block."""
        folded = block | 32  # This turns [ into { and ] into }, so one comparison finds both.
        is_opening = (folded == ord("{")) & outside
        positions = np.flatnonzero(is_opening | ((folded == ord("}")) & outside))
        if not positions.size:
            return
        opens = is_opening[positions]
        depth = len(self.open_brackets) + np.cumsum(np.where(opens, 1, -1))
        self._num_containers += int(np.count_nonzero(opens))
        if int(depth.max()) > self._limits.max_depth:
            raise TooDeepError
        if self._num_containers > self._limits.max_containers:
            raise TooManyContainersError
        lowest = min(len(self.open_brackets), int(depth.min()))
        if lowest < 0:
            raise InvalidJsonError("a closing bracket without an opening one")
        new_brackets = [
            int(block[positions[np.flatnonzero(opens & (depth == level))[-1]]])
            for level in range(lowest + 1, int(depth[-1]) + 1)
        ]
        self.num_kept_open = min(self.num_kept_open, lowest)
        self.open_brackets = self.open_brackets[:lowest] + bytes(new_brackets)


class _PartialValue:
    """The value of the pieces so far.

    A piece begins and ends within open containers (objects and lists). To make a piece parsable,
    the opening brackets of these containers are written before the piece, and their closing
    brackets after it. Within an object, the bracket of the next inner container needs a key. This
    key is a random string, the mark. The mark is also written at the end of each container that the
    piece opens and does not close, so that this container can be found in the parsed value.
    """

    def __init__(self, max_items: int) -> None:
        self.root: Any = None
        self._max_items = max_items
        self._open_containers: list[Any] = []
        """The containers that are not closed yet, the outermost first."""
        # The key has 122 random bits, so a text cannot contain it by accident or on purpose.
        self._mark = uuid4().hex
        self._quoted_mark = b'"%b"' % self._mark.encode()

    def add(
        self, piece: bytes, begin: int, open_before: bytes, open_after: bytes, num_kept_open: int
    ) -> None:
        """Parse a piece that begins at byte `begin` of the text, and merge its value. `open_before`
        and `open_after` are the brackets that are open at the start and at the end of the piece.
        The first `num_kept_open` of these brackets are the same, because they stay open throughout
        the piece.
        """
        parsed = self._parse_piece(piece, begin, open_before, open_after, num_kept_open)
        continuations = self._continuations(parsed, open_before)
        new_containers: list[Any] = []
        parent = continuations[num_kept_open - 1] if num_kept_open else None
        for level in range(num_kept_open, len(open_after)):
            child = parsed if parent is None else self._open_child(parent, level > num_kept_open)
            new_containers.append(child)
            parent = child
        for container in new_containers:
            if type(container) is list:
                container.pop()
            else:
                del container[self._mark]
        if not open_before:
            self.root = parsed
        for target, continuation in zip(self._open_containers, continuations, strict=True):
            self._extend(target, continuation)
        self._open_containers = self._open_containers[:num_kept_open] + new_containers

    def _parse_piece(
        self, piece: bytes, begin: int, open_before: bytes, open_after: bytes, num_kept_open: int
    ) -> Any:
        prefixes = [_OPENING_BRACKETS[bracket] for bracket in open_before]
        for level, bracket in enumerate(open_before[:-1]):
            if bracket == ord("{"):
                prefixes[level] += self._quoted_mark + b":"
        suffixes = [_CLOSING_BRACKETS[bracket] for bracket in open_after]
        for level in range(num_kept_open, len(open_after)):
            mark = b"," + self._quoted_mark + (b":0" if open_after[level] == ord("{") else b"")
            suffixes[level] = mark + suffixes[level]
        prefix, suffix = b"".join(prefixes), b"".join(reversed(suffixes))
        # Without these checks, a comma without a value before or after it would be accepted.
        if (open_before and piece.lstrip(_WHITESPACE)[:1] in (b"]", b"}", b"")) or (
            open_after and (prefix + piece).rstrip(_WHITESPACE)[-1:] in (b"[", b"{")
        ):
            raise InvalidJsonError(f"a comma without a value near byte {begin}")
        try:
            return orjson.loads(prefix + piece + suffix)
        except orjson.JSONDecodeError as error:
            if "Not enough memory" in str(error):  # orjson reports a lack of memory as invalid JSON
                raise MemoryError from None
            raise InvalidJsonError(f"{error.msg}, near byte {begin}") from None

    def _continuations(self, parsed: Any, open_before: bytes) -> list[JsonContainer]:
        """Return the part of each open container that is in this piece, the outermost container
        first. Parsing nests these parts in each other. This method takes each inner part out of the
        outer one, because the outer container already contains the inner container.
        """
        continuations: list[JsonContainer] = []
        for level in range(len(open_before)):
            container: JsonContainer = parsed
            continuations.append(container)
            if level + 1 < len(open_before):
                is_list = isinstance(container, list)
                parsed = container.pop(0) if is_list else container.pop(self._mark)
        return continuations

    def _open_child(self, parent: JsonContainer, is_marked: bool) -> Any:
        """Return the item of `parent` that is still open at the end of the piece. `is_marked` is
        True if the last item of `parent` is the mark.
        """
        if isinstance(parent, list):
            return parent[-2 if is_marked else -1]
        # The open item is the last value, unless its key occurred earlier in this object.
        return next(value for value in reversed(parent.values()) if self._has_mark(value))

    def _has_mark(self, value: JsonValue) -> bool:
        if isinstance(value, list):
            return bool(value) and value[-1] == self._mark
        return isinstance(value, dict) and self._mark in value

    def _extend(self, target: JsonContainer, continuation: Any) -> None:
        if isinstance(target, dict):
            target.update(continuation)
        else:
            target.extend(continuation)
        if len(target) > self._max_items and (
            isinstance(target, dict) or type(target[-1]) not in (int, float)
        ):
            raise TooManyItemsError
