"""The operations that the model asks of its kernels, as Protocols without an implementation.

A `Backend` (backend.py) has all of them for one base model. Decoder, head, trainer and sampler call
its operations, and never look at the device or the dtype themselves. There are three kinds of
kernels: torch (the reference implementation, for any device), C++ (CPUs) and Triton (GPUs). torch
also computes what compiled kernels do not support, such as weights with an odd number of inputs, or
a family of kernels that failed its self-test.

All tensors are on the backend's device. Operations whose names end in `_` change an argument in
place. Arguments with other shapes or dtypes than documented are errors of the caller; an operation
need not detect them. An operation of a compiled kernel raises MemoryError if its scratch memory
cannot be allocated.

Letters in shapes:
- Decoder: T tokens of a batch (its rows), D hidden size, H attention heads (Hq query heads, Hkv KV
  heads), E size of a head, I hidden size of the MLP.
- LM head: R rows (hidden states) whose logits are computed, V vocabulary size, P pairs of a row and
  a token, N rows that a token is sampled from.
- LoRA: r rank, n linears that read the same input (3 for q, k and v).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from planish.model.layers.expert_pairs import TokenExpertPairs
from planish.model.layers.layer_weights import Layer
from planish.model.layers.linear import PackedLinear, PackedQuantizedWeight, PackedWeight
from planish.model.layers.lora import (
    AdapterRange,
    AdapterStackRange,
    HeadAdapterRange,
    LoraLayout,
    LoraMatrices,
    PackedAdapter,
)
from planish.model.layers.quantization import QuantizedWeight
from planish.model.layers.recurrence import Recurrence, StateSegment
from planish.model.sequences.kv_cache import KVPool, KVPools, PrefillSpan, SlotOwner
from planish.model.sequences.prefix_tree import MicroBatch
from planish.types import SamplingParams

MIN_WEIGHT = 1e-20
"""`Sampling.sample` may round a token's weight to 0 if it is smaller than this.

The weight is the token's probability divided by the largest probability in the vocabulary, in
float32.
"""

ExactLogits = tuple[Tensor, Tensor]
"""Logits that were recomputed in float32: tokens int64 [R, k] and their values, float32 [R, k].

They replace the rounded logits of the same tokens.
"""


class Matmuls(Protocol):
    """Matmuls with frozen weights."""

    needs_adjacent_weights: bool
    """Whether `pack` needs the weights of several linears as adjacent views of one tensor."""
    weight_copies: int
    """The number of copies of the weights in memory.

    With 16-bit weights on a CPU there are three: the memory-mapped file, the weights packed for the
    forward pass, and the weights packed for the backward pass.
    """
    num_dequantized_weights: int
    """The number of weights that the checkpoint or `quantize` quantizes, but that are packed
    dequantized (see `pack_quantized`).
    """

    def can_pack(self, fan_out: int, fan_in: int) -> bool:
        """Return whether a compiled kernel multiplies by weights [fan_out, fan_in]."""
        ...

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
        ...

    def pack_quantized(
        self, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None]
    ) -> PackedLinear:
        """Return linears that read the same input, with quantized weights, as one packed linear.

        `weights`: [out_i, in] each, all of the same scheme. `biases`: as in `pack`. If
        `packs_dequantized`, the weights are packed in the model's dtype, and their codes are kept
        beside the packed weights.
        """
        ...

    def packs_dequantized(self, fan_out: int, fan_in: int, *, is_fp8: bool) -> bool:
        """Return whether quantized weights are dequantized once and packed in the model's dtype.

        `fan_out`, `fan_in`: the outputs of all linears that one matmul computes, and their inputs.
        `is_fp8`: whether the weights are fp8, which no kernel of a CPU reads.
        """
        ...

    def matmul(self, x: Tensor, linear: PackedLinear, *, training: bool = False) -> Tensor:
        """Return x @ weights.T plus the bias: [T, out], without gradients.

        `x`: [T, in]. `training`: the rows are a micro-batch of the trainer. Such a matmul never
        uses fixed tiles, because they would be too slow for its many rows. The rows are padded for
        batch invariance.
        """
        ...

    def matmul_backward(self, grad: Tensor, linear: PackedLinear) -> Tensor:
        """Return grad @ weights, the gradient of the input: [T, in]. `grad`: [T, out]."""
        ...


class WeightPacker(Protocol):
    """Packs frozen weights in the layouts of the kernels that multiply by them."""

    def can_pack(self, fan_out: int, fan_in: int) -> bool:
        """Return whether a compiled kernel multiplies by weights [fan_out, fan_in]."""
        ...

    def pack(self, weights: Sequence[Tensor], transposed: bool) -> PackedWeight | None:
        """Return fused weights [out_i, in], packed (see `Packer` in layers/linear.py), or None."""
        ...

    def packs_dequantized(self, fan_out: int, fan_in: int, *, is_fp8: bool) -> bool:
        """Do the same as `Matmuls.packs_dequantized`."""
        ...

    def pack_quantized(self, weights: Sequence[QuantizedWeight]) -> PackedQuantizedWeight:
        """Return the weights in the layout of a kernel that reads their codes."""
        ...


class AdapterBatch(Protocol):
    """The adapters of the rows of one batch, for passes without gradients."""

    def add_(self, x: Tensor, out: Tensor, sizes: Sequence[int], layer: int, module: str) -> None:
        """Add the LoRA outputs of one target module to `out`, in place.

        `x`: input [T, in]. `out`: [T, sum(sizes)]. `module`: its name in `fused_module_names` ("attn_in").
        """

    def add_expert_(
        self, x: Tensor, out: Tensor, pairs: TokenExpertPairs, layer: int, module: str
    ) -> None:
        """Add the LoRA outputs of a layer's experts to `out`, in place.

        `x`, `out`: input [P, in] and output [P, out] of `pairs`, which are sorted by expert.
        `module`: "mlp_in" or "mlp_out".
        """


class Lora(Protocol):
    """Matmuls with adapters."""

    packs_layer_adapters: bool
    """Whether a compiled kernel applies the adapters of the layers, for all rows of a batch at
    once. The rows then need no padding.
    """
    packs_head_adapters: bool
    """Whether a compiled kernel applies the adapters of the head."""

    def pack_adapter(
        self, targets: Sequence[LoraMatrices | None], *, is_head: bool = False
    ) -> PackedAdapter | None:
        """Return the matrices of all target modules, packed for the backend's kernel.

        Return None if torch computes all of them. `is_head`: the target is the head, not a layer.
        """
        ...

    def packed_adapter_sizes(self, layout: LoraLayout) -> tuple[int, int]:
        """Return the number of elements of the packed copies of an adapter: (forward, backward).

        Both are 0 if adapters are not packed.
        """
        ...

    def can_stack(self, rank: int) -> bool:
        """Return whether torch may apply several adapters of this rank with one batched matmul.

        Stacking must keep the required batch invariance.
        """
        ...

    def adapter_batch(self, adapters: Sequence[AdapterRange | AdapterStackRange]) -> AdapterBatch:
        """Return an `AdapterBatch` of these adapters, each with the rows that it applies to."""
        ...

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
        ...

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
        ...


class Norms(Protocol):
    """RMSNorm and its gradient."""

    def rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        *,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return x + residual, its RMSNorm in the model's dtype, and the norm's scale per row.

        `x`: float32 [..., D]. `in_place`: `x` may be overwritten with the sum.
        """
        ...

    def rms_norm_backward(
        self, grad: Tensor, total: Tensor, weight: Tensor, scale: Tensor, grad_total: Tensor | None
    ) -> Tensor:
        """Return the float32 gradient of `total`, the sum that `rms_norm` normed.

        `grad`: gradient of the normed output. `total`, `scale`: results of `rms_norm`.
        `grad_total`: the gradient of `total` from other uses than the norm, such as the residual
        connection; or None.
        """
        ...


class Rope(Protocol):
    """The rotary position embedding (RoPE)."""

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        """Return x [T, H, E] rotated by the angles of `cos` and `sin` [T, 1, E/2].

        `inverse`: rotate by the negative angles. The rotation is computed in float32 and rounded to
        the dtype of x.
        """
        ...


class QkNormRope(Protocol):
    """The norms and rotations of queries and keys in one operation."""

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
        ...


class Activations(Protocol):
    """The gated activations of MLPs and their gradients."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up: [T, I]. `gate_up`: [T, 2 * I]."""
        ...

    def swiglu_backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """Return the gradient of `gate_up`: [T, 2 * I]. `grad`: the gradient of the result."""
        ...

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up: [T, I]. `gate_up`: [T, 2 * I].

        GELU is the approximation by tanh.
        """
        ...

    def geglu_backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """Return the gradient of `gate_up`: [T, 2 * I]. `grad`: the gradient of the result."""
        ...

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """Return (up + 1) * gate * sigmoid(alpha * gate): [T, I].

        `gate_up`: [T, 2 * I], where the columns of gate and up alternate. Before the activation,
        the gate is clamped to at most `limit`, and up to between -limit and limit.
        """
        ...

    def clamped_swiglu_backward(
        self, grad: Tensor, gate_up: Tensor, alpha: float, limit: float
    ) -> Tensor:
        """Return the gradient of `gate_up`: [T, 2 * I], given that of the result: [T, I].

        Clamped numbers have the gradient 0.
        """
        ...


class Attend(Protocol):
    """The attention function of one forward pass.

    RoPE is already applied to q and k. The function itself scales the scores by E ** -0.5. In a
    layer with a window of W positions, a row attends to its own position and to the W - 1 before
    it.
    """

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, /
    ) -> Tensor:
        """Return the attention output [T, Hq, E].

        `q`: [T, Hq, E]. `k`, `v`: [T, Hkv, E]. `sinks`: float32 [Hq], only for models with
        attention sinks. The sink of a head is a score that takes part in the softmax of each row,
        but has no value: it only makes the other weights smaller.
        """
        ...


class Attention(Protocol):
    """The attention of trainer and sampler."""

    kv_dtype: torch.dtype
    """The dtype of stored keys and values."""
    attention_is_batch_invariant: bool
    """Whether a kernel computes all attention, so that a row's output has the same bits in every
    batch. torch's attention needs a minimum number of rows for this (`RowTiling.query_rows`).
    """
    pool_class: type[KVPool]
    """The class of the KV cache pools that prefill and decoding read."""

    def tree_attention(self, micro_batch: MicroBatch) -> Attend:
        """Return the attention of a micro-batch of the trainer, with gradients."""
        ...

    def prefill_attention(self, spans: Sequence[PrefillSpan]) -> Attend:
        """Return the causal attention of prompt rows, which stores their keys and values."""
        ...

    def decode_attention(
        self,
        first_rows: dict[SlotOwner, int],
        prompt_pools: KVPools,
        sample_pools: KVPools,
        row_counts: Mapping[SlotOwner, int] | None = None,
    ) -> Attend:
        """Return the attention of a decoding step with new rows for some or all samples.

        `first_rows`: the first batch row of each sample of the step. Other samples in
        `sample_pools` take no part in it.
        `row_counts`: the number of consecutive rows of each sample; 1 for samples that it does not
        contain.
        """
        ...


class Recurrences(Protocol):
    """The recurrences of layers with a recurrent state (model/layers/recurrence.py)."""

    def tree_recurrence(self, micro_batch: MicroBatch) -> Recurrence | None:
        """Return the recurrence of a micro-batch of the trainer, with gradients.

        Return None if the model has no such layers.
        """
        ...

    def sequence_recurrence(
        self, segments: Sequence[StateSegment], num_rows: int
    ) -> Recurrence | None:
        """Return the recurrence of batch rows that continue stored states, without gradients.

        `segments`: all rows of the batch except padding. `num_rows`: the rows of the batch.
        Return None if the model has no such layers.
        """
        ...


class HeadAdapters(Protocol):
    """The head adapters of the rows of one batch, applied to given hidden states [R, D]."""

    hidden: Tensor
    """The LoRA hidden states [R, r or more]."""

    def add_(self, logits: Tensor) -> None:
        """Add the adapters' part to `logits` [R, V], in place."""

    def add_single_(self, out: Tensor, rows: Tensor, tokens: Tensor) -> None:
        """Add the adapters' part to single logits `out` [P] of `rows` and `tokens` [P]."""


SingleLogits = Callable[[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None], Tensor]
"""A function that returns single logits [P] in float32 (see `Head.token_logits`).

Its arguments are the hidden states [R, D], the weight [V, D], the rows and the tokens of the pairs,
and perhaps the LoRA hidden states [R, r or more] and B [V, r] of the adapter of all rows.
"""


class Head(Protocol):
    """The logits of the LM head."""

    logits_dtype: torch.dtype
    """The dtype of the sampler's logits."""
    training_logits_dtype: torch.dtype
    """The dtype of the trainer's logits, in which they are stored for the backward pass."""
    head_rows: int
    """The number of rows whose logits the trainer computes at a time.

    If the backward pass recomputes the logits, only the logits of these rows are in memory.
    """

    def base_logits(self, hidden: Tensor, head: PackedLinear, *, training: bool = False) -> Tensor:
        """Return the logits [R, V] of the base model. `hidden`: [R, D].

        Their dtype is `training_logits_dtype` if `training`, and otherwise `logits_dtype`.
        """
        ...

    def head_adapters(
        self,
        adapter_ranges: Sequence[HeadAdapterRange],
        hidden: Tensor,
        lora_hidden: Tensor | None = None,
    ) -> HeadAdapters:
        """Return the head adapters of ranges of rows of `hidden` [R, D].

        `lora_hidden`: the LoRA hidden states of these rows, if they are known.
        """
        ...

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
        ...

    def token_logits(
        self,
        hidden: Tensor,
        head: PackedLinear,
        adapters: HeadAdapters | None,
        rows: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        """Return single logits [P] in float32 or wider. `rows`, `tokens`: int64 [P].

        Each logit is its own dot product, so it is bitwise independent of the other pairs.
        """
        ...


class LogSumExp(Protocol):
    """The log-sum-exp of logits and its gradient."""

    def log_sum_exp(
        self,
        logits: Tensor,
        temperature: Tensor,
        exact: ExactLogits | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the log-sum-exp [R] of logits [R, V] / temperature [R], in float32 or wider.

        `exact`: values that replace some of the logits. `weights`: an optional float32 output
        [R, V], which may be `logits`. It receives exp(scaled logit - max of the row).
        """
        ...

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
        is log_total[r].
        """

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
        ...


class Sampling(Protocol):
    """The choice of tokens from logits."""

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
        ...

    def filter_(self, weights: Tensor, params: Sequence[SamplingParams]) -> None:
        """Zero the weights [N, V] that top_k, then top_p, then min_p exclude.

        The largest weight of each row must be 1. Of equal weights, the first ones stay. The kept
        weights are those above a threshold, which the Triton kernel searches for.
        """

    def sample_from_weights(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Sample K tokens from each row of unnormalized probabilities. Return them as [N, K].

        `weights`: the probabilities, float32 [N, V]. `uniforms`: uniform random numbers, float64
        [N, K]. Each token is the first one at which the cumulative sum of the row exceeds its
        uniform number times the row's total. The tokens of a row that is not finite are undefined.
        Every token is within the vocabulary.
        """
        ...


class DecoderWeights(Protocol):
    """The frozen weights of a decoder, for kernels that run all of its layers in one call."""

    @property
    def layers(self) -> Sequence[Layer]:
        """The layers, the first one first."""
        ...

    embedding: Tensor
    """[V, D] in the model's dtype."""
    final_norm: Tensor
    """The float32 weight [D] of the last norm."""
    embedding_scale: float
    """The factor of the embeddings."""


ForwardPass = Callable[[Tensor, Tensor, Attend, AdapterBatch], Tensor]
"""(tokens [T], positions [T], attention, adapters) -> last hidden states [T, D]."""


class DecodePasses(Protocol):
    """Forward passes of decoding steps."""

    def decode_pass(self, decoder: DecoderWeights) -> ForwardPass | None:
        """Return a forward pass for decoding steps that is faster than `Decoder.forward`, or None
        if this backend has none.

        The attention passed to it must come from `Attention.decode_attention`, the adapters from
        `Lora.adapter_batch`.
        """
        ...
