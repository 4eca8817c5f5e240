"""Checked access to the fields of a config.json. A wrong or missing field raises TypeError."""

from collections.abc import Mapping
from typing import Any


def positive_int(fields: Mapping[str, Any], key: str) -> int:
    """Return a field that must be a positive integer."""
    value = fields[key] if key in fields else raise_missing(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TypeError(f"{key} is {value!r}, not a positive integer")
    return value


def positive_float(fields: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a field that must be a positive number, or `default` if the field is missing."""
    value = fields.get(key, default)
    if value is None:
        raise_missing(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise TypeError(f"{key} is {value!r}, not a positive number")
    return float(value)


def raise_missing(key: str) -> Any:
    """Raise the TypeError of a missing field."""
    raise TypeError(f"{key} is missing")
