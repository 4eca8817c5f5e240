"""The Triton backend: kernels for GPUs, which are compiled at first use.

torch computes the matmuls with frozen weights, except those of decoding steps with quantized
weights. It also computes what the kernels do not support: unusual head sizes, attention windows and
sinks, gated delta nets, GeGLU, experts, and families that failed their self-test. In deterministic
mode torch computes attention and LoRA too, because the order of additions of these kernels depends
on the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from planish.model.config import ModelConfig
from planish.model.kernels.interface import Attend
from planish.model.kernels.linear import PackedQuantizedWeight
from planish.model.kernels.reference.backend import TorchBackend
from planish.model.kernels.triton.families import FAMILIES, supported_families
from planish.model.kernels.triton.tree_attention import TritonTreeAttention
from planish.model.prefix_tree import MicroBatch
from planish.model.quantization import QuantizedWeight


class TritonBackend(TorchBackend):
    """The backend for GPUs. Tests run it on a CPU, where Triton interprets the kernels."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        families: Collection[str],
    ) -> None:
        """`families`: the families of kernels that passed their self-test for this model."""
        # Triton is absent on machines without a GPU.
        kernels: Any = import_module("planish.model.kernels.triton.elementwise_kernels")
        families = set(families).intersection(supported_families(config))
        super().__init__(config, dtype, device)
        self.use_kernels(kernels, families)
        if {"norms", "rope"} <= families:
            # One kernel normalizes and rotates all heads, because launches take longer than the
            # work.
            self.qk_norm_rope = kernels.qk_norm_rope
        self._module = kernels
        self.kv_dtype = dtype

    @property
    def name(self) -> str:
        """The name of the kernels."""
        return "Triton kernels"

    @property
    def torch_families(self) -> frozenset[str]:
        """The families that torch computes, because they failed or do not support the model."""
        return frozenset(FAMILIES) - self.families

    @property
    def supports_graph_runner(self) -> bool:
        """Whether the sampler can use the runner of cuda_graph_runner.py with these kernels.

        This requires the families "attention" and "lora", and no batch invariance.
        """
        return self.tiling is None and {"attention", "lora"} <= self.families

    def _pack_quantized_weight(self, weights: Sequence[QuantizedWeight]) -> PackedQuantizedWeight:
        """Return the weights for the kernels of decoding steps. In deterministic mode, torch
        computes all rows.
        """
        kernels: Any = import_module("planish.model.kernels.triton.quantized_kernels")
        if (
            self.tiling is not None
            or "quantized" not in self.families
            or not kernels.supports(weights)
        ):
            return super()._pack_quantized_weight(weights)
        found: PackedQuantizedWeight = kernels.QuantizedCodes(weights, self.dtype)
        return found

    def tree_attention(self, micro_batch: MicroBatch) -> Attend:
        """Return the attention of the trainer. torch computes it in deterministic mode."""
        if self.tiling is not None or "tree attention" not in self.families:
            return super().tree_attention(micro_batch)
        return TritonTreeAttention(micro_batch, self.device)

    def sample_from_weights(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Sample tokens [N, K] at uniform numbers. The kernel supports only K = 1."""
        if "sampling" not in self.families or uniforms.shape[1] != 1:
            return super().sample_from_weights(weights, uniforms)
        found: Tensor = self._module.sample(weights, uniforms.squeeze(1))
        return found.unsqueeze(1)
