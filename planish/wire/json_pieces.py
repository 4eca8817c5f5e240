"""Parsing a large JSON text in pieces, so that other threads run in between.

A parser written in C holds Python's interpreter lock until it returns: for 8 MiB of small values,
80 to 250 ms. All other threads wait, and so does the event loop of a server. `parse_pieces` cuts
the text at commas, into pieces of about 16 KiB. It completes each piece with the brackets that are
open at its ends, parses it, and merges the result into the value of the pieces before it.

A search for the commas must know which of them are within strings. It runs in numpy functions,
which release the interpreter lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np
import orjson

PIECE_BYTES = 1 << 14
"""The size of the pieces, in bytes. orjson parses a piece in at most 0.5 ms, during which other
threads wait.
"""
_OPENING, _CLOSING = {ord("["): b"[", ord("{"): b"{"}, {ord("["): b"]", ord("{"): b"}"}
_SPACE = b" \t\n\r"


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
    """Limits of a text. `parse_pieces` stops at the first piece that exceeds one of them."""

    depth: int
    """The maximum nesting depth of objects and lists. Above it, TooDeepError is raised."""
    containers: int
    """The maximum number of objects and lists. Above it, TooManyContainersError is raised."""
    items: int
    """The maximum number of entries of an object, and of items of a list that does not end with a
    number. Above it, TooManyItemsError is raised.
    """


def parse_pieces(text: bytes, limits: JsonLimits, piece: int = PIECE_BYTES) -> Any:
    """Return the value of a JSON text, as `orjson.loads` does. `piece` is the size of the pieces,
    in bytes. Raise InvalidJsonError if the text is not JSON, the error that `limits` names if the
    text exceeds a limit, and MemoryError if memory is short.
    """
    value = _PartialValue(limits.items)
    cutter = _Cutter(text, limits, piece)
    begin, before = 0, b""
    while (cut := cutter.next_cut()) is not None:
        value.add(text[begin:cut], begin, before, cutter.stack, cutter.kept)
        begin, before = cut + 1, cutter.stack
    value.add(text[begin:], begin, before, b"", 0)
    return value.root


class _Cutter:
    """Finds the commas at which a text is cut, and the brackets that are open there."""

    def __init__(self, text: bytes, limits: JsonLimits, piece: int) -> None:
        self._text, self._limits, self._piece = text, limits, piece
        self._containers = 0
        self._bytes = np.frombuffer(text, np.uint8)
        self._next = 0
        self._in_string = self._is_escaped = False
        self.stack = b""
        """The opening brackets that are not closed yet, the outermost first."""
        self.kept = 0
        """The number of brackets that were open at the previous cut and have stayed open since."""

    def next_cut(self) -> int | None:
        """Return the position of the next comma to cut at; None if there is none."""
        self.kept = len(self.stack)
        while self._next < len(self._text):
            begin = self._next
            end = min(begin + self._piece, len(self._text))
            outside = self._outside_strings(begin, end)
            block = self._bytes[begin:end]
            commas = np.flatnonzero((block == ord(",")) & outside)
            if commas.size:
                end = begin + int(commas[-1])
                block, outside = block[: commas[-1]], outside[: commas[-1]]
            self._track_brackets(block, outside)
            if commas.size:
                self._next, self._in_string, self._is_escaped = end + 1, False, False
                if not self.stack:
                    raise InvalidJsonError(f"a comma outside of objects and lists, byte {end}")
                return end
            self._next = end
        return None

    def _outside_strings(self, begin: int, end: int) -> np.ndarray:
        """Return which bytes are outside of strings. An opening quote counts as inside, and a
        closing quote as outside.
        """
        block = self._bytes[begin:end]
        quotes = block == ord('"')
        if self._is_escaped or self._text.find(b"\\", begin, end) >= 0:
            slashes = block == ord("\\")
            if self._is_escaped:
                slashes[0] = quotes[0] = False
            where = np.flatnonzero(slashes)
            is_start = np.diff(where, prepend=-2) > 1
            starts = where[is_start]
            stops = where[np.append(is_start[1:], True)] + 1 if where.size else where
            escaped = stops[(stops - starts) % 2 == 1]
            self._is_escaped = bool(escaped.size) and int(escaped[-1]) == len(block)
            quotes[escaped[escaped < len(block)]] = False
        inside = np.cumsum(quotes, dtype=np.uint8) & 1
        if self._in_string:
            inside ^= 1
        self._in_string = bool(inside[-1])
        return inside == 0

    def _track_brackets(self, block: np.ndarray, outside: np.ndarray) -> None:
        """Update `stack` and `kept` for the brackets of a block."""
        lowered = block | 32  # This turns [ into { and ] into }, so one comparison finds both.
        opens = (lowered == ord("{")) & outside
        where = np.flatnonzero(opens | ((lowered == ord("}")) & outside))
        if not where.size:
            return
        is_open = opens[where]
        depth = len(self.stack) + np.cumsum(np.where(is_open, 1, -1))
        self._containers += int(np.count_nonzero(is_open))
        if int(depth.max()) > self._limits.depth:
            raise TooDeepError
        if self._containers > self._limits.containers:
            raise TooManyContainersError
        lowest = min(len(self.stack), int(depth.min()))
        if lowest < 0:
            raise InvalidJsonError("a closing bracket without an opening one")
        opened = [
            int(block[where[np.flatnonzero(is_open & (depth == level))[-1]]])
            for level in range(lowest + 1, int(depth[-1]) + 1)
        ]
        self.kept = min(self.kept, lowest)
        self.stack = self.stack[:lowest] + bytes(opened)


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
        self._open: list[Any] = []
        """The containers that are not closed yet, the outermost first."""
        # The key has 122 random bits, so a text cannot contain it by accident or on purpose.
        self._mark = uuid4().hex
        self._quoted = b'"%b"' % self._mark.encode()

    def add(self, piece: bytes, begin: int, before: bytes, after: bytes, kept: int) -> None:
        """Parse a piece that begins at byte `begin` of the text, and merge its value. `before` and
        `after` are the brackets that are open at the start and at the end of the piece. The first
        `kept` of these brackets are the same, because they stay open throughout the piece.
        """
        parsed = self._parsed(piece, begin, before, after, kept)
        continued = self._continuations(parsed, before)
        opened: list[Any] = []
        holder = continued[kept - 1] if kept else None
        for level in range(kept, len(after)):
            child = parsed if holder is None else self._open_child(holder, level > kept)
            opened.append(child)
            holder = child
        for container in opened:
            if type(container) is list:
                container.pop()
            else:
                del container[self._mark]
        if not before:
            self.root = parsed
        for target, continuation in zip(self._open, continued, strict=True):
            self._extend(target, continuation)
        self._open = self._open[:kept] + opened

    def _parsed(self, piece: bytes, begin: int, before: bytes, after: bytes, kept: int) -> Any:
        heads = [_OPENING[bracket] for bracket in before]
        for level, bracket in enumerate(before[:-1]):
            if bracket == ord("{"):
                heads[level] += self._quoted + b":"
        tails = [_CLOSING[bracket] for bracket in after]
        for level in range(kept, len(after)):
            mark = b"," + self._quoted + (b":0" if after[level] == ord("{") else b"")
            tails[level] = mark + tails[level]
        head, tail = b"".join(heads), b"".join(reversed(tails))
        # Without these checks, a comma without a value before or after it would be accepted.
        if (before and piece.lstrip(_SPACE)[:1] in (b"]", b"}", b"")) or (
            after and (head + piece).rstrip(_SPACE)[-1:] in (b"[", b"{")
        ):
            raise InvalidJsonError(f"a comma without a value near byte {begin}")
        try:
            return orjson.loads(head + piece + tail)
        except orjson.JSONDecodeError as error:
            if "Not enough memory" in str(error):  # orjson reports a lack of memory as invalid JSON
                raise MemoryError from None
            raise InvalidJsonError(f"{error.msg}, near byte {begin}") from None

    def _continuations(self, parsed: Any, before: bytes) -> list[Any]:
        """Return the part of each open container that is in this piece, the outermost container
        first. Parsing nests these parts in each other. This method takes each inner part out of the
        outer one, because the outer container already contains the inner container.
        """
        found = []
        for level in range(len(before)):
            found.append(parsed)
            if level + 1 < len(before):
                parsed = parsed.pop(0) if type(parsed) is list else parsed.pop(self._mark)
        return found

    def _open_child(self, holder: Any, is_marked: bool) -> Any:
        """Return the item of `holder` that is still open at the end of the piece. `is_marked` is
        True if the last item of `holder` is the mark.
        """
        if type(holder) is list:
            return holder[-2 if is_marked else -1]
        # The open item is the last value, unless its key occurred earlier in this object.
        return next(value for value in reversed(holder.values()) if self._has_mark(value))

    def _has_mark(self, value: Any) -> bool:
        if type(value) is list:
            return bool(value) and value[-1] == self._mark
        return type(value) is dict and self._mark in value

    def _extend(self, target: Any, continuation: Any) -> None:
        if type(target) is dict:
            target.update(continuation)
        else:
            target.extend(continuation)
        if len(target) > self._max_items and (
            type(target) is dict or type(target[-1]) not in (int, float)
        ):
            raise TooManyItemsError
