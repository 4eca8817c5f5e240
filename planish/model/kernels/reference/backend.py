"""The torch backend: the reference implementation of every operation, for any device.

With a `RowTiling` it is batch-invariant: it pads and splits the rows of its matmuls itself.

Shapes: see `planish.model.kernels.backend`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.model.config import ModelConfig
from planish.model.delta_net import Recurrence, StateSegment
from planish.model.expert_pairs import TokenExpertPairs
from planish.model.kernels.device import Device
from planish.model.kernels.interface import (
    MIN_WEIGHT,
    AdapterBatch,
    Attend,
    DecoderWeights,
    ExactLogits,
    ForwardPass,
    HeadAdapters,
)
from planish.model.kernels.linear import (
    DequantizedWeights,
    OneDnnWeight,
    PackedLinear,
    PackedQuantizedWeight,
    PackedWeight,
    QuantizedLinear,
    concatenate,
    onednn_packs_bfloat16,
)
from planish.model.kernels.reference.attention import TorchTreeAttention
from planish.model.kernels.reference.delta_net import SequenceRecurrence, TreeRecurrence
from planish.model.kernels.reference.lora import add_lora_, add_lora_stack_, lora_backward_
from planish.model.kernels.reference.sampling_attention import (
    ATTENDED_ROWS,
    DecodeAttention,
    PrefillAttention,
)
from planish.model.kernels.reference.token_sampling import (
    SORTING_BYTES,
    filter_,
    filter_sorted_,
    keep_allowed_,
    sample_from_weights,
)
from planish.model.kernels.row_tiling import RowTiling
from planish.model.kv_cache import KVPools, KVSpec, PrefillSpan, SlotOwner
from planish.model.lora import (
    AdapterRange,
    AdapterStackRange,
    HeadAdapterRange,
    LoraLayout,
    LoraMatrices,
    PackedAdapter,
    padded_lora_columns,
)
from planish.model.prefix_tree import MicroBatch
from planish.model.quantization import Fp8Weight, QuantizedWeight
from planish.types import SamplingParams

# Number of vocabulary entries that `_chunk_sums` sums in float32 before it changes to float64.
_SUM_CHUNK = 128
# Number of vocabulary entries per block in the search for the largest logits.
_BLOCK = 32
# Number of rows converted to float32 at a time, on a CPU and on a GPU. Larger buffers do not fit
# into a CPU's cache and take four times as long.
_FLOAT32_ROWS = (16, 256)
# Maximum number of gathered weight entries in memory at a time, on a CPU and on a GPU. It is larger
# on a GPU because each part costs twenty kernel launches and a synchronization.
_GATHERED_ENTRIES = (1 << 18, 1 << 24)
_REPLACED = {
    "norms": ("rms_norm_backward",),
    "rope": ("rope",),
    "swiglu": ("swiglu", "swiglu_backward"),
    "log_sum_exp": ("log_sum_exp", "log_sum_exp_backward_"),
}
"""Maps families of kernels to the operations that `use_kernels` replaces. The C++ and the Triton
functions of these families have the same signatures.
"""
_ANY_ROWS = RowTiling()
# Number of rows per matmul with the head, on a CPU and on a GPU. Fewer rows would not fill a GPU.
_HEAD_ROWS = (256, 2048)


class TorchBackend:
    """The operations of one base model on one device, in one dtype, computed by torch.

    The compiled backends inherit from this class. All tensors are on `device`. Methods whose names
    end in `_` change an argument in place.
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    """The dtype of weights and matmuls."""
    tiling: RowTiling | None
    """The row counts that make torch's matmuls batch-invariant. None: these matmuls may depend on
    the batch.
    """
    families: frozenset[str]
    """The families of compiled kernels in use."""
    packs_layer_adapters: bool
    """Whether a compiled kernel applies the adapters of the layers."""
    packs_head_adapters: bool
    """Whether a compiled kernel applies the adapters of the head."""
    attention_is_batch_invariant: bool
    logits_dtype: torch.dtype
    """The dtype in which logits are computed, and stored for the backward pass."""
    kv_dtype: torch.dtype
    """The dtype of stored keys and values."""
    logits_are_exact: bool
    """Whether the sampler may return the logits of `base_logits` as they are.

    This is the case on a GPU without batch invariance, where logits are computed in float32.
    Otherwise the sampler recomputes the logit of each sampled token with `token_logits`.
    """
    needs_adjacent_weights: bool
    """Whether `pack` needs the weights of several linears as adjacent views of one tensor."""
    weight_copies: int
    """The number of copies of the weights in memory.

    With 16-bit weights on a CPU there are three: the memory-mapped file, the weights packed for the
    forward pass, and the weights packed for the backward pass.
    """
    uses_main_memory: bool
    """Whether tensors are in main memory, which is the case on a CPU.

    The operating system provides a page of main memory only when the page is first used. So on a
    CPU the KV slot of a sample grows with the sample, and a sample that ends early uses little
    memory. By default, each memory limit has a fixed maximum on a CPU. On a GPU the limits are
    shares of the free memory.
    """
    workspace_bytes: int
    """The memory of a decoding step in addition to its activations and logits."""
    num_dequantized_weights: int
    """The number of weights that the checkpoint or `quantize` quantizes, but that are packed
    dequantized (see `pack_quantized`).
    """
    head_rows: int
    """The number of rows whose logits the trainer computes at a time.

    If the backward pass recomputes the logits, only the logits of these rows are in memory.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.families = frozenset()
        self.packs_layer_adapters = self.packs_head_adapters = self.attention_is_batch_invariant = (
            False
        )
        self.make_batch_invariant(None)
        on_gpu = self.needs_adjacent_weights = Device(device).is_gpu
        accum_dtype = torch.promote_types(dtype, torch.float32)
        self.logits_dtype = accum_dtype if on_gpu else dtype
        # torch's bf16 matmuls on a CPU would round scores and weighted sums to bf16.
        self.kv_dtype = dtype if on_gpu else accum_dtype
        self.num_dequantized_weights = 0
        self.head_rows = _HEAD_ROWS[on_gpu]
        self._float32_rows, self._gathered_entries = (
            _FLOAT32_ROWS[on_gpu],
            _GATHERED_ENTRIES[on_gpu],
        )
        self.weight_copies = 3 if not on_gpu and dtype.itemsize == 2 else 1
        self.uses_main_memory = not on_gpu
        self.workspace_bytes = SORTING_BYTES if on_gpu else _score_bytes(config)
        self._filter_ = filter_sorted_ if on_gpu else filter_
        self._packs = not on_gpu and dtype == torch.bfloat16 and onednn_packs_bfloat16()

    @property
    def name(self) -> str:
        """The kernels, such as "C++ kernels (AVX512_BF16)" or "torch"."""
        return "torch"

    @property
    def torch_families(self) -> frozenset[str]:
        """The families of compiled kernels that torch replaces for this model.

        It is empty here, because this class uses no compiled kernels of its own.
        """
        return frozenset()

    @property
    def uses_compiled_kernels(self) -> bool:
        """Whether C++ kernels compute all matmuls and the attention.

        These kernels are batch-invariant: they add in the same order for every batch.
        """
        return False

    @property
    def supports_graph_runner(self) -> bool:
        """Whether the sampler can use the runner of cuda_graph_runner.py: not with torch."""
        return False

    @property
    def kv_spec(self) -> KVSpec:
        """The shape, dtype and device of the keys and values of one position."""
        return KVSpec.of(self.config, self.kv_dtype, self.device)

    def use_kernels(self, kernels: Any, families: Collection[str]) -> None:
        """Let the functions of the module `kernels` replace this backend's operations of the same
        names, in the given families.
        """
        self.families = frozenset(families)
        for family in _REPLACED.keys() & self.families:
            for name in _REPLACED[family]:
                setattr(self, name, getattr(kernels, name))
        if "norms" in self.families:
            self.rms_norm = partial(kernels.rms_norm, dtype=self.dtype)

    def make_batch_invariant(self, tiling: RowTiling | None) -> None:
        """Use these row counts for torch's matmuls from now on; None: any row counts."""
        self.tiling, self._row_tiling = tiling, tiling or _ANY_ROWS
        self.logits_are_exact = Device(self.device).is_gpu and tiling is None

    # Matmuls with frozen weights

    def can_pack(self, fan_out: int, fan_in: int) -> bool:
        """Return whether a compiled kernel multiplies by weights [fan_out, fan_in].

        Here it is False, because torch computes the matmuls.
        """
        return False

    def pack(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] = (None,),
        *,
        keep_unpacked: bool = True,
    ) -> PackedLinear:
        """Join linears that read the same input, and return them as one packed linear.

        `weights`: [out_i, in] each. `biases`: one bias per weight, or None for every weight.
        `keep_unpacked`: whether to keep unpacked float32 weights, so that `PackedLinear.weight`
        works. On a CPU, torch packs bf16 weights for oneDNN.
        """
        return PackedLinear(
            weights,
            biases,
            packer=self._pack_weight,
            are_adjacent=self.needs_adjacent_weights,
            keep_unpacked=keep_unpacked,
        )

    def _pack_weight(self, weights: Sequence[Tensor], transposed: bool) -> PackedWeight | None:
        if not self._packs or weights[0].dtype != self.dtype:
            return None
        whole = concatenate(weights)
        return OneDnnWeight(whole.t() if transposed else whole)

    def pack_quantized(
        self, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None]
    ) -> PackedLinear:
        """Return linears that read the same input, with quantized weights, as one packed linear.

        `weights`: [out_i, in] each, all of the same scheme. `biases`: as in `pack`. If
        `packs_dequantized`, the weights are packed in the model's dtype, and their codes are kept
        beside the packed weights.
        """
        fan_out, fan_in = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        if self.packs_dequantized(fan_out, fan_in, is_fp8=isinstance(weights[0], Fp8Weight)):
            self.num_dequantized_weights += sum(prod(weight.shape) for weight in weights)

            def restore() -> list[Tensor]:
                return [weight.dequantize(self.dtype) for weight in weights]

            return PackedLinear(
                restore(), biases, packer=self._pack_weight, keep_unpacked=False, restore=restore
            )
        return QuantizedLinear(weights, biases, self._pack_quantized_weight(weights))

    def packs_dequantized(self, fan_out: int, fan_in: int, *, is_fp8: bool) -> bool:
        """Return whether quantized weights are dequantized once and packed in the model's dtype.

        `fan_out`, `fan_in`: the outputs of all linears that one matmul computes, and their inputs.
        No kernel of a CPU reads fp8.
        """
        return is_fp8 and self.uses_main_memory

    def _pack_quantized_weight(self, weights: Sequence[QuantizedWeight]) -> PackedQuantizedWeight:
        """Return the weights in the layout of the matmuls' kernel. Torch uses the codes as they
        are.
        """
        return DequantizedWeights(weights, self.dtype, self._pack_weight)

    def matmul(self, x: Tensor, linear: PackedLinear, *, training: bool = False) -> Tensor:
        """Return x @ weights.T plus the bias: [T, out], without gradients.

        `x`: [T, in]. `training`: the rows are a micro-batch of the trainer. Such a matmul never
        uses fixed tiles, because they would be too slow for its many rows. The rows are padded for
        batch invariance.
        """
        tiling = _ANY_ROWS if linear.is_batch_invariant else self._tiling(training)
        return tiling.run(linear.matmul, x)

    def _tiling(self, training: bool) -> RowTiling:
        """Return the row tiling. Fixed tiles are too slow for the many rows of the trainer."""
        return _ANY_ROWS if training and self._row_tiling.tile else self._row_tiling

    def matmul_backward(self, grad: Tensor, linear: PackedLinear) -> Tensor:
        """Return grad @ weights, the gradient of the input: [T, in]. `grad`: [T, out]."""
        return linear.matmul_backward(grad)

    # LoRA

    def pack_adapter(
        self, targets: Sequence[LoraMatrices | None], *, is_head: bool = False
    ) -> PackedAdapter | None:
        """Return the matrices of all target modules, packed for the backend's kernel.

        Return None if torch computes all of them. `is_head`: the target is the head, not a layer.
        Here it is None, because torch multiplies by the unpacked matrices.
        """
        return None

    def packed_adapter_sizes(self, layout: LoraLayout) -> tuple[int, int]:
        """Return the number of elements of the packed copies of an adapter: (forward, backward).

        Here both are 0, because torch does not pack adapters.
        """
        return 0, 0

    def can_stack(self, rank: int) -> bool:
        """Return whether torch may apply several adapters of this rank with one batched matmul.

        Stacking must keep the required batch invariance.
        """
        if self.config.num_experts:
            return False  # Adapters of experts are applied expert by expert.
        return self.tiling is None or self.tiling.can_stack(rank)

    def adapter_batch(self, adapters: Sequence[AdapterRange | AdapterStackRange]) -> AdapterBatch:
        """Return an `AdapterBatch` of these adapters, each with the rows that it applies to.

        Torch applies them to one range of rows after another.
        """
        return _TorchAdapters(self, adapters)

    def add_lora_(
        self,
        x: Tensor,
        out: Tensor,
        sizes: Sequence[int],
        lora: LoraMatrices,
        *,
        training: bool = True,
    ) -> Tensor:
        """Add the LoRA outputs of one adapter for all rows to `out` [T, sum(sizes)].

        Return the LoRA hidden states [T, n * r], which `lora_backward_` needs. `x`: [T, in].
        `training`: whether the rows are a micro-batch of the trainer.
        """
        if training and lora.packed is not None:
            return lora.packed.add_(x, out, sizes)
        tiling = self._tiling(training)
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
        """Return the gradients of A and of the Bs, and add the gradient of the input to `grad_x`.

        `grad`: gradient of the output [T, sum(sizes)]. `x`, `lora_hidden`: input and result of
        `add_lora_`. `grad_x`: [T, in], or None if the gradient of the input is not needed.
        """
        if lora.packed is None or not lora.packed.has_backward:
            return lora_backward_(grad, x, lora_hidden, grad_x, sizes, lora)
        grad_hidden = lora.packed.backward_(grad, grad_x, sizes)
        return lora.packed.gradients(x, lora_hidden, grad, grad_hidden, sizes)

    # Norms, RoPE, SwiGLU and GeGLU

    def rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        *,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return x + residual, its RMSNorm in `dtype`, and the norm's scale per row.

        `x`: float32 [..., D]. `in_place`: `x` may be overwritten with the sum.
        """
        total = x
        if residual is not None:
            total = x.add_(residual) if in_place else x + residual
        scale = (
            torch.linalg.vector_norm(total, dim=-1, keepdim=True)
            .square_()
            .div_(total.shape[-1])
            .add_(eps)
            .rsqrt_()
        )
        return total, (total * scale).mul_(weight).to(self.dtype), scale

    def rms_norm_backward(
        self, grad: Tensor, total: Tensor, weight: Tensor, scale: Tensor, grad_total: Tensor | None
    ) -> Tensor:
        """Return the float32 gradient of `total`, the sum that `rms_norm` normed.

        `grad`: gradient of the normed output. `total`, `scale`: results of `rms_norm`.
        `grad_total`: the gradient of `total` from other uses than the norm, such as the residual
        connection; or None.
        """
        weighted_grad = grad.to(total.dtype) * weight
        mean_product = (
            torch.linalg.vecdot(weighted_grad, total)
            .unsqueeze(-1)
            .div_(total.shape[-1])
            .mul_(scale)
            .mul_(scale)
        )
        grad_x = weighted_grad.sub_(total * mean_product).mul_(scale)
        return grad_x if grad_total is None else grad_x.add_(grad_total)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        """Return x [T, H, E] rotated by the angles of `cos` and `sin` [T, 1, E/2].

        `inverse`: rotate by the negative angles. Torch rotates in float32 and rounds to the dtype
        of x.
        """
        sin = -sin if inverse else sin
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(
            x.dtype
        )

    def qk_norm_rope(
        self,
        qkv: Tensor,
        heads: tuple[int, int],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return q [T, Hq, E] and k [T, Hkv, E] of `qkv`, normed and rotated, without gradients.

        `qkv`: [T, (Hq + 2 * Hkv) * E]. `heads`: (Hq, Hkv). `norms`: weights [E] of the norms of q
        and k, or None for models without these norms.
        """
        q, k, _ = qkv.unflatten(-1, (-1, 2 * cos.shape[-1])).split([*heads, heads[1]], 1)
        if norms is not None:
            q, k = (
                self.rms_norm(x.float(), None, weight, eps, in_place=True)[1]
                for x, weight in zip((q, k), norms, strict=True)
            )
        return self.rope(q, cos, sin), self.rope(k, cos, sin)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up: [T, I]. `gate_up`: [T, 2 * I]."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def swiglu_backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """Return the gradient of `gate_up`: [T, 2 * I]."""
        gate, up = gate_up.chunk(2, -1)
        return torch.cat(
            [torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)], -1
        )

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up: [T, I]. `gate_up`: [T, 2 * I].

        GELU is the approximation by tanh.
        """
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def geglu_backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """Return the gradient of `gate_up`: [T, 2 * I]."""
        gate, up = gate_up.chunk(2, -1)
        grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        return torch.cat([grad_gate, F.gelu(gate, approximate="tanh").mul_(grad)], -1)

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """Return (up + 1) * gate * sigmoid(alpha * gate): [T, I].

        `gate_up`: [T, 2 * I], where the columns of gate and up alternate. Before the activation,
        the gate is clamped to at most `limit`, and up to between -limit and limit.
        """
        gate, up = _clamped(gate_up, limit)
        return (gate * torch.sigmoid(gate * alpha)).mul_(up + 1).to(gate_up.dtype)

    def clamped_swiglu_backward(
        self, grad: Tensor, gate_up: Tensor, alpha: float, limit: float
    ) -> Tensor:
        """Return the gradient of `gate_up`: [T, 2 * I], given that of the result: [T, I].

        Clamped numbers have the gradient 0.
        """
        gate, up = _clamped(gate_up, limit)
        gate_sigmoid, grad = torch.sigmoid(gate * alpha), grad.to(gate.dtype)
        activation_grad = gate_sigmoid * (1 + alpha * gate * (1 - gate_sigmoid))
        unclamped = gate_up.unflatten(-1, (-1, 2))
        grad_gate = (grad * (up + 1) * activation_grad).masked_fill_(unclamped[..., 0] > limit, 0.0)
        grad_up = (grad * gate * gate_sigmoid).masked_fill_(unclamped[..., 1].abs() > limit, 0.0)
        return torch.stack((grad_gate, grad_up), -1).flatten(-2).to(gate_up.dtype)

    # Head

    def base_logits(self, hidden: Tensor, head: PackedLinear, *, training: bool = False) -> Tensor:
        """Return the logits [R, V] of the base model in `logits_dtype`. `hidden`: [R, D].

        On a GPU, torch computes them in float32.
        """
        if self.logits_dtype == self.dtype:
            return self.matmul(hidden, head, training=training)

        def float32_matmul(hidden: Tensor) -> Tensor:
            return torch.mm(hidden, head.weight.t(), out_dtype=self.logits_dtype)

        return self._tiling(training).run(float32_matmul, hidden)

    def head_adapters(
        self,
        adapter_ranges: Sequence[HeadAdapterRange],
        hidden: Tensor,
        lora_hidden: Tensor | None = None,
    ) -> HeadAdapters:
        """Return the head adapters of ranges of rows of `hidden` [R, D].

        `lora_hidden`: the LoRA hidden states of these rows, if they are known. Torch applies the
        adapters to one range of rows after another.
        """
        return TorchHeadAdapters(self._row_tiling, adapter_ranges, hidden, lora_hidden)

    def top_logits(
        self,
        hidden: Tensor,
        head: PackedLinear,
        adapters: HeadAdapters | None,
        logits: Tensor,
        k: int,
        float32_logits: Tensor | None = None,
    ) -> ExactLogits:
        """Find the k largest `logits` of each row, and return them recomputed in float32.

        `float32_logits`: an optional float32 output [R, V]. It receives all logits, with the exact
        values at the returned tokens.
        """
        tokens = _top_tokens(logits, k)
        rows = torch.arange(hidden.shape[0], device=hidden.device).repeat_interleave(k)
        exact = self.token_logits(hidden, head, adapters, rows, tokens.flatten())
        exact = exact.view(tokens.shape)
        if float32_logits is not None:
            float32_logits.copy_(logits).scatter_(1, tokens, exact)
        return tokens, exact

    def token_logits(
        self,
        hidden: Tensor,
        head: PackedLinear,
        adapters: HeadAdapters | None,
        rows: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        """Return single logits [P] in float32 or wider.

        Each logit is its own dot product, so it is bitwise independent of the other pairs. Torch
        sums elementwise products.
        """
        out = torch.empty(rows.shape[0], dtype=_accum_dtype(hidden), device=hidden.device)
        for pair_slice in _spans(rows.shape[0], max(1, self._gathered_entries // hidden.shape[1])):
            x, weight = (
                hidden[rows[pair_slice]].to(out.dtype),
                head.weight[tokens[pair_slice]].to(out.dtype),
            )
            out[pair_slice] = (x * weight).sum(-1)
            if adapters is not None:
                adapters.add_single_(out[pair_slice], rows[pair_slice], tokens[pair_slice])
        return out

    def log_sum_exp(
        self,
        logits: Tensor,
        temperature: Tensor,
        exact: ExactLogits | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the log-sum-exp [R] of logits [R, V] / temperature [R], in float32 or wider.

        `exact`: values that replace some of the logits. `weights`: an optional float32 output
        [R, V], which may be `logits`. It receives exp(scaled logit - max of the row). Torch
        computes a few rows at a time.
        """
        if weights is not None:
            weights = weights if weights is logits else weights.copy_(logits)
            if exact is not None:
                weights.scatter_(1, *exact)
            return _log_sum_exp_(weights, temperature)
        totals = torch.empty(len(logits), dtype=_accum_dtype(logits), device=logits.device)
        for row_slice, scaled_logits in self._float32_logits(logits, exact):
            totals[row_slice] = _log_sum_exp_(scaled_logits, temperature[row_slice])
        return totals

    def log_sum_exp_backward_(
        self,
        logits: Tensor,
        temperature: float,
        log_total: Tensor,
        first: Tensor,
        targets: Tensor,
        grads: Tensor,
        exact: ExactLogits | None = None,
    ) -> None:
        """Overwrite logits [R, V] with the gradient of the loss sum(grads * logprobs).

        The logprobs are those of `targets` [P], and `grads` is [P]. The gradient is with respect to
        logits / temperature. Pairs first[r] .. first[r + 1] - 1 belong to row r, whose log-sum-exp
        is log_total[r]. Torch computes a few rows at a time.
        """
        rows = torch.arange(len(logits), device=logits.device)
        row_of_pair = rows.repeat_interleave(first.diff(), output_size=len(targets))
        row_grad = log_total.new_zeros(len(logits)).index_add_(0, row_of_pair, grads)
        for row_slice, logits_grad in self._float32_logits(logits, exact):
            logits_grad.div_(temperature).sub_(log_total[row_slice, None]).exp_().mul_(
                -row_grad[row_slice, None]
            )
            pairs = slice(*first[[row_slice.start, row_slice.stop]].tolist())
            logits_grad.index_put_(
                (row_of_pair[pairs] - row_slice.start, targets[pairs]),
                grads[pairs],
                accumulate=True,
            )
            logits[row_slice] = logits_grad

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
        """Return the gradient of `log_sum_exp_backward_` for some rows of `logits` [R, V]: [N, V].

        `rows`: int64 [N]. `logits` stays unchanged. `exact`: for all rows of `logits`. The other
        arguments are for `rows` only.
        """
        grad = logits[rows]
        exact_of_rows = None if exact is None else (exact[0][rows], exact[1][rows])
        self.log_sum_exp_backward_(
            grad, temperature, log_total, first, targets, grads, exact_of_rows
        )
        return grad

    def _float32_logits(
        self, logits: Tensor, exact: ExactLogits | None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the logits in float32 or wider with their exact values, a few rows at a time.

        All parts share one buffer, which fits into a CPU's cache. Each part
        is valid until the next part is requested.
        """
        rows, vocab = logits.shape
        size = (min(self._float32_rows, rows), vocab)
        buffer = torch.empty(size, dtype=_accum_dtype(logits), device=logits.device)
        for row_slice in _spans(rows, self._float32_rows):
            float32_logits = buffer[: row_slice.stop - row_slice.start].copy_(logits[row_slice])
            if exact is not None:
                float32_logits.scatter_(1, exact[0][row_slice], exact[1][row_slice])
            yield row_slice, float32_logits

    # Attention

    def decode_pass(self, decoder: DecoderWeights) -> ForwardPass | None:
        """Return a forward pass for decoding steps that is faster than `Decoder.forward`, or None
        if this backend has none.

        The attention passed to it must come from `decode_attention`, the adapters from
        `adapter_batch`. Torch has none.
        """
        return None

    def tree_attention(self, micro_batch: MicroBatch) -> Attend:
        """Return the attention of a micro-batch of the trainer, with gradients."""
        return TorchTreeAttention(micro_batch, self.device, windows=self.config.windows)

    def prefill_attention(self, spans: Sequence[PrefillSpan]) -> Attend:
        """Return the causal attention of prompt rows, which stores their keys and values."""
        return PrefillAttention(spans, self.config.windows)

    def tree_recurrence(self, micro_batch: MicroBatch) -> Recurrence | None:
        """Return the recurrence of a micro-batch of the trainer, with gradients.

        Return None if the model has no gated delta-net layers.
        """
        config = self.config.delta_net
        return None if config is None else TreeRecurrence(micro_batch, config, self.device)

    def sequence_recurrence(
        self, segments: Sequence[StateSegment], num_rows: int
    ) -> Recurrence | None:
        """Return the recurrence of batch rows that continue stored states, without gradients.

        `segments`: all rows of the batch except padding. `num_rows`: the rows of the batch.
        Return None if the model has no gated delta-net layers.
        """
        config = self.config.delta_net
        return (
            None if config is None else SequenceRecurrence(segments, num_rows, config, self.device)
        )

    def decode_attention(
        self,
        first_rows: dict[SlotOwner, int],
        prompt_pools: KVPools,
        sample_pools: KVPools,
        row_counts: Mapping[SlotOwner, int] | None = None,
    ) -> Attend:
        """Return the attention of a decoding step with new rows for each running sample.

        `first_rows`: the first batch row of each sample. Every sample in `sample_pools` has one.
        `row_counts`: the number of consecutive rows of each sample; 1 for samples that it does not
        contain.
        """
        query_rows = self.tiling.query_rows if self.tiling is not None else 1
        return DecodeAttention(
            first_rows,
            prompt_pools,
            sample_pools,
            query_rows,
            self.device,
            self.config.windows,
            row_counts,
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
        """Sample one token from each row, or from each row in `rows` [N].

        `logits`: float32 [R, V]. `temperatures`: [N]. `uniforms`: float64 [N]. `allowed`: the
        tokens that may be sampled, int32 [N, (V + 31) // 32], one bit per token, with bit 0 of word
        0 first.

        Return the tokens, int64 [N], and the log-sum-exp [N] of logits / temperature over the whole
        row, including tokens that are not allowed. The token is -1 if the weight of every allowed
        token is below MIN_WEIGHT.
        """
        weights = logits.clone() if rows is None else logits[rows]
        normalizer = self.log_sum_exp(weights, temperatures, weights=weights)
        if allowed is None:
            return self.sample_from_weights(weights, uniforms.unsqueeze(1)).squeeze(1), normalizer
        keep_allowed_(weights, allowed)
        tokens = self.sample_from_weights(weights, uniforms.unsqueeze(1)).squeeze(1)
        return tokens.masked_fill_(weights.amax(1) < MIN_WEIGHT, -1), normalizer

    def filter_(self, weights: Tensor, params: Sequence[SamplingParams]) -> None:
        """Zero the weights [N, V] that top_k, then top_p, then min_p exclude.

        The largest weight of each row must be 1.
        """
        self._filter_(weights, params)

    def sample_from_weights(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Sample K tokens from each row of unnormalized probabilities. Return them as [N, K].

        `weights`: the probabilities, float32 [N, V]. `uniforms`: uniform random numbers, float64
        [N, K]. Each token is the first one at which the cumulative sum of the row exceeds its
        uniform number times the row's total. The tokens of a row that is not finite are undefined.
        Every token is within the vocabulary.
        """
        # The tokens of a row that is not finite are undefined, but never outside the vocabulary.
        return sample_from_weights(weights, uniforms).clamp_(max=weights.shape[1] - 1)


class _TorchAdapters:
    """The adapters of ranges of rows, applied one after another."""

    def __init__(
        self, backend: TorchBackend, adapter_ranges: Sequence[AdapterRange | AdapterStackRange]
    ) -> None:
        self._backend, self._adapter_ranges = backend, adapter_ranges

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
                self._backend.add_lora_(x[row_slice], out[row_slice], sizes, lora, training=False)

    def add_expert_(
        self, x: Tensor, out: Tensor, pairs: TokenExpertPairs, layer: int, module: str
    ) -> None:
        for adapter_range, lora in self._targets(layer, module):
            assert isinstance(adapter_range, AdapterRange)  # can_stack returns False
            for expert, part in pairs.expert_slices_of(adapter_range.start, adapter_range.stop):
                own = lora.expert(expert)
                self._backend.add_lora_(x[part], out[part], [out.shape[1]], own, training=False)


class TorchHeadAdapters:
    """The head adapters of ranges of rows, applied one after another."""

    hidden: Tensor
    """The LoRA hidden states [R, r or more]."""

    def __init__(
        self,
        tiling: RowTiling,
        adapter_ranges: Sequence[HeadAdapterRange],
        x: Tensor,
        lora_hidden: Tensor | None,
    ) -> None:
        self._tiling, self._adapter_ranges = tiling, adapter_ranges
        self.hidden = self._lora_hidden(x) if lora_hidden is None else lora_hidden

    def _lora_hidden(self, x: Tensor) -> Tensor:
        ranks = [lora.rank for _, _, lora in self._adapter_ranges]
        width = max(map(padded_lora_columns, ranks), default=0)
        # The C++ kernels of single logits read an even number of columns and multiply those after
        # the rank by zero, which gives NaN if they are not finite.
        hidden = x.new_zeros(x.shape[0], width)
        for start, stop, lora in self._adapter_ranges:
            a, rows = lora.a.t(), x[start:stop]
            hidden[start:stop, : lora.rank] = self._tiling.run(
                lambda rows, a=a: rows @ a, rows, rank=lora.rank
            )
        return hidden

    def add_(self, logits: Tensor) -> None:
        """Add the adapters' part to `logits` [R, V], in place."""
        for start, stop, lora in self._adapter_ranges:

            def add(hidden: Tensor, logits: Tensor, lora: LoraMatrices = lora) -> Tensor:
                lora_hidden, b = hidden[:, : lora.rank], lora.b_matrices[0].t()
                if logits.dtype == hidden.dtype:
                    logits.addmm_(lora_hidden, b)
                else:
                    logits.add_(torch.mm(lora_hidden, b, out_dtype=logits.dtype))
                return hidden

            self._tiling.run(add, self.hidden[start:stop], logits[start:stop], rank=lora.rank)

    def add_single_(self, out: Tensor, rows: Tensor, tokens: Tensor) -> None:
        """Add the adapters' part to single logits `out` [P] of `rows` and `tokens` [P]."""
        for start, stop, lora in self._adapter_ranges:
            own_pairs = ((rows >= start) & (rows < stop)).nonzero().squeeze(1)
            lora_hidden, b = (
                self.hidden[rows[own_pairs], : lora.rank],
                lora.b_matrices[0][tokens[own_pairs]],
            )
            out[own_pairs] += (lora_hidden.to(out.dtype) * b.to(out.dtype)).sum(-1)


def _score_bytes(config: ModelConfig) -> int:
    """Return the bytes of the attention scores of all threads of a CPU."""
    group = config.num_heads // config.num_kv_heads
    return 4 * ATTENDED_ROWS * group * config.max_context * (os.cpu_count() or 1)


def _accum_dtype(x: Tensor) -> torch.dtype:
    """Return float32, or the dtype of `x` if that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def _clamped(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return gate and up [T, I] of a clamped SwiGLU, clamped, in float32 or wider."""
    gate, up = gate_up.to(_accum_dtype(gate_up)).unflatten(-1, (-1, 2)).unbind(-1)
    return gate.clamp(max=limit), up.clamp(-limit, limit)


def _spans(total: int, size: int) -> list[slice]:
    """Return slices of at most `size` that cover range(total)."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _log_sum_exp_(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return the log-sum-exp [R] of logits / temperature.

    `logits` [R, V] are overwritten with exp(scaled logit - max of the row).
    """
    row_max = logits.div_(temperature.unsqueeze(1)).amax(1, keepdim=True)
    return (row_max.squeeze(1) + _chunk_sums(logits.sub_(row_max).exp_()).sum(1).log()).to(
        logits.dtype
    )


def _chunk_sums(weights: Tensor) -> Tensor:
    """Return the sums of 128 consecutive entries each: float64 [R, C].

    torch adds so few entries in the same order for every R, so the sums are batch-invariant.
    """
    missing = -weights.shape[1] % _SUM_CHUNK
    padded = F.pad(weights, (0, missing)) if missing else weights
    return padded.unflatten(1, (-1, _SUM_CHUNK)).sum(2).double()


def _top_tokens(logits: Tensor, k: int) -> Tensor:
    """Return the indices [R, k] of the k largest logits of each row.

    The k largest logits lie in the k blocks with the largest maxima. So one pass over the logits
    suffices. A full `topk` over the vocabulary would cost as much as the matmul itself.
    """
    num_blocks = logits.shape[1] // _BLOCK
    if num_blocks <= 2 * k:
        return logits.topk(k, dim=1).indices
    blocks = (
        logits[:, : num_blocks * _BLOCK]
        .unflatten(1, (_BLOCK, num_blocks))
        .amax(1)
        .topk(k, dim=1)
        .indices
    )
    offsets_in_block = torch.arange(_BLOCK, device=logits.device) * num_blocks
    candidates = (blocks.unsqueeze(2) + offsets_in_block).flatten(1)
    tail_tokens = torch.arange(num_blocks * _BLOCK, logits.shape[1], device=logits.device).expand(
        logits.shape[0], -1
    )
    candidates = torch.cat([candidates, tail_tokens], 1)
    return candidates.gather(1, logits.gather(1, candidates).topk(k, dim=1).indices)
