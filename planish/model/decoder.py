"""The decoder of Llama 3.x, Mistral, Qwen2.5, Qwen3 (dense) and similar models.

These models share RMSNorm, RoPE, grouped-query attention and SwiGLU.

The decoder receives a flat list of T rows, each a token with a position. It knows nothing about
sequences. The trainer or the sampler passes in an `attend` function, which decides how rows attend
to one another and where keys and values are stored. So trainer and sampler run the same arithmetic
over the same weights.

The base weights are frozen and shared. Matmuls run in the model's dtype. The residual stream, norms
and RoPE are float32. That costs little and keeps the bf16 logprobs of sampler and trainer close
together.

Shapes: T rows, D hidden, H heads, E head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from planish.model.config import ModelConfig
from planish.model.kernels import choose
from planish.model.kernels.cpp import cpu
from planish.model.kernels.cpp.cpu import KeptAttention
from planish.model.kernels.cpp.cpu_pass import PanelLayer, PanelPass
from planish.model.kernels.cpp.cpu_products import PanelRows, PanelSite, WeightRoom
from planish.model.linear import FrozenLinear
from planish.model.lora import SITES, AdapterRows, LayerLora, LoraStack, Site, StackRows
from planish.model.rope import RotaryEmbedding, Rotation, rotate
from planish.model.weights import load_weights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""The attention function of one forward pass: (layer, q [T, Hq, E], k [T, Hkv, E], v [T, Hkv, E])
-> [T, Hq, E].

RoPE is already applied to q and k. The function itself scales the scores by E ** -0.5.
"""


class GroupedLora(Protocol):
    """The adapters of all rows of a batch, applied by one grouped kernel."""

    def add_(self, x: Tensor, out: Tensor, sizes: Sequence[int], layer: int, site: str) -> None:
        """Add the LoRA outputs of one target module to `out`, in place and without gradients.

        `x`: input [T, in]. `out`: [T, sum(sizes)]. `site`: a field of LayerLora, such as "attn_in".
        """
        ...


Adapters = Sequence[AdapterRows | StackRows] | GroupedLora


@dataclass(frozen=True)
class Layer:
    """The frozen weights of one decoder layer."""

    input_norm: Tensor
    qkv: FrozenLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: FrozenLinear
    mlp_norm: Tensor
    gate_up: FrozenLinear
    down: FrozenLinear


class Decoder:
    """The frozen base model: embedding, decoder layers and output head."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        taken = _Taken(weights, dtype, device)
        self._embedding = taken.one("model.embed_tokens.weight")
        room = WeightRoom()
        self.head = FrozenLinear(
            [self._embedding if config.tied_head else taken.one("lm_head.weight")], room=room
        )
        self._final_norm = taken.one("model.norm.weight").float()
        self._layers = [
            _layer(config, taken, f"model.layers.{i}.", room) for i in range(config.num_layers)
        ]
        self._rope = RotaryEmbedding(config.rope, config.head_dim, config.max_context, device)

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
        """Load the model in `directory` (config and weight files) in `dtype` onto `device`."""
        config = ModelConfig.from_directory(directory)
        return cls(config, load_weights(directory, config), dtype, device)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        adapters: Adapters,
        *,
        tile: int | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """Return the last hidden states after the final norm: [T, D] in the model's dtype.

        `tokens`, `positions`: int64 [T]. `tile`: run every matmul in tiles of exactly this many
        rows, so that a row is bitwise reproducible for any T. T must be a multiple of `tile`.
        `recompute`: use activation checkpointing, which stores only each layer's input for the
        backward pass.
        """
        # Run all layers in one native call, if the attention has a native plan and all weights and
        # adapters are packed.
        if tile is None and not torch.is_grad_enabled():
            adapters = _grouped(adapters)
            panels = adapters if isinstance(adapters, PanelRows) else None
            planned = (
                attend.plan
                if isinstance(attend, KeptAttention) and (panels or not adapters)
                else None
            )
            if planned is not None and cpu.serves("decode") and self._in_panels is not None:
                return self._in_panels.decoded(tokens, positions, planned, panels)
        x = self._embedding[tokens].float()
        run = _Forward(self.config, self.dtype, self._rope(positions), attend, adapters, tile)
        more: Tensor | None = None
        for index, layer in enumerate(self._layers):
            if recompute and torch.is_grad_enabled():
                x, more = checkpoint(
                    run.layer, index, layer, x, more, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x, more = run.layer(index, layer, x, more)
        return add_norm(x, more, self._final_norm, self.config.rms_norm_eps, self.dtype)[1]

    @cached_property
    def _in_panels(self) -> PanelPass | None:
        """All layers as one native call, or None unless all their weights are packed."""
        layers = [_panel_layer(layer) for layer in self._layers]
        found = [layer for layer in layers if layer is not None]
        if len(found) < len(layers):
            return None
        config = self.config
        return PanelPass(
            layers=found,
            embedding=self._embedding,
            final_norm=self._final_norm,
            cos=self._rope.cos,
            sin=self._rope.sin,
            eps=config.rms_norm_eps,
            heads=(config.num_heads, config.num_kv_heads),
            inner=config.intermediate_size,
        )


@dataclass(frozen=True)
class _Forward:
    """The inputs that all layers of one forward pass share."""

    config: ModelConfig
    dtype: torch.dtype
    rotation: Rotation
    attend: Attend
    adapters: Adapters
    tile: int | None

    def layer(
        self, index: int, layer: Layer, x: Tensor, more: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run one decoder layer on the float32 residual stream.

        The residual stream is the sum of `x` [T, D] and `more` [T, D], the output of the previous
        layer's MLP. The next norm adds the two in one fused kernel. Return the same pair for the
        next layer.
        """
        heads = [self.config.num_heads, self.config.num_kv_heads, self.config.num_kv_heads]
        x, h = self.add_norm(x, more, layer.input_norm)
        qkv = self.linear(h, layer.qkv, index, "attn_in")
        q, k, v = qkv.unflatten(-1, (-1, self.config.head_dim)).split(heads, 1)
        norms = (
            None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        )
        fused = None if torch.is_grad_enabled() else choose.fused_heads(qkv)
        eps = self.config.rms_norm_eps
        if fused is not None:
            q, k = fused.turned_heads(
                qkv, (heads[0], heads[1]), norms, eps, self.rotation.cos, self.rotation.sin
            )
        else:
            if norms is not None:
                q, k = (
                    norm(x, weight, eps, self.dtype)
                    for x, weight in zip((q, k), norms, strict=True)
                )
            q, k = rotate(q, self.rotation), rotate(k, self.rotation)
        attended = self.attend(index, q, k, v)
        x, h = self.add_norm(
            x, self.linear(attended.flatten(-2), layer.o, index, "attn_out"), layer.mlp_norm
        )
        return x, self.linear(
            swiglu(self.linear(h, layer.gate_up, index, "mlp_in")), layer.down, index, "mlp_out"
        )

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + more, and its RMSNorm in the model's dtype."""
        return add_norm(x, more, weight, self.config.rms_norm_eps, self.dtype)

    def linear(self, x: Tensor, linear: FrozenLinear, layer: int, site: str) -> Tensor:
        """Apply the linears that read `x` [T, in], and the adapters of its rows; return [T, out].

        `site`: the target module, a field of LayerLora.
        """
        if not isinstance(self.adapters, Sequence):
            out = linear.product(x, self.tile)
            self.adapters.add_(x, out, linear.sizes, layer, site)
            return out
        whole = len(self.adapters) == 1 and not isinstance(self.adapters[0].weights, LoraStack)
        if whole and torch.is_grad_enabled():
            lora_site = _site(self.adapters[0], layer, site)
            if lora_site is None:
                return _Adapted.apply(x, linear, self.tile, None, None)  # type: ignore[no-any-return]
            panels = lora_site.panels if self.tile is None else None
            return _Adapted.apply(x, linear, self.tile, panels, lora_site.a, *lora_site.bs)  # type: ignore[no-any-return]
        out = linear.product(x, self.tile)
        for rows in self.adapters:
            lora_site = _site(rows, layer, site)
            if lora_site is None:
                continue
            part = slice(rows.start, rows.stop)
            outs = out[part].split(linear.sizes, 1)
            if isinstance(rows.weights, LoraStack):
                add_lora_stack_(x[part], outs, lora_site)
            else:
                add_lora_(
                    lora_hidden(x[part], lora_site.a, self.tile), outs, lora_site.bs, self.tile
                )
        return out


def _grouped(adapters: Adapters) -> Adapters:
    """Return the adapters as one PanelRows, which a single kernel applies.

    Return them unchanged if the kernel does not support one of them.
    """
    if not isinstance(adapters, Sequence):
        return adapters
    members = []
    for rows in adapters:
        if isinstance(rows.weights, LoraStack) or (
            rows.weights is not None and not rows.weights.panels.is_served
        ):
            return adapters
        if rows.weights is not None and not rows.weights.panels.is_empty:
            members.append((rows.start, rows.stop, rows.weights.panels))
    return PanelRows(members, SITES) if members else ()


def _site(rows: AdapterRows | StackRows, layer: int, site: str) -> Site | None:
    """Return the LoRA matrices of one target module, or None if the rows have none there."""
    lora: LayerLora | None = rows.weights.layers[layer] if rows.weights is not None else None
    return getattr(lora, site) if lora is not None else None


class _Adapted(torch.autograd.Function):
    """Frozen linears with one adapter for all rows.

    The backward pass returns gradients for the input, A and the Bs.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        linear: FrozenLinear,
        tile: int | None,
        panels: PanelSite | None,
        a: Tensor | None,
        *bs: Tensor,
    ) -> Tensor:
        """`panels`: `a` and `bs` packed for the native CPU kernel; None to compute with torch."""
        out = linear.product(x, tile)
        ctx.linear, ctx.panels = linear, panels
        if a is not None:
            if panels is not None:
                low = panels.add_(x, out, linear.sizes)
            else:
                low = lora_hidden(x, a, tile)
                add_lora_(low, out.split(linear.sizes, 1), bs, tile)
            ctx.save_for_backward(x, low, a, *bs)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_x = ctx.linear.product_back(grad)
        saved = ctx.saved_tensors
        if not saved:
            return grad_x, None, None, None, None
        x, low, a, *bs = saved
        grad_a, grad_bs = Site(a, tuple(bs), ctx.panels).backward_(
            grad, x, low, grad_x, ctx.linear.sizes
        )
        return grad_x, None, None, None, grad_a, *grad_bs


def lora_hidden(x: Tensor, a: Tensor, tile: int | None) -> Tensor:
    """Return x @ a.T, the LoRA hidden states of the n linears that read x: [T, n * rank].

    `x`: [T, in]. `tile`: if given, compute in tiles of this many rows.
    """
    if tile is None or x.shape[0] == tile:
        return x @ a.t()
    return torch.cat([part @ a.t() for part in x.split(tile)])


def add_lora_(low: Tensor, outs: Sequence[Tensor], bs: Sequence[Tensor], tile: int | None) -> None:
    """Add each linear's LoRA output to its part [T, out] of the output, in place.

    `low`: the LoRA hidden states [T, n * rank]. Each B [out, rank] multiplies its share of them.
    """
    for out, part, b in zip(outs, low.chunk(len(outs), 1), bs, strict=True):
        if tile is None:
            out.addmm_(part, b.t())
        else:
            out.add_(lora_hidden(part, b, tile))


def add_lora_stack_(x: Tensor, outs: Sequence[Tensor], site: Site) -> None:
    """Add the LoRA outputs of n stacked adapters in place; each adapter has 1 / n of the rows."""
    n = site.a.shape[0]
    lows = torch.bmm(x.unflatten(0, (n, -1)), site.a.transpose(1, 2)).chunk(len(outs), dim=-1)
    for out, part, b in zip(outs, lows, site.bs, strict=True):
        out.unflatten(0, (n, -1)).baddbmm_(part, b.transpose(1, 2))


def norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return the RMSNorm of x over the last dimension (Zhang & Sennrich 2019), in `dtype`.

    It computes x / sqrt(mean(x ** 2) + eps) * weight in float32.
    """
    return add_norm(x.float(), None, weight, eps, dtype)[1].contiguous()


def add_norm(
    x: Tensor, more: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return x + more (float32), and its RMSNorm in `dtype`.

    If gradients are disabled, `x` may be overwritten with the sum.
    """
    if torch.is_grad_enabled():
        return _AddNorm.apply(x, more, weight, eps, dtype)  # type: ignore[no-any-return]
    own = choose.serving(x, "norms")
    if own is not None:
        total, out, _ = own.rms_norm(x.contiguous(), more, weight, eps, dtype, in_place=True)
        return total, out
    total = x if more is None else x.add_(more)
    return total, _norm(total, weight, eps, dtype)[0]


def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the norm in `dtype`, and 1 / sqrt(mean(x ** 2) + eps) of each row."""
    scale = (
        torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        .square_()
        .div_(x.shape[-1])
        .add_(eps)
        .rsqrt_()
    )
    return (x * scale).mul_(weight).to(dtype), scale


class _AddNorm(torch.autograd.Function):
    """Residual addition and RMSNorm in one differentiable operation.

    The norm's weight is frozen, so only the two summands get gradients. The backward pass needs
    only their sum and one scale factor per row.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, more: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ):
        own = choose.serving(x, "norms")
        if own is not None:
            total, out, scale = own.rms_norm(x.contiguous(), more, weight, eps, dtype)
        else:
            total = x if more is None else x + more
            out, scale = _norm(total, weight, eps, dtype)
        ctx.save_for_backward(total, weight, scale)
        ctx.more = None if more is None else more.dtype
        ctx.set_materialize_grads(False)
        return total.view_as(total) if total is x else total, out

    @staticmethod
    def backward(ctx, grad_total: Tensor | None, grad: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, scale = ctx.saved_tensors
        own = choose.serving(x, "norms")
        if grad is None:
            found = grad_total
        elif own is not None:
            more = None if grad_total is None else grad_total.contiguous()
            found = own.rms_norm_backward(grad.contiguous(), x, weight, scale, more)
        else:
            weighted = grad.to(x.dtype) * weight
            inner = (
                torch.linalg.vecdot(weighted, x)
                .unsqueeze(-1)
                .div_(x.shape[-1])
                .mul_(scale)
                .mul_(scale)
            )
            found = weighted.sub_(x * inner).mul_(scale)
            found = found if grad_total is None else found.add_(grad_total)
        assert found is not None
        return found, None if ctx.more is None else found.to(ctx.more), None, None, None


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer 2020): [T, I].

    `gate_up`: [T, 2 * I], the gate followed by up.
    """
    if torch.is_grad_enabled():
        return _SwiGLU.apply(gate_up)  # type: ignore[no-any-return]
    return _swiglu(gate_up)


def _swiglu(gate_up: Tensor) -> Tensor:
    own = choose.serving(gate_up, "swiglu")
    if own is not None:
        return own.swiglu(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    """SwiGLU whose backward pass recomputes silu instead of storing it."""

    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _swiglu(gate_up)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gate_up,) = ctx.saved_tensors
        own = choose.serving(gate_up, "swiglu")
        if own is not None:
            return own.swiglu_backward(grad.contiguous(), gate_up)
        gate, up = gate_up.chunk(2, -1)
        return torch.cat(
            [torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)], -1
        )


@dataclass(frozen=True)
class _Taken:
    """Weights loaded from files, converted to `dtype` and moved to `device` on access."""

    weights: Mapping[str, Tensor]
    dtype: torch.dtype
    device: torch.device

    def one(self, name: str) -> Tensor:
        """Return one weight in `dtype` on `device`."""
        # A CPU weight that already has the right dtype stays memory-mapped, because `to` then
        # returns the same tensor.
        return self.weights[name].to(device=self.device, dtype=self.dtype)

    def several(self, names: Sequence[str]) -> Sequence[Tensor]:
        """Return the weights that one matmul reads; on a GPU they share one contiguous tensor."""
        if self.device.type == "cpu":
            return [self.one(name) for name in names]
        given = [self.weights[name] for name in names]
        # Copy each weight straight into the joint buffer. torch.cat on the device would need twice
        # the memory, and the freed half would stay fragmented in torch's caching allocator.
        whole = torch.empty(
            sum(map(len, given)), *given[0].shape[1:], dtype=self.dtype, device=self.device
        )
        parts = whole.split([len(weight) for weight in given])
        for part, weight in zip(parts, given, strict=True):
            part.copy_(weight)
        return parts


def _layer(config: ModelConfig, taken: _Taken, prefix: str, room: WeightRoom) -> Layer:
    """Load the decoder layer whose weight names start with `prefix`.

    `room`: the arena in which packed weights are allocated.
    """

    def linear(*names: str) -> FrozenLinear:
        biased = f"{prefix}{names[0]}.bias" in taken.weights
        biases = [taken.one(f"{prefix}{name}.bias") if biased else None for name in names]
        return FrozenLinear(
            taken.several([f"{prefix}{name}.weight" for name in names]), biases, room, keeps=False
        )

    def norm(name: str) -> Tensor:
        return taken.one(f"{prefix}{name}.weight").float()

    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=norm("self_attn.q_norm") if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm") if config.qk_norm else None,
        o=linear("self_attn.o_proj"),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )


def _panel_layer(layer: Layer) -> PanelLayer | None:
    """Return the layer for the native forward pass, or None unless all its weights are packed."""
    qkv, o, gate_up, down = (
        layer.qkv.panels,
        layer.o.panels,
        layer.gate_up.panels,
        layer.down.panels,
    )
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    norms = (layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
    return PanelLayer(*norms, *qkv, *o, *gate_up, *down)
