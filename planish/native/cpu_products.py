"""Products with bf16 weights in the CPU's own kernel (kernels.cpp): frozen ones, and those of adapters.

Weights are packed once, into panels. A row's bits depend on that row and its weights alone: on no other row, nor on how many there are.

Shapes: T rows, `in` and `out` columns, n linears that read one input, r rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from planish.native.cpu import call, loaded

_PANEL = 64
LOW_COLUMNS = _HALF_PANEL = 32
"""What lies between the matrices of an adapter has a multiple of so many columns."""
_MOST_COLUMNS = 1 << 14
"""Of weights in a product: rows are taken whole, so with more of them neither a panel nor a few inputs would stay in a cache."""
_ROOM = 1 << 25
"""Numbers that a room has at least: what is not used of it costs no memory."""
_LoraRows = np.dtype([(name, np.int64) for name in ("a", "b0", "b1", "b2", "rank", "columns", "first", "count")])
"""Rows first .. first + count - 1 of a batch and the panels of their adapter's matrices at one site."""
MOST_LINEARS = 3


def multiplies(fan_out: int, fan_in: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a product with weights of this shape that is at least as fast as oneDNN's for any number of rows (docs/log.md)."""
    fits = fan_out % _HALF_PANEL == 0 and fan_in % 2 == 0 and fan_in <= _MOST_COLUMNS
    if not fits or dtype != torch.bfloat16 or device.type != "cpu":
        return False
    found = loaded()
    return found is not None and bool(found.multiplies_bf16())


class WeightRoom:
    """Memory for weights on pages of 2 MB, from which they are read a third faster; most fill no such page alone, so they lie side by side."""

    def __init__(self, least: int = _ROOM) -> None:
        self._least = least
        self._left = torch.empty(0, dtype=torch.bfloat16)

    def take(self, size: int) -> Tensor:
        """Memory for `size` numbers, from which nothing else is taken."""
        if size > len(self._left):
            self._left = torch.empty(max(size, self._least), dtype=torch.bfloat16)
            found = loaded()
            assert found is not None
            found.on_huge_pages(ctypes.c_void_p(self._left.data_ptr()), ctypes.c_int64(self._left.nbytes))
        taken, self._left = self._left[:size], self._left[size:]
        return taken


class PanelWeight:
    """A weight [out, in], bf16, for products in a kernel of our own. A row's bits depend on that row alone."""

    def __init__(self, weight: Tensor, room: WeightRoom) -> None:
        self._fan_out, self._fan_in = weight.shape
        self._panels = room.take((self._fan_out + -self._fan_out % _PANEL) * self._fan_in)
        call("pack_panels", weight.dtype, weight.contiguous(), self._panels, *weight.shape)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in] times the weight transposed, plus the bias [out]: [T, out]."""
        x = x.contiguous()
        out = x.new_empty(x.shape[0], self._fan_out)
        call("product", x.dtype, self._panels, x, bias, out, *out.shape, self._fan_in)
        return out

    @property
    def address(self) -> int:
        return self._panels.data_ptr()


def adapts(shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel serves adapters of linears of these shapes (out, in), forward and backward."""
    return all(
        multiplies(fan_out, fan_in, dtype, device) and multiplies(fan_in, fan_out, dtype, device)
        for fan_out, fan_in in shapes
    )


class PanelSite:
    """An adapter's matrices for linears that read one input: A [n * r, in], one B [out, r] for each."""

    def __init__(self, a: Tensor, bs: Sequence[Tensor]) -> None:
        self._a, self._bs = a.detach(), [b.detach() for b in bs]
        self._forward = _Panels(self._a, [_even(b) for b in self._bs], len(bs))

    @property
    def record(self) -> np.ndarray:
        """[1] of _LoraRows, for no rows yet."""
        return self._forward.record

    def add_(self, x: Tensor, out: Tensor, sizes: Sequence[int]) -> Tensor:
        """Adds to out [T, sum(sizes)] the products of x [T, in]; returns what lies between A and B: [T, n * r]."""
        low = x.new_empty(x.shape[0], _padded(len(self._a)))
        _add(_whole(self._forward.record, x), x, out, sizes, low)
        return low[:, : len(self._a)]

    def backward_(self, grad: Tensor, grad_x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Adds to grad_x [T, in] what comes back of grad [T, sum(sizes)]; returns the gradient between A and B: [T, n * r]."""
        low = grad.new_empty(grad.shape[0], _padded(len(self._a)))
        adapters, columns = _whole(self._turned.record, grad), np.array(sizes, np.int64)
        given = (grad.contiguous(), columns.ctypes.data, len(columns), low, grad_x, grad_x.shape[1])
        call("lora_backward", grad.dtype, adapters.ctypes.data, 1, *given)
        return low[:, : len(self._a)]

    @cached_property
    def _turned(self) -> _Panels:
        return _Panels(_even(self._a.t()), [b.t() for b in self._bs], len(self._bs), len(self._a))


class PanelRows:
    """The adapters of a batch's rows, at all sites of all layers (`GroupedLora` of the decoder)."""

    def __init__(self, members: Sequence[tuple[int, int, Sequence[PanelSite | None]]], sites: Sequence[str]) -> None:
        """(start, stop, the adapter at each site of each layer) each; `sites` are the names of a layer's."""
        missing = np.zeros(1, _LoraRows)
        tables = [[missing if site is None else site.record for site in every] for _, _, every in members]
        self._table = np.array(tables, _LoraRows)[..., 0].T.copy()
        starts, stops = (np.array(ends, np.int64) for ends in list(zip(*members, strict=True))[:2])
        self._table["first"] = starts
        self._table["count"] = np.where(self._table["a"] != 0, stops - starts, 0)
        self._members = members  # their panels must stay
        self._sites = {name: index for index, name in enumerate(sites)}

    def add_(self, x: Tensor, out: Tensor, sizes: Sequence[int], layer: int, site: str) -> None:
        _add(self._table[layer * len(self._sites) + self._sites[site]], x, out, sizes, None)


class _Panels:
    """Matrices of one site as panels, in a record."""

    def __init__(self, a: Tensor, bs: Sequence[Tensor], linears: int, columns: int | None = None) -> None:
        columns = len(a) if columns is None else columns
        self._held = [PanelWeight(matrix, WeightRoom(0)) for matrix in (a, *bs)]
        rank = columns // linears
        self.record = np.zeros(1, _LoraRows)
        addresses = [panels.address for panels in self._held]
        addresses += [0] * (1 + MOST_LINEARS - len(addresses))
        self.record[0] = (*addresses, rank + rank % 2, columns, 0, 0)


def _add(adapters: np.ndarray, x: Tensor, out: Tensor, sizes: Sequence[int], kept: Tensor | None) -> None:
    x, columns = x.contiguous(), np.array(sizes, np.int64)
    given = (x, x.shape[1], out, columns.ctypes.data, len(columns), kept)
    call("add_lora", x.dtype, adapters.ctypes.data, len(adapters), *given)


def _whole(record: np.ndarray, x: Tensor) -> np.ndarray:
    rows = record.copy()
    rows["count"] = len(x)
    return rows


def _padded(columns: int) -> int:
    return columns + -columns % _HALF_PANEL


def _even(matrix: Tensor) -> Tensor:
    """With an even number of columns, since the kernel takes them in pairs."""
    return F.pad(matrix, (0, matrix.shape[1] % 2))
