"""Frozen linears that read the same input, computed as one matmul with packed weights.

On a CPU the backend packs the weights once, when they are loaded. The C++ backend has its own
packed format. The torch backend packs bf16 weights for oneDNN, because oneDNN would otherwise
repack the weights at every call. Packing for oneDNN makes a matmul of one row 2 to 3 times faster
and one of 128 rows 1.15 times faster (measured). The last bits of the result may differ.

The packed weights are a copy. A bf16 original stays memory-mapped for code that reads single rows,
and uses memory only for the pages that are read. A float32 original, which is rare in files, is
freed unless the caller needs it.

Shapes: T rows, `in` columns of the input, `out` columns of all linears' outputs together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache, cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.model.layers.quantization import QuantizedWeight, dequantized
from planish.model.layers.quantized_experts import QuantizedExperts

before_each_matmul: ContextVar[Callable[[], None]] = ContextVar("before_each_matmul")
"""A callback of the computing thread, called before each matmul with base weights, forward and
backward.

An exception from the callback aborts the pass, which may otherwise take many seconds.
"""

ADDRESS_ALIGNMENT = 16
"""The bytes that the widest load instruction of a GPU reads. Its address is a multiple of this."""


class PackedLinear:
    """One or more frozen linears that read the same input."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] = (None,),
        *,
        packer: Packer,
        are_adjacent: bool = False,
        keep_unpacked: bool = True,
        restore: Callable[[], Sequence[Tensor]] | None = None,
    ) -> None:
        """`weights`: [out_i, in] each. `biases`: one bias per weight, or None for every weight.

        `packer`: the backend's function that packs weights. `are_adjacent`: the weights are
        adjacent views of one tensor. `keep_unpacked`: whether to keep the unpacked weights even if
        they could be restored from the packed weights. `restore`: a function that returns `weights`
        again; with it the unpacked weights are never kept.
        """
        self.sizes = [len(weight) for weight in weights]
        self.fan_in = weights[0].shape[1]
        present = [bias for bias in biases if bias is not None]
        assert len(present) in (0, len(weights))
        self.bias = torch.cat(present) if present else None
        self._packer = packer
        self.packed = packer(weights, False)
        """The packed weights, or None if torch multiplies by the unpacked weights."""
        self._packed_backward: PackedWeight | None = None
        keeps = keep_unpacked or self._unpack is None
        self._restore = restore if keeps else None
        self._kept = tuple(weights) if keeps and restore is None else ()
        self._are_adjacent = are_adjacent or len(weights) == 1

    @property
    def _weights(self) -> Sequence[Tensor]:
        """The unpacked weights; empty if only the packed weights have them."""
        return self._kept if self._restore is None else self._restore()

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], if there is a single linear."""
        (weight,) = self._weights
        return weight

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row of the output is bit-identical for any number of rows."""
        return self.packed is not None and self.packed.is_batch_invariant

    def matmul(self, x: Tensor) -> Tensor:
        """Return x @ weights.T plus the bias: [T, out], without gradients. `x`: [T, in]."""
        call_before_matmul()
        if self.packed is not None:
            return self.packed.matmul(x, self.bias)
        if self._are_adjacent:
            return F.linear(x, self._fused_weight, self.bias)
        out = torch.cat([F.linear(x, weight) for weight in self._weights], 1)
        return out if self.bias is None else out.add_(self.bias)

    def matmul_backward(self, grad: Tensor) -> Tensor:
        """Return grad @ weights, the gradient of the input: [T, in]. `grad`: [T, out]."""
        call_before_matmul()
        unpack = self._unpack
        if unpack is not None:
            # Do not pack float32 weights for the backward pass: the copy is large, and for many
            # rows torch is as fast.
            return grad @ (self.weight if len(self._weights) == 1 else unpack())
        if self.packed is not None and self._packed_backward is None:
            self._packed_backward = self._packer(self._weights, True)
        if self._packed_backward is not None:
            return self._packed_backward.matmul(grad, None)
        # One matmul, because a sum of several bf16 matmuls rounds more often.
        return grad @ (self._fused_weight if self._are_adjacent else concatenate(self._weights))

    @property
    def fused_weight(self) -> Tensor | None:
        """The weights of all linears as one contiguous tensor [out, in].

        None if they are packed, quantized, or not adjacent.
        """
        if self.packed is not None or not self._are_adjacent:
            return None
        return self._fused_weight if self._weights[0].is_contiguous() else None

    @property
    def _unpack(self) -> Callable[[], Tensor] | None:
        return None if self.packed is None else self.packed.unpack

    @property
    def _fused_weight(self) -> Tensor:
        """The fused weight tensor [out, in] of all linears, a view."""
        first = self._weights[0]
        return first.as_strided(
            (sum(self.sizes), first.shape[1]), first.stride(), first.storage_offset()
        )


class QuantizedLinear(PackedLinear):
    """Frozen linears that read the same input, with quantized weights.

    Each matmul has the same bits as a matmul with the dequantized weights.
    """

    def __init__(
        self,
        weights: Sequence[QuantizedWeight],
        biases: Sequence[Tensor | None],
        packed: PackedQuantizedWeight,
    ) -> None:
        """`weights`: [out_i, in] each. `biases`: as in PackedLinear. `packed`: the same weights."""
        self.sizes = [weight.shape[0] for weight in weights]
        self.fan_in = weights[0].shape[1]
        present = [bias for bias in biases if bias is not None]
        self.bias = torch.cat(present) if present else None
        self.packed = self._packed = packed

    @property
    def kernel_weights(self) -> Sequence[QuantizedWeight]:
        """The weights, if a kernel for all experts of a layer can read them; otherwise empty."""
        return self._packed.kernel_weights

    @property
    def fused_weight(self) -> None:
        """None, because the weights are quantized."""
        return None

    def matmul_backward(self, grad: Tensor) -> Tensor:
        """Return grad @ weights, the gradient of the input: [T, in]. `grad`: [T, out]."""
        call_before_matmul()
        return self._packed.matmul_backward(grad)


class ExpertLinears(tuple[PackedLinear, ...]):
    """The same linear of each expert of a layer."""

    @cached_property
    def addresses(self) -> Tensor | None:
        """The addresses of the contiguous weights [out, in]: int64 [N] on their device.

        None if a kernel cannot read the weights (see `PackedLinear.fused_weight`), or if an address
        is not a multiple of ADDRESS_ALIGNMENT.
        """
        weights = [linear.fused_weight for linear in self]
        present = [weight for weight in weights if weight is not None]
        found = [weight.data_ptr() for weight in present]
        if len(present) < len(weights) or any(address % ADDRESS_ALIGNMENT for address in found):
            return None
        return torch.tensor(found, device=present[0].device)

    @cached_property
    def quantized(self) -> QuantizedExperts | None:
        """The quantized weights for a kernel. None if a kernel cannot read them."""
        found = [linear.kernel_weights for linear in self if isinstance(linear, QuantizedLinear)]
        return QuantizedExperts.of(found) if len(found) == len(self) and all(found) else None

    @property
    def kernel_weights(self) -> Tensor | QuantizedExperts | None:
        """What a kernel for all experts multiplies by: `addresses` or `quantized`."""
        return self.quantized if self.addresses is None else self.addresses

    @cached_property
    def biases(self) -> Tensor | None:
        """The biases [N, out], or None."""
        present = [linear.bias for linear in self if linear.bias is not None]
        return torch.stack(present) if present else None


class PackedWeight(Protocol):
    """The fused weights [out, in] of one or more linears in the layout of one matmul kernel."""

    is_batch_invariant: bool
    """Whether a row of the output is bit-identical for any number of rows."""

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T plus the bias: [T, out]."""
        ...

    @property
    def unpack(self) -> Callable[[], Tensor] | None:
        """A function that returns a copy of the weights [out, in].

        None if callers must keep the unpacked weights.
        """
        ...


class PackedQuantizedWeight(PackedWeight, Protocol):
    """Quantized weights [out, in] in the layout of a kernel, for the forward and backward pass."""

    @property
    def kernel_weights(self) -> Sequence[QuantizedWeight]:
        """The weights, if a kernel for all experts of a layer can read them; otherwise empty."""
        ...

    def matmul_backward(self, grad: Tensor) -> Tensor:
        """Return grad @ weight: [T, in]. `grad`: [T, out]."""
        ...


class DequantizedWeights:
    """Quantized weights [out, in], which torch dequantizes for each matmul and then frees.

    This is the reference implementation. Kernels dequantize small tiles, or all weights at once.
    """

    is_batch_invariant = False
    unpack = None
    kernel_weights: Sequence[QuantizedWeight] = ()

    def __init__(
        self,
        weights: Sequence[QuantizedWeight],
        dtype: torch.dtype,
        packer: Packer = lambda weights, transposed: None,
    ) -> None:
        """`weights`: [out_i, in] each. `dtype`: the matmuls' dtype. `packer`: as in PackedLinear."""
        self._weights, self._dtype, self._packer = tuple(weights), dtype, packer

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T plus the bias [out]: [T, out]. `x`: [T, in]."""
        weight = self._dequantized()
        # Use the kernel of unquantized weights. `F.linear` may add in another order, for which the
        # probe for batch invariance (reference/probe.py) found no rule.
        packed = self._packer([weight], False)
        return F.linear(x, weight, bias) if packed is None else packed.matmul(x, bias)

    def matmul_backward(self, grad: Tensor) -> Tensor:
        """Return grad @ weight: [T, in]. `grad`: [T, out]."""
        return grad @ self._dequantized()

    def _dequantized(self) -> Tensor:
        """Return the fused weight [out, in]."""
        return dequantized(self._weights, self._dtype)


Packer = Callable[[Sequence[Tensor], bool], PackedWeight | None]
"""A function that packs fused weights: (weights, transposed) -> packed weights, or None.

`transposed`: pack for x @ weight (the backward pass) instead of x @ weight.T.
"""


def call_before_matmul() -> None:
    """Call the callback in `before_each_matmul`, if this thread has one."""
    function = before_each_matmul.get(None)
    if function is not None:
        function()


class OneDnnWeight:
    """A weight [out, in], packed for oneDNN."""

    is_batch_invariant = False
    unpack = None

    def __init__(self, weight: Tensor) -> None:
        self._blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T plus the bias: [T, out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self._blocks, bias, "none", [], "")  # type: ignore[no-any-return]


def concatenate(weights: Sequence[Tensor]) -> Tensor:
    """Return the weights [out_i, in] as one tensor [out, in]."""
    return weights[0] if len(weights) == 1 else torch.cat(tuple(weights))


@cache
def onednn_packs_bfloat16() -> bool:
    """Return whether this CPU and this torch run bf16 matmuls with oneDNN's packed weights."""
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return (
        torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        and all(hasattr(torch.ops.mkldnn, name) for name in names)
    )
