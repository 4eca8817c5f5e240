"""Checked access to the fields of a config.json. A wrong or missing field raises TypeError."""

from collections.abc import Mapping
from typing import Any

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
