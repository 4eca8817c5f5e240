"""The parts of a backend that compute with Triton kernels.

torch computes the matmuls with frozen weights, except those of experts, and those of few rows with
quantized weights. It also computes what the kernels do not support: unusual head sizes, limits of
scores, gated delta nets, GeGLU, and families that failed their self-test. In deterministic mode
torch computes all matmuls, attention and LoRA, because the order of additions of these kernels
depends on the batch.

Triton is absent on machines without a GPU. So the modules of the kernels are imported only when a
part is made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from planish.model.architecture.config import ModelConfig
from planish.model.kernels.interface.parts import (
    Activations,
    Attend,
    Attention,
    ExactLogits,
    SingleLogits,
    WeightPacker,
)
from planish.model.kernels.reference.adapter_stacks import ROWS
from planish.model.kernels.reference.token_sampling import WeightFilter, sample_from_weights
from planish.model.kernels.triton.sampling_attention import DecodeTables, GpuPrefill, PoolBases
from planish.model.kernels.triton.tree_attention import TritonTreeAttention
from planish.model.layers.expert_pairs import ExpertKernels
from planish.model.layers.linear import PackedQuantizedWeight, PackedWeight
from planish.model.layers.quantization import QuantizedWeight
from planish.model.sequences.kv_cache import KVPools, KVSpec, PrefillSpan, SlotOwner
from planish.model.sequences.prefix_tree import MicroBatch

_MIN_DECODE_ROWS = 64
"""The minimum number of rows for which `TritonAttention` allocates the tables of decoding steps."""


def elementwise_kernels() -> Any:
    """Return the module of the kernels for norms, RoPE and SwiGLU."""
    return import_module("planish.model.kernels.triton.elementwise_kernels")


def head_kernels() -> Any:
    """Return the module of the kernels for log-sum-exp, sampling and single logits."""
    return import_module("planish.model.kernels.triton.head_kernels")


def weight_filter() -> WeightFilter:
    """Return the function of the kernel for top_k, top_p and min_p."""
    kernels: Any = import_module("planish.model.kernels.triton.filter_kernels")
    found: WeightFilter = kernels.filter_
    return found


def single_logits() -> SingleLogits:
    """Return the function of the kernel for single logits."""
    found: SingleLogits = head_kernels().token_logits
    return found


def expert_kernels() -> ExpertKernels:
    """Return the module of the kernels for mixtures of experts."""
    found: Any = import_module("planish.model.kernels.triton.expert_kernels")
    return found  # type: ignore[no-any-return]


class TritonPacker:
    """Packs quantized weights for Triton kernels (see `WeightPacker`)."""

    def __init__(
        self, dtype: torch.dtype, fallback: WeightPacker, *, is_batch_invariant: bool
    ) -> None:
        """`dtype`: the dtype of the model. `fallback`: packs weights that are not quantized.

        `is_batch_invariant`: whether torch must compute all matmuls, with dequantized weights.
        """
        self._kernels: Any = import_module("planish.model.kernels.triton.quantized_kernels")
        self._dtype, self._fallback = dtype, fallback
        self._buffer = self._kernels.WeightBuffer(dtype)
        self._max_rows = 0 if is_batch_invariant else self._kernels.MAX_ROWS

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
        """Return the codes for the kernels."""
        found: PackedQuantizedWeight = self._kernels.QuantizedCodes(
            weights, self._dtype, self._buffer, self._max_rows, packer=self._fallback.pack
        )
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
    """The attention of trainer and sampler (see `Attention`).

    The sampler's kernels need tables of the slots. The runner of cuda_graph_runner.py has its own.
    A sampler without this runner, as for a mixture of experts, uses the tables of this class.
    """

    attention_is_batch_invariant = False

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        families: Collection[str],
        fallback: Attention,
    ) -> None:
        """`families`: the families of kernels in use; `fallback` does the work of the others."""
        self._config, self._device, self._fallback = config, device, fallback
        self.kv_dtype, self.pool_class = fallback.kv_dtype, fallback.pool_class
        self._has_tree, self._has_sampling = "tree attention" in families, "attention" in families
        self._decode_tables: DecodeTables | None = None

    def tree_attention(self, micro_batch: MicroBatch) -> Attend:
        """Return the attention of a micro-batch of the trainer, with gradients."""
        if not self._has_tree or micro_batch.blocks:
            return self._fallback.tree_attention(micro_batch)
        return TritonTreeAttention(micro_batch, self._device, self._config.attention_windows)

    def prefill_attention(self, spans: Sequence[PrefillSpan]) -> Attend:
        """Return the causal attention of prompt rows, which stores their keys and values."""
        if not self._has_sampling or not spans or any(span.blocks for span in spans):
            return self._fallback.prefill_attention(spans)
        config = self._config
        return GpuPrefill(spans, self._pool_bases, config.num_heads, config.attention_windows)

    def decode_attention(
        self,
        first_rows: dict[SlotOwner, int],
        prompt_pools: KVPools,
        sample_pools: KVPools,
        row_counts: Mapping[SlotOwner, int] | None = None,
    ) -> Attend:
        """Return the attention of a decoding step, valid until the next call."""
        given = (first_rows, prompt_pools, sample_pools, row_counts)
        if not self._has_sampling or not first_rows:
            return self._fallback.decode_attention(*given)
        counts = row_counts or {}
        # Padding rows may follow the last sample.
        num_rows = max(row + counts.get(sample, 1) for sample, row in first_rows.items()) + ROWS
        if self._decode_tables is None or self._decode_tables.max_rows < num_rows:
            max_rows = max(_MIN_DECODE_ROWS, 1 << (num_rows - 1).bit_length())
            config = self._config
            self._decode_tables = DecodeTables(
                self._pool_bases, max_rows, config.num_heads, config.attention_windows
            )
        self._decode_tables.fill(*given)
        return self._decode_tables

    @cached_property
    def _pool_bases(self) -> PoolBases:
        spec = KVSpec.of(self._config, self.kv_dtype, self._device)
        return PoolBases(spec, self._config.max_context)


class TritonLogSumExp:
    """The log-sum-exp of logits and its gradient (see `LogSumExp`)."""

    def __init__(self) -> None:
        kernels = head_kernels()
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
        of_rows = None if exact is None else (exact[0][rows], exact[1][rows])
        self.log_sum_exp_backward_(grad, temperature, log_total, first, targets, grads, of_rows)
        return grad


class TritonWeightSampler:
    """Samples tokens from weights (see `WeightSampler`)."""

    def __init__(self) -> None:
        self._sample = head_kernels().sample

    def __call__(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Sample tokens [N, K] at uniform numbers. The kernel supports only K = 1."""
        if uniforms.shape[1] != 1:
            return sample_from_weights(weights, uniforms)
        found: Tensor = self._sample(weights, uniforms.squeeze(1))
        return found.unsqueeze(1)
