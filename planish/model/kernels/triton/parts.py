"""The parts of a backend that compute with Triton kernels.

torch computes the matmuls with frozen weights, except those of decoding steps with quantized
weights. It also computes what the kernels do not support: unusual head sizes, attention windows and
sinks, gated delta nets, GeGLU, experts, and families that failed their self-test. In deterministic
mode torch computes attention and LoRA too, because the order of additions of these kernels depends
on the batch.

Triton is absent on machines without a GPU. So the modules of the kernels are imported only when a
part is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from planish.model.kernels.interface import (
    Activations,
    Attend,
    Attention,
    ExactLogits,
    WeightPacker,
)
from planish.model.kernels.linear import PackedQuantizedWeight, PackedWeight
from planish.model.kernels.reference.token_sampling import sample_from_weights
from planish.model.kernels.triton.tree_attention import TritonTreeAttention
from planish.model.kv_cache import KVPools, PrefillSpan, SlotOwner
from planish.model.prefix_tree import MicroBatch
from planish.model.quantization import QuantizedWeight


def elementwise_kernels() -> Any:
    """Return the module of the kernels for norms, RoPE, SwiGLU, log-sum-exp and sampling."""
    return import_module("planish.model.kernels.triton.elementwise_kernels")


class TritonPacker:
    """Packs quantized weights for the kernels of decoding steps (see `WeightPacker`)."""

    def __init__(self, dtype: torch.dtype, fallback: WeightPacker) -> None:
        """`dtype`: the dtype of the model. `fallback`: packs what the kernels do not support."""
        self._kernels: Any = import_module("planish.model.kernels.triton.quantized_kernels")
        self._dtype, self._fallback = dtype, fallback

    def can_pack(self, fan_out: int, fan_in: int) -> bool:
        """Return False, because torch computes the matmuls."""
        return False

    def pack(self, weights: Sequence[Tensor], transposed: bool) -> PackedWeight | None:
        """Return the weights as the fallback packs them."""
        return self._fallback.pack(weights, transposed)

    def packs_dequantized(self, fan_out: int, fan_in: int, *, is_fp8: bool) -> bool:
        """Return whether quantized weights are dequantized once and packed in the model's dtype."""
        return self._fallback.packs_dequantized(fan_out, fan_in, is_fp8=is_fp8)

    def pack_quantized(self, weights: Sequence[QuantizedWeight]) -> PackedQuantizedWeight:
        """Return the codes for the kernels, if they support them."""
        if not self._kernels.supports(weights):
            return self._fallback.pack_quantized(weights)
        found: PackedQuantizedWeight = self._kernels.QuantizedCodes(weights, self._dtype)
        return found


class TritonActivations:
    """The gated activations of MLPs (see `Activations`): kernels for SwiGLU only."""

    def __init__(self, fallback: Activations) -> None:
        """`fallback`: computes the other activations."""
        kernels = elementwise_kernels()
        self.swiglu, self.swiglu_backward = kernels.swiglu, kernels.swiglu_backward
        self.geglu, self.geglu_backward = fallback.geglu, fallback.geglu_backward
        self.clamped_swiglu = fallback.clamped_swiglu
        self.clamped_swiglu_backward = fallback.clamped_swiglu_backward


class TritonAttention:
    """The attention of the trainer (see `Attention`).

    The sampler's attention kernels belong to the runner of cuda_graph_runner.py. A sampler without
    this runner uses the fallback.
    """

    attention_is_batch_invariant = False

    def __init__(self, device: torch.device, fallback: Attention) -> None:
        self._device, self._fallback = device, fallback
        self.kv_dtype = fallback.kv_dtype

    def tree_attention(self, micro_batch: MicroBatch) -> Attend:
        """Return the attention of a micro-batch of the trainer, with gradients."""
        return TritonTreeAttention(micro_batch, self._device)

    def prefill_attention(self, spans: Sequence[PrefillSpan]) -> Attend:
        """Return the fallback's attention of prompt rows."""
        return self._fallback.prefill_attention(spans)

    def decode_attention(
        self,
        first_rows: dict[SlotOwner, int],
        prompt_pools: KVPools,
        sample_pools: KVPools,
        row_counts: Mapping[SlotOwner, int] | None = None,
    ) -> Attend:
        """Return the fallback's attention of a decoding step."""
        return self._fallback.decode_attention(first_rows, prompt_pools, sample_pools, row_counts)


class TritonLogSumExp:
    """The log-sum-exp of logits and its gradient (see `LogSumExp`)."""

    def __init__(self) -> None:
        kernels = elementwise_kernels()
        self.log_sum_exp = kernels.log_sum_exp
        self.log_sum_exp_backward_ = kernels.log_sum_exp_backward_

    def log_sum_exp_backward(
        self,
        logits: Tensor,
        rows: Tensor,
        temperature: float,
        log_total: Tensor,
        first: Tensor,
        targets: Tensor,
        grads: Tensor,
        exact: ExactLogits | None = None,
    ) -> Tensor:
        """Return the gradient for some rows of `logits` [R, V]: [N, V]. `rows`: int64 [N]."""
        grad = logits[rows]
        self.log_sum_exp_backward_(grad, temperature, log_total, first, targets, grads, exact)
        return grad


class TritonWeightSampler:
    """Samples tokens from weights (see `WeightSampler`)."""

    def __init__(self) -> None:
        self._sample = elementwise_kernels().sample

    def __call__(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Sample tokens [N, K] at uniform numbers. The kernel supports only K = 1."""
        if uniforms.shape[1] != 1:
            return sample_from_weights(weights, uniforms)
        found: Tensor = self._sample(weights, uniforms.squeeze(1))
        return found.unsqueeze(1)
