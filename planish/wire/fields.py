"""Reading a JSON object field by field: every field has a type, and an error names the path of the
field in the body.

`with Fields.of(body) as fields` ends with a check that every field was read. An unread field is
rejected, unless it is empty (null, false, 0, "", [] or {}). A client may send the empty defaults of
options that planish does not know. But planish must not ignore an option that the client has set.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeVar, overload

import numpy as np
import orjson

from planish.errors import UserError
from planish.wire.json_pieces import (
    PIECE_BYTES,
    InvalidJsonError,
    JsonContainer,
    JsonLimits,
    JsonValue,
    TooDeepError,
    TooManyContainersError,
    TooManyItemsError,
    parse_in_pieces,
)
from planish.wire.pacing import pause_if_due

T = TypeVar("T")

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,255}")
MAX_ID_CHARACTERS = 256
"""Maximum number of characters of an id."""
MAX_STRING_CHARACTERS = 4096
"""Maximum number of characters of a string, unless its field has a limit of its own."""
MAX_LIST_ITEMS = 1024
"""Maximum number of items of a list, unless its field has a limit of its own."""
MAX_MAP_ENTRIES = 64
"""Maximum number of entries of an object whose keys are chosen by the client."""
_MAX_SHOWN_CHARACTERS = 80
MAX_CONTAINERS = 1 << 17
"""Limit for the number of objects and lists in a body. Parsed into Python objects, they take up to
40 times the memory of their JSON text, and a garbage collection of many of them stops all threads.
"""
MAX_VALUES = 1 << 24
"""Limit for the number of values in a body, and of token ids in one request. Each takes up to 40
bytes of memory while the body is read.
"""
MAX_DEPTH = 64
"""Limit for the nesting depth of objects and lists. Recursive code can process this depth."""
MAX_CONTAINER_ITEMS = 1 << 17
"""Limit of the entries of an object, and of the items of a list that are not numbers."""
_LIMITS = JsonLimits(
    max_depth=MAX_DEPTH, max_containers=MAX_CONTAINERS, max_items=MAX_CONTAINER_ITEMS
)
_COUNT_STEP_BYTES = 1 << 20
_MAX_UNSPLIT_BYTES, _MAX_UNSPLIT_VALUES = 1 << 20, 1 << 13
"""Bodies with at most this many bytes and values are parsed by one call, which takes about 1 ms at
most. Larger bodies are parsed in pieces, so that other threads run in between.
"""


class _JsonObject:
    """One JSON object, which notes the fields that were read."""

    def __init__(self, values: Mapping[str, Any], object_path: str = "") -> None:
        """`object_path` is the path of the object in its body, empty for the body itself."""
        self._values = values
        self._object_path = object_path
        self._read_names: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.reject_unread()

    def reject_unread(self) -> None:
        """Raise UserError for a field that is set and was not read."""
        for name, value in self._values.items():
            if name not in self._read_names and value not in (None, False, 0, "", [], {}):
                raise UserError(
                    f"{self.path(name)}={shown(value)} is unknown, and unknown fields are not "
                    "ignored; leave it out"
                )

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the fields."""
        return iter(self._values)

    def path(self, name: str) -> str:
        """Return the path of a field in the body, for error messages."""
        name = name if len(name) <= _MAX_SHOWN_CHARACTERS else f"{name[:_MAX_SHOWN_CHARACTERS]}..."
        return f"{self._object_path}.{name}" if self._object_path else name

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self._values.get(name) is not None

    def skip(self, *names: str) -> None:
        """Mark fields as read without reading them, because their values have no effect."""
        self._read_names.update(names)

    def raw(self, name: str) -> Any:
        """Return the value, which may have any type, or None if the field is absent."""
        self._read_names.add(name)
        return self._values.get(name)

    def _get(self, name: str) -> JsonValue:
        self._read_names.add(name)
        if not self.has(name):
            raise UserError(f"{self.path(name)} is missing")
        return self._values[name]

    def _wrong_value(self, name: str, expected: str) -> UserError:
        return UserError(f"{self.path(name)}={shown(self._values[name])}: give {expected}")


class Fields(_JsonObject):
    """One JSON object, whose fields are read with their types."""

    @classmethod
    def of(cls, body: bytes) -> Fields:
        """Parse the body of a request, which must be one JSON object. Raise MemoryError if there is
        too little memory for it.
        """
        value_count = _max_value_count(body)
        if value_count > MAX_VALUES:
            raise UserError(f"the body has more than {MAX_VALUES:,} values; send fewer in one call")
        value = _parse(body.removeprefix(codecs.BOM_UTF8), value_count)
        if not isinstance(value, dict):
            raise UserError(
                f"the body is {_type_name(value)}; give an object with the request's fields"
            )
        return cls(value)

    @overload
    def optional(self, read: Callable[[str], T], name: str) -> T | None: ...

    @overload
    def optional(self, read: Callable[[str], T], name: str, default: T) -> T: ...

    def optional(self, read: Callable[[str], Any], name: str, default: Any = None) -> Any:
        """Return `read(name)`, where `read` is usually a method of this object. Return the default
        if the field is absent or null.
        """
        self._read_names.add(name)
        return read(name) if self.has(name) else default

    def text(self, name: str, maximum: int = MAX_STRING_CHARACTERS) -> str:
        """Read a string of at most `maximum` characters."""
        value = self._get(name)
        if not isinstance(value, str):
            raise self._wrong_value(name, "a string")
        check_count(self.path(name), len(value), maximum, "characters")
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
            raise self._wrong_value(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str) -> float:
        """Read a finite number."""
        value = self._get(name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
        ):
            raise self._wrong_value(name, "a finite number")
        return value

    def boolean(self, name: str) -> bool:
        """Read true or false."""
        value = self._get(name)
        if not isinstance(value, bool):
            raise self._wrong_value(name, "true or false")
        return value

    def as_body(self) -> Fields:
        """Return the same object as if it were a body: errors name its fields without its path."""
        return Fields(self._values)

    def array(self, name: str, maximum: int = MAX_LIST_ITEMS) -> list[Any]:
        """Read a list of at most `maximum` items."""
        value = self._get(name)
        if not isinstance(value, list):
            raise self._wrong_value(name, "a list")
        check_count(self.path(name), len(value), maximum, "items")
        return value

    def texts(self, name: str) -> list[str]:
        """Read a list of strings."""
        values = self.array(name)
        if not all(isinstance(value, str) for value in values):
            raise UserError(f"{self.path(name)} contains a value that is not a string")
        return values

    def object(self, name: str) -> Fields:
        """Read an object."""
        return self._object(name, self._get(name))

    def objects(self, name: str, maximum: int = MAX_LIST_ITEMS) -> Iterator[Fields]:
        """Read a list of at most `maximum` objects."""
        for index, value in enumerate(self.array(name, maximum)):
            pause_if_due()
            yield self._object(f"{name}[{index}]", value)

    def mapping(self, name: str, maximum: int = MAX_MAP_ENTRIES) -> dict[str, Any]:
        """Read an object as a dict of at most `maximum` entries."""
        value = self._get(name)
        if not isinstance(value, dict):
            raise self._wrong_value(name, "an object")
        check_count(self.path(name), len(value), maximum, "entries")
        return value

    def strings(self, name: str, maximum: int = MAX_LIST_ITEMS) -> dict[str, str]:
        """Read an object of at most `maximum` strings, such as user_metadata."""
        value = self.mapping(name, maximum)
        for key, item in value.items():
            if not isinstance(item, str):
                raise UserError(
                    f"{self.path(name)}.{key[:_MAX_SHOWN_CHARACTERS]} is {_type_name(item)}; "
                    "give a string"
                )
        return value

    def _object(self, name: str, value: JsonValue) -> Fields:
        if not isinstance(value, dict):
            raise UserError(f"{self.path(name)} is {_type_name(value)}; give an object")
        return Fields(value, self.path(name))


def _max_value_count(body: bytes) -> int:
    """Return an upper bound of (number of values - 1). Other threads can run while it is
    computed.
    """
    return sum(
        body.count(b",", begin, begin + _COUNT_STEP_BYTES)
        for begin in range(0, len(body), _COUNT_STEP_BYTES)
    )


def _parse(body: bytes, value_count: int) -> JsonValue:
    try:
        if not _is_parsed_at_once(body, value_count):
            return parse_in_pieces(body, _LIMITS)
        value = orjson.loads(body)
        if _depth_exceeds(value, MAX_DEPTH):
            raise TooDeepError
        return value
    except TooDeepError:
        raise UserError(
            f"the body nests objects and lists more than {MAX_DEPTH} levels deep; send a body "
            "with less nesting"
        ) from None
    except TooManyContainersError:
        raise UserError(
            f"the body has more than {MAX_CONTAINERS:,} objects and lists; send fewer in one call"
        ) from None
    except TooManyItemsError:
        raise UserError(
            f"the body has an object or a list with more than {MAX_CONTAINER_ITEMS:,} items that "
            "are not numbers; send fewer in one call"
        ) from None
    except InvalidJsonError as error:
        raise UserError(f"the body is not JSON: {error}") from None
    except orjson.JSONDecodeError as error:
        if "Not enough memory" in str(error):  # orjson reports a lack of memory as invalid JSON
            raise MemoryError from None
        raise UserError(f"the body is not JSON: {error}") from None


def _is_parsed_at_once(body: bytes, value_count: int) -> bool:
    """Return whether the body is parsed by one call, and not in pieces. `value_count` is the result
    of `_max_value_count`.
    """
    if len(body) <= 2 * PIECE_BYTES:
        return True
    if len(body) > _MAX_UNSPLIT_BYTES:
        return False
    # A container's first value follows a bracket, and any other value follows a comma. Brackets and
    # commas within strings are counted too.
    characters = np.frombuffer(body, np.uint8)
    brackets = sum(int(np.count_nonzero(characters == ord(bracket))) for bracket in "[{")
    return value_count + brackets <= _MAX_UNSPLIT_VALUES


def _depth_exceeds(value: JsonValue, maximum: int) -> bool:
    """Return whether objects and lists are nested more than `maximum` deep."""
    level: list[JsonContainer] = [value] if isinstance(value, (dict, list)) else []
    for _ in range(maximum):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if type(item) in (dict, list)
        ]
        if not level:
            return False
    return True


def check_count(name: str, count: int, maximum: int, kind: str) -> None:
    """Raise UserError if a field has more than `maximum` things of a kind, such as "entries"."""
    if count > maximum:
        raise UserError(f"{name} has {count:,} {kind}; give at most {maximum:,}")


def check_identifier(name: str, value: str) -> None:
    """Raise UserError unless `value` can be an id."""
    if not _ID.fullmatch(value):
        raise UserError(
            f"{name}={shown(value)} is not an id: give up to 256 letters, digits and _ . : -"
        )


def shown(value: Any) -> str:
    """Return the text of a value for an error message. Long values are shortened."""
    match value:
        case list():
            return "[...]"
        case dict():
            return "{...}"
        case str():
            return (
                repr(value)
                if len(value) <= _MAX_SHOWN_CHARACTERS
                else f"{value[:_MAX_SHOWN_CHARACTERS]!r}..."
            )
        case _:
            return repr(value)


def _type_name(value: object) -> str:
    names: dict[type, str] = {
        str: "a string",
        list: "a list",
        dict: "an object",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")
