"""Requests that are valid except that one or two of their strings, lists, maps or numbers are far
too large: for JSON bodies and for protobuf messages.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import orjson
import zstandard
from full_requests import FullRequest
from google.protobuf.descriptor import FieldDescriptor

MAX_BODY = 8 << 20
"""Bodies are cut to about this size, so that a run sends requests and not only bytes."""
MAX_MESSAGES = 20_000
"""An empty message has two bytes in a body and hundreds in the memory of this program."""
MAX_CONTAINER_ITEMS = 64
"""Only so many items of a list or map can be blown up in turn. A blown-up list has millions, and a
`Place` for each of them took more than 2 GiB.
"""
_HUGE, _DEEP = "\0huge\0", "\0deep\0"
"""Stand for an integer and for nested lists that orjson cannot write."""
NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 65_536, 10**6, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1),
    *(-(2**63), 0.5, -0.0, 1e-320, 1e-30, 1e38, 1e308, -1e308, _HUGE),
)
_CHARACTERS = ("a", "é", "\U0001f600", "\0", "9", " ", '"', "\ud7ff", "\n", ",")


@dataclass(frozen=True)
class Place:
    """One value in a body. `blow_up` replaces it by one of about `size` bytes or items."""

    path: str
    blow_up: Callable[[random.Random, int], None]


def places(body: Any) -> list[Place]:
    """Return the values of a body, of either encoding, at any depth: all fields, and the first
    MAX_CONTAINER_ITEMS items of each list or map.
    """
    found = _json_places(body, "") if isinstance(body, dict) else _message_places(body, "")
    return list(found)


def shot_of(
    request: FullRequest, source: random.Random, chosen: tuple[int, ...], size: int
) -> tuple[bytes, bool]:
    """Return the body of `request` with the chosen places blown up, and whether it is
    compressed.
    """
    body = copy.deepcopy(request.body)
    for index in chosen:
        found = places(body)
        found[index % len(found)].blow_up(source, size)
    data = FullRequest("", "", "", body).encoded()
    depth = source.choice((300, 1000, size))
    for mark, written in ((_HUGE, b"9" * 5000), (_DEEP, b"[" * depth + b"]" * depth)):
        # Other marks stay: a list of many huge values would need more memory than there is.
        data = data.replace(orjson.dumps(mark), written, 1)
    is_packed = source.random() < 0.1
    return (zstandard.compress(data) if is_packed else data), is_packed


def _json_places(value: Any, path: str) -> Iterator[Place]:
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in islice(keys, MAX_CONTAINER_ITEMS):
        where = f"{path}[]" if isinstance(value, list) else f"{path}.{key}".lstrip(".")
        yield Place(where, lambda source, size, key=key: _blow_up_json(value, key, source, size))
        if isinstance(value[key], dict | list):
            yield from _json_places(value[key], where)
    if isinstance(value, dict):
        yield Place(f"{path}{{}}", lambda source, size: _blow_up_keys(value, source, size))


def _blow_up_json(holder: Any, key: Any, source: random.Random, size: int) -> None:
    match holder[key]:
        case str() as text:
            pick = source.choice((text, *_CHARACTERS)) or "a"
            holder[key] = pick * max(1, size // len(pick.encode()))
        case list() as items if source.random() < 0.8:
            item = copy.deepcopy(source.choice(items)) if items else ""
            if source.random() < 0.3:
                item = source.choice((0, "", "a", [], {}, 2**40, -1, 0.5))
            holder[key] = _copies([item] * max(1, size // (len(orjson.dumps(item)) + 1)))
        case list() | dict():
            holder[key] = _DEEP
        case _:
            holder[key] = source.choice(NUMBERS)


def _blow_up_keys(holder: dict[str, Any], source: random.Random, size: int) -> None:
    """Add many keys, or one long key, with a value of the kind that the object holds."""
    value = copy.deepcopy(next(iter(holder.values()), 1))
    if source.random() < 0.3:
        holder["k" * size] = value
        return
    count = max(1, size // (len(orjson.dumps(value)) + 12))
    holder |= _copies({f"k{i}": value for i in range(count)})


def _copies(value: Any) -> Any:
    """Return a copy that holds no object twice, so that a change of one item changes only that."""
    return orjson.loads(orjson.dumps(value))


def _message_places(message: Any, path: str) -> Iterator[Place]:
    for descriptor, value in message.ListFields():
        where = f"{path}.{descriptor.name}".lstrip(".")
        yield Place(
            where,
            lambda source, size, one=descriptor: _blow_up_field(message, one, source, size),
        )
        if descriptor.message_type is None:
            continue
        if descriptor.message_type.GetOptions().map_entry:
            if descriptor.message_type.fields_by_name["value"].message_type is not None:
                for key in list(islice(value, MAX_CONTAINER_ITEMS)):
                    yield from _message_places(value[key], f"{where}[{key}]")
        elif descriptor.is_repeated:
            for item in islice(value, MAX_CONTAINER_ITEMS):
                yield from _message_places(item, f"{where}[]")
        else:
            yield from _message_places(value, where)


def _blow_up_field(message: Any, field: FieldDescriptor, source: random.Random, size: int) -> None:
    value = getattr(message, field.name)
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        _blow_up_map(value, kind, source, size)
    elif field.is_repeated and kind is not None:
        item = value[0] if value else None
        width = 2 + (item.ByteSize() if item is not None else 0)
        for _ in range(min(size // width, MAX_MESSAGES)):
            value.add().CopyFrom(
                item
            ) if item is not None and source.random() < 0.7 else value.add()
    elif field.is_repeated:
        value.extend([source.choice((0, 1, 2, 2**62, -1))] * size)
    elif kind is None:
        setattr(message, field.name, _scalar(field, source, size))


def _blow_up_map(value: Any, entry: Any, source: random.Random, size: int) -> None:
    is_message = entry.fields_by_name["value"].message_type is not None
    first = next(iter(value), None)
    width = 8 + (value[first].ByteSize() if is_message and first is not None else 8)
    count = min(size // width, MAX_MESSAGES) + 1
    keys = ["k" * size] if source.random() < 0.3 else [f"k{i}" for i in range(count)]
    for key in keys:
        if not is_message:
            value[key] = 1.0
        elif first is None or source.random() < 0.3:
            value.get_or_create(key)
        else:
            value[key].CopyFrom(value[first])


def _scalar(field: FieldDescriptor, source: random.Random, size: int) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return source.choice((b"\0", b"\1\0\0\0", b"\xff", b"\0\0\x80\x7f")) * (size // 4 + 1)
        case FieldDescriptor.CPPTYPE_STRING:
            return source.choice(("a", "é", "\0", "9")) * size
        case FieldDescriptor.CPPTYPE_INT32:
            return source.choice((0, -1, 2**31 - 1, -(2**31), 10**6))
        case FieldDescriptor.CPPTYPE_INT64:
            return source.choice((0, -1, 2**63 - 1, -(2**63), 2**31))
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return source.choice((1e308, -1e308, float("nan"), float("inf"), 1e-320))
        case FieldDescriptor.CPPTYPE_ENUM:
            return source.choice((0, 1, 2, 3, 4, 5, 2**31 - 1))
    return True
