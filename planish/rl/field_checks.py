"""Validators of chz fields."""

import math
from collections.abc import Callable
from typing import Any

from planish.errors import UserError


def field_check(accepts: Callable[[Any], bool], wanted: str) -> Callable[[Any, str], None]:
    """Return a validator that raises UserError for a value that `accepts` rejects. `wanted`
    describes the valid values in the error message.
    """

    def check(config: Any, name: str) -> None:
        value = getattr(config, name)
        if not accepts(value):
            # chz passes the name of its internal attribute, which is X_ and the field's name.
            field = name.removeprefix("X_")
            raise UserError(f"{type(config).__name__}.{field}={value!r}: give {wanted}")

    return check


def is_whole(value: object, at_least: int) -> bool:
    """Return whether `value` is an int of at least `at_least` and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def is_finite(value: object) -> bool:
    """Return whether `value` is a finite number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
