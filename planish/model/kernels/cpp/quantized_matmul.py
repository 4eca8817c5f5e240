"""Matmuls with quantized weights by the C++ kernels (src/quantized.h).

The kernels read packed codes and dequantize one tile at a time. The forward and the backward pass
use the same packed codes. The results have the same bits as those of `CppPackedWeight` with the
dequantized weights.

Shapes: T rows, `in` and `out` columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from planish.model.architecture.weight_sizes import NF4_BLOCK_SIZE
from planish.model.kernels.cpp import ops
from planish.model.kernels.cpp.matmul import PANEL_WIDTH, WeightArena, supports_matmul
from planish.model.layers.quantization import (
    MXFP4_VALUES,
    NF4_VALUES,
    Int8Weight,
    Mxfp4Weight,
    Nf4Weight,
    QuantizedWeight,
    dynamic_values,
    mxfp4_scales,
)

_GROUP = 256
_QuantizedRecord = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("scheme", "n", "k", "codes", "scales", "values", "scale_codes", "scale_values"),
            *("scale_scales", "offsets", "first_blocks"),
        )
    ]
)
"""`struct QuantizedWeight` of src/quantized.h, whose fields are numbers and addresses."""
_SCHEMES = {Int8Weight: 1, Nf4Weight: 2, Mxfp4Weight: 3}


def supports_quantized(fan_out: int, fan_in: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel supports quantized weights [fan_out, fan_in] in matmuls of this
    dtype.

    `fan_out`: the outputs of all linears that one matmul computes.
    """
    return (
        fan_out % 16 == 0
        and fan_in % 32 == 0
        and supports_matmul(fan_out, fan_in, dtype)
        and supports_matmul(fan_in, fan_out, dtype)
    )


class CppQuantizedWeight:
    """The quantized weights [out, in] of linears that read the same input, packed as panels."""

    is_batch_invariant = True
    kernel_weights: Sequence[QuantizedWeight] = ()

    def __init__(self, weights: Sequence[QuantizedWeight], arena: WeightArena) -> None:
        """`arena`: the arena of the codes. All weights must have the same scheme."""
        self._fan_out = sum(weight.shape[0] for weight in weights)
        self._fan_in = weights[0].shape[1]
        scheme = type(weights[0])
        if scheme is Int8Weight:
            self._tensors = _int8(cast("Sequence[Int8Weight]", weights), arena)
        elif scheme is Nf4Weight:
            self._tensors = _nf4(cast("Sequence[Nf4Weight]", weights), arena)
        else:
            self._tensors = _mxfp4(cast("Sequence[Mxfp4Weight]", weights), arena)
        self._record = np.zeros(1, _QuantizedRecord)
        self._record["scheme"] = _SCHEMES[scheme]
        self._record["n"], self._record["k"] = self._fan_out, self._fan_in
        for name, tensor in self._tensors.items():
            self._record[name] = tensor.data_ptr()

    @property
    def unpack(self) -> Callable[[], Tensor] | None:
        """None, because no caller needs the unpacked weights."""
        return None

    @property
    def nbytes(self) -> int:
        """The size of the codes and scales in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def address(self) -> int:
        """The address of the weight's record, for kernels that run several matmuls in one call."""
        return self._record.ctypes.data

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T plus the bias [out]: [T, out]. `x`: [T, in]."""
        return self._product(x, bias, self._fan_out, transposed=False)

    def matmul_backward(self, grad: Tensor) -> Tensor:
        """Return grad @ weight: [T, in]. `grad`: [T, out]."""
        return self._product(grad, None, self._fan_in, transposed=True)

    def _product(self, x: Tensor, bias: Tensor | None, columns: int, *, transposed: bool) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(x.shape[0], columns)
        arguments = (self.address, int(transposed), x, bias, out, len(out))
        ops.call("quantized_matmul", x.dtype, *arguments)
        return out


def _int8(weights: Sequence[Int8Weight], arena: WeightArena) -> dict[str, Tensor]:
    codes = torch.cat([weight.codes for weight in weights])
    return {
        "codes": _pack_codes(codes.view(len(codes), -1, 2), arena),
        "scales": torch.cat([weight.scales for weight in weights]),
    }


def _nf4(weights: Sequence[Nf4Weight], arena: WeightArena) -> dict[str, Tensor]:
    codes = torch.cat([weight.codes for weight in weights])
    blocks = [weight.scale_codes.numel() for weight in weights]
    # Blocks of different weights never share a group of scales. So the blocks of each weight are
    # numbered from a multiple of the group size. Then block // _GROUP is the index of the group.
    groups = [0, *(-(-count // _GROUP) for count in blocks)]
    starts = torch.tensor(groups).cumsum(0) * _GROUP
    first_blocks = [
        start + torch.arange(weight.shape[0]) * (weight.shape[1] // NF4_BLOCK_SIZE)
        for start, weight in zip(starts[:-1], weights, strict=True)
    ]
    return {
        # The kernel expects the code of the first of two inputs in the lower four bits.
        "codes": _pack_codes(((codes >> 4) | (codes << 4))[..., None], arena),
        "values": torch.tensor(NF4_VALUES),
        "scale_codes": _pack_codes(
            torch.cat([weight.scale_codes for weight in weights])[..., None]
        ),
        "scale_values": dynamic_values(),
        "scale_scales": torch.cat([weight.scale_scales for weight in weights]),
        "offsets": torch.cat([weight.offset.expand(weight.shape[0]) for weight in weights]),
        "first_blocks": torch.cat(first_blocks),
    }


def _mxfp4(weights: Sequence[Mxfp4Weight], arena: WeightArena) -> dict[str, Tensor]:
    codes = torch.cat([weight.codes for weight in weights])
    exponents = torch.cat([weight.exponents for weight in weights])
    return {
        "codes": _pack_codes(codes[..., None], arena),
        "values": torch.tensor(MXFP4_VALUES),
        "scale_codes": _pack_codes(exponents[..., None]),
        "scale_values": mxfp4_scales(),
    }


def _pack_codes(codes: Tensor, arena: WeightArena | None = None) -> Tensor:
    """Return codes [out, pairs, n] as consecutive panels of 64 outputs, each [pairs, 64, n].

    The last panel has fewer outputs if `out` is not a multiple of 64.
    """
    size = codes.numel()
    flat = codes.new_empty(size) if arena is None else arena.take(size, codes.dtype)
    panel_pairs = zip(
        flat.split(PANEL_WIDTH * codes[0].numel()), codes.split(PANEL_WIDTH), strict=True
    )
    for panel, panel_codes in panel_pairs:
        panel.view(codes.shape[1], len(panel_codes), codes.shape[2]).copy_(
            panel_codes.transpose(0, 1)
        )
    return flat
