"""Validators of chz fields."""

import math
from collections.abc import Callable
from typing import Any

from planish.errors import UserError


def field_check(accepts: Callable[[Any], bool], wanted: str) -> Callable[[Any, str], None]:
    """Return a validator that raises UserError for a value that `accepts` rejects. `wanted` says
    in the message which values are right.
    """

    def check(config: Any, name: str) -> None:
        value = getattr(config, name)
        if not accepts(value):
            field = name.removeprefix("X_")  # chz stores the value of a field under this name
            raise UserError(f"{type(config).__name__}.{field}={value!r}: give {wanted}")

    return check


def is_whole(value: object, at_least: int) -> bool:
    """Return whether `value` is an int of at least `at_least`, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def is_finite(value: object) -> bool:
    """Return whether `value` is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
