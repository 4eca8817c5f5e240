"""The addresses of the quantized experts of a layer, for kernels that read the codes of all of them.

Shapes: N experts, out, in: outputs and inputs of one weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planish.model.layers.quantization import (
    Fp8Weight,
    Int8Weight,
    Mxfp4Weight,
    Nf4Weight,
    QuantizedWeight,
)

FIELDS = 4
"""The number of addresses of a weight; those after its last tensor are 0."""
_CODE_ALIGNMENT = 16
"""The codes begin at addresses that are multiples of this number of bytes."""
_INPUTS_OF_A_TILE = 64
"""The inputs of a tile of 8-bit weights, which must share a scale."""
_SCHEMES: dict[type[QuantizedWeight], str] = {
    Int8Weight: "int8",
    Fp8Weight: "fp8",
    Nf4Weight: "nf4",
    Mxfp4Weight: "mxfp4",
}


@dataclass(frozen=True, eq=False)
class QuantizedExperts:
    """The same linear of each expert of a layer, with quantized weights."""

    weights: tuple[tuple[QuantizedWeight, ...], ...]
    """The weights [out, in] of each expert, which read the same input. All have one layout."""
    addresses: Tensor
    """int64 [N, parts, FIELDS]: the addresses of the codes, and of the scales or the scale codes.
    In nf4, the addresses of the scales of the scales and of their offset follow.
    """

    @classmethod
    def of(cls, weights: Sequence[Sequence[QuantizedWeight]]) -> QuantizedExperts | None:
        """Return the experts with these weights, or None if a kernel cannot read them.

        A kernel needs one scheme, one shape and one layout of the scales for all weights, codes
        that begin at multiples of 16 bytes, and no scale that ends within a tile.
        """
        each = [weight for expert in weights for weight in expert]
        tensors = [_tensors(weight) for weight in each]
        if len({_layout(weight) for weight in each}) != 1:
            return None
        if len({len(expert) for expert in weights}) != 1:
            return None
        first = each[0]
        if isinstance(first, Fp8Weight):
            width = first.block[1]
            if width < first.shape[1] and width % _INPUTS_OF_A_TILE:
                return None
        if any(weight.codes.data_ptr() % _CODE_ALIGNMENT for weight in each):
            return None
        found = [[x.data_ptr() for x in own] + [0] * (FIELDS - len(own)) for own in tensors]
        addresses = torch.tensor(found, device=first.codes.device)
        return cls(tuple(map(tuple, weights)), addresses.view(len(weights), -1, FIELDS))

    @property
    def weight(self) -> QuantizedWeight:
        """The first weight of the first expert."""
        return self.weights[0][0]

    @property
    def parts(self) -> int:
        """The number of weights of an expert."""
        return self.addresses.shape[1]

    @property
    def scheme(self) -> str:
        """The scheme of the weights: int8, fp8, nf4 or mxfp4."""
        return _SCHEMES[type(self.weight)]


def _tensors(weight: QuantizedWeight) -> tuple[Tensor, ...]:
    if isinstance(weight, Nf4Weight):
        return weight.codes, weight.scale_codes, weight.scale_scales, weight.offset
    if isinstance(weight, Mxfp4Weight):
        return weight.codes, weight.exponents
    assert isinstance(weight, Int8Weight | Fp8Weight)
    return weight.codes, weight.scales


def _layout(weight: QuantizedWeight) -> tuple[object, ...]:
    block = weight.block if isinstance(weight, Fp8Weight) else None
    return type(weight), weight.shape, block, tuple(x.stride() for x in _tensors(weight))
