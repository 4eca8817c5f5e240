"""Reads the tool calls of Gemma 4: call:name{key:value,other:[1,2]} with strings in <|"|>."""

import json
import re
from typing import Any

from planish.renderers.tool_calls import read_named_call

QUOTE = '<|"|>'
_MAX_DEPTH = 64
_CALL = re.compile(r"\s*call:([^{}\s]+)\s*(\{.*\})\s*", re.DOTALL)
_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:")
_WORD = re.compile(r"\s*([^\s,{}\[\]]+)")


def read_gemma4_call(text: str) -> tuple[dict[str, Any] | None, str | None]:
    """Return (call, None) for the text between the tags of a call, or (None, error)."""
    call = _CALL.fullmatch(text)
    if call is None:
        return None, "it is not call:name{arguments}"
    reader = _Reader(call.group(2))
    try:
        arguments = reader.value(0)
        if reader.rest.strip():
            raise ValueError(f"there is text after the arguments: {reader.rest.strip()[:40]!r}")
    except ValueError as error:
        return None, str(error)
    return read_named_call(call.group(1), json.dumps(arguments, ensure_ascii=False))


class _Reader:
    """The text of arguments that is left to read."""

    def __init__(self, text: str) -> None:
        self.rest = text

    def value(self, depth: int) -> Any:
        """Read one value. Raises ValueError if there is none."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"the arguments have more than {_MAX_DEPTH} levels")
        if self._take(QUOTE):
            return self._until_quote()
        if self._take("{"):
            return dict(self._items("}", depth, has_keys=True))
        if self._take("["):
            return [value for _, value in self._items("]", depth, has_keys=False)]
        word = _WORD.match(self.rest)
        if word is None:
            raise ValueError("a value is missing")
        self.rest = self.rest[word.end() :]
        return json.loads(word.group(1), parse_constant=_reject)

    def _items(self, end: str, depth: int, *, has_keys: bool) -> list[tuple[str, Any]]:
        items: list[tuple[str, Any]] = []
        while not self._take(end):
            if items and not self._take(","):
                raise ValueError("a comma is missing")
            items.append((self._key() if has_keys else "", self.value(depth + 1)))
        return items

    def _key(self) -> str:
        if self._take(QUOTE):
            key = self._until_quote()
            if not self._take(":"):
                raise ValueError("a colon is missing")
            return key
        found = _KEY.match(self.rest)
        if found is None:
            raise ValueError("a key is missing")
        self.rest = self.rest[found.end() :]
        return found.group(1)

    def _until_quote(self) -> str:
        text, quote, self.rest = self.rest.partition(QUOTE)
        if not quote:
            raise ValueError("a string is not closed")
        return text

    def _take(self, mark: str) -> bool:
        """Skip a mark and white space before it. Returns whether it is next."""
        rest = self.rest.lstrip()
        if rest.startswith(mark):
            self.rest = rest[len(mark) :]
            return True
        return False


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON value")
