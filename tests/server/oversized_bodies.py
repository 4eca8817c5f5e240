"""Requests that are valid except that one or two of their strings, lists, maps or numbers are far
too large: for JSON bodies and for protobuf messages.
"""

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

MAX_BODY_BYTES = 8 << 20
"""Bodies are cut to about this size, so that a run sends requests and not only bytes."""
MAX_MESSAGES = 20_000
"""An empty message has two bytes in a body and hundreds in the memory of this program."""
MAX_CONTAINER_ITEMS = 64
"""Only so many items of a list or map can be enlarged in turn. An enlarged list has millions, and a
`BodyField` for each of them took more than 2 GiB.
"""
_HUGE, _DEEP = "\0huge\0", "\0deep\0"
"""Stand for an integer and for nested lists that orjson cannot write."""
NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 65_536, 10**6, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1),
    *(-(2**63), 0.5, -0.0, 1e-320, 1e-30, 1e38, 1e308, -1e308, _HUGE),
)
_CHARACTERS = ("a", "é", "\U0001f600", "\0", "9", " ", '"', "\ud7ff", "\n", ",")


@dataclass(frozen=True)
class BodyField:
    """One value in a body. `enlarge` replaces it by one of about `size` bytes or items."""

    path: str
    enlarge: Callable[[random.Random, int], None]


def body_fields(body: Any) -> list[BodyField]:
    """Return the values of a body, of either encoding, at any depth: all fields, and the first
    MAX_CONTAINER_ITEMS items of each list or map.
    """
    found = _json_fields(body, "") if isinstance(body, dict) else _message_fields(body, "")
    return list(found)


def oversized_body(
    request: FullRequest, rng: random.Random, field_indices: tuple[int, ...], size: int
) -> tuple[bytes, bool]:
    """Return the body of `request` with the chosen values enlarged, and whether it is
    compressed.
    """
    body = copy.deepcopy(request.body)
    for index in field_indices:
        found = body_fields(body)
        found[index % len(found)].enlarge(rng, size)
    data = FullRequest("", "", "", body).encoded_body()
    depth = rng.choice((300, 1000, size))
    for mark, json_text in ((_HUGE, b"9" * 5000), (_DEEP, b"[" * depth + b"]" * depth)):
        # Other marks stay: a list of many huge values would need more memory than there is.
        data = data.replace(orjson.dumps(mark), json_text, 1)
    is_compressed = rng.random() < 0.1
    return (zstandard.compress(data) if is_compressed else data), is_compressed


def _json_fields(value: Any, path: str) -> Iterator[BodyField]:
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in islice(keys, MAX_CONTAINER_ITEMS):
        field_path = f"{path}[]" if isinstance(value, list) else f"{path}.{key}".lstrip(".")
        yield BodyField(field_path, lambda rng, size, key=key: _enlarge_json(value, key, rng, size))
        if isinstance(value[key], dict | list):
            yield from _json_fields(value[key], field_path)
    if isinstance(value, dict):
        yield BodyField(f"{path}{{}}", lambda rng, size: _add_keys(value, rng, size))


def _enlarge_json(container: Any, key: Any, rng: random.Random, size: int) -> None:
    match container[key]:
        case str() as text:
            unit = rng.choice((text, *_CHARACTERS)) or "a"
            container[key] = unit * max(1, size // len(unit.encode()))
        case list() as items if rng.random() < 0.8:
            item = copy.deepcopy(rng.choice(items)) if items else ""
            if rng.random() < 0.3:
                item = rng.choice((0, "", "a", [], {}, 2**40, -1, 0.5))
            container[key] = _deep_copy([item] * max(1, size // (len(orjson.dumps(item)) + 1)))
        case list() | dict():
            container[key] = _DEEP
        case _:
            container[key] = rng.choice(NUMBERS)


def _add_keys(container: dict[str, Any], rng: random.Random, size: int) -> None:
    """Add many keys, or one long key, with a value of the kind that the object holds."""
    value = copy.deepcopy(next(iter(container.values()), 1))
    if rng.random() < 0.3:
        container["k" * size] = value
        return
    count = max(1, size // (len(orjson.dumps(value)) + 12))
    container |= _deep_copy({f"k{i}": value for i in range(count)})


def _deep_copy(value: Any) -> Any:
    """Return a copy that holds no object twice, so that a change of one item changes only that."""
    return orjson.loads(orjson.dumps(value))


def _message_fields(message: Any, path: str) -> Iterator[BodyField]:
    for descriptor, value in message.ListFields():
        field_path = f"{path}.{descriptor.name}".lstrip(".")
        yield BodyField(
            field_path,
            lambda rng, size, field=descriptor: _enlarge_message_field(message, field, rng, size),
        )
        if descriptor.message_type is None:
            continue
        if descriptor.message_type.GetOptions().map_entry:
            if descriptor.message_type.fields_by_name["value"].message_type is not None:
                for key in list(islice(value, MAX_CONTAINER_ITEMS)):
                    yield from _message_fields(value[key], f"{field_path}[{key}]")
        elif descriptor.is_repeated:
            for item in islice(value, MAX_CONTAINER_ITEMS):
                yield from _message_fields(item, f"{field_path}[]")
        else:
            yield from _message_fields(value, field_path)


def _enlarge_message_field(
    message: Any, field: FieldDescriptor, rng: random.Random, size: int
) -> None:
    value = getattr(message, field.name)
    message_type = field.message_type
    if message_type is not None and message_type.GetOptions().map_entry:
        _enlarge_map(value, message_type, rng, size)
    elif field.is_repeated and message_type is not None:
        item = value[0] if value else None
        item_bytes = 2 + (item.ByteSize() if item is not None else 0)
        for _ in range(min(size // item_bytes, MAX_MESSAGES)):
            value.add().CopyFrom(item) if item is not None and rng.random() < 0.7 else value.add()
    elif field.is_repeated:
        value.extend([rng.choice((0, 1, 2, 2**62, -1))] * size)
    elif message_type is None:
        setattr(message, field.name, _odd_scalar(field, rng, size))


def _enlarge_map(value: Any, entry_type: Any, rng: random.Random, size: int) -> None:
    is_message = entry_type.fields_by_name["value"].message_type is not None
    first = next(iter(value), None)
    item_bytes = 8 + (value[first].ByteSize() if is_message and first is not None else 8)
    count = min(size // item_bytes, MAX_MESSAGES) + 1
    keys = ["k" * size] if rng.random() < 0.3 else [f"k{i}" for i in range(count)]
    for key in keys:
        if not is_message:
            value[key] = 1.0
        elif first is None or rng.random() < 0.3:
            value.get_or_create(key)
        else:
            value[key].CopyFrom(value[first])


def _odd_scalar(field: FieldDescriptor, rng: random.Random, size: int) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.choice((b"\0", b"\1\0\0\0", b"\xff", b"\0\0\x80\x7f")) * (size // 4 + 1)
        case FieldDescriptor.CPPTYPE_STRING:
            return rng.choice(("a", "é", "\0", "9")) * size
        case FieldDescriptor.CPPTYPE_INT32:
            return rng.choice((0, -1, 2**31 - 1, -(2**31), 10**6))
        case FieldDescriptor.CPPTYPE_INT64:
            return rng.choice((0, -1, 2**63 - 1, -(2**63), 2**31))
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice((1e308, -1e308, float("nan"), float("inf"), 1e-320))
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 4, 5, 2**31 - 1))
    return True
