"""The window of an attention mask is read from its mask function."""

import pytest

from planish.errors import UnsupportedError
from planish.model.architecture.inspection.masks import read_mask

CONTEXT = 100


def causal(batch, head, query, key):
    return key <= query


def window(size):
    return lambda batch, head, query, key: (key <= query) & (key > query - size)


def chunk(size):
    return lambda batch, head, query, key: (key <= query) & (key // size == query // size)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (causal, None),
        (window(10), 10),
        (window(99), 99),
        (window(100), None),
        (window(200), None),
        (chunk(200), None),
    ],
)
def test_the_window_of_a_causal_mask(function, expected):
    assert read_mask(function, CONTEXT).window == expected


@pytest.mark.parametrize("size", [7, 10, 33, 98])
def test_chunks_are_refused(size):
    with pytest.raises(UnsupportedError, match="in chunks"):
        read_mask(chunk(size), CONTEXT)


def test_masks_that_are_not_causal_are_refused():
    for function in (
        lambda batch, head, query, key: key == key,
        lambda batch, head, query, key: (key <= query) & (key % 2 == 0),
    ):
        with pytest.raises(UnsupportedError, match="not causal"):
            read_mask(function, CONTEXT)
