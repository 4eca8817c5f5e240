"""Matmuls with frozen weights: padded to batch-invariant row counts, in the layout of a packer."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from planish.model.device import Device
from planish.model.kernels.interface.parts import WeightPacker
from planish.model.layers.linear import (
    DequantizedWeights,
    OneDnnWeight,
    PackedLinear,
    PackedQuantizedWeight,
    PackedWeight,
    QuantizedLinear,
    concatenate,
    onednn_packs_bfloat16,
)
from planish.model.layers.quantization import Fp8Weight, QuantizedWeight
from planish.model.layers.row_tiling import ANY_ROWS, RowTilings


class FrozenMatmuls:
    """Matmuls with frozen weights (see `Matmuls`), in the layouts of a `WeightPacker`.

    Matmuls with weights that a kernel has packed are batch-invariant. The rows of all others are
    padded.
    """

    def __init__(
        self, packer: WeightPacker, dtype: torch.dtype, device: torch.device, tilings: RowTilings
    ) -> None:
        """`dtype`: the dtype of the model."""
        is_gpu = Device(device).is_gpu
        self.needs_adjacent_weights = is_gpu
        self.weight_copies = 3 if not is_gpu and dtype.itemsize == 2 else 1
        self.num_dequantized_weights = 0
        self.can_pack, self.packs_dequantized = packer.can_pack, packer.packs_dequantized
        self._packer, self._dtype, self._tilings = packer, dtype, tilings

    def pack(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] = (None,),
        *,
        keep_unpacked: bool = True,
    ) -> PackedLinear:
        """Join linears that read the same input, and return them as one packed linear."""
        return PackedLinear(
            weights,
            biases,
            packer=self._packer.pack,
            are_adjacent=self.needs_adjacent_weights,
            keep_unpacked=keep_unpacked,
        )

    def pack_quantized(
        self, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None]
    ) -> PackedLinear:
        """Return linears that read the same input, with quantized weights, as one packed linear."""
        fan_out, fan_in = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        is_fp8 = isinstance(weights[0], Fp8Weight)
        if not self.packs_dequantized(fan_out, fan_in, is_fp8=is_fp8):
            return QuantizedLinear(weights, biases, self._packer.pack_quantized(weights))
        self.num_dequantized_weights += sum(prod(weight.shape) for weight in weights)

        def restore() -> list[Tensor]:
            return [weight.dequantize(self._dtype) for weight in weights]

        return PackedLinear(
            restore(), biases, packer=self._packer.pack, keep_unpacked=False, restore=restore
        )

    def matmul(self, x: Tensor, linear: PackedLinear, *, training: bool = False) -> Tensor:
        """Return x @ weights.T plus the bias: [T, out], without gradients."""
        tiling = ANY_ROWS if linear.is_batch_invariant else self._tilings.of(training=training)
        return tiling.run(linear.matmul, x)

    def matmul_backward(self, grad: Tensor, linear: PackedLinear) -> Tensor:
        """Return grad @ weights, the gradient of the input: [T, in]. `grad`: [T, out]."""
        return linear.matmul_backward(grad)


class TorchPacker:
    """Packs weights for torch (see `WeightPacker`): bf16 weights on a CPU for oneDNN."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: the dtype of the model."""
        is_gpu = Device(device).is_gpu
        self._dtype, self._reads_fp8 = dtype, is_gpu
        self._packs = not is_gpu and dtype == torch.bfloat16 and onednn_packs_bfloat16()

    def can_pack(self, fan_out: int, fan_in: int) -> bool:
        """Return False, because torch computes the matmuls."""
        return False

    def pack(self, weights: Sequence[Tensor], transposed: bool) -> PackedWeight | None:
        """Return the weights packed for oneDNN, or None."""
        if not self._packs or weights[0].dtype != self._dtype:
            return None
        whole = concatenate(weights)
        return OneDnnWeight(whole.t() if transposed else whole)

    def packs_dequantized(self, fan_out: int, fan_in: int, *, is_fp8: bool) -> bool:
        """Return whether the weights are fp8 on a CPU, where no kernel reads fp8."""
        return is_fp8 and not self._reads_fp8

    def pack_quantized(self, weights: Sequence[QuantizedWeight]) -> PackedQuantizedWeight:
        """Return the codes as they are. torch dequantizes them for each matmul."""
        return DequantizedWeights(weights, self._dtype, self.pack)
