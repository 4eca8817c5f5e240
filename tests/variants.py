"""Parametrizations of which `make test` runs the first variants and `make test-all` the others."""

from collections.abc import Sequence
from typing import Any

import pytest


def slow_after(count: int, variants: Sequence[Any]) -> list[Any]:
    """Return the variants for `pytest.mark.parametrize`, slow except for the first `count`.

    A variant of several parameters is a tuple.
    """
    slow = [
        pytest.param(
            *(variant if isinstance(variant, tuple) else (variant,)), marks=pytest.mark.slow
        )
        for variant in variants[count:]
    ]
    return [*variants[:count], *slow]
