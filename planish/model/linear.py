"""Frozen linears that read the same input, computed as one matmul with packed weights.

On a CPU the weights are packed once, when they are loaded. If the CPU has the instructions, the
native matmul uses its own packed format (model/kernels/cpp/src/products.h). Otherwise bf16 weights are packed
for oneDNN, which would repack them at every call. Packing for oneDNN makes a matmul of one row 2 to
3 times faster and one of 128 rows 1.15 times faster (measured), with bit-identical results.

The packed weights are a copy. A bf16 original stays memory-mapped for code that reads single rows,
and uses memory only for the pages that are read. A float32 original, which is rare in files, is
freed unless the caller needs it.

Shapes: T rows, `in` columns of the input, `out` columns of all linears' outputs together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.model.kernels.cpp.cpu_products import PanelWeight, WeightRoom, multiplies

before_each_matmul: ContextVar[Callable[[], None]] = ContextVar("before_each_matmul")
"""A callback of the computing thread, called before each matmul with base weights, forward and
backward.

An exception from the callback aborts the pass, which may otherwise take many seconds.
"""


class FrozenLinear:
    """One or more frozen linears that read the same input."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] = (None,),
        room: WeightRoom | None = None,
        *,
        keeps: bool = True,
    ) -> None:
        """`weights`: [out_i, in] each; on a GPU they must be adjacent views of one tensor.

        `biases`: one bias per weight, or None for every weight. `room`: the arena in which the
        packed weights are allocated, by default a new one. `keeps`: whether to keep the unpacked
        float32 weights so that `weight` works.
        """
        self.sizes = [len(weight) for weight in weights]
        given = [bias for bias in biases if bias is not None]
        assert len(given) in (0, len(weights))
        self._bias = torch.cat(given) if given else None
        self._room = room or WeightRoom()
        self._packed = _packed(weights, self._room)
        self._packed_back: _Packed | None = None
        self._weights: tuple[Tensor, ...] = (
            tuple(weights) if keeps or self._float_panels is None else ()
        )

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], if there is a single linear."""
        (weight,) = self._weights
        return weight

    @property
    def panels(self) -> tuple[PanelWeight, Tensor | None] | None:
        """The packed weights and the bias of all linears, or None without the native matmul."""
        found = self._packed
        return (
            (found, self._bias)
            if isinstance(found, PanelWeight) and found.address is not None
            else None
        )

    def product(self, x: Tensor, tile: int | None = None) -> Tensor:
        """Return x @ weights.T plus the bias: [T, out], without gradients.

        `x`: [T, in]. `tile`: if given, compute in tiles of this many rows.
        """
        _call_before_matmul()
        if tile is None or x.shape[0] == tile:
            return self._product(x)
        return torch.cat([self._product(part) for part in x.split(tile)])

    def product_back(self, grad: Tensor) -> Tensor:
        """Return grad @ weights, the gradient of the input: [T, in].

        `grad`: gradient of the output [T, out].
        """
        _call_before_matmul()
        if self._float_panels is not None:
            # Do not pack float32 weights for the backward pass: the copy is large, and for many
            # rows torch is as fast.
            return grad @ (self.weight if len(self._weights) == 1 else self._float_panels.matrix())
        if self._packed is not None and self._packed_back is None:
            self._packed_back = _packed(self._weights, self._room, turned=True)
        if self._packed_back is not None:
            return self._packed_back.product(grad, None)
        if len(self._weights) == 1 or grad.device.type != "cpu":
            return grad @ (self.weight if len(self._weights) == 1 else self._whole)
        parts = [
            part @ weight
            for part, weight in zip(grad.split(self.sizes, 1), self._weights, strict=True)
        ]
        return torch.stack(parts).sum(0)

    @property
    def _float_panels(self) -> PanelWeight | None:
        found = self._packed
        return found if isinstance(found, PanelWeight) and found.dtype == torch.float32 else None

    @property
    def _whole(self) -> Tensor:
        """The joint weight tensor [out, in] of all linears on a GPU; a view."""
        first = self._weights[0]
        return first.as_strided(
            (sum(self.sizes), first.shape[1]), first.stride(), first.storage_offset()
        )

    def _product(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return self._packed.product(x, self._bias)
        if len(self._weights) == 1 or x.device.type != "cpu":
            return F.linear(x, self.weight if len(self._weights) == 1 else self._whole, self._bias)
        found = torch.cat([F.linear(x, weight) for weight in self._weights], 1)
        return found if self._bias is None else found.add_(self._bias)


def _call_before_matmul() -> None:
    function = before_each_matmul.get(None)
    if function is not None:
        function()


class _BlockedWeight:
    """A weight [out, in], packed for oneDNN."""

    def __init__(self, weight: Tensor) -> None:
        self._blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T plus the bias: [T, out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self._blocks, bias, "none", [], "")  # type: ignore[no-any-return]


_Packed = PanelWeight | _BlockedWeight


def _packed(weights: Sequence[Tensor], room: WeightRoom, *, turned: bool = False) -> _Packed | None:
    """Return the joint packed weights, or None if this machine does not pack them.

    `turned`: pack for x @ weight (the backward pass) instead of x @ weight.T.
    """
    first = weights[0]
    rows, columns = sum(map(len, weights)), first.shape[1]
    fan_out, fan_in = (columns, rows) if turned else (rows, columns)
    own = multiplies(fan_out, fan_in, first.dtype, first.device)
    if not own and not _packs(first.device, first.dtype):
        return None
    whole = first if len(weights) == 1 else torch.cat(tuple(weights))
    return (
        PanelWeight(whole, room, turned=turned)
        if own
        else _BlockedWeight(whole.t() if turned else whole)
    )


@cache
def _packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this machine and this torch can run matmuls with oneDNN's packed weights."""
    if device.type != "cpu" or dtype != torch.bfloat16 or not onednn_multiplies_bfloat16():
        return False
    return all(
        hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
    )


@cache
def onednn_multiplies_bfloat16() -> bool:
    """Return whether oneDNN supports bf16 matmuls on this CPU.

    If it does not, torch's bf16 matmul takes five to ten times as long as a float32 one.
    """
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
