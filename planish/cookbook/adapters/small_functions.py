"""Small functions that recipes of the cookbook use."""

import importlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from planish.errors import UserError


@contextmanager
def timed(key: str, metrics: dict[str, Any]) -> Iterator[None]:
    """Put the seconds of the block into metrics["time/KEY"]."""
    began = time.monotonic()
    yield
    metrics[f"time/{key}"] = time.monotonic() - began


def safezip(*iterables: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Do what `zip` does, but raise ValueError for unequal lengths."""
    return zip(*iterables, strict=True)


def lookup_func(path_to_func: str, default_module: str | None = None) -> Any:
    """Return the object MODULE:NAME. A bare NAME is looked up in `default_module`."""
    module, colon, name = path_to_func.rpartition(":")
    if not colon:
        module = default_module or ""
    if not module or ":" in module:
        raise UserError(f"{path_to_func!r}: write MODULE:NAME")
    return getattr(importlib.import_module(module), name)


def dict_mean(list_of_dicts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each key over the dictionaries in which its value is not None."""
    values: dict[str, list[float]] = {}
    for each in list_of_dicts:
        for key, value in each.items():
            if value is not None:
                values.setdefault(key, []).append(float(value))
    return {key: sum(found) / len(found) for key, found in values.items()}


def all_same(xs: Sequence[Any]) -> bool:
    """Return whether all elements are equal."""
    return all(x == xs[0] for x in xs)


def split_list(lst: Sequence[Any], num_splits: int) -> list[list[Any]]:
    """Split the list into `num_splits` contiguous parts whose sizes differ by at most one."""
    bounds = [len(lst) * part // num_splits for part in range(num_splits + 1)]
    return [list(lst[low:high]) for low, high in itertools.pairwise(bounds)]


def concat_lists(list_of_lists: Sequence[Sequence[Any]]) -> list[Any]:
    """Return one list with the elements of all lists."""
    return [element for each in list_of_lists for element in each]


def not_none(x: Any) -> Any:
    """Return `x`. Raises UserError if it is None."""
    if x is None:
        raise UserError("not_none: the value is None; give another value")
    return x
