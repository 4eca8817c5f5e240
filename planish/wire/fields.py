"""Reading a JSON object field by field: every field has a type, and an error names it by its path
in the body.

`with Fields.of(body) as fields` ends with a check that every field was read. An unread field is
rejected, unless it is empty (null, false, 0, "", [] or {}): a client may send the defaults of
options that we do not know, but an option that is set must not be ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar, overload

import orjson

from planish.errors import UserError

T = TypeVar("T")
D = TypeVar("D")

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,255}")
_MAX_TEXT = 100_000
_MAX_SHOWN = 80
_MAX_CONTAINERS = 1 << 20
"""Limit of objects and lists in a body. As Python objects they take up to 40 times their bytes."""


class Fields:
    """One JSON object."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        """`where` is the path of the object in its body, empty for the body itself."""
        self._values = values
        self._where = where
        self._read: set[str] = set()

    @classmethod
    def of(cls, body: bytes) -> Fields:
        """Parse the body of a request, which must be one JSON object."""
        if body.count(b"{") + body.count(b"[") > _MAX_CONTAINERS:
            raise UserError(
                f"the body has more than {_MAX_CONTAINERS:,} objects and lists; send fewer in one "
                "call"
            )
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise UserError(f"the body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise UserError(f"the body is {_kind(value)}; give an object with the request's fields")
        return cls(value)

    def __enter__(self) -> Fields:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.refuse_others()

    def refuse_others(self) -> None:
        """Raise UserError for a field that is set and was not read."""
        for name, value in self._values.items():
            if name not in self._read and value not in (None, False, 0, "", [], {}):
                raise UserError(
                    f"{self.path(name)}={shown(value)} is unknown, and unknown fields are not "
                    "ignored; leave it out"
                )

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the fields."""
        return iter(self._values)

    def path(self, name: str) -> str:
        """Return how errors name a field."""
        return f"{self._where}.{name}" if self._where else name

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self._values.get(name) is not None

    def skip(self, *names: str) -> None:
        """Mark fields as read without reading them, because their values have no effect."""
        self._read.update(names)

    @overload
    def optional(self, read: Callable[[str], T], name: str) -> T | None: ...
    @overload
    def optional(self, read: Callable[[str], T], name: str, default: D) -> T | D: ...
    def optional(self, read: Callable[[str], Any], name: str, default: Any = None) -> Any:
        """Return `read(name)`, where `read` is usually a method of this object. Return the default
        if the field is absent or null.
        """
        self._read.add(name)
        return read(name) if self.has(name) else default

    def text(self, name: str) -> str:
        """Read a string."""
        value = self._get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        if len(value) > _MAX_TEXT:
            raise UserError(
                f"{self.path(name)} has {len(value)} characters; at most {_MAX_TEXT} are allowed"
            )
        return value

    def identifier(self, name: str) -> str:
        """Read an id, which can be a part of a URL or a path."""
        value = self.text(name)
        check_identifier(self.path(name), value)
        return value

    def integer(self, name: str, low: int = -(2**63), high: int = 2**63 - 1) -> int:
        """Read an integer from `low` to `high`."""
        value = self._get(name)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            # A client whose language has no integers may write 3 as 3.0.
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str) -> float:
        """Read a finite number."""
        value = self._get(name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
        ):
            raise self._wrong(name, "a finite number")
        return value

    def boolean(self, name: str) -> bool:
        """Read true or false."""
        value = self._get(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def alone(self) -> Fields:
        """Return the object as a body of its own, so that errors do not name its position."""
        return Fields(self._values)

    def array(self, name: str) -> list[Any]:
        """Read a list."""
        value = self._get(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value

    def object(self, name: str) -> Fields:
        """Read an object."""
        return self._object(name, self._get(name))

    def objects(self, name: str) -> Iterator[Fields]:
        """Read a list of objects."""
        for index, value in enumerate(self.array(name)):
            yield self._object(f"{name}[{index}]", value)

    def mapping(self, name: str) -> dict[str, Any]:
        """Read an object as a dict."""
        value = self._get(name)
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return value

    def strings(self, name: str) -> dict[str, str]:
        """Read an object of strings, such as user_metadata."""
        value = self.mapping(name)
        for key, item in value.items():
            if not isinstance(item, str):
                raise UserError(f"{self.path(name)}.{key} is {_kind(item)}; give a string")
        return value

    def raw(self, name: str) -> Any:
        """Return the value of any type; None if it is absent."""
        self._read.add(name)
        return self._values.get(name)

    def _object(self, name: str, value: Any) -> Fields:
        if not isinstance(value, dict):
            raise UserError(f"{self.path(name)} is {_kind(value)}; give an object")
        return Fields(value, self.path(name))

    def _get(self, name: str) -> Any:
        self._read.add(name)
        if not self.has(name):
            raise UserError(f"{self.path(name)} is missing")
        return self._values[name]

    def _wrong(self, name: str, wanted: str) -> UserError:
        return UserError(f"{self.path(name)}={shown(self._values[name])}: give {wanted}")


def check_identifier(name: str, value: str) -> None:
    """Raise UserError unless `value` can be an id."""
    if not _ID.fullmatch(value):
        raise UserError(
            f"{name}={shown(value)} is not an id: give up to 256 letters, digits and _ . : -"
        )


def shown(value: Any) -> str:
    """Return how an error shows a value; long values are shortened."""
    match value:
        case list():
            return "[...]"
        case dict():
            return "{...}"
        case str():
            return repr(value) if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]!r}..."
        case _:
            return repr(value)


def _kind(value: Any) -> str:
    names = {
        str: "a string",
        list: "a list",
        dict: "an object",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")
