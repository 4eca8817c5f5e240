"""The interface between the model and the kernels that compute it.

`choose_backend` (choose.py) makes one `Backend` per base model. Decoder, head, trainer and sampler
ask it for every operation, and never look at the device or the dtype themselves. There are three
backends: torch (the reference implementation, for any device), C++ (CPUs) and Triton (GPUs). The
compiled backends inherit from the torch backend. So they compute with torch what their kernels do
not support, such as odd widths or a family of kernels that failed its self-test.

Letters in shapes:
- Decoder: T tokens of a batch (its rows), D hidden size, H attention heads (Hq query heads, Hkv KV
  heads), E size of a head, I hidden size of the MLP.
- LM head: R rows (hidden states) whose logits are computed, V vocabulary size, P pairs of a row and
  a token, N rows that a token is sampled from.
- LoRA: r rank, n linears that read the same input (3 for q, k and v).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from planish.model.kernels.linear import PackedLinear

if TYPE_CHECKING:
    from planish.model.config import ModelConfig
    from planish.model.decoder import Decoder
    from planish.model.delta_net import Recurrence, StateRun
    from planish.model.experts import ExpertRows
    from planish.model.kernels.reference.row_tiling import RowTiling
    from planish.model.kernels.reference.sampling_attention import PrefillSpan
    from planish.model.kv_cache import KVPools, SlotOwner
    from planish.model.lora import AdapterRows, LoraLayout, StackRows
    from planish.model.prefix_tree import Packed
    from planish.model.quantization import QuantizedWeight
    from planish.types import SamplingParams


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


Exact = tuple[Tensor, Tensor]
"""Logits that were recomputed in float32: tokens int64 [R, k] and their values, float32 [R, k].

They replace the rounded logits of the same tokens.
"""

MIN_WEIGHT = 1e-20
"""The smallest float32 weight that a token may have in `Backend.sample`.

The weight of a token is its probability divided by that of the likeliest token of the whole
vocabulary. A smaller weight may be rounded to 0.
"""
LORA_COLUMNS = 16
"""The number of columns of the head's LoRA hidden states is padded to a multiple of this."""


def padded_lora_columns(columns: int) -> int:
    """Return `columns` rounded up to a multiple of LORA_COLUMNS."""
    return columns + -columns % LORA_COLUMNS


HeadMember = tuple[int, int, "LoraMatrices"]
"""An adapter of the LM head, and the rows that it applies to: (start, stop, matrices).

The rows are start .. stop - 1. The matrices are A [r, D] and a single B [V, r].
"""


class PackedMatrices(Protocol):
    """The LoRA matrices of one target module, packed for a compiled kernel."""

    has_backward: bool
    """Whether the kernel supports the backward pass too."""

    def add_(self, x: Tensor, out: Tensor, sizes: Sequence[int]) -> Tensor:
        """Do the same as `Backend.add_lora_`."""
        ...

    def backward_(self, grad: Tensor, grad_x: Tensor | None, sizes: Sequence[int]) -> Tensor:
        """Return the gradient of the LoRA hidden states, and add that of the input to `grad_x`.

        `grad_x` may be None if the gradient of the input is not needed.
        """
        ...

    def gradients(
        self,
        x: Tensor,
        lora_hidden: Tensor,
        grad: Tensor,
        hidden_grad: Tensor,
        sizes: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of A and of the Bs.

        `x`, `grad`: the input and the gradient of the output. `lora_hidden`: the LoRA hidden
        states, as `add_` returned them. `hidden_grad`: their gradient, as `backward_` returned it.
        """
        ...

    def expert(self, index: int) -> PackedMatrices:
        """Return the matrices of expert `index`. Only a target module of experts supports this."""
        ...


class PackedAdapter(Protocol):
    """All LoRA matrices of one version of an adapter, packed for a compiled kernel."""

    def target(self, index: int) -> PackedMatrices | None:
        """Return the matrices of target module `index`, or None if torch computes them."""
        ...

    def drop_backward(self) -> None:
        """Free the copies that only the backward pass needs."""
        ...


@dataclass(frozen=True)
class LoraMatrices:
    """The LoRA matrices of n linears that read the same input (one target module).

    `a`: the joint A [n * r, in]. `bs`: one B [out, r] per linear. Stacks of adapters and the
    matrices of all experts of a layer have one more dimension in front.
    """

    a: Tensor
    bs: tuple[Tensor, ...]
    packed: PackedMatrices | None = None
    """The same matrices packed for the backend's kernel, or None if torch computes them."""

    @property
    def rank(self) -> int:
        """The rank r."""
        return self.a.shape[-2] // len(self.bs)

    def expert(self, index: int) -> LoraMatrices:
        """Return the matrices of expert `index`. Only a target module of experts supports this."""
        packed = None if self.packed is None else self.packed.expert(index)
        return LoraMatrices(self.a[index], tuple(b[index] for b in self.bs), packed)


class AdapterBatch(Protocol):
    """The adapters of the rows of one batch, for passes without gradients."""

    def add_(self, x: Tensor, out: Tensor, sizes: Sequence[int], layer: int, module: str) -> None:
        """Add the LoRA outputs of one target module to `out`, in place.

        `x`: input [T, in]. `out`: [T, sum(sizes)]. `module`: a field of LayerLora ("attn_in").
        """
        ...

    def add_expert_(
        self, x: Tensor, out: Tensor, rows: ExpertRows, layer: int, module: str
    ) -> None:
        """Add the LoRA outputs of a layer's experts to `out`, in place.

        `x`, `out`: input [P, in] and output [P, out] of the pairs of `rows`, sorted by expert.
        `module`: "mlp_in" or "mlp_out".
        """
        ...


class HeadAdapters(Protocol):
    """The head adapters of the rows of one batch, applied to given hidden states [R, D]."""

    @property
    def hidden(self) -> Tensor:
        """The LoRA hidden states [R, r or more]; undefined in rows without an adapter."""
        ...

    def add_(self, logits: Tensor) -> None:
        """Add the adapters' part to `logits` [R, V], in place."""
        ...

    def add_single_(self, out: Tensor, rows: Tensor, tokens: Tensor) -> None:
        """Add the adapters' part to single logits `out` [P] of `rows` and `tokens` [P]."""
        ...


ForwardPass = Callable[[Tensor, Tensor, Attend, AdapterBatch], Tensor]
"""(tokens [T], positions [T], attention, adapters) -> last hidden states [T, D]."""


class Backend(Protocol):
    """The operations of one base model on one device, in one dtype.

    All tensors are on `device`. Functions whose names end in `_` change an argument in place.
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
    has_attention: bool
    """Whether sampler and trainer use the C++ attention kernel.

    The flag is False for the backends of torch and Triton.
    """
    logits_dtype: torch.dtype
    """The dtype in which logits are computed, and stored for the backward pass."""
    kv_dtype: torch.dtype
    """The dtype of stored keys and values."""
    logits_are_exact: bool
    """Whether the sampler may return the logits of `base_logits` as they are.

    This is the case on a GPU without batch invariance, where logits are computed in float32.
    Otherwise the sampler recomputes the logit of each sampled token with `token_logits`.
    """
    joins_weights: bool
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
    head_rows: int
    """The number of rows whose logits the trainer computes at a time.

    If the backward pass recomputes the logits, only the logits of these rows are in memory.
    """

    @property
    def name(self) -> str:
        """The kernels, such as "C++ kernels (AVX512_BF16)" or "torch"."""
        ...

    @property
    def replaced_families(self) -> frozenset[str]:
        """The families of compiled kernels that torch replaces for this model."""
        ...

    @property
    def is_compiled(self) -> bool:
        """Whether C++ kernels compute all matmuls and the attention.

        These kernels are batch-invariant: they add in the same order for every batch.
        """
        ...

    # Matmuls with frozen weights

    def packs(self, fan_out: int, fan_in: int) -> bool:
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
        works.
        """
        ...

    def pack_quantized(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], scheme: str
    ) -> PackedLinear:
        """Quantize linears that read the same input, and return them as one packed linear.

        `weights`, `biases`: as in `pack`. `scheme`: a name in weight_sizes.SCHEMES.
        """
        ...

    def pack_codes(
        self, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None]
    ) -> PackedLinear:
        """Return linears that read the same input, with quantized weights, as one packed linear.

        `weights`: [out_i, in] each, all of the same scheme. `biases`: as in `pack`.
        """
        ...

    def matmul(self, x: Tensor, linear: PackedLinear, *, training: bool = False) -> Tensor:
        """Return x @ weights.T plus the bias: [T, out], without gradients.

        `x`: [T, in]. `training`: the rows are a micro-batch of the trainer. Such a matmul never
        uses fixed tiles, because they would be too slow for its many rows.
        """
        ...

    def matmul_backward(self, grad: Tensor, linear: PackedLinear) -> Tensor:
        """Return grad @ weights, the gradient of the input: [T, in]. `grad`: [T, out]."""
        ...

    # LoRA

    def pack_adapter(
        self, targets: Sequence[LoraMatrices | None], *, is_head: bool = False
    ) -> PackedAdapter | None:
        """Return the matrices of all target modules, packed for the backend's kernel.

        Return None if torch computes all of them. `is_head`: the target is the head, not a layer.
        """
        ...

    def packed_adapter_sizes(self, layout: LoraLayout) -> tuple[int, int]:
        """Return the number of elements of the packed copies of an adapter: (forward, backward)."""
        ...

    def can_stack(self, rank: int) -> bool:
        """Return whether torch may apply several adapters of this rank with one batched matmul."""
        ...

    def adapter_batch(self, adapters: Sequence[AdapterRows | StackRows]) -> AdapterBatch:
        """Return an `AdapterBatch` of these adapters, each with the rows that it applies to."""
        ...

    def add_lora_(self, x: Tensor, out: Tensor, sizes: Sequence[int], lora: LoraMatrices) -> Tensor:
        """Add the LoRA outputs of one adapter for all rows to `out` [T, sum(sizes)], in training.

        Return the LoRA hidden states [T, n * r], which `lora_backward_` needs. `x`: [T, in].
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

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        """Return x [T, H, E] rotated by the angles of `cos` and `sin` [T, 1, E/2].

        `inverse`: rotate by the negative angles.
        """
        ...

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

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up: [T, I]. `gate_up`: [T, 2 * I]."""
        ...

    def swiglu_backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """Return the gradient of `gate_up`: [T, 2 * I]."""
        ...

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up: [T, I]. `gate_up`: [T, 2 * I].

        GELU is the approximation by tanh.
        """
        ...

    def geglu_backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """Return the gradient of `gate_up`: [T, 2 * I]."""
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

    # Head

    def base_logits(self, hidden: Tensor, head: PackedLinear, *, training: bool = False) -> Tensor:
        """Return the logits [R, V] of the base model in `logits_dtype`. `hidden`: [R, D]."""
        ...

    def head_adapters(
        self, members: Sequence[HeadMember], hidden: Tensor, lora_hidden: Tensor | None = None
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
        wide: Tensor | None = None,
    ) -> Exact:
        """Find the k largest `logits` of each row, and return them recomputed in float32.

        `wide`: an optional float32 output [R, V]. It receives all logits, with the exact values at
        the returned tokens.
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
        """Return single logits [P] in float32 or wider.

        Each logit is its own dot product, so it is bitwise independent of the other pairs.
        """
        ...

    def log_sum_exp(
        self,
        logits: Tensor,
        temperature: Tensor,
        exact: Exact | None = None,
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
        exact: Exact | None = None,
    ) -> None:
        """Overwrite logits [R, V] with the gradient of the loss sum(grads * logprobs).

        The logprobs are those of `targets` [P], and `grads` is [P]. The gradient is with respect to
        logits / temperature. Pairs first[r] .. first[r + 1] - 1 belong to row r, whose log-sum-exp
        is log_total[r].
        """
        ...

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
        ...

    def filter_(self, weights: Tensor, params: Sequence[SamplingParams]) -> None:
        """Zero the weights [N, V] that top_k, then top_p, then min_p exclude.

        The largest weight of each row must be 1.
        """
        ...

    def invert(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Sample K tokens from each row of unnormalized probabilities. Return them as [N, K].

        `weights`: the probabilities, float32 [N, V]. `uniforms`: uniform random numbers, float64
        [N, K]. Each token is the first one at which the cumulative sum of the row exceeds its
        uniform number times the row's total. The tokens of a row that is not finite are undefined.
        """
        ...

    # Attention

    def decode_pass(self, decoder: Decoder) -> ForwardPass | None:
        """Return a forward pass for decoding steps that is faster than `Decoder.forward`, or None
        if this backend has none.

        The attention passed to it must come from `decode_attention`, the adapters from
        `adapter_batch`.
        """
        ...

    def tree_attention(self, packed: Packed) -> Attend:
        """Return the attention of a micro-batch of the trainer, with gradients."""
        ...

    def prefill_attention(self, spans: Sequence[PrefillSpan]) -> Attend:
        """Return the causal attention of prompt rows, which stores their keys and values."""
        ...

    def tree_recurrence(self, packed: Packed) -> Recurrence | None:
        """Return the recurrence of a micro-batch of the trainer, with gradients.

        Return None if the model has no gated delta-net layers.
        """
        ...

    def sequence_recurrence(self, runs: Sequence[StateRun], rows: int) -> Recurrence | None:
        """Return the recurrence of batch rows that continue stored states, without gradients.

        `runs`: all rows of the batch except padding. `rows`: the rows of the batch. Return None if
        the model has no gated delta-net layers.
        """
        ...

    def decode_attention(
        self,
        rows: dict[SlotOwner, int],
        prompts: KVPools,
        samples: KVPools,
        row_counts: Mapping[SlotOwner, int] | None = None,
    ) -> Attend:
        """Return the attention of a decoding step with new rows for each running sample.

        `rows`: the first batch row of each sample. Every sample in `samples` has one. `row_counts`:
        the number of consecutive rows of each sample; 1 for samples that it does not contain.
        """
        ...
