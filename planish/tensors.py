"""TensorData, the tensor type of all operations: int64 or float32, dense or CSR.

The values are numpy arrays. torch is imported only to convert to a torch tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from planish.errors import UserError

if TYPE_CHECKING:
    import torch

TensorDtype = Literal["int64", "float32"]

_NUMPY_DTYPE: dict[str, type[np.generic]] = {"int64": np.int64, "float32": np.float32}

# The dtype of a plain list, by the name of the loss input.
LOSS_INPUT_DTYPES: dict[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "mask": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}


class ArrayEquality:
    """Base of dataclasses with array fields: two objects are equal if their arrays are, where NaN
    equals NaN. (The default `==` fails, since comparing two arrays gives an array.)
    """

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return all(_values_equal(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]


def _values_equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other, equal_nan=True)
    return bool(one == other)


@dataclass(frozen=True, eq=False, init=False, repr=False)
class TensorData(ArrayEquality):
    """A dense or CSR tensor of int64 or float32, independent of any framework.

    A CSR tensor is given by `sparse_crow_indices` and `sparse_col_indices`. It is two-dimensional,
    and `data` contains only the stored values. The other entries are 0, or the `pad_value` that is
    given on conversion.
    """

    dtype: TensorDtype
    shape: list[int] | None
    sparse_crow_indices: list[int] | None
    sparse_col_indices: list[int] | None
    _values: np.ndarray

    def __init__(
        self,
        data: Sequence[Any] | np.ndarray | None = None,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | None = None,
        sparse_col_indices: Sequence[int] | None = None,
    ) -> None:
        if dtype not in _NUMPY_DTYPE:
            raise UserError(f"TensorData dtype={dtype!r}: give 'int64' or 'float32'")
        values = _as_array(data if data is not None else [], dtype)
        if (sparse_crow_indices is None) != (sparse_col_indices is None):
            raise UserError(
                "TensorData: sparse_crow_indices and sparse_col_indices go together; give both or "
                "neither"
            )
        crow = None if sparse_crow_indices is None else [int(i) for i in sparse_crow_indices]
        col = None if sparse_col_indices is None else [int(i) for i in sparse_col_indices]
        if crow is not None and col is not None:
            values = values.reshape(-1)
            _check_csr(values, crow, col, shape)
        elif shape is not None:
            if math.prod(shape) != values.size:
                raise UserError(f"TensorData: {values.size} values do not fill shape={list(shape)}")
            values = values.reshape(tuple(shape))
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", list(shape) if shape is not None else list(values.shape))
        object.__setattr__(self, "sparse_crow_indices", crow)
        object.__setattr__(self, "sparse_col_indices", col)
        object.__setattr__(self, "_values", values)

    def __repr__(self) -> str:
        layout = "" if self.sparse_crow_indices is None else ", sparse"
        return f"TensorData(dtype={self.dtype!r}, shape={self.shape}{layout})"

    @property
    def data(self) -> list[Any]:
        """The stored values as one flat list (of a CSR tensor: without the padding)."""
        return self._values.reshape(-1).tolist()

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> TensorData:
        """Copy an array of any shape: integers become int64, floating point becomes float32. Raises
        UserError for another dtype.
        """
        if not isinstance(array, (np.ndarray, np.generic)):
            raise UserError(
                f"TensorData.from_numpy: got a {type(array).__name__}; give a numpy array"
            )
        kind = {"f": "float32", "i": "int64"}.get(array.dtype.kind)
        if kind is None:
            raise UserError(
                f"TensorData.from_numpy: dtype {array.dtype} is neither integer nor floating "
                "point; convert it first"
            )
        return cls(data=array, dtype=kind, shape=array.shape)  # type: ignore[arg-type]

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        """Copy a tensor of any shape and device, without its gradient: integers become int64,
        floating point becomes float32. Raises UserError for another dtype.
        """
        if not hasattr(tensor, "detach"):
            raise UserError(
                f"TensorData.from_torch: got a {type(tensor).__name__}; give a torch tensor"
            )
        dense = tensor.detach().cpu()
        return cls.from_numpy(
            (dense.float() if dense.dtype.is_floating_point else dense).contiguous().numpy()
        )

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: int = 0) -> TensorData:
        """Copy a tensor as CSR if it has the shape [rows, columns] and CSR is smaller, otherwise as
        dense. CSR leaves out the entries that equal `pad_value`.
        """
        dense = cls.from_torch(tensor)
        if tensor.ndim != 2:
            return dense
        array = dense._values
        rows, cols = np.nonzero(array != pad_value)
        if array.shape[0] + 1 + 2 * len(rows) >= array.size:
            return dense
        crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=array.shape[0]))])
        return cls(array[rows, cols], dense.dtype, array.shape, crow.tolist(), cols.tolist())

    def to_numpy(self, pad_value: int = 0) -> np.ndarray:
        """Return the dense array, of any shape. Entries that a CSR tensor does not store are
        `pad_value`.
        """
        if self.sparse_crow_indices is None or self.sparse_col_indices is None:
            return self._values
        assert self.shape is not None
        out = np.full(self.shape, pad_value, dtype=_NUMPY_DTYPE[self.dtype])
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.sparse_crow_indices))
        out[rows, self.sparse_col_indices] = self._values
        return out

    def to_torch(self, pad_value: int = 0) -> torch.Tensor:
        """Return the dense tensor on the CPU, of any shape; `pad_value` as in `to_numpy`."""
        import torch

        array = self.to_numpy(pad_value)
        # torch warns on arrays it cannot write to (memory maps, buffers of received bytes).
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def tolist(self, pad_value: int = 0) -> list[Any]:
        """Return the dense values as nested lists; `pad_value` as in `to_numpy`."""
        return self.to_numpy(pad_value).tolist()

    def __len__(self) -> int:
        return int((self.shape or [0])[0])


def as_tensor_data(key: str, value: Any) -> TensorData:
    """Convert `value` to TensorData. `key` names it in errors and selects the dtype of a plain
    list. Raises UserError for another type, and for a list under an unknown key.
    """
    if isinstance(value, TensorData):
        return value
    if isinstance(value, np.ndarray):
        return _with_key_in_error(key, lambda: TensorData.from_numpy(value))
    if type(value).__module__.split(".")[0] == "torch":
        return _with_key_in_error(key, lambda: TensorData.from_torch(value))
    if isinstance(value, (list, tuple)):
        if key not in LOSS_INPUT_DTYPES:
            known = ", ".join(sorted(LOSS_INPUT_DTYPES))
            raise UserError(
                f"loss_fn_inputs[{key!r}]: a plain list is allowed only for {known}; give a "
                "TensorData or an array"
            )
        return _with_key_in_error(key, lambda: TensorData(list(value), LOSS_INPUT_DTYPES[key]))
    raise UserError(
        f"loss_fn_inputs[{key!r}] is a {type(value).__name__}; give TensorData, a tensor, an array "
        "or a list"
    )


def _with_key_in_error(key: str, build: Any) -> TensorData:
    try:
        return build()
    except ValueError as error:
        raise UserError(f"loss_fn_inputs[{key!r}]: {error}") from None


def _as_array(data: Sequence[Any] | np.ndarray, dtype: TensorDtype) -> np.ndarray:
    try:
        array = np.asarray(data)
    except ValueError:
        raise UserError("nested lists of unequal lengths; give a rectangular array") from None
    if array.size == 0:
        return array.astype(_NUMPY_DTYPE[dtype])
    if array.dtype.kind not in "iufb":
        kind = "None" if any(value is None for value in array.flat) else array.dtype
        raise UserError(f"values of type {kind} are not numbers; give numbers")
    if dtype == "int64" and array.dtype.kind == "f" and not np.array_equal(array, np.trunc(array)):
        raise UserError(
            "an int64 tensor cannot hold fractions; give whole numbers or dtype='float32'"
        )
    # Copy the caller's arrays: operations are queued, so later changes must not affect them.
    return array.astype(_NUMPY_DTYPE[dtype], copy=array is data or array.base is not None)


def _check_csr(
    values: np.ndarray, crow: list[int], col: list[int], shape: Sequence[int] | None
) -> None:
    if shape is None or len(shape) != 2:
        raise UserError("TensorData: a CSR tensor needs a two-dimensional shape")
    if (
        len(crow) != shape[0] + 1
        or crow[0] != 0
        or crow[-1] != len(col)
        or np.any(np.diff(crow) < 0)
    ):
        raise UserError(
            "TensorData: sparse_crow_indices must not decrease, must begin with 0 and end with the "
            "number of values, and needs rows + 1 entries"
        )
    if len(col) != values.size or any(not 0 <= c < shape[1] for c in col):
        raise UserError(
            "TensorData: sparse_col_indices needs one column index, within the shape, for each "
            "value"
        )
