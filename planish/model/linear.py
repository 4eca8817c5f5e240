"""Frozen linears that read one input, as one product; on a CPU with the weights as its kernels want
them.

Weights are brought into blocks once: for our own product where the CPU has its instructions
(native/cpp/products.h), elsewhere those of bf16 for oneDNN's, which does so at every call otherwise
(measured: 1 row 2 to 3 times, 128 rows 1.15 times faster, with the same bits). The blocks are a
copy. In bf16 the original stays as it is, mapped from its file, for what reads single rows of it,
and costs memory only as far as it is read; in float32, which files seldom have, it is let go of
unless it is asked for.

Shapes: T rows, `in` columns of the input, `out` those of all linears together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.native.cpu_products import PanelWeight, WeightRoom, multiplies

before_each_matmul: ContextVar[Callable[[], None]] = ContextVar("before_each_matmul")
"""In the thread that computes: called before each matmul with base weights, forward and backward.
What it raises ends the pass, which may otherwise take many seconds.
"""


class FrozenLinear:
    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] = (None,),
        room: WeightRoom | None = None,
        *,
        keeps: bool = True,
    ) -> None:
        """`weights` [out_i, in] each, on a GPU side by side in one tensor; all of them have a bias,
        or none. `room`: where their blocks may lie beside those of others.

        `keeps`: whether `weight` will be asked for.
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
        """[out, in] of a single linear."""
        (weight,) = self._weights
        return weight

    @property
    def panels(self) -> tuple[PanelWeight, Tensor | None] | None:
        """The weights and the bias of all linears, where kernels of our own multiply by them."""
        found = self._packed
        return (
            (found, self._bias)
            if isinstance(found, PanelWeight) and found.address is not None
            else None
        )

    def product(self, x: Tensor, tile: int | None = None) -> Tensor:
        """x [T, in] times the weights transposed: [T, out]; no gradient. `tile`: in tiles of so
        many rows.
        """
        _call_before_matmul()
        if tile is None or x.shape[0] == tile:
            return self._product(x)
        return torch.cat([self._product(part) for part in x.split(tile)])

    def product_back(self, grad: Tensor) -> Tensor:
        """grad [T, out] times the weights: [T, in], the gradient of the input."""
        _call_before_matmul()
        if self._float_panels is not None:
            # No blocks for the way back: float32 is large, and for many rows torch is as fast.
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
        """The weights side by side, as they are kept on a device: [out, in]."""
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
    """A weight [out, in] in oneDNN's blocks."""

    def __init__(self, weight: Tensor) -> None:
        self._blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._blocks, bias, "none", [], "")  # type: ignore[no-any-return]


_Packed = PanelWeight | _BlockedWeight


def _packed(weights: Sequence[Tensor], room: WeightRoom, *, turned: bool = False) -> _Packed | None:
    """`turned`: for products with the matrix as it is, rather than transposed."""
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
    """Whether this machine and torch multiply by weights in oneDNN's blocks."""
    if device.type != "cpu" or dtype != torch.bfloat16 or not onednn_multiplies_bfloat16():
        return False
    return all(
        hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
    )


@cache
def onednn_multiplies_bfloat16() -> bool:
    """Without it, torch takes five to ten times as long for a product of bf16 on a CPU as for one
    of float32.
    """
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
