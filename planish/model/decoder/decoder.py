"""The decoder of the families in hf_config/families.py: Llama 3.x, Qwen3, Gemma 3 and others.

These models share RMSNorm, RoPE and grouped-query attention. Each layer has a gated MLP or a
mixture of experts, whose experts are gated MLPs.

The decoder receives a flat list of T rows, each a token with a position. It knows nothing about
sequences. The trainer or the sampler passes in an `attend` function, which decides how rows attend
to one another and where keys and values are stored. A `recurrence` does the same for the states of
gated delta-net layers (layers/recurrence.py), which Qwen3.5 has in three of four layers. So trainer
and sampler run the same arithmetic over the same weights.

The base weights are frozen and shared. Matmuls run in the model's dtype. The residual stream, norms
and RoPE are float32. That costs little and keeps the bf16 logprobs of sampler and trainer close
together.

Shapes: T rows, D hidden, H heads, E head_dim, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from planish.model.architecture.linears import fused_modules
from planish.model.decoder.experts import mixture_of_experts
from planish.model.decoder.operations import (
    adapted_linear,
    add_rms_norm,
    apply_output_gate,
    gated_activation,
    permute_last_dim,
    rope,
)
from planish.model.decoder.tensor_parallel.collectives import Collectives
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.interface.parts import AdapterBatch, Attend, ForwardPass
from planish.model.layers.layer_weights import DenseMLP, Experts, Layer, SharedExpert
from planish.model.layers.linear import ExpertLinears, PackedLinear
from planish.model.layers.lora import LoraWeights
from planish.model.layers.quantization import Fp8Weight, Mxfp4Weight, quantize
from planish.model.layers.recurrence import DeltaNetInputs, DeltaNetWeights, Recurrence
from planish.model.layers.rope import RotaryEmbedding, Rotation, half_pairing_order, query_scales
from planish.model.sources.weights import scale_name
from planish.model.vision.image_tokens import ImageRegistry
from planish.model.vision.tower import VisionTower

_log = logging.getLogger(__name__)


class Decoder:
    """The frozen base model: embedding, decoder layers and output head."""

    def __init__(
        self, weights: Mapping[str, Tensor], backend: Backend, quantize: str | None = None
    ) -> None:
        """`weights`: all weights of `backend.config` by name, on the CPU in any dtype.

        `quantize`: the scheme of the layers' linears (layers/quantization.py), or None.
        """
        self.config, self.backend = backend.config, backend
        self.images: ImageRegistry | None = None
        self.vision: VisionTower | None = None
        self.collectives: Collectives | None = None
        """The sums over the ranks of tensor parallelism, if `weights` are the part of one rank."""
        config, loader = backend.config, _WeightLoader(weights, backend, quantize)
        self.embedding = loader.weight("model.embed_tokens.weight")
        """[V, D] in the model's dtype."""
        self.head = backend.pack(
            [self.embedding if config.tied_head else loader.weight("lm_head.weight")]
        )
        self.final_norm = loader.norm("model.norm")
        ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
        rope_tables = {
            rope: RotaryEmbedding(
                rope,
                config.head_dim,
                config.max_context,
                backend.device,
                config.rotary_dims,
                () if config.vision is None else config.vision.mrope_section,
            )
            for rope in dict.fromkeys(ropes)
        }
        self.layers = [loader.layer(i, rope_tables[rope]) for i, rope in enumerate(ropes)]
        recurrent_layers = config.delta_net.layers if config.delta_net is not None else ()
        layers_by_kind = (config.attention_layers, recurrent_layers)
        self._index_in_kind = {
            layer: index for layers in layers_by_kind for index, layer in enumerate(layers)
        }
        """For each layer, its index among the layers of its kind (attention or gated delta net)."""
        self.head_dim_order: Tensor | None = None
        """The order of each head's dimensions in queries and keys: int64 [E] (see
        `half_pairing_order`). None: the checkpoint's order.
        """
        if config.rotary_dims is not None:
            order = half_pairing_order(config.head_dim, config.rotary_dims)
            self.head_dim_order = order.to(backend.device)
        self.query_scales: Tensor | None = None
        """The factor of the queries at each position: float32 [max_context]. None: the model does
        not scale queries by position.
        """
        if config.query_scale_beta is not None:
            beta, interval = config.query_scale_beta, config.query_scale_interval
            self.query_scales = query_scales(beta, interval, config.max_context).to(backend.device)
        if backend.num_dequantized_weights:
            is_fp8 = config.fp8 is not None and quantize is None
            sizes = "outputs are not a multiple of 16 or whose inputs are not a multiple of 32"
            _log.info(
                "no CPU kernel reads %s, so these linears are dequantized to %s: %.2f GB%s%s",
                "fp8" if is_fp8 else f"{quantize or 'mxfp4'} weights whose {sizes}",
                str(backend.dtype).removeprefix("torch."),
                backend.num_dequantized_weights * backend.dtype.itemsize / 1e9,
                ", and as much again when training begins" if backend.weight_copies > 1 else "",
                "; quantize='int8' or 'nf4' takes less memory" if is_fp8 else "",
            )
        # The factor is rounded to the model's dtype, as in transformers.
        self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=backend.dtype))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and matmuls."""
        return self.backend.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.backend.device

    def decode_pass(self) -> ForwardPass | None:
        """Return a forward pass for decoding steps that is faster than `forward`, or None."""
        return self.backend.decode_pass(self)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [T, D] in the model's dtype."""
        ranks = self.collectives
        x = self.embedding[tokens] if ranks is None else ranks.embed(self.embedding, tokens)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        adapters: LoraWeights | AdapterBatch | None,
        *,
        layers_per_checkpoint: int = 0,
        recurrence: Recurrence | None = None,
    ) -> Tensor:
        """Return the last hidden states after the final norm: [T, D] in the model's dtype.

        See `BaseDecoder.forward` for the arguments.
        """
        if positions.dim() == 2:
            assert self.vision is not None
            x = self.vision.embed(tokens, self._embed).embeddings.float()
        else:
            x = self._embed(tokens).float()
        rope_tables = dict.fromkeys(layer.rope for layer in self.layers)
        rotations = {table: table(positions) for table in rope_tables}
        scales = None if self.query_scales is None else self.query_scales[positions].view(-1, 1, 1)
        forward_pass = _ForwardPass(
            self.backend,
            rotations,
            attend,
            adapters,
            self._index_in_kind,
            recurrence,
            scales,
            self.head_dim_order,
            self.collectives,
        )
        residual: Tensor | None = None
        run: Callable[..., tuple[Tensor, Tensor | None]] = forward_pass.run
        if layers_per_checkpoint and torch.is_grad_enabled():
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        group_size = layers_per_checkpoint or len(self.layers)
        for first in range(0, len(self.layers), group_size):
            # Store the sum alone. The norm would compute the same float32 sum.
            x = x if residual is None else x + residual
            x, residual = run(first, self.layers[first : first + group_size], x)
        return forward_pass.add_rms_norm(x, residual, self.final_norm)[1]


@dataclass(frozen=True)
class _ForwardPass:
    """The inputs that all layers of one forward pass share."""

    backend: Backend
    rotations: Mapping[RotaryEmbedding, Rotation]
    """The cos and sin of the rows' positions, for each RoPE table of the model."""
    attend: Attend
    adapters: LoraWeights | AdapterBatch | None
    index_in_kind: Mapping[int, int]
    """For each layer, its index among the layers of its kind (attention or gated delta net)."""
    recurrence: Recurrence | None = None
    query_scales: Tensor | None = None
    """The factor of each row's queries: float32 [T, 1, 1]."""
    head_dim_order: Tensor | None = None
    """The order of each head's dimensions in queries and keys (see `Decoder`)."""
    collectives: Collectives | None = None
    """See `Decoder`."""

    def run(self, first: int, layers: Sequence[Layer], x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run consecutive layers, of which the first has index `first` and the input x [T, D].

        Return the hidden state and the residual of the layer after them (see `layer`).
        """
        residual: Tensor | None = None
        for index, layer in enumerate(layers, first):
            x, residual = self.layer(index, layer, x, residual)
        return x, residual

    def layer(
        self, index: int, layer: Layer, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run one decoder layer, whose input is the float32 hidden state x + residual [T, D].

        `residual` is the output of the previous layer's MLP, or None in the first layer. It is not
        yet added to `x`, because one fused kernel computes both the sum and its RMSNorm. Return the
        hidden state after this layer's attention, and the output of its MLP. They are `x` and
        `residual` of the next layer.
        """
        x, normed = self.add_rms_norm(x, residual, layer.input_norm)
        projected = self.linear(normed, layer.qkv, index, "attn_in")
        if layer.delta_net is None:
            mixer_output = self.attention(projected, layer, index)
        else:
            mixer_output = self.delta_net(normed, projected, layer.delta_net, index)
        out = self.linear(mixer_output, layer.o, index, "attn_out")
        x, normed = self.add_rms_norm(
            x, self.output_norm(out, layer.attn_output_norm), layer.mlp_norm
        )
        out = self.mlp(normed, layer.mlp, index)
        return x, self.output_norm(out, layer.mlp_output_norm)

    def mlp(self, x: Tensor, mlp: DenseMLP | Experts, layer: int) -> Tensor:
        """Return the output [T, D] of a layer's MLP. `x`: [T, D]."""
        if not isinstance(mlp, Experts):
            return self.gated_mlp(x, mlp, layer, "mlp")
        out = mixture_of_experts(self.backend, x, mlp, self.adapters, layer)
        if mlp.shared is None:
            return out
        shared = self.gated_mlp(x, mlp.shared, layer, "shared")
        # The gate is float32, as the router is.
        gate = self.linear_without_adapter(x.float(), mlp.shared.output_gate)
        return out + apply_output_gate(shared, gate)

    def gated_mlp(self, x: Tensor, mlp: DenseMLP | SharedExpert, layer: int, prefix: str) -> Tensor:
        """Return the output [T, D] of a gated MLP.

        `prefix`: the beginning of the names of its target modules. It is "mlp" for "mlp_in" and
        "mlp_out", and "shared" for the shared expert's "shared_in" and "shared_out".
        """
        gate_up = self.linear(x, mlp.gate_up, layer, f"{prefix}_in")
        return self.linear(
            gated_activation(self.backend, gate_up), mlp.down, layer, f"{prefix}_out"
        )

    def attention(self, projected: Tensor, layer: Layer, index: int) -> Tensor:
        """Return the attention output [T, Hq * E].

        `projected`: queries, keys and values side by side, as the output of `layer.qkv`.
        """
        config, gate = self.backend.config, None
        if config.output_gate:
            # q_proj has the query and the gate of each head side by side.
            query_columns = 2 * config.num_heads * config.head_dim
            queries_and_gates, keys_values = projected.split(
                [query_columns, projected.shape[1] - query_columns], 1
            )
            q, gate = queries_and_gates.unflatten(1, (config.num_heads, 2, -1)).unbind(2)
            projected, gate = torch.cat([q.flatten(1), keys_values], 1), gate.flatten(1)
        q, k, v = self.qkv(projected, layer)
        sinks = () if layer.sinks is None else (layer.sinks,)
        attended = self.attend(self.index_in_kind[index], q, k, v, *sinks).flatten(-2)
        return attended if gate is None else apply_output_gate(attended, gate)

    def delta_net(
        self, normed: Tensor, projected: Tensor, weights: DeltaNetWeights, index: int
    ) -> Tensor:
        """Return the gated outputs [T, Hv * Dv] of a gated delta net before the output projection.

        `normed`: the layer's normed input [T, D]. `projected`: the inputs of the convolution and of
        the output gate, [T, C + Hv * Dv] (see model/layers/recurrence.py for the symbols).
        """
        config = self.backend.config.delta_net
        assert config is not None
        assert self.recurrence is not None, (
            "recurrence is None; a model with gated delta nets needs one"
        )
        qkv, gate = projected.split([config.channels, projected.shape[1] - config.channels], 1)
        inputs = DeltaNetInputs(
            qkv, self.linear_without_adapter(normed, weights.beta_decay), weights
        )
        out = self.recurrence(self.index_in_kind[index], inputs)
        normed_output = self.add_rms_norm(out, None, weights.norm)[1].flatten(1)
        return gated_activation(self.backend, torch.cat([gate, normed_output], 1))

    def output_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Return the RMSNorm of `x` [T, D], or `x` if the model has no norm here."""
        return x if weight is None else self.add_rms_norm(x.float(), None, weight)[1]

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return x + residual, and its RMSNorm in the model's dtype. Without a weight, the second
        result is the sum in the model's dtype.
        """
        if weight is None:
            total = x if residual is None else x + residual
            return total, total.to(self.backend.dtype)
        return add_rms_norm(self.backend, x, residual, weight, self.backend.config.rms_norm_eps)

    def qkv(self, qkv: Tensor, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, Hq, E] and k [T, Hkv, E], normed and rotated, and v [T, Hkv, E]."""
        config, rotation = self.backend.config, self.rotations[layer.rope]
        cos, sin = rotation.cos, rotation.sin
        heads = (config.num_heads, config.num_kv_heads)
        q, k, v = qkv.unflatten(-1, (-1, config.head_dim)).split([*heads, heads[1]], 1)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm, layer.k_norm)
        can_fuse_norm_and_rope = self.query_scales is None and self.head_dim_order is None
        if can_fuse_norm_and_rope and not config.joint_qk_norm and not torch.is_grad_enabled():
            eps = config.rms_norm_eps
            return *self.backend.qk_norm_rope(qkv, heads, norms, eps, cos, sin), v
        if norms is not None:
            q, k = (self.head_norm(x, weight) for x, weight in zip((q, k), norms, strict=True))
        if self.head_dim_order is not None:
            q = permute_last_dim(q, self.head_dim_order)
            k = permute_last_dim(k, self.head_dim_order)
        q_cos, q_sin = cos, sin
        if self.query_scales is not None:
            q_cos, q_sin = cos * self.query_scales, sin * self.query_scales
        return rope(self.backend, q, q_cos, q_sin), rope(self.backend, k, cos, sin), v

    def head_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the RMSNorm of queries or keys [T, H, E], per head or over all heads together."""
        head_rows = x.flatten(1) if self.backend.config.joint_qk_norm else x
        return self.add_rms_norm(head_rows.float(), None, weight)[1].view(x.shape)

    def linear_without_adapter(self, x: Tensor, linear: PackedLinear) -> Tensor:
        """Return the outputs [T, out] of linears that have no adapter."""
        if torch.is_grad_enabled():
            return adapted_linear(self.backend, x, linear, None)
        return self.backend.matmul(x, linear)

    def linear(self, x: Tensor, linear: PackedLinear, layer: int, module: str) -> Tensor:
        """Return the outputs [T, out] of the linears that share the input `x` [T, in].

        The LoRA outputs of each row's adapter are already added. `module`: the name of the target
        module (see `fused_module_names`).
        """
        ranks, is_column = self.collectives, module.endswith("_in")
        if ranks is not None and is_column:
            x = ranks.column_input(x)
        if self.adapters is None:
            out = adapted_linear(self.backend, x, linear, None)
        elif isinstance(self.adapters, LoraWeights):
            lora = self.adapters.layers[layer].matrices_of(module)
            out = adapted_linear(self.backend, x, linear, lora)
        else:
            out = self.backend.matmul(x, linear)
            self.adapters.add_(x, out, linear.sizes, layer, module)
        return out if ranks is None or is_column else ranks.row_output(out)


@dataclass(frozen=True)
class _WeightLoader:
    """Provides a checkpoint's weights in the dtype and on the device of a backend."""

    weights: Mapping[str, Tensor]
    backend: Backend
    quantize: str | None = None

    def weight(self, name: str) -> Tensor:
        """Return one weight."""
        # A CPU weight that already has the right dtype stays memory-mapped, because `to` then
        # returns the same tensor.
        weight = self.float_weight(name, self.backend.dtype)
        return weight.to(device=self.backend.device, dtype=self.backend.dtype)

    def float_weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one weight as it is stored, or dequantized to `dtype` if it is stored in fp8."""
        weight = self.weights[name]
        return self.fp8_weight(name).dequantize(dtype) if _is_fp8(weight) else weight

    def fp8_weight(self, name: str) -> Fp8Weight:
        """Return a weight that the checkpoint stores in fp8, on the backend's device."""
        layout = self.backend.config.fp8
        assert layout is not None
        codes = self.weights[name].to(self.backend.device)
        return Fp8Weight.from_stored(codes, self.weights[scale_name(name)], layout.block)

    def fused_weights(self, names: Sequence[str]) -> Sequence[Tensor]:
        """Return the weights that one matmul reads; on a GPU they share one contiguous tensor."""
        if not self.backend.needs_adjacent_weights:
            return [self.weight(name) for name in names]
        weights = [self.float_weight(name, self.backend.dtype) for name in names]
        # Copy each weight straight into the fused buffer. torch.cat on the device would need twice
        # the memory, and the freed half would stay fragmented in torch's caching allocator.
        fused = torch.empty(
            sum(map(len, weights)),
            *weights[0].shape[1:],
            dtype=self.backend.dtype,
            device=self.backend.device,
        )
        fused_slices = fused.split([len(weight) for weight in weights])
        for fused_slice, weight in zip(fused_slices, weights, strict=True):
            fused_slice.copy_(weight)
        return fused_slices

    def norm(self, name: str, factor: float = 1.0) -> Tensor:
        """Return the float32 weight of an RMSNorm: (stored weight + norm_offset) * `factor`."""
        weight = self.weight(f"{name}.weight").float()
        offset = self.backend.config.norm_offset
        # Do not copy a weight that is used as it is.
        return weight if offset == 0.0 and factor == 1.0 else (weight + offset) * factor

    def layer(self, index: int, rope: RotaryEmbedding) -> Layer:
        """Return the decoder layer `index`, with its RoPE table."""
        config, prefix = self.backend.config, f"model.layers.{index}."
        is_recurrent = config.delta_net is not None and index in config.delta_net.layers
        has_qk_norm = config.qk_norm and not is_recurrent

        def linear(*names: str) -> PackedLinear:
            has_bias = f"{prefix}{names[0]}.bias" in self.weights
            biases = [self.weight(f"{prefix}{name}.bias") if has_bias else None for name in names]
            if f"{prefix}{names[0]}.blocks" in self.weights:
                quantized_weights = [self.mxfp4_weight(f"{prefix}{name}") for name in names]
                return self.backend.pack_quantized(quantized_weights, biases)
            weight_names = [f"{prefix}{name}.weight" for name in names]
            if self.quantize is not None:
                # Quantize from float32, so that the result does not depend on the model's dtype.
                weights = [
                    self.float_weight(name, torch.float32).to(self.backend.device)
                    for name in weight_names
                ]
                quantized_weights = [quantize(weight, self.quantize) for weight in weights]
                return self.backend.pack_quantized(quantized_weights, biases)
            if all(_is_fp8(self.weights[name]) for name in weight_names):
                return self.backend.pack_quantized(
                    [self.fp8_weight(n) for n in weight_names], biases
                )
            return self.backend.pack(self.fused_weights(weight_names), biases, keep_unpacked=False)

        def norm(name: str, factor: float = 1.0) -> Tensor:
            return self.norm(prefix + name, factor)

        def input_norm(name: str) -> Tensor | None:
            return norm(name) if config.input_norms else None

        def output_norm(name: str) -> Tensor | None:
            return norm(name) if config.output_norms else None

        # Attention multiplies scores by head_dim ** -0.5, but some configs ask for another factor.
        # So the weight of the query norm is multiplied by the ratio of the two factors. RoPE, which
        # comes after the norm, is linear and keeps that ratio.
        query_norm_factor = (config.head_dim / (config.query_scalar or config.head_dim)) ** 0.5
        mlp_norm_name = (
            "pre_feedforward_layernorm" if config.output_norms else "post_attention_layernorm"
        )
        attn_in, attn_out, mlp_in, mlp_out, *shared = fused_modules(config, index)

        def mlp() -> DenseMLP | Experts:
            if not config.has_experts(index):
                return DenseMLP(linear(*mlp_in), linear(*mlp_out))
            names = [f"mlp.experts.{expert}" for expert in range(config.num_experts)]
            if config.expert_biases:
                return Experts(
                    self.float32_linear(f"{prefix}mlp.router"),
                    ExpertLinears(linear(f"{name}.gate_up_proj") for name in names),
                    ExpertLinears(linear(f"{name}.down_proj") for name in names),
                )
            return Experts(
                self.float32_linear(f"{prefix}mlp.gate"),
                ExpertLinears(linear(f"{name}.gate_proj", f"{name}.up_proj") for name in names),
                ExpertLinears(linear(f"{name}.down_proj") for name in names),
                shared_expert() if config.has_shared_expert else None,
            )

        def shared_expert() -> SharedExpert:
            gate_up, down = (linear(*names) for names in shared)
            gate = self.float32_linear(f"{prefix}mlp.shared_expert_gate")
            return SharedExpert(gate_up, down, gate)

        return Layer(
            input_norm=input_norm("input_layernorm"),
            qkv=linear(*attn_in),
            q_norm=norm("self_attn.q_norm", query_norm_factor) if has_qk_norm else None,
            k_norm=norm("self_attn.k_norm") if has_qk_norm else None,
            o=linear(*attn_out),
            attn_output_norm=output_norm("post_attention_layernorm"),
            mlp_norm=input_norm(mlp_norm_name),
            mlp=mlp(),
            mlp_output_norm=output_norm("post_feedforward_layernorm"),
            rope=rope,
            delta_net=self.delta_net(f"{prefix}linear_attn.") if is_recurrent else None,
            sinks=self.float32_weight(f"{prefix}self_attn.sinks")
            if config.attention_sinks
            else None,
        )

    def float32_weight(self, name: str) -> Tensor:
        """Return one weight in float32."""
        return self.float_weight(name, torch.float32).to(self.backend.device, torch.float32)

    def float32_linear(self, name: str) -> PackedLinear:
        """Return a linear whose weights are float32 in a model of any dtype, such as a router."""
        bias = self.float32_weight(f"{name}.bias") if f"{name}.bias" in self.weights else None
        return self.backend.pack([self.float32_weight(f"{name}.weight")], [bias])

    def mxfp4_weight(self, name: str) -> Mxfp4Weight:
        """Return the matrix of a linear that the checkpoint stores in mxfp4."""
        blocks, scales = (
            self.weights[f"{name}.{part}"].to(self.backend.device) for part in ("blocks", "scales")
        )
        return Mxfp4Weight(blocks.flatten(1), scales)

    def delta_net(self, prefix: str) -> DeltaNetWeights:
        """Return the weights of the gated delta net whose weight names start with `prefix`."""

        def float32_weight(name: str) -> Tensor:
            # No matmul reads these weights, so they stay float32.
            return self.float32_weight(prefix + name)

        projections = self.fused_weights([f"{prefix}in_proj_{part}.weight" for part in ("b", "a")])
        return DeltaNetWeights(
            beta_decay=self.backend.pack(projections, (None, None), keep_unpacked=False),
            conv=float32_weight("conv1d.weight").squeeze(1),
            decay_rate=-float32_weight("A_log").exp(),
            decay_bias=float32_weight("dt_bias"),
            norm=float32_weight("norm.weight"),
        )


def _is_fp8(weight: Tensor) -> bool:
    """Return whether a weight is stored in fp8."""
    return weight.dtype == torch.float8_e4m3fn
