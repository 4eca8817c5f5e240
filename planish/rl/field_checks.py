"""Validators of chz fields."""

import math
from collections.abc import Callable
from typing import Any

from planish.errors import UserError


def field_validator(is_valid: Callable[[Any], bool], expected: str) -> Callable[[Any, str], None]:
    """Return a validator that raises UserError for a value that `is_valid` rejects. `expected`
    describes the valid values in the error message.
    """

    def validate(config: Any, name: str) -> None:
        value = getattr(config, name)
        if not is_valid(value):
            # chz passes the name of its internal attribute, which is X_ and the field's name.
            field = name.removeprefix("X_")
            raise UserError(f"{type(config).__name__}.{field}={value!r}: give {expected}")

    return validate


def is_whole(value: object, minimum: int) -> bool:
    """Return whether `value` is an int of at least `minimum` and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_finite(value: object) -> bool:
    """Return whether `value` is a finite number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
