"""TensorData and token chunks in both encodings: little-endian bytes in protobuf, lists of numbers
in JSON.

A CSR tensor stays sparse here; the code that uses it converts it to dense form. A small body can
have a CSR tensor with a huge shape. So the reader adds up the sizes that all CSR tensors of a body
have in dense form, and rejects a sum above `MAX_DENSE_ELEMENTS`. The number of datums, chunks and
tensors is limited too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from planish.errors import UserError
from planish.images import MAX_IMAGES, ImageChunk
from planish.tensors import TensorData, TensorDtype
from planish.types import EncodedTextChunk, ModelInput, ModelInputChunk
from planish.wire.fields import MAX_VALUES, Fields, check_count, shown
from planish.wire.images import (
    image_from_json,
    image_from_message,
    image_to_json,
    unsupported_chunk,
    write_image,
)
from planish.wire.messages import BFLOAT16, FLOAT32, INT32, INT64, TensorMessage
from planish.wire.pacing import pause_if_due

MAX_DENSE_ELEMENTS = 1 << 26
"""Limit for all CSR tensors of one body, in dense form."""
MAX_DATA_ITEMS = 1 << 17
"""Limit for the number of datums, chunks and tensors in one body. Each of them takes memory and
time, however small it is.
"""
MAX_TOKENS = 1 << 20
"""Limit of token ids in one prompt or model input. No model that is served has a longer context."""
MAX_DIMENSIONS = 8
"""Limit of a tensor's dimensions."""

_PIECE_ITEMS = 1 << 14
_NUMPY_DTYPES: dict[TensorDtype, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "int64": np.dtype("<i8"),
}
PROTO_DTYPES: dict[TensorDtype, int] = {"float32": FLOAT32, "int64": INT64}
_WIRE_DTYPES: dict[int, tuple[np.dtype[Any], TensorDtype]] = {
    FLOAT32: (np.dtype("<f4"), "float32"),
    INT64: (np.dtype("<i8"), "int64"),
    INT32: (np.dtype("<i4"), "int64"),
    BFLOAT16: (np.dtype("<u2"), "float32"),
}


def array_from_bytes(data: bytes, dtype: np.dtype[Any] | str, path: str) -> np.ndarray:
    """Return bytes as a one-dimensional array of `dtype`, without a copy. Raise UserError if the
    length is not a multiple of the item size.
    """
    item_dtype = np.dtype(dtype)
    if len(data) % item_dtype.itemsize:
        raise UserError(
            f"{path} has {len(data)} bytes, which is not a multiple of the {item_dtype.itemsize} "
            f"of {item_dtype.name}"
        )
    return np.frombuffer(data, dtype=item_dtype)


def tensor_values(data: bytes, dtype: int, path: str) -> tuple[np.ndarray, TensorDtype]:
    """Return the values of a tensor, as int64 or float32, and the name of their dtype. `dtype` is
    the type of the bytes: float32, int64, int32 or bfloat16 (messages.py). Raise UserError for
    another type.
    """
    if dtype not in _WIRE_DTYPES:
        raise UserError(f"{path}: dtype {dtype} is unknown; give 1 (float32) or 2 (int64)")
    item_dtype, name = _WIRE_DTYPES[dtype]
    values = array_from_bytes(data, item_dtype, path)
    if dtype == BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(_NUMPY_DTYPES[name], copy=False), name


def tensor_from_message(message: Any, path: str) -> TensorData:
    """Read a tensor from protobuf."""
    match message.WhichOneof("encoding"):
        case "dense":
            values, dtype = tensor_values(message.dense, message.dtype, path)
            check_count(f"{path}.shape", len(message.shape), MAX_DIMENSIONS, "dimensions")
            return _tensor(path, values, dtype, _checked_shape(message.shape, values.size, path))
        case "sparse_csr":
            csr = message.sparse_csr
            check_count(f"{path}.shape", len(message.shape), MAX_DIMENSIONS, "dimensions")
            values, dtype = tensor_values(csr.values, message.dtype, f"{path}.values")
            crow = array_from_bytes(csr.crow_indices, "<i8", f"{path}.crow_indices").tolist()
            col = array_from_bytes(csr.col_indices, "<i8", f"{path}.col_indices").tolist()
            return _csr_tensor(path, values, dtype, list(message.shape), crow, col)
        case _:
            raise UserError(f"{path} has no values: give dense or sparse_csr")


def tensor_to_message(tensor: TensorData) -> Any:
    """Write a tensor as protobuf."""
    message = TensorMessage(dtype=PROTO_DTYPES[tensor.dtype], shape=tensor.shape)
    item_dtype = _NUMPY_DTYPES[tensor.dtype]
    if tensor.sparse_crow_indices is None:
        message.dense = tensor.to_numpy().astype(item_dtype, copy=False).tobytes()
    else:
        message.sparse_csr.values = np.asarray(tensor.data, dtype=item_dtype).tobytes()
        message.sparse_csr.crow_indices = np.asarray(
            tensor.sparse_crow_indices, dtype="<i8"
        ).tobytes()
        message.sparse_csr.col_indices = np.asarray(
            tensor.sparse_col_indices, dtype="<i8"
        ).tobytes()
    return message


def tensor_from_json(fields: Fields) -> TensorData:
    """Read a tensor from JSON."""
    with fields:
        path = fields.path("data")
        dtype = fields.text("dtype")
        if dtype not in _NUMPY_DTYPES:
            raise UserError(f"{fields.path('dtype')}={dtype[:40]!r}: give 'float32' or 'int64'")
        values = _array_from_list(fields.array("data", MAX_VALUES), dtype, path)
        shape = _integers(fields, "shape")
        check_count(fields.path("shape"), len(shape or ()), MAX_DIMENSIONS, "dimensions")
        crow = _integers(fields, "sparse_crow_indices")
        col = _integers(fields, "sparse_col_indices")
        if crow is None and col is None:
            return _tensor(
                path, values, dtype, _checked_shape(shape or (), values.size, fields.path("shape"))
            )
        if crow is None or col is None or shape is None:
            raise UserError(
                f"{path}: a CSR tensor has shape, sparse_crow_indices and sparse_col_indices"
            )
        return _csr_tensor(path, values, dtype, shape, crow, col)


def tensor_to_json(tensor: TensorData) -> dict[str, Any]:
    """Write a tensor as JSON."""
    fields: dict[str, Any] = {"data": tensor.data, "dtype": tensor.dtype, "shape": tensor.shape}
    if tensor.sparse_crow_indices is not None:
        fields |= {
            "sparse_crow_indices": tensor.sparse_crow_indices,
            "sparse_col_indices": tensor.sparse_col_indices,
        }
    return fields


def model_input_from_messages(chunks: Sequence[Any], path: str) -> ModelInput:
    """Read a model input from protobuf chunks."""
    check_data_items(path, len(chunks))
    parts: list[ModelInputChunk] = []
    num_tokens = num_images = 0
    for index, chunk in enumerate(chunks):
        chunk_type = chunk.WhichOneof("chunk")
        if chunk_type == "image":
            num_images += 1
            check_count(path, num_images, MAX_IMAGES, "images")
            parts.append(image_from_message(chunk.image, f"{path}[{index}].image"))
            continue
        if chunk_type != "encoded_text":
            raise unsupported_chunk(f"{path}[{index}]", chunk_type)
        tokens = array_from_bytes(chunk.encoded_text.tokens, "<i4", f"{path}[{index}].tokens")
        num_tokens += tokens.size
        check_count(path, num_tokens, MAX_TOKENS, "token ids")
        parts.append(EncodedTextChunk(tokens.tolist()))
    return ModelInput(parts)


def write_chunks(model_input: ModelInput, chunks: Any) -> None:
    """Add the chunks of `model_input` to a repeated field of chunk messages."""
    for chunk in model_input.chunks:
        if isinstance(chunk, ImageChunk):
            write_image(chunk, chunks.add().image)
            continue
        try:
            chunks.add().encoded_text.tokens = np.asarray(chunk.tokens, dtype="<i4").tobytes()
        except OverflowError:
            raise UserError(
                "a prompt or model_input contains a token id that no vocabulary has"
            ) from None


def model_input_from_json(fields: Fields) -> ModelInput:
    """Read a model input from JSON."""
    parts: list[ModelInputChunk] = []
    num_tokens = num_images = 0
    with fields:
        check_data_items(fields.path("chunks"), len(fields.array("chunks", MAX_VALUES)))
        for chunk in fields.objects("chunks", MAX_DATA_ITEMS):
            with chunk:
                chunk_type = chunk.optional(chunk.text, "type", "encoded_text")
                if chunk_type == "image":
                    num_images += 1
                    check_count(fields.path("chunks"), num_images, MAX_IMAGES, "images")
                    parts.append(image_from_json(chunk))
                    continue
                if chunk_type != "encoded_text":
                    raise unsupported_chunk(chunk.path("type"), chunk_type)
                tokens = chunk.array("tokens", MAX_VALUES)
                num_tokens += len(tokens)
                check_count(fields.path("chunks"), num_tokens, MAX_TOKENS, "token ids")
                _check_integers(tokens, chunk.path("tokens"))
                parts.append(EncodedTextChunk(tokens))
    return ModelInput(parts)


def model_input_to_json(model_input: ModelInput) -> dict[str, Any]:
    """Write a model input as JSON."""
    return {
        "chunks": [
            image_to_json(chunk)
            if isinstance(chunk, ImageChunk)
            else {"type": "encoded_text", "tokens": chunk.tokens}
            for chunk in model_input.chunks
        ]
    }


def _tensor(
    path: str,
    values: np.ndarray,
    dtype: TensorDtype,
    shape: list[int] | None,
    crow: list[int] | None = None,
    col: list[int] | None = None,
) -> TensorData:
    try:
        return TensorData(values, dtype, shape, crow, col)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _csr_tensor(
    path: str,
    values: np.ndarray,
    dtype: TensorDtype,
    shape: list[int],
    crow: list[int],
    col: list[int],
) -> TensorData:
    if len(shape) != 2 or min(shape) < 0:
        raise UserError(f"{path}: a CSR tensor of shape {shape[:4]}; it has two dimensions")
    check_dense_elements(path, math.prod(shape))
    return _tensor(path, values, dtype, shape, crow, col)


def check_dense_elements(path: str, num_elements: int, maximum: int = MAX_DENSE_ELEMENTS) -> None:
    """Raise UserError if CSR tensors have more than `maximum` elements in dense form."""
    if num_elements > maximum:
        raise UserError(
            f"{path}: CSR tensors have {num_elements:,} elements in dense form; give at most "
            f"{maximum:,}"
        )


def check_data_items(path: str, num_items: int) -> None:
    """Raise UserError if there are too many datums, chunks and tensors."""
    if num_items > MAX_DATA_ITEMS:
        raise UserError(
            f"{path} has more than {MAX_DATA_ITEMS:,} datums, chunks of tokens and tensors; send "
            "fewer in one call"
        )


def dense_element_count(tensor: TensorData) -> int:
    """Return the number of elements of a CSR tensor in dense form; 0 for a dense tensor."""
    return 0 if tensor.sparse_crow_indices is None else math.prod(tensor.shape or ())


def _checked_shape(shape: Sequence[int], size: int, path: str) -> list[int] | None:
    """Return a shape after checking that `size` values fill it. Return None for an empty shape,
    which on the wire means one dimension.
    """
    if not shape:
        return None
    if min(shape) < 0 or math.prod(shape) != size:
        raise UserError(f"{path}: {size} values do not fill the shape {list(shape)[:8]}")
    return list(shape)


def _integers(fields: Fields, name: str) -> list[int] | None:
    values = fields.optional(lambda name: fields.array(name, MAX_VALUES), name)
    if values is not None:
        _check_integers(values, fields.path(name))
    return values


def _check_integers(values: list[Any], path: str) -> None:
    for index, value in enumerate(values):
        if index % _PIECE_ITEMS == 0:
            pause_if_due()
        if type(value) is not int or not -(2**63) <= value < 2**63:
            raise UserError(f"{path} holds {shown(value)}; give whole numbers")


def _array_from_list(values: list[Any], dtype: TensorDtype, path: str) -> np.ndarray:
    array = np.empty(len(values), _NUMPY_DTYPES[dtype])
    # numpy holds the interpreter lock while it reads a list. So the list is read in pieces, and
    # other threads run in between.
    for begin in range(0, len(values), _PIECE_ITEMS):
        pause_if_due()
        piece = values[begin : begin + _PIECE_ITEMS]
        array[begin : begin + len(piece)] = _array_from_piece(piece, dtype, path)
    return array


def _array_from_piece(values: list[Any], dtype: TensorDtype, path: str) -> np.ndarray:
    for value in values:
        if type(value) is not int and type(value) is not float:
            raise UserError(f"{path} holds {shown(value)}; give one flat list of numbers")
    if dtype == "float32":
        with np.errstate(over="ignore"):
            # An overflow becomes infinite. Code that needs finite values reports it later.
            return np.asarray(values, np.float64).astype(np.float32)
    for value in values:
        if not (math.isfinite(value) and value == math.trunc(value) and -(2**63) <= value < 2**63):
            raise UserError(f"{path} holds {value!r}, which is not an int64; give whole numbers")
    return np.asarray([int(value) for value in values], np.int64)
