"""JSON files of settings, and checked access to their fields. A wrong or missing field raises
TypeError.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planish.errors import DamagedFileError

MAX_CONFIG_BYTES = 16 << 20
"""The maximum size of a JSON file of settings."""
_INT_LIMIT = 2**31
_FLOAT_LIMIT = 1e30


def positive_int(fields: Mapping[str, Any], key: str) -> int:
    """Return a field that must be a positive integer below 2**31."""
    value = fields[key] if key in fields else raise_missing(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _INT_LIMIT:
        raise TypeError(f"{key} is {value!r}, not a positive integer below 2**31")
    return value


def positive_float(fields: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a field that must be a positive number up to 1e30, or `default` if the field is
    missing.
    """
    value = fields.get(key, default)
    if value is None:
        raise_missing(key)
    # The comparison also excludes NaN.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value <= _FLOAT_LIMIT
    ):
        raise TypeError(f"{key} is {value!r}, not a positive number up to 1e30")
    return float(value)


def optional_object(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a field that must be an object; an empty one if the field is missing or null."""
    value = fields.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{key} is {value!r}, not an object")
    return value


def raise_missing(key: str) -> Any:
    """Raise the TypeError of a missing field."""
    raise TypeError(f"{key} is missing")


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises DamagedFileError if the file contains anything else, is nested too deeply, or has more
    than `max_bytes`.
    """
    with open(path, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise DamagedFileError(
            f"{path} has more than {max_bytes:,} bytes, the maximum for such a file; copy it from "
            "the model again"
        )
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(
            f"{path} is not JSON ({error}); copy it from the model again"
        ) from error
    if not isinstance(content, dict):
        raise DamagedFileError(f"{path} contains no JSON object; copy it from the model again")
    return content
