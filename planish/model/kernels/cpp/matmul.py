"""Matmuls with the C++ kernels (src/matmul.h, src/adapters.h): frozen weights and LoRA.

Weights are bf16 or float32. They are packed once, into panels of 64 output columns. The matmuls are
batch-invariant: a row's result depends only on the row and its weights.

Shapes: T rows, `in` and `out` columns, n linears that read one input, r rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from planish.model.kernels.cpp import ops
from planish.model.layers.expert_pairs import TokenExpertPairs
from planish.model.layers.lora import LORA_COLUMNS, padded_lora_columns

PANEL_WIDTH = 64
_VECTOR_SIZE = LORA_COLUMNS
"""The number of elements of one SIMD vector. Output columns are padded to a multiple of it."""
_MIN_ARENA_ELEMENTS = 1 << 25
"""The minimum number of elements that a `WeightArena` allocates at a time.

Unused pages of an allocation use no memory.
"""
_PackRecord = np.dtype([(name, np.int64) for name in ("matrix", "panels", "n", "k")])
"""The addresses of a matrix [n, k] and of its panels. A transposed matrix is given as [k, n]."""
_AdapterRecord = np.dtype(
    [(name, np.int64) for name in ("a", "b0", "b1", "b2", "rank", "columns", "first", "count")]
)
"""The adapter of one target module for rows first .. first + count - 1 of a batch.

`a`, `b0`, `b1`, `b2`: the addresses of the packed matrices. `rank`: r, rounded up to an even
number. `columns`: n * r, the number of columns of the LoRA hidden states.
"""
MAX_FUSED_LINEARS = 3


def supports_matmul(fan_out: int, fan_in: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel supports frozen weights [fan_out, fan_in] of this dtype.

    For any number of rows the kernel is at least as fast as oneDNN (docs/lab/log.md; not measured
    with AMX).
    """
    if fan_out < 1 or fan_in % 2:
        return False
    if dtype == torch.bfloat16:
        return supports_bf16_matmul()
    return dtype == torch.float32 and ops.is_supported("matmul")


def supports_bf16_matmul() -> bool:
    """Return whether the kernels support bf16 matmuls on this CPU and are not slower than oneDNN.

    oneDNN is faster on a CPU with AMX if the kernels' AMX code failed its self-test.
    """
    found = ops.load_library()
    return ops.is_supported("matmul") and found is not None and bool(found.has_fast_bf16_matmul())


class WeightArena:
    """An arena for packed weights on huge pages of 2 MB.

    Weights are read a third faster from huge pages. Most weights are smaller than a page, so
    several share one allocation.
    """

    def __init__(self, min_elements: int = _MIN_ARENA_ELEMENTS) -> None:
        """`min_elements`: the minimum number of elements per allocation."""
        self._min_elements = min_elements
        self._free = torch.empty(0)

    def take(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory for `size` elements. Every call returns different memory."""
        if size > len(self._free) or self._free.dtype != dtype:
            self._free = torch.empty(max(size, self._min_elements), dtype=dtype)
            found = ops.load_library()
            assert found is not None
            found.advise_huge_pages(
                ctypes.c_void_p(self._free.data_ptr()), ctypes.c_int64(self._free.nbytes)
            )
        allocated, self._free = self._free[:size], self._free[size:]
        return allocated


class CppPackedWeight:
    """A weight [out, in], packed as panels for the C++ matmul, which is batch-invariant."""

    is_batch_invariant = True

    def __init__(self, weight: Tensor, arena: WeightArena, *, transposed: bool = False) -> None:
        """`arena`: the arena of the panels. `transposed`: `weight` is given as [in, out]."""
        self._fan_out, self._fan_in = weight.shape[::-1] if transposed else weight.shape
        self._panels = _pack_matrices([weight.contiguous()], arena, transposed=transposed)[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight."""
        return self._panels.dtype

    @property
    def unpack(self) -> Callable[[], Tensor] | None:
        """A function that returns a copy of the weight [out, in]; None for bf16 weights."""
        return self._unpacked if self.dtype == torch.float32 else None

    def _unpacked(self) -> Tensor:
        panels = self._panels.split(PANEL_WIDTH * self._fan_in)
        return torch.cat([panel.view(self._fan_in, -1).t() for panel in panels])[: self._fan_out]

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T plus the bias [out]: [T, out]. `x`: [T, in]."""
        x, missing = x.contiguous(), -self._fan_out % _VECTOR_SIZE
        if bias is not None and missing:
            bias = F.pad(bias, (0, missing))
        out = x.new_empty(x.shape[0], self._fan_out + missing)
        ops.call("matmul", x.dtype, self._panels, x, bias, out, *out.shape, self._fan_in)
        return out[:, : self._fan_out].contiguous() if missing else out

    @property
    def address(self) -> int | None:
        """The address of the panels, for kernels that run several matmuls in one call.

        None if `out` is not a multiple of 16, because these kernels do not pad their outputs.
        """
        return None if self._fan_out % _VECTOR_SIZE else self._panels.data_ptr()


def supports_lora(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> bool:
    """Return whether the kernel supports adapters of linears of these shapes (out, in).

    The answer covers the forward and the backward pass.
    """
    transposed = [(fan_in, fan_out) for fan_out, fan_in in shapes]
    return supports_lora_forward(shapes, dtype) and supports_lora_forward(transposed, dtype)


def supports_lora_forward(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> bool:
    """Return whether the kernel supports the forward pass of adapters of these shapes (out, in)."""
    return ops.is_supported("lora") and all(
        fan_out % _VECTOR_SIZE == 0 and supports_matmul(fan_out, fan_in, dtype)
        for fan_out, fan_in in shapes
    )


Matrices = tuple[Tensor, Sequence[Tensor]]
"""An adapter's matrices for n linears that read one input: the concatenated A
[n * r, in] and n Bs.
"""


class CppPackedAdapter:
    """All matrices of one version of an adapter, packed as panels at first use.

    The matrices for the backward pass are packed separately, because a sampler does not need them.
    """

    def __init__(
        self,
        matrices: Sequence[Matrices | None],
        *,
        use_kernel: bool = True,
        first_entries: Sequence[int] | None = None,
    ) -> None:
        """`matrices`: the matrices of each entry; None if the adapter does not train the entry.

        An entry is a target module, or one expert's part of a target module of experts.
        `first_entries`: for each target module, the index of its first entry in `matrices`. If it
        is None, each target module has one entry. `use_kernel`: whether the kernel may be used at
        all.
        """
        self.first_entries = range(len(matrices)) if first_entries is None else first_entries
        self._matrices = [
            None if entry is None else (entry[0].detach(), [b.detach() for b in entry[1]])
            for entry in matrices
        ]
        shapes = [
            None if entry is None else tuple((len(b), entry[0].shape[1]) for b in entry[1])
            for entry in self._matrices
        ]
        first = next((entry[0] for entry in self._matrices if entry is not None), torch.empty(0))
        distinct_shapes = {shape for shape in shapes if shape is not None}
        forward = {
            shape
            for shape in distinct_shapes
            if use_kernel and supports_lora_forward(shape, first.dtype)
        }
        backward_shapes = {shape for shape in forward if supports_lora(shape, first.dtype)}
        self._has_forward, self._has_backward = (
            [shape in found for shape in shapes] for found in (forward, backward_shapes)
        )
        self.is_empty = not distinct_shapes

    def target(self, index: int) -> CppPackedModule | None:
        """Return the matrices of target module `index`.

        Return None if the adapter does not train the module or the kernel does not support it.
        """
        first = self.first_entries[index]
        return (
            CppPackedModule(self, first, self._has_backward[first])
            if self._has_forward[first]
            else None
        )

    def matrices(self, index: int) -> Matrices:
        """Return the unpacked matrices of entry `index`, which the adapter must train."""
        found = self._matrices[index]
        assert found is not None
        return found

    @property
    def forward(self) -> np.ndarray:
        """The addresses and sizes of each entry's packed matrices: [entries] of _AdapterRecord.

        The fields `first` and `count` are 0, because no rows are assigned yet. All fields are 0 if
        the kernel does not support the module.
        """
        return self._forward[0]

    @property
    def backward(self) -> np.ndarray:
        """The transposed matrices, packed for the backward pass, in the form of `forward`."""
        return self._backward[0]

    def drop_backward(self) -> None:
        """Free the matrices for the backward pass. They are packed again if they are needed."""
        self.__dict__.pop("_backward", None)

    @cached_property
    def _forward(self) -> tuple[np.ndarray, list[Tensor]]:
        return self._records(self._has_forward, transposed=False)

    @cached_property
    def _backward(self) -> tuple[np.ndarray, list[Tensor]]:
        return self._records(self._has_backward, transposed=True)

    def _records(
        self, supported: Sequence[bool], *, transposed: bool
    ) -> tuple[np.ndarray, list[Tensor]]:
        """Return the records of all target modules, and the panels whose addresses they contain."""
        entries = [
            (i, *self.matrices(i)) for i, is_supported in enumerate(supported) if is_supported
        ]
        panels = _pack_matrices(
            [matrix for _, a, b_matrices in entries for matrix in (a, *b_matrices)],
            WeightArena(0),
            transposed=transposed,
        )
        records = np.zeros(len(self._matrices), _AdapterRecord)
        remaining = iter(packed.data_ptr() for packed in panels)
        for i, a, b_matrices in entries:
            addresses = [next(remaining) for _ in range(1 + len(b_matrices))] + [0] * (
                MAX_FUSED_LINEARS - len(b_matrices)
            )
            rank = len(a) // len(b_matrices)
            records[i] = (*addresses, rank + rank % 2, len(a), 0, 0)
        return records, panels


class CppPackedModule:
    """The packed matrices of one target module, for batches in which all rows use the adapter."""

    def __init__(self, adapter: CppPackedAdapter, index: int, has_backward: bool) -> None:
        self._adapter, self._index = adapter, index
        self.has_backward = has_backward
        """Whether the kernel supports `backward_` too."""
        self._columns = len(adapter.matrices(index)[0])

    def expert(self, index: int) -> CppPackedModule:
        """Return the matrices of one expert, if this is the target module of a layer's experts."""
        return CppPackedModule(self._adapter, self._index + index, self.has_backward)

    @property
    def _record(self) -> np.ndarray:
        return self._adapter.forward[self._index : self._index + 1]

    @property
    def addresses(self) -> tuple[int, int]:
        """The addresses of the packed A and of the first packed B."""
        return self._record["a"][0], self._record["b0"][0]

    def add_(self, x: Tensor, out: Tensor, sizes: Sequence[int]) -> Tensor:
        """Add the LoRA outputs for x [T, in] to `out` [T, sum(sizes)], in place.

        Return the LoRA hidden states [T, n * r].
        """
        lora_hidden = x.new_empty(x.shape[0], padded_lora_columns(self._columns))
        _add_lora(_for_all_rows(self._record, x), x, out, sizes, lora_hidden)
        return lora_hidden[:, : self._columns]

    def backward_(self, grad: Tensor, grad_x: Tensor | None, sizes: Sequence[int]) -> Tensor:
        """Add the gradient of the input to `grad_x` [T, in], given `grad` [T, sum(sizes)].

        Return the gradient of the LoRA hidden states [T, n * r]. With `grad_x` None, compute
        nothing else.
        """
        lora_hidden = grad.new_empty(grad.shape[0], padded_lora_columns(self._columns))
        records = _for_all_rows(self._adapter.backward[self._index : self._index + 1], grad)
        sizes_array = np.array(sizes, np.int64)
        arguments = (
            grad.contiguous(),
            sizes_array.ctypes.data,
            len(sizes_array),
            lora_hidden,
            grad_x,
            self._adapter.matrices(self._index)[0].shape[1],
        )
        ops.call("lora_backward", grad.dtype, records.ctypes.data, 1, *arguments)
        return lora_hidden[:, : self._columns]

    def gradients(
        self,
        x: Tensor,
        lora_hidden: Tensor,
        grad: Tensor,
        hidden_grad: Tensor,
        sizes: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of A and of the Bs in float32, summed over all rows.

        `lora_hidden`, `hidden_grad`: the results of `add_` and `backward_` for this `x` and `grad`.
        """
        rank, sizes_array = self._columns // len(sizes), np.array(sizes, np.int64)
        grad_a = torch.empty(self._columns, x.shape[1], dtype=torch.float32)
        b_grads = torch.empty(int(sizes_array.sum()), rank, dtype=torch.float32)
        arguments = (
            lora_hidden,
            grad.contiguous(),
            sizes_array.ctypes.data,
            len(sizes_array),
            hidden_grad,
            rank,
            grad_a,
            b_grads,
            len(x),
        )
        ops.call("lora_gradients", x.dtype, x.contiguous(), x.shape[1], *arguments)
        return grad_a, list(b_grads.split(list(sizes)))


class CppAdapterBatch:
    """The adapters of the rows of a batch, for all target modules (see `AdapterBatch`)."""

    def __init__(
        self, adapter_ranges: Sequence[tuple[int, int, CppPackedAdapter]], modules: Sequence[str]
    ) -> None:
        """`adapter_ranges`: (start, stop, adapter) of each range of rows.

        `modules`: the names of a layer's target modules, in the order of the adapters' matrices.
        """
        self.table = np.stack([adapter.forward for _, _, adapter in adapter_ranges], 1)
        """A table of _AdapterRecord, with a row per entry and a column per range of rows.

        The entries are those of `CppPackedAdapter.forward`, for all target modules of all layers.
        """
        starts, stops = (
            np.array(ends, np.int64) for ends in list(zip(*adapter_ranges, strict=True))[:2]
        )
        self.table["first"] = starts
        self.table["count"] = np.where(self.table["a"] != 0, stops - starts, 0)
        # The table contains addresses of the members' panels, so it must keep them alive.
        self._adapter_ranges = adapter_ranges
        self._first_entries = adapter_ranges[0][2].first_entries
        self._module_index = {name: index for index, name in enumerate(modules)}

    def add_(self, x: Tensor, out: Tensor, sizes: Sequence[int], layer: int, module: str) -> None:
        """Do the same as `AdapterBatch.add_`."""
        _add_lora(self.table[self._first_entry(layer, module)], x, out, sizes, None)

    def add_expert_(
        self, x: Tensor, out: Tensor, pairs: TokenExpertPairs, layer: int, module: str
    ) -> None:
        """Do the same as `AdapterBatch.add_expert_`, with one kernel call for all experts."""
        bounds = [pairs.expert_ranges(start, stop) for start, stop, _ in self._adapter_ranges]
        begin, count = (np.stack(ends, 1) for ends in zip(*bounds, strict=True))
        first = self._first_entry(layer, module)
        table = self.table[first : first + len(begin)].copy()
        table["first"], table["count"] = begin, count
        used_records = table[(table["a"] != 0) & (count > 0)]
        if len(used_records):
            _add_lora(used_records, x, out, [out.shape[1]], None)

    def _first_entry(self, layer: int, module: str) -> int:
        return self._first_entries[layer * len(self._module_index) + self._module_index[module]]


def _pack_matrices(
    matrices: Sequence[Tensor], arena: WeightArena, *, transposed: bool = False
) -> list[Tensor]:
    """Return the panels of each of the contiguous matrices [n, k] ([k, n] if `transposed`).

    All panels are consecutive in one allocation of `arena`.
    """
    shapes = [matrix.shape[::-1] if transposed else matrix.shape for matrix in matrices]
    sizes = [packed_size(*shape) for shape in shapes]
    dtype = matrices[0].dtype if matrices else torch.bfloat16
    panels = list(arena.take(sum(sizes), dtype).split(sizes))
    matrix_records = zip(matrices, panels, shapes, strict=True)
    table = np.array(
        [
            (matrix.data_ptr(), packed.data_ptr(), *shape)
            for matrix, packed, shape in matrix_records
        ],
        _PackRecord,
    )
    ops.call("pack_panels", dtype, table.ctypes.data, len(table), int(transposed))
    return panels


def packed_size(n: int, k: int) -> int:
    """Return the number of elements of a matrix [n, k] as panels, including padding."""
    return (n + -n % _VECTOR_SIZE) * (k + k % 2)


def _add_lora(
    adapters: np.ndarray, x: Tensor, out: Tensor, sizes: Sequence[int], lora_hidden: Tensor | None
) -> None:
    x, columns = x.contiguous(), np.array(sizes, np.int64)
    arguments = (x, x.shape[1], out, columns.ctypes.data, len(columns), lora_hidden)
    ops.call("add_lora", x.dtype, adapters.ctypes.data, len(adapters), *arguments)


def _for_all_rows(record: np.ndarray, x: Tensor) -> np.ndarray:
    rows = record.copy()
    rows["count"] = len(x)
    return rows
