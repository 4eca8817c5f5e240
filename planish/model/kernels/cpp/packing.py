"""Frozen weights in the layouts of the C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planish.model.kernels.cpp.matmul import CppPackedWeight, WeightArena, supports_matmul
from planish.model.kernels.cpp.quantized_matmul import CppQuantizedWeight, supports_quantized
from planish.model.kernels.interface.parts import WeightPacker
from planish.model.layers.linear import PackedQuantizedWeight, PackedWeight, concatenate
from planish.model.layers.quantization import QuantizedWeight


class CppPacker:
    """Packs frozen weights for the C++ kernels (see `WeightPacker`)."""

    def __init__(self, dtype: torch.dtype, fallback: WeightPacker) -> None:
        """`dtype`: the dtype of the model. `fallback`: packs what the kernels do not support."""
        self._dtype, self._fallback = dtype, fallback
        # The routers of experts are float32 in a model of any dtype.
        self._arenas = {each: WeightArena() for each in {dtype, torch.float32}}
        self._quantized_arena = WeightArena()

    def can_pack(self, fan_out: int, fan_in: int) -> bool:
        """Return whether the matmul kernel supports weights [fan_out, fan_in]."""
        return supports_matmul(fan_out, fan_in, self._dtype)

    def pack(self, weights: Sequence[Tensor], transposed: bool) -> PackedWeight | None:
        """Return fused weights as panels, or as the fallback packs them."""
        fan_out, fan_in, dtype = sum(map(len, weights)), weights[0].shape[1], weights[0].dtype
        shape = (fan_in, fan_out) if transposed else (fan_out, fan_in)
        if not supports_matmul(*shape, dtype):
            return self._fallback.pack(weights, transposed)
        return CppPackedWeight(concatenate(weights), self._arenas[dtype], transposed=transposed)

    def packs_dequantized(self, fan_out: int, fan_in: int, *, is_fp8: bool) -> bool:
        """Return whether quantized weights are dequantized once and packed in the model's dtype.

        This keeps matmuls batch-invariant if the kernel for quantized weights does not support
        their sizes, but the kernel for other weights does.
        """
        return self._fallback.packs_dequantized(fan_out, fan_in, is_fp8=is_fp8) or (
            self.can_pack(fan_out, fan_in) and not supports_quantized(fan_out, fan_in, self._dtype)
        )

    def pack_quantized(self, weights: Sequence[QuantizedWeight]) -> PackedQuantizedWeight:
        """Return the codes in the layout of the kernel that reads them, if it supports them."""
        fan_out, fan_in = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        if not supports_quantized(fan_out, fan_in, self._dtype):
            return self._fallback.pack_quantized(weights)
        return CppQuantizedWeight(weights, self._quantized_arena)
