"""LoRA matmuls in torch, for one adapter and for stacks of adapters.

Shapes: T rows, n linears that read one input, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from planish.model.architecture.config import ModelConfig
from planish.model.kernels.interface.parts import AdapterBatch
from planish.model.layers.expert_pairs import TokenExpertPairs
from planish.model.layers.lora import (
    AdapterRange,
    AdapterStackRange,
    LoraLayout,
    LoraMatrices,
    PackedAdapter,
)
from planish.model.layers.row_tiling import RowTilings


class TorchLora:
    """Matmuls with adapters (see `Lora`), which torch computes.

    Only matrices that a kernel has packed (`LoraMatrices.packed`) are multiplied by that kernel.
    """

    def __init__(self, config: ModelConfig, tilings: RowTilings) -> None:
        self.packs_layer_adapters = self.packs_head_adapters = False
        self._config, self._tilings = config, tilings

    def pack_adapter(
        self, targets: Sequence[LoraMatrices | None], *, is_head: bool = False
    ) -> PackedAdapter | None:
        """Return None, because torch multiplies by the unpacked matrices."""
        return None

    def packed_adapter_sizes(self, layout: LoraLayout) -> tuple[int, int]:
        """Return (0, 0), because torch does not pack adapters."""
        return 0, 0

    def can_stack(self, rank: int) -> bool:
        """Return whether one batched matmul may apply several adapters of this rank."""
        if self._config.num_experts:
            return False  # Adapters of experts are applied expert by expert.
        return self._tilings.can_stack(rank)

    def adapter_batch(self, adapters: Sequence[AdapterRange | AdapterStackRange]) -> AdapterBatch:
        """Return adapters that are applied to one range of rows after another."""
        return TorchAdapterBatch(self, adapters)

    def add_lora_(
        self,
        x: Tensor,
        out: Tensor,
        sizes: Sequence[int],
        lora: LoraMatrices,
        *,
        training: bool = True,
    ) -> Tensor:
        """Add the LoRA outputs of one adapter for all rows to `out` [T, sum(sizes)]."""
        if training and lora.packed is not None:
            return lora.packed.add_(x, out, sizes)
        tiling = self._tilings.of(training=training)
        return tiling.run(lambda x, out: add_lora_(x, out, sizes, lora), x, out, rank=lora.rank)

    def lora_backward_(
        self,
        grad: Tensor,
        x: Tensor,
        lora_hidden: Tensor,
        grad_x: Tensor | None,
        sizes: Sequence[int],
        lora: LoraMatrices,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the gradients of A and the Bs; add the gradient of the input to `grad_x`."""
        if lora.packed is None or not lora.packed.has_backward:
            return lora_backward_(grad, x, lora_hidden, grad_x, sizes, lora)
        grad_hidden = lora.packed.backward_(grad, grad_x, sizes)
        return lora.packed.gradients(x, lora_hidden, grad, grad_hidden, sizes)


class TorchAdapterBatch:
    """The adapters of ranges of rows, applied one after another."""

    def __init__(
        self, lora: TorchLora, adapter_ranges: Sequence[AdapterRange | AdapterStackRange]
    ) -> None:
        self._lora, self._adapter_ranges = lora, adapter_ranges

    def _targets(
        self, layer: int, module: str
    ) -> Iterator[tuple[AdapterRange | AdapterStackRange, LoraMatrices]]:
        """Yield the ranges of rows whose adapter trains the target module, with its matrices."""
        for row_range in self._adapter_ranges:
            lora = (
                None
                if row_range.weights is None
                else row_range.weights.layers[layer].matrices_of(module)
            )
            if lora is not None:
                yield row_range, lora

    def add_(self, x: Tensor, out: Tensor, sizes: Sequence[int], layer: int, module: str) -> None:
        for row_range, lora in self._targets(layer, module):
            row_slice = slice(row_range.start, row_range.stop)
            if isinstance(row_range, AdapterStackRange):
                add_lora_stack_(x[row_slice], out[row_slice], sizes, lora)
            else:
                self._lora.add_lora_(x[row_slice], out[row_slice], sizes, lora, training=False)

    def add_expert_(
        self, x: Tensor, out: Tensor, pairs: TokenExpertPairs, layer: int, module: str
    ) -> None:
        for adapter_range, lora in self._targets(layer, module):
            assert isinstance(adapter_range, AdapterRange)  # can_stack returns False
            start, stop = adapter_range.start, adapter_range.stop
            if pairs.kernels is not None:
                (b,) = lora.b_matrices
                pairs.kernels.add_lora_(x, out, lora.a, b, pairs.device_ranges(start, stop))
                continue
            for expert, part in pairs.expert_slices_of(start, stop):
                own = lora.expert(expert)
                self._lora.add_lora_(x[part], out[part], [out.shape[1]], own, training=False)


def add_lora_(x: Tensor, out: Tensor, sizes: Sequence[int], lora: LoraMatrices) -> Tensor:
    """Add the LoRA outputs of n linears to `out` [T, sum(sizes)]; return x @ A.T [T, n * r].

    `x`: [T, in]. Each B multiplies its share of the LoRA hidden states x @ A.T.
    """
    hidden = x @ lora.a.t()
    add_outputs_(hidden, out, sizes, lora.b_matrices)
    return hidden


def add_outputs_(
    hidden: Tensor, out: Tensor, sizes: Sequence[int], b_matrices: Sequence[Tensor]
) -> None:
    """Add the products of LoRA hidden states [T, n * r] and the Bs to `out` [T, sum(sizes)]."""
    parts = zip(out.split(list(sizes), 1), hidden.chunk(len(sizes), 1), b_matrices, strict=True)
    for part, share, b in parts:
        part.addmm_(share, b.t())


def add_lora_stack_(x: Tensor, out: Tensor, sizes: Sequence[int], stack: LoraMatrices) -> None:
    """Add the LoRA outputs of k stacked adapters to `out`; each adapter has 1 / k of the rows."""
    k = stack.a.shape[0]
    shares = torch.bmm(x.unflatten(0, (k, -1)), stack.a.transpose(1, 2)).chunk(len(sizes), dim=-1)
    for part, share, b in zip(out.split(list(sizes), 1), shares, stack.b_matrices, strict=True):
        part.unflatten(0, (k, -1)).baddbmm_(share, b.transpose(1, 2))


def lora_backward_(
    grad: Tensor,
    x: Tensor,
    lora_hidden: Tensor,
    grad_x: Tensor | None,
    sizes: Sequence[int],
    lora: LoraMatrices,
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of A and of the Bs; add the gradient of the input to `grad_x`.

    See `Lora.lora_backward_` for the arguments.
    """
    parts = grad.split(list(sizes), 1)
    grad_hidden = torch.cat([part @ b for part, b in zip(parts, lora.b_matrices, strict=True)], 1)
    if grad_x is not None:
        grad_x.addmm_(grad_hidden, lora.a)
    shares = lora_hidden.chunk(len(lora.b_matrices), 1)
    b_grads = [part.t() @ share for part, share in zip(parts, shares, strict=True)]
    return grad_hidden.t() @ x, b_grads
