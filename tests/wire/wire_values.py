"""Hypothesis strategies for values in requests, and bodies with one invalid field."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import tinker.types as sdk
from hypothesis import strategies as st

from planish.images import ImageChunk
from planish.service import ForwardBackward
from planish.tensors import TensorData
from planish.types import Datum, EncodedTextChunk, ModelInput

TOKENS = st.integers(0, 2**31 - 1)
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@st.composite
def dense_tensors(draw: st.DrawFn, dtype: str | None = None) -> TensorData:
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    kind = dtype or draw(st.sampled_from(["float32", "int64"]))
    values = FLOATS if kind == "float32" else st.integers(-(2**63), 2**63 - 1)
    size = int(np.prod(shape))
    flat = np.array(draw(st.lists(values, min_size=size, max_size=size)), dtype=kind)
    return TensorData(flat, kind, shape)  # type: ignore[arg-type]


@st.composite
def sparse_tensors(draw: st.DrawFn) -> TensorData:
    rows, columns = draw(st.integers(0, 4)), draw(st.integers(0, 5))
    listed = [
        sorted(draw(st.sets(st.integers(0, columns - 1)))) if columns else [] for _ in range(rows)
    ]
    crow = np.cumsum([0, *map(len, listed)]).tolist()
    col = [column for row in listed for column in row]
    values = np.array(draw(st.lists(TOKENS, min_size=len(col), max_size=len(col))), dtype=np.int64)
    return TensorData(values, "int64", [rows, columns], crow, col)


TENSORS = st.one_of(dense_tensors(), sparse_tensors())
IMAGES = st.builds(
    ImageChunk,
    st.binary(min_size=1, max_size=8),
    st.sampled_from(["png", "jpeg"]),
    st.one_of(st.none(), st.integers(1, 2**16)),  # a body has at most 2**24 tokens
)
MODEL_INPUTS = st.one_of(
    st.lists(TOKENS, max_size=6).map(ModelInput.from_ints),
    st.lists(
        st.one_of(IMAGES, st.builds(EncodedTextChunk, st.lists(TOKENS, max_size=3))), max_size=4
    ).map(ModelInput),
)
DATUMS = st.builds(Datum, MODEL_INPUTS, st.dictionaries(NAMES, TENSORS, max_size=3))
CONFIGS = st.dictionaries(NAMES, st.floats(allow_nan=False, allow_infinity=False), max_size=3)


def forward_backwards(
    tensors: st.SearchStrategy[TensorData] = TENSORS,
) -> st.SearchStrategy[ForwardBackward]:
    datums = st.builds(Datum, MODEL_INPUTS, st.dictionaries(NAMES, tensors, max_size=3))
    return st.builds(
        ForwardBackward,
        model_id=st.just("s-1:train:0"),
        data=st.lists(datums, max_size=3),
        loss_fn=st.text(st.characters(codec="utf-8"), max_size=10),
        loss_fn_config=CONFIGS,
        forward_only=st.booleans(),
    )


def sdk_model_input(model_input: ModelInput) -> sdk.ModelInput:
    """Return a model input of the SDK."""
    return sdk.ModelInput(
        chunks=[
            sdk.ImageChunk(
                data=chunk.data, format=chunk.format, expected_tokens=chunk.expected_tokens
            )
            if isinstance(chunk, ImageChunk)
            else sdk.EncodedTextChunk(tokens=chunk.tokens)
            for chunk in model_input.chunks
        ]
    )


def plain(value: Any) -> Any:
    """Return `value` with tensors replaced by their content, so that == compares it, NaN
    included.
    """
    if isinstance(value, TensorData):
        layout = (value.sparse_crow_indices, value.sparse_col_indices)
        return value.dtype, value.shape, np.asarray(value.data, dtype=value.dtype).tobytes(), layout
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return type(value).__name__, {
            name: plain(getattr(value, name)) for name in value.__dataclass_fields__
        }
    return value


def wrong_bodies(body: dict[str, Any], *skipped: str) -> list[tuple[str, dict[str, Any]]]:
    """Yield `body` with one value, at any depth, replaced by one of another kind, and the name of
    the field.
    """
    found = []
    for path in _paths(body):
        name = next(part for part in reversed(path) if isinstance(part, str))
        if name in skipped:
            continue
        changed = copy.deepcopy(body)
        holder: Any = changed
        for part in path[:-1]:
            holder = holder[part]
        holder[path[-1]] = True if not isinstance(holder[path[-1]], bool) else "x"
        found.append((name, changed))
    return found


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield (*prefix, key)
        yield from _paths(item, (*prefix, key))
