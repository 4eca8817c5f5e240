"""All operations of one base model on one device, composed of parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from planish.model.architecture.config import ModelConfig
from planish.model.device import Device
from planish.model.kernels.interface.parts import (
    Activations,
    Attention,
    DecodePasses,
    DecoderWeights,
    ForwardPass,
    Head,
    LogSumExp,
    Lora,
    Matmuls,
    Norms,
    QkNormRope,
    Recurrences,
    Rope,
    Sampling,
)
from planish.model.layers.expert_pairs import ExpertKernels
from planish.model.layers.lora import LoraLayout, LoraWeights
from planish.model.layers.row_tiling import RowTiling
from planish.model.sequences.kv_cache import KVSpec


@dataclass(frozen=True)
class Parts:
    """The parts of a backend. Each computes some of the operations, with torch or with kernels."""

    matmuls: Matmuls
    lora: Lora
    norms: Norms
    rope: Rope
    qk_norm_rope: QkNormRope
    activations: Activations
    attention: Attention
    recurrences: Recurrences
    head: Head
    log_sum_exp: LogSumExp
    sampling: Sampling
    decode_passes: DecodePasses | None = None
    expert_kernels: ExpertKernels | None = None
    """The kernels for all experts of a layer. None: torch computes one expert after another."""


@dataclass(frozen=True)
class KernelUse:
    """The compiled kernels that a backend uses."""

    name: str = "torch"
    """The kernels, such as "C++ kernels (AVX512_BF16)" or "torch"."""
    families: frozenset[str] = frozenset()
    """The families of compiled kernels in use."""
    torch_families: frozenset[str] = frozenset()
    """The families of compiled kernels that torch replaces for this model."""
    uses_compiled_kernels: bool = False
    """Whether C++ kernels compute all matmuls and the attention.

    These kernels are batch-invariant: they add in the same order for every batch.
    """
    supports_graph_runner: bool = False
    """Whether the sampler can use the runner of cuda_graph_runner.py with these kernels."""


class Backend:
    """The operations of one base model on one device, in one dtype.

    Each operation is a method of a part, whose Protocol in parts.py documents it. `choose.py`
    chooses the parts, one by one.
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    """The dtype of weights and matmuls."""
    tiling: RowTiling | None
    """The row counts that make torch's matmuls batch-invariant. None: these matmuls may depend on
    the batch.
    """
    workspace_bytes: int
    """The memory of a decoding step in addition to its activations and logits."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        tiling: RowTiling | None,
        parts: Parts,
        use: KernelUse,
        workspace_bytes: int,
    ) -> None:
        """`parts`: made for the same model, device, dtype and tiling. `use`: what they use."""
        self.config, self.dtype, self.device, self.tiling = config, dtype, device, tiling
        self.workspace_bytes = workspace_bytes
        self.parts, self._use = parts, use
        self.name, self.families, self.torch_families = use.name, use.families, use.torch_families
        self.uses_compiled_kernels = use.uses_compiled_kernels
        self.supports_graph_runner = use.supports_graph_runner
        is_gpu = Device(device).is_gpu
        self.uses_main_memory = not is_gpu
        """Whether tensors are in main memory, which is the case on a CPU.

        By default, each memory limit has a fixed maximum on a CPU. On a GPU the limits are shares of
        the free memory.
        """
        self.logits_are_exact = is_gpu and tiling is None
        """Whether the sampler may return the logits of `base_logits` as they are.

        This is the case on a GPU without batch invariance, where logits are computed in float32.
        Otherwise the sampler recomputes the logit of each sampled token with `token_logits`.
        """

        # The operations are attributes of the instance. A call then costs no more than a call of
        # the part's own method, which matters in a decoding step of a small model.
        matmuls, lora = parts.matmuls, parts.lora
        self.needs_adjacent_weights = matmuls.needs_adjacent_weights
        self.weight_copies = matmuls.weight_copies
        self.can_pack, self.pack = matmuls.can_pack, matmuls.pack
        self.pack_quantized = matmuls.pack_quantized
        self.packs_dequantized = matmuls.packs_dequantized
        self.matmul, self.matmul_backward = matmuls.matmul, matmuls.matmul_backward

        self.packs_layer_adapters = lora.packs_layer_adapters
        self.packs_head_adapters = lora.packs_head_adapters
        self.pack_adapter, self.packed_adapter_sizes = lora.pack_adapter, lora.packed_adapter_sizes
        self.can_stack, self.adapter_batch = lora.can_stack, lora.adapter_batch
        self.add_lora_, self.lora_backward_ = lora.add_lora_, lora.lora_backward_

        self.rms_norm, self.rms_norm_backward = parts.norms.rms_norm, parts.norms.rms_norm_backward
        self.rope, self.qk_norm_rope = parts.rope.rope, parts.qk_norm_rope.qk_norm_rope
        activations = parts.activations
        self.swiglu, self.swiglu_backward = activations.swiglu, activations.swiglu_backward
        self.geglu, self.geglu_backward = activations.geglu, activations.geglu_backward
        self.clamped_swiglu = activations.clamped_swiglu
        self.clamped_swiglu_backward = activations.clamped_swiglu_backward

        attention, recurrences = parts.attention, parts.recurrences
        self.kv_dtype = attention.kv_dtype
        self.attention_is_batch_invariant = attention.attention_is_batch_invariant
        self.pool_class = attention.pool_class
        self.tree_attention = attention.tree_attention
        self.prefill_attention = attention.prefill_attention
        self.decode_attention = attention.decode_attention
        self.tree_recurrence = recurrences.tree_recurrence
        self.sequence_recurrence = recurrences.sequence_recurrence

        self.expert_kernels = parts.expert_kernels

        head, log_sum_exp, sampling = parts.head, parts.log_sum_exp, parts.sampling
        self.logits_dtype, self.head_rows = head.logits_dtype, head.head_rows
        self.training_logits_dtype = head.training_logits_dtype
        self.base_logits, self.head_adapters = head.base_logits, head.head_adapters
        self.top_logits, self.token_logits = head.top_logits, head.token_logits
        self.log_sum_exp = log_sum_exp.log_sum_exp
        self.log_sum_exp_backward = log_sum_exp.log_sum_exp_backward
        self.log_sum_exp_backward_ = log_sum_exp.log_sum_exp_backward_
        self.sample, self.filter_ = sampling.sample, sampling.filter_
        self.sample_from_weights = sampling.sample_from_weights

    @property
    def num_dequantized_weights(self) -> int:
        """The number of quantized weights that are packed dequantized (see `Matmuls`)."""
        return self.parts.matmuls.num_dequantized_weights

    @property
    def kv_spec(self) -> KVSpec:
        """The shape, dtype and device of the keys and values of one position."""
        return KVSpec.of(self.config, self.kv_dtype, self.device)

    def decode_pass(self, decoder: DecoderWeights) -> ForwardPass | None:
        """Return a faster forward pass for decoding steps, or None (see `DecodePasses`)."""
        passes = self.parts.decode_passes
        return None if passes is None else passes.decode_pass(decoder)

    def lora_weights(
        self, layout: LoraLayout, master: Tensor, requires_grad: bool = False
    ) -> LoraWeights:
        """Return the compute copy of one version of an adapter (see `LoraWeights`)."""
        return LoraWeights(layout, master, self, requires_grad)

    def with_parts(self, parts: Parts) -> Backend:
        """Return a backend for the same model with other parts."""
        given = (self.config, self.dtype, self.device, self.tiling)
        return Backend(*given, parts, self._use, self.workspace_bytes)
