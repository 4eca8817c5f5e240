"""Frozen linears that read one input, as one product; on a CPU in bf16 with the weights as its matrix library wants them.

oneDNN brings a weight into blocks of its own before it multiplies, at every call. With few rows that takes longer than the product:
it is done once here (measured: 1 row 2 to 3 times, 128 rows 1.15 times faster, with the same bits). The blocks are a copy; the
original stays as it is, mapped from its file, for what reads single rows of it, and costs memory only as far as it is read.

Shapes: T rows, `in` columns of the input, `out` those of all linears together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


class FrozenLinear:
    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = (None,)) -> None:
        """`weights` [out_i, in] each; all of them have a bias, or none."""
        self.sizes = [len(weight) for weight in weights]
        given = [bias for bias in biases if bias is not None]
        assert len(given) in (0, len(weights))
        self._bias = torch.cat(given) if given else None
        self._packed = _packed(weights)
        self._packed_back: Tensor | None = None
        if weights[0].device.type != "cpu":  # what is not mapped from a file can as well lie side by side
            weights = torch.cat(tuple(weights)).split(self.sizes)
        self._weights = tuple(weights)

    @property
    def weight(self) -> Tensor:
        """[out, in] of a single linear."""
        (weight,) = self._weights
        return weight

    def product(self, x: Tensor, tile: int | None = None) -> Tensor:
        """x [T, in] times the weights transposed: [T, out]; no gradient. `tile`: in tiles of so many rows."""
        if tile is None or x.shape[0] == tile:
            return self._product(x)
        return torch.cat([self._product(part) for part in x.split(tile)])

    def product_back(self, grad: Tensor) -> Tensor:
        """grad [T, out] times the weights: [T, in], the gradient of the input."""
        if self._packed is not None:
            if self._packed_back is None:
                self._packed_back = _pack(torch.cat([weight.t() for weight in self._weights], 1).contiguous())
            return _multiply(grad, self._packed_back, None)
        if len(self._weights) == 1 or grad.device.type != "cpu":
            return grad @ (self.weight if len(self._weights) == 1 else self._whole)
        parts = [part @ weight for part, weight in zip(grad.split(self.sizes, 1), self._weights, strict=True)]
        return torch.stack(parts).sum(0)

    @property
    def _whole(self) -> Tensor:
        """The weights side by side, as they are kept on a device: [out, in]."""
        first = self._weights[0]
        return first.as_strided((sum(self.sizes), first.shape[1]), first.stride(), first.storage_offset())

    def _product(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return _multiply(x, self._packed, self._bias)
        if len(self._weights) == 1 or x.device.type != "cpu":
            return F.linear(x, self.weight if len(self._weights) == 1 else self._whole, self._bias)
        found = torch.cat([F.linear(x, weight) for weight in self._weights], 1)
        return found if self._bias is None else found.add_(self._bias)


def _packed(weights: Sequence[Tensor]) -> Tensor | None:
    if not _packs(weights[0].device, weights[0].dtype):
        return None
    return _pack(weights[0] if len(weights) == 1 else torch.cat(tuple(weights)))


@cache
def _packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine and torch multiply by weights in oneDNN's blocks."""
    if device.type != "cpu" or dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    if not all(hasattr(ops, name) for name in ("_linear_pointwise", "_reorder_linear_weight")):
        return False
    return bool(ops._is_mkldnn_bf16_supported())


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)  # type: ignore[no-any-return]


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]
