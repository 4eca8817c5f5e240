"""Keeps the text of a tool call's arguments while clients know them as an object only.

A prompt must repeat a sampled call token by token, so its JSON must keep its spaces, escapes and
number formats. In Anthropic's API a client gets the arguments as an object (`input`), and sends
this object back. The server is stateless, so the id of the call carries the difference between the
text and the object's usual form: a zlib stream whose preset dictionary is that form. Most calls
have the usual form, and then the id carries nothing.

If a client changes the object, the dictionary no longer fits the stream, which zlib detects. The
call is then written in the usual form.
"""

from __future__ import annotations

import base64
import json
import math
import re
import secrets
import zlib
from typing import Any, TypeGuard

from pydantic_core import from_json

from planish.wire.json_pieces import JsonValue

_MARK = "__z"
"""Separates an id from the difference that it carries."""
MAX_DIFFERENCE_CHARACTERS = 4096
"""An id carries at most this many characters. Calls with a larger difference are written in the
usual form when they are sent back.
"""
_EXACT_INTEGERS = 2**53


def parse_arguments(text: str) -> Any:
    """Return the value of a JSON text. If the text was cut off, return the value of its complete
    part, as Anthropic's client does for a stream. Return {} if the text is not JSON.
    """
    try:
        return from_json(text or "{}", allow_partial=True)
    except ValueError:  # for example half of a character, as the escape \\ud83d
        return {}


def input_json(arguments: str) -> str:
    """Return the arguments as JSON that every client can parse. The arguments of a call that was
    cut off stay incomplete.
    """
    try:
        from_json(arguments or "{}", allow_partial=True, allow_inf_nan=False)
        return arguments
    except ValueError:
        value = _without_special_numbers(parse_arguments(arguments))
        return json.dumps(value, ensure_ascii=False)


def call_id(arguments: str, id_of_model: str | None) -> str:
    """Return the id of a call with these arguments. `id_of_model` is the id that the model wrote,
    if its format has ids.
    """
    base = id_of_model or f"toolu_{secrets.token_hex(12)}"
    value = parse_arguments(arguments)
    if json.dumps(value, ensure_ascii=False) == (arguments or "{}") and _is_stable(value):
        return base
    compressor = zlib.compressobj(9, zlib.DEFLATED, 15, 9, 0, _dictionary(value))
    stream = compressor.compress(arguments.encode()) + compressor.flush()
    difference = base64.urlsafe_b64encode(stream).decode().rstrip("=")
    return f"{base}{_MARK}{difference}" if len(difference) <= MAX_DIFFERENCE_CHARACTERS else base


def read_call(id_: str, value: dict[str, Any]) -> tuple[str, str]:
    """Return (id, arguments) for the id and the `input` that a client sends back: the id without
    the difference that it carries, and the text of the arguments.
    """
    for mark in re.finditer(_MARK, id_):
        arguments = _decode(id_[mark.end() :], value)
        if arguments is not None:
            return id_[: mark.start()], arguments
    return id_, json.dumps(value, ensure_ascii=False)


def _decode(difference: str, value: dict[str, Any]) -> str | None:
    """Return the text that a difference stands for; None if it does not belong to `value`."""
    dictionary = _dictionary(value)
    # The limit stops a stream that a client made to fill the memory.
    limit = 1024 + 8 * len(dictionary)
    if len(difference) > MAX_DIFFERENCE_CHARACTERS:
        return None
    try:
        stream = base64.urlsafe_b64decode(difference + "=" * (-len(difference) % 4))
        decompressor = zlib.decompressobj(15, dictionary)
        text = decompressor.decompress(stream, limit)
        return text.decode() if decompressor.eof else None
    except (ValueError, zlib.error):
        return None


def _dictionary(value: JsonValue) -> bytes:
    """Return the bytes that are the same for all objects that clients make of one JSON text."""
    return json.dumps(_normalized(value), sort_keys=True).encode()


def _normalized(value: JsonValue) -> JsonValue:
    """Return a JSON value with the numbers that JavaScript makes of it: 1.0 becomes 1, and integers
    of more than 53 bits become floats.
    """
    if isinstance(value, dict):
        return {key: _normalized(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_normalized(one) for one in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_INTEGERS:
        return int(value)
    if _is_large_integer(value):
        try:
            return float(value)
        except OverflowError:
            return None
    return _without_special_numbers(value)


def _is_large_integer(value: JsonValue) -> TypeGuard[int]:
    return type(value) is int and abs(value) >= _EXACT_INTEGERS


def _is_stable(value: JsonValue) -> bool:
    """Return whether clients in JavaScript send a value back in the same form. They move keys that
    are numbers to the start of an object, and have floats only.
    """
    if isinstance(value, dict):
        return not any(key.isdigit() for key in value) and all(map(_is_stable, value.values()))
    if isinstance(value, list):
        return all(map(_is_stable, value))
    if isinstance(value, float):
        return math.isfinite(value) and not value.is_integer()
    return not _is_large_integer(value)


def _without_special_numbers(value: JsonValue) -> JsonValue:
    """Return a JSON value with null in place of NaN and infinity."""
    if isinstance(value, dict):
        return {key: _without_special_numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_special_numbers(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
