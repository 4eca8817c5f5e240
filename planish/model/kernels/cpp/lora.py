"""Adapters with the C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from planish.model.architecture.config import ModelConfig
from planish.model.architecture.linears import (
    distinct_group_shapes,
    head_name,
    num_experts_of,
    target_modules,
)
from planish.model.kernels.cpp.matmul import (
    CppAdapterBatch,
    CppPackedAdapter,
    Matrices,
    packed_size,
    supports_lora,
    supports_lora_forward,
)
from planish.model.kernels.interface.parts import AdapterBatch, Lora
from planish.model.layers.lora import (
    AdapterRange,
    AdapterStackRange,
    LoraLayout,
    LoraMatrices,
    LoraWeights,
    fused_module_names,
)


class CppLora:
    """Matmuls with adapters (see `Lora`), for the target modules that the kernels support."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, fallback: Lora) -> None:
        """`dtype`: the dtype of the model. `fallback`: computes what the kernels do not support."""
        self._config, self._dtype, self._fallback = config, dtype, fallback
        linears = [shape for group in distinct_group_shapes(config) for shape in group]
        self.packs_layer_adapters = supports_lora(linears, dtype)
        self.packs_head_adapters = supports_lora_forward(
            [(config.vocab_size, config.hidden_size)], dtype
        )
        # The fallback multiplies by packed matrices too.
        self.add_lora_, self.lora_backward_ = fallback.add_lora_, fallback.lora_backward_
        self.can_stack = fallback.can_stack

    def pack_adapter(
        self, targets: Sequence[LoraMatrices | None], *, is_head: bool = False
    ) -> CppPackedAdapter:
        """Return the matrices of all target modules, packed as panels at first use."""
        # Use the kernel for all target modules of all adapters or for none. Otherwise the kernel
        # of one adapter would depend on the other adapters in the batch, and results would not be
        # batch-invariant.
        use_kernel = is_head or self.packs_layer_adapters
        if is_head or not self._config.num_experts:
            matrices = [None if lora is None else (lora.a, lora.b_matrices) for lora in targets]
            return CppPackedAdapter(matrices, use_kernel=use_kernel)
        # Each expert of a layer is a target module of its own for the kernel.
        matrices, first_entries = list[Matrices | None](), list[int]()
        for lora, num_experts in zip(targets, self._num_experts_per_target, strict=True):
            first_entries.append(len(matrices))
            if lora is None:
                matrices += [None] * max(num_experts, 1)
            elif num_experts:
                a, b_matrices = lora.a.detach(), [b.detach() for b in lora.b_matrices]
                matrices += [(a[i], [b[i] for b in b_matrices]) for i in range(num_experts)]
            else:
                matrices.append((lora.a, lora.b_matrices))
        return CppPackedAdapter(matrices, use_kernel=use_kernel, first_entries=first_entries)

    @property
    def _num_experts_per_target(self) -> list[int]:
        """The number of experts of each target module of all layers; 0 for a single linear."""
        return [
            num_experts_of(self._config, names)
            for layer in range(self._config.num_layers)
            for names in target_modules(self._config, layer)
        ]

    def packed_adapter_sizes(self, layout: LoraLayout) -> tuple[int, int]:
        """Return the number of elements of an adapter's panels: (forward, backward)."""
        forward = backward = 0
        for entries in layout.target_modules:
            *leading_dims, _, fan_in = entries[0].shape
            num_experts = leading_dims[0] if leading_dims else 1
            b_shapes = [entry.shape[-2:] for entry in entries if entry.is_b]
            lora_columns = sum(entry.shape[-2] for entry in entries if not entry.is_b)
            shapes = [(fan_out, fan_in) for fan_out, _ in b_shapes]
            is_head = entries[0].target == head_name(self._config)
            if (is_head or self.packs_layer_adapters) and supports_lora_forward(
                shapes, self._dtype
            ):
                forward += num_experts * packed_size(lora_columns, fan_in)
                forward += num_experts * sum(packed_size(*shape) for shape in b_shapes)
                if supports_lora(shapes, self._dtype):
                    backward += num_experts * packed_size(fan_in, lora_columns)
                    backward += num_experts * sum(
                        packed_size(rank, fan_out) for fan_out, rank in b_shapes
                    )
        return forward, backward

    def adapter_batch(self, adapters: Sequence[AdapterRange | AdapterStackRange]) -> AdapterBatch:
        """Return an `AdapterBatch` that applies all adapters with one kernel call per module."""
        if not self.packs_layer_adapters:
            return self._fallback.adapter_batch(adapters)
        packed = [
            (rows.start, rows.stop, cast("LoraWeights", rows.weights).packed)
            for rows in adapters
            if rows.weights is not None
        ]
        adapter_ranges = [
            (start, stop, cast("CppPackedAdapter", own)) for start, stop, own in packed
        ]
        adapter_ranges = [
            adapter_range for adapter_range in adapter_ranges if not adapter_range[2].is_empty
        ]
        if not adapter_ranges:
            return self._fallback.adapter_batch(())
        return CppAdapterBatch(adapter_ranges, fused_module_names(self._config))
