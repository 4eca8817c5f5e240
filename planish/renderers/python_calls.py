"""Read tool calls that a model writes as in Python: `[add(a=1, b='x'), now()]`."""

import json
import re
from typing import Any

from planish.renderers.tool_calls import read_named_call

_NAME = re.compile(r"[^\W\d][\w.\-]*")
_STRING = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_CONSTANTS = {
    "True": True, "true": True, "False": False, "false": False, "None": None, "null": None,
}  # fmt: skip


def read_python_calls(text: str) -> tuple[list[dict[str, Any]] | None, str | None]:
    """Read a list of calls with named arguments, or one call on each line. JSON's `true`, `false`
    and `null` are allowed as values. Returns (calls, None) or (None, error).
    """
    try:
        return _Reader(text).calls(), None
    except (ValueError, RecursionError) as error:
        return None, f"not a list of Python calls: {error}"


class _Reader:
    """Reads a text from its start to its end. Methods raise ValueError for another text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def calls(self) -> list[dict[str, Any]]:
        is_list = self.skip("[")
        calls: list[dict[str, Any]] = []
        while not self.skip("]" if is_list else ""):
            if calls and is_list and not self.skip(","):
                raise ValueError(self.wrong("a comma"))
            calls.append(self.call())
        if self.skip_space() < len(self.text):
            raise ValueError(self.wrong("the end"))
        if not calls:
            raise ValueError("there is no call")
        return calls

    def call(self) -> dict[str, Any]:
        name = self.match(_NAME, "the name of a function")[0]
        if not self.skip("("):
            raise ValueError(self.wrong("an opening parenthesis"))
        arguments: dict[str, Any] = {}
        while not self.skip(")"):
            if arguments and not self.skip(","):
                raise ValueError(self.wrong("a comma"))
            key = self.match(_NAME, "the name of an argument")[0]
            if not self.skip("=") or key in arguments:
                raise ValueError(self.wrong("a value of an argument that has none yet"))
            arguments[key] = self.value()
        call, error = read_named_call(name, json.dumps(arguments, ensure_ascii=False))
        if call is None:
            raise ValueError(error)
        return call

    def value(self) -> Any:
        if self.skip("["):
            return self.items("]", self.value)
        if self.skip("{"):
            return dict(self.items("}", self.pair))
        self.skip_space()
        string = _STRING.match(self.text, self.at)
        if string is not None:
            self.at = string.end()
            return _ESCAPE.sub(_unescaped, string[1] if string[1] is not None else string[2])
        name = _NAME.match(self.text, self.at)
        if name is not None and name[0] in _CONSTANTS:
            self.at = name.end()
            return _CONSTANTS[name[0]]
        number = self.match(_NUMBER, "a value")[0]
        return int(number) if number.lstrip("+-").isdigit() else float(number)

    def items(self, end: str, read: Any) -> list[Any]:
        items: list[Any] = []
        while not self.skip(end):
            if items and not self.skip(","):
                raise ValueError(self.wrong("a comma"))
            items.append(read())
        return items

    def pair(self) -> tuple[str, Any]:
        key = self.value()
        if not self.skip(":") or not isinstance(key, str):
            raise ValueError(self.wrong("a key with a value"))
        return key, self.value()

    def skip_space(self) -> int:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.at

    def skip(self, character: str) -> bool:
        """Skip `character` if it comes next. An empty string stands for the end of the text."""
        self.skip_space()
        if not character:
            return self.at == len(self.text)
        found = self.text.startswith(character, self.at)
        self.at += found
        return found

    def match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        self.skip_space()
        found = pattern.match(self.text, self.at)
        if found is None:
            raise ValueError(self.wrong(what))
        self.at = found.end()
        return found

    def wrong(self, expected: str) -> str:
        return f"character {self.at} is not {expected}"


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2]
    return chr(int(code, 16)) if code else _ESCAPED.get(found[3], found[3])
