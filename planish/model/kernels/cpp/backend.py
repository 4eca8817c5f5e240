"""The C++ backend: kernels for CPUs with AVX2 or AVX-512, which are compiled at first use.

Its matmuls and its attention are batch-invariant. torch computes what the kernels do not support:

- weights with an odd number of inputs
- adapters of linears whose sizes are not multiples of 16
- attention heads whose size is not a multiple of 16
- families of kernels that failed their self-test
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from planish.model.config import ModelConfig
from planish.model.delta_net import Recurrence, StateSegment
from planish.model.kernels.cpp import head as head_ops
from planish.model.kernels.cpp import ops
from planish.model.kernels.cpp.attention import (
    CppDecodeAttention,
    CppPrefillAttention,
    CppTreeAttention,
)
from planish.model.kernels.cpp.decode_pass import DecodeLayer, DecodePass
from planish.model.kernels.cpp.delta_net import (
    CppSequenceRecurrence,
    CppTreeRecurrence,
    supports_delta_net,
)
from planish.model.kernels.cpp.head import Float32Logits, HeadTable
from planish.model.kernels.cpp.matmul import (
    CppAdapterBatch,
    CppPackedAdapter,
    CppPackedModule,
    CppPackedWeight,
    Matrices,
    WeightArena,
    packed_size,
    supports_lora,
    supports_lora_forward,
    supports_matmul,
)
from planish.model.kernels.cpp.ops import StoringAttention
from planish.model.kernels.cpp.quantized_matmul import CppQuantizedWeight, supports_quantized
from planish.model.kernels.cpp.self_test import FAMILIES
from planish.model.kernels.interface import (
    AdapterBatch,
    Attend,
    DecoderWeights,
    ExactLogits,
    ForwardPass,
    HeadAdapters,
)
from planish.model.kernels.linear import (
    PackedLinear,
    PackedQuantizedWeight,
    PackedWeight,
    concatenate,
)
from planish.model.kernels.reference.backend import TorchBackend, TorchHeadAdapters
from planish.model.kernels.row_tiling import RowTiling
from planish.model.kv_cache import KVPools, PrefillSpan, SlotOwner
from planish.model.layers import DenseMLP, Layer
from planish.model.linears import (
    distinct_fused_modules,
    fused_modules,
    linear_shape,
    num_experts_of,
)
from planish.model.lora import (
    AdapterRange,
    AdapterStackRange,
    HeadAdapterRange,
    LoraLayout,
    LoraMatrices,
    LoraWeights,
    fused_module_names,
)
from planish.model.prefix_tree import MicroBatch
from planish.model.quantization import QuantizedWeight


class CppBackend(TorchBackend):
    """The backend for CPUs on which at least one family of the C++ kernels works."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: float32 or bfloat16. `device`: a CPU."""
        library = ops.load_library()
        assert library is not None
        families = {family for family in FAMILIES if ops.is_supported(family)}
        if not library.uses_amx:
            families.discard("amx")
        super().__init__(config, dtype, device)
        self.use_kernels(ops, families)
        if "swiglu" in self.families:
            self.geglu, self.geglu_backward = ops.geglu, ops.geglu_backward
            self.clamped_swiglu = ops.clamped_swiglu
            self.clamped_swiglu_backward = ops.clamped_swiglu_backward
        if "log_sum_exp" in self.families:
            self.log_sum_exp_backward = ops.log_sum_exp_backward
        # The routers of experts are float32 in a model of any dtype.
        self._arenas = {each: WeightArena() for each in {dtype, torch.float32}}
        self._quantized_arena = WeightArena()
        linears = [
            linear_shape(config, name) for names in distinct_fused_modules(config) for name in names
        ]
        self.packs_layer_adapters = supports_lora(linears, dtype)
        self.packs_head_adapters = supports_lora_forward(
            [(config.vocab_size, config.hidden_size)], dtype
        )
        self._supports_delta_net = config.delta_net is None or supports_delta_net(config.delta_net)
        self.attention_is_batch_invariant = ops.supports_attention(config.head_dim)
        if self.attention_is_batch_invariant:
            self.kv_dtype = dtype

    @property
    def name(self) -> str:
        """The kernels and their instruction set, such as "C++ kernels (AVX2)"."""
        return f"C++ kernels ({ops.instructions()}{', AMX' if 'amx' in self.families else ''})"

    @property
    def torch_families(self) -> frozenset[str]:
        """The families that torch computes, because they failed or do not support the model."""
        size = self.config.hidden_size
        supported = {
            "matmul": self.can_pack(size, size),
            "lora": self.packs_layer_adapters,
            "attention": self.attention_is_batch_invariant,
            "delta_net": self._supports_delta_net,
        }
        return frozenset(
            family
            for family in FAMILIES
            if family != "amx" and not (family in self.families and supported.get(family, True))
        )

    @property
    def uses_compiled_kernels(self) -> bool:
        """Whether the kernels compute all matmuls and the attention."""
        return self.torch_families.isdisjoint(("matmul", "lora", "attention"))

    # Matmuls with frozen weights

    def can_pack(self, fan_out: int, fan_in: int) -> bool:
        """Return whether the matmul kernel supports weights [fan_out, fan_in]."""
        return supports_matmul(fan_out, fan_in, self.dtype)

    def _pack_weight(self, weights: Sequence[Tensor], transposed: bool) -> PackedWeight | None:
        fan_out, fan_in, dtype = sum(map(len, weights)), weights[0].shape[1], weights[0].dtype
        shape = (fan_in, fan_out) if transposed else (fan_out, fan_in)
        if not supports_matmul(*shape, dtype):
            return super()._pack_weight(weights, transposed)
        return CppPackedWeight(concatenate(weights), self._arenas[dtype], transposed=transposed)

    def packs_dequantized(self, fan_out: int, fan_in: int, *, is_fp8: bool) -> bool:
        """Return whether quantized weights are dequantized once and packed in the model's dtype.

        This keeps matmuls batch-invariant if the kernel for quantized weights does not support
        their sizes, but the kernel for other weights does.
        """
        return super().packs_dequantized(fan_out, fan_in, is_fp8=is_fp8) or (
            self.can_pack(fan_out, fan_in) and not supports_quantized(fan_out, fan_in, self.dtype)
        )

    def _pack_quantized_weight(self, weights: Sequence[QuantizedWeight]) -> PackedQuantizedWeight:
        fan_out, fan_in = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        if not supports_quantized(fan_out, fan_in, self.dtype):
            return super()._pack_quantized_weight(weights)
        return CppQuantizedWeight(weights, self._quantized_arena)

    # LoRA

    def pack_adapter(
        self, targets: Sequence[LoraMatrices | None], *, is_head: bool = False
    ) -> CppPackedAdapter:
        """Return the matrices of all target modules, packed as panels at first use."""
        # Use the kernel for all target modules of all adapters or for none. Otherwise the kernel
        # of one adapter would depend on the other adapters in the batch, and results would not be
        # batch-invariant.
        use_kernel = is_head or self.packs_layer_adapters
        if is_head or not self.config.num_experts:
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
            num_experts_of(self.config, names)
            for layer in range(self.config.num_layers)
            for names in fused_modules(self.config, layer)
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
            is_head = entries[0].target == "lm_head"
            if (is_head or self.packs_layer_adapters) and supports_lora_forward(shapes, self.dtype):
                forward += num_experts * packed_size(lora_columns, fan_in)
                forward += num_experts * sum(packed_size(*shape) for shape in b_shapes)
                if supports_lora(shapes, self.dtype):
                    backward += num_experts * packed_size(fan_in, lora_columns)
                    backward += num_experts * sum(
                        packed_size(rank, fan_out) for fan_out, rank in b_shapes
                    )
        return forward, backward

    def adapter_batch(self, adapters: Sequence[AdapterRange | AdapterStackRange]) -> AdapterBatch:
        """Return an `AdapterBatch` that applies all adapters with one kernel call per module."""
        if not self.packs_layer_adapters:
            return super().adapter_batch(adapters)
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
            return super().adapter_batch(())
        return CppAdapterBatch(adapter_ranges, fused_module_names(self.config))

    # Forward pass

    def decode_pass(self, decoder: DecoderWeights) -> ForwardPass | None:
        """Return a forward pass that runs all layers in one native call.

        Return None if the kernels do not support all weights, all adapters and the attention, or if
        the model needs steps that only `Decoder.forward` implements.
        """
        config = self.config
        if (
            config.fused_projections
            or config.joint_qk_norm
            or not config.input_norms
            or config.rotary_dims is not None
            or config.query_scale_beta is not None
            or config.output_gate
            or config.delta_net is not None
        ):
            return None
        if not (
            self.packs_layer_adapters
            and self.attention_is_batch_invariant
            and "decode" in self.families
        ):
            return None
        if self.config.num_experts:
            return None  # The native pass has no experts.
        layers = [
            _decode_layer(layer, self.config.window(index))
            for index, layer in enumerate(decoder.layers)
        ]
        packed_layers = [layer for layer in layers if layer is not None]
        if len(packed_layers) < len(layers):
            return None
        decode_pass = DecodePass(
            layers=packed_layers,
            embedding=decoder.embedding,
            final_norm=decoder.final_norm,
            eps=config.rms_norm_eps,
            heads=(config.num_heads, config.num_kv_heads),
            intermediate_size=config.intermediate_size,
            uses_gelu=config.activation == "gelu_tanh",
            embedding_scale=decoder.embedding_scale,
        )

        def run(tokens: Tensor, positions: Tensor, attend: Attend, batch: AdapterBatch) -> Tensor:
            assert isinstance(attend, StoringAttention)
            adapters = batch if isinstance(batch, CppAdapterBatch) else None
            return decode_pass.forward(tokens, positions, attend.plan, adapters)

        return run

    # Head

    def head_adapters(
        self,
        adapter_ranges: Sequence[HeadAdapterRange],
        hidden: Tensor,
        lora_hidden: Tensor | None = None,
    ) -> HeadAdapters:
        """Return the head adapters of ranges of rows, applied by one kernel if possible."""
        return _CppHeadAdapters(self._row_tiling, adapter_ranges, hidden, lora_hidden)

    def top_logits(
        self,
        hidden: Tensor,
        head: PackedLinear,
        adapters: HeadAdapters | None,
        logits: Tensor,
        k: int,
        float32_logits: Tensor | None = None,
    ) -> ExactLogits:
        """Return the k largest logits of each row, recomputed in float32."""
        single = self._float32_logits_of(hidden, head, adapters)
        if single is None:
            return super().top_logits(hidden, head, adapters, logits, k, float32_logits)
        return single.top_k(logits, k, float32_logits)

    def token_logits(
        self,
        hidden: Tensor,
        head: PackedLinear,
        adapters: HeadAdapters | None,
        rows: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        """Return single logits [P], computed as float32 dot products."""
        single = self._float32_logits_of(hidden, head, adapters)
        if single is None:
            return super().token_logits(hidden, head, adapters, rows, tokens)
        return single.pair_logits(rows, tokens)

    def _float32_logits_of(
        self, hidden: Tensor, head: PackedLinear, adapters: HeadAdapters | None
    ) -> Float32Logits | None:
        if (
            self.dtype != torch.bfloat16
            or "sampling" not in self.families
            or not hidden.is_contiguous()
            or not head.weight.is_contiguous()
        ):
            return None
        if not isinstance(adapters, _CppHeadAdapters):
            return Float32Logits(hidden, head.weight, HeadTable(()), None)
        return Float32Logits(hidden, head.weight, adapters.table, adapters.hidden)

    # Attention

    def tree_attention(self, micro_batch: MicroBatch) -> Attend:
        """Return the attention of a micro-batch of the trainer, with gradients."""
        if not self.attention_is_batch_invariant:
            return super().tree_attention(micro_batch)
        return CppTreeAttention(micro_batch, self.config.windows)

    def prefill_attention(self, spans: Sequence[PrefillSpan]) -> Attend:
        """Return the causal attention of prompt rows, which stores their keys and values."""
        if not self.attention_is_batch_invariant:
            return super().prefill_attention(spans)
        return CppPrefillAttention(spans, self.config.windows)

    def tree_recurrence(self, micro_batch: MicroBatch) -> Recurrence | None:
        """Return the recurrence of a micro-batch of the trainer, with gradients."""
        config = self.config.delta_net
        if config is None or not self._supports_delta_net:
            return super().tree_recurrence(micro_batch)
        return CppTreeRecurrence(micro_batch, config, self.device)

    def sequence_recurrence(
        self, segments: Sequence[StateSegment], num_rows: int
    ) -> Recurrence | None:
        """Return the recurrence of rows that continue stored states, without gradients."""
        config = self.config.delta_net
        if config is None or not self._supports_delta_net:
            return super().sequence_recurrence(segments, num_rows)
        return CppSequenceRecurrence(segments, num_rows, config, self.device)

    def decode_attention(
        self,
        first_rows: dict[SlotOwner, int],
        prompt_pools: KVPools,
        sample_pools: KVPools,
        row_counts: Mapping[SlotOwner, int] | None = None,
    ) -> Attend:
        """Return the attention of a decoding step with new rows for each sample."""
        if not self.attention_is_batch_invariant:
            return super().decode_attention(first_rows, prompt_pools, sample_pools, row_counts)
        return CppDecodeAttention(
            first_rows, prompt_pools, sample_pools, self.config.windows, row_counts
        )

    # Sampling

    def sample(
        self,
        logits: Tensor,
        rows: Tensor | None,
        temperatures: Tensor,
        uniforms: Tensor,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sample one token from each row: tokens, int64 [N], and log-sum-exp [N]."""
        if "sampling" not in self.families or not logits.is_contiguous():
            return super().sample(logits, rows, temperatures, uniforms, allowed)
        rows = torch.arange(len(logits)) if rows is None else rows
        return head_ops.sample(logits, rows, temperatures, uniforms, allowed)

    def sample_from_weights(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Sample tokens [N, K] (see `Backend.sample_from_weights`). Every token is within the
        vocabulary.
        """
        if "sampling" not in self.families or not weights.is_contiguous():
            return super().sample_from_weights(weights, uniforms)
        return head_ops.sample_from_weights(weights, uniforms).clamp_(max=weights.shape[1] - 1)


class _CppHeadAdapters(TorchHeadAdapters):
    """The head adapters of ranges of rows, applied by one kernel if all of them are packed."""

    def __init__(
        self,
        tiling: RowTiling,
        adapter_ranges: Sequence[HeadAdapterRange],
        x: Tensor,
        lora_hidden: Tensor | None,
    ) -> None:
        self.table = HeadTable(
            [
                (
                    start,
                    stop,
                    lora.b_matrices[0].detach(),
                    cast("CppPackedModule | None", lora.packed),
                )
                for start, stop, lora in adapter_ranges
            ]
        )
        super().__init__(tiling, adapter_ranges, x, lora_hidden)

    def _lora_hidden(self, x: Tensor) -> Tensor:
        return (
            self.table.lora_hidden(x.contiguous())
            if self.table.is_supported
            else super()._lora_hidden(x)
        )

    def add_(self, logits: Tensor) -> None:
        """Add the adapters' part to `logits` [R, V], in place."""
        if self.table.is_supported:
            self.table.add_(self.hidden, logits)
        else:
            super().add_(logits)


def _decode_layer(layer: Layer, window: int | None) -> DecodeLayer | None:
    """Return the layer for the native forward pass, or None if a weight of it is not packed."""
    mlp = cast("DenseMLP", layer.mlp)
    weights: list[CppPackedWeight | CppQuantizedWeight | Tensor | None] = []
    for linear in (layer.qkv, layer.o, mlp.gate_up, mlp.down):
        packed = linear.packed
        if not isinstance(packed, CppPackedWeight | CppQuantizedWeight) or packed.address is None:
            return None
        weights += [packed, linear.bias]
    # The native pass needs all weights of a layer in one form, either quantized or not.
    if len({type(weights[i]) for i in range(0, len(weights), 2)}) > 1:
        return None
    norms = (layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
    output_norms = (layer.attn_output_norm, layer.mlp_output_norm)
    rope = (layer.rope.cos, layer.rope.sin)
    return DecodeLayer(*norms, *output_norms, *rope, window or 0, *weights)  # type: ignore[arg-type]
