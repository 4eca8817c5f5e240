"""One decoder for Llama 3.x, Qwen2.5, Qwen3 (dense) and their kin: RMSNorm, RoPE, grouped-query attention, SwiGLU.

It sees a flat list of T rows, each a token with a position, and knows nothing of sequences: how rows attend to one another,
and where keys and values are kept, is the business of the `attend` function that the trainer or the sampler passes in. So
both run the same arithmetic over the same weights.

The base weights are frozen and shared. Products run in the model's dtype; the residual stream, norms and rotations are float32, which
costs little and keeps sampler and trainer close together in bf16.

Shapes: T rows, D hidden, H heads, E head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from planish.model.config import ModelConfig
from planish.model.lora import AdapterRows, LayerLora, LoraStack, Site, StackRows
from planish.model.rope import RotaryEmbedding, Rotation, rotate
from planish.model.weights import load_weights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, Hq, E], k [T, Hkv, E], v [T, Hkv, E]), q and k rotated -> [T, Hq, E]. Scores are scaled by E ** -0.5 there."""


@dataclass(frozen=True)
class Linear:
    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """Frozen weights of one decoder layer."""

    input_norm: Tensor
    qkv: tuple[Linear, Linear, Linear]
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    gate_up: tuple[Linear, Linear]
    down: Linear


class Decoder:
    """The frozen base model."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        # Weights that are in the right dtype and place already stay memory-mapped: `to` returns them as they are.
        moved = {name: tensor.to(device=device, dtype=dtype) for name, tensor in weights.items()}
        self._embedding = moved["model.embed_tokens.weight"]
        self.head_weight = self._embedding if config.tied_head else moved["lm_head.weight"]
        self._final_norm = moved["model.norm.weight"].float()
        self._layers = [_layer(config, moved, f"model.layers.{i}.") for i in range(config.num_layers)]
        self._rope = RotaryEmbedding(config.rope, config.head_dim, config.max_context, device)

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
        config = ModelConfig.from_directory(directory)
        return cls(config, load_weights(directory, config), dtype, device)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        adapters: Sequence[AdapterRows | StackRows],
        *,
        tile: int | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """Last hidden states after the final norm: [T, D] in the model's dtype.

        `tokens`, `positions`: int64 [T]. `tile`: run every product in tiles of exactly this many rows (T must be a
        multiple), so that a row's bits do not depend on T. `recompute`: keep only each layer's input for the backward pass.
        """
        x = self._embedding[tokens].float()
        run = _Forward(self.config, self.dtype, self._rope(positions), attend, adapters, tile)
        for index, layer in enumerate(self._layers):
            if recompute and torch.is_grad_enabled():
                x = checkpoint(run.layer, index, layer, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = run.layer(index, layer, x)
        return rms_norm(x, self._final_norm, self.config.rms_norm_eps, self.dtype)


@dataclass(frozen=True)
class _Forward:
    """What all layers of one pass share."""

    config: ModelConfig
    dtype: torch.dtype
    rotation: Rotation
    attend: Attend
    adapters: Sequence[AdapterRows | StackRows]
    tile: int | None

    def layer(self, index: int, layer: Layer, x: Tensor) -> Tensor:
        """One decoder layer on the float32 residual stream x [T, D]."""
        h = rms_norm(x, layer.input_norm, self.config.rms_norm_eps, self.dtype)
        q, k, v = self.linears(h, layer.qkv, index, "attn_in")
        q, k, v = (y.unflatten(-1, (-1, self.config.head_dim)) for y in (q, k, v))
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, self.config.rms_norm_eps, self.dtype)
            k = rms_norm(k, layer.k_norm, self.config.rms_norm_eps, self.dtype)
        attended = self.attend(index, rotate(q, self.rotation), rotate(k, self.rotation), v)
        x = x + self.linears(attended.flatten(-2), (layer.o,), index, "attn_out")[0]
        h = rms_norm(x, layer.mlp_norm, self.config.rms_norm_eps, self.dtype)
        gate, up = self.linears(h, layer.gate_up, index, "mlp_in")
        return x + self.linears(_SwiGLU.apply(gate, up), (layer.down,), index, "mlp_out")[0]

    def linears(self, x: Tensor, linears: Sequence[Linear], layer: int, site: str) -> list[Tensor]:
        """Each linear of one input [T, in], with the rows' adapters: list of [T, out]."""
        outs = [product(x, linear.weight, linear.bias, self.tile) for linear in linears]
        for rows in self.adapters:
            lora: LayerLora | None = rows.weights.layers[layer] if rows.weights is not None else None
            lora_site: Site | None = getattr(lora, site) if lora is not None else None
            if lora_site is None:
                continue
            if isinstance(rows.weights, LoraStack):
                part = slice(rows.start, rows.stop)
                _add_stack_(x[part], [out[part] for out in outs], lora_site)
                continue
            if rows.start == 0 and rows.stop == x.shape[0]:
                return _add_lora(x, outs, lora_site, self.tile)
            # Several adapters share the batch only without gradients, so each may write into its rows in place.
            part = slice(rows.start, rows.stop)
            _add_lora_(x[part], [out[part] for out in outs], lora_site, self.tile)
        return outs


def _add_lora(x: Tensor, outs: list[Tensor], site: Site, tile: int | None) -> list[Tensor]:
    low = product(x, site.a, None, tile)
    lows = low.chunk(len(outs), dim=-1)
    if tile is None:
        return [torch.addmm(out, part, b.t()) for out, part, b in zip(outs, lows, site.bs, strict=True)]
    return [out + product(part, b, None, tile) for out, part, b in zip(outs, lows, site.bs, strict=True)]


def _add_lora_(x: Tensor, outs: list[Tensor], site: Site, tile: int | None) -> None:
    """_add_lora in place."""
    lows = product(x, site.a, None, tile).chunk(len(outs), dim=-1)
    for out, part, b in zip(outs, lows, site.bs, strict=True):
        if tile is None:
            out.addmm_(part, b.t())
        else:
            out.add_(product(part, b, None, tile))


def _add_stack_(x: Tensor, outs: list[Tensor], site: Site) -> None:
    """_add_lora_ of n adapters, each of which has 1 / n of the rows."""
    n = site.a.shape[0]
    lows = torch.bmm(x.unflatten(0, (n, -1)), site.a.transpose(1, 2)).chunk(len(outs), dim=-1)
    for out, part, b in zip(outs, lows, site.bs, strict=True):
        out.unflatten(0, (n, -1)).baddbmm_(part, b.transpose(1, 2))


def product(x: Tensor, weight: Tensor, bias: Tensor | None, tile: int | None) -> Tensor:
    """x [T, in] times weight [out, in] transposed; in tiles of `tile` rows if given."""
    if tile is None or x.shape[0] == tile:
        return F.linear(x, weight, bias)
    return torch.cat([F.linear(part, weight, bias) for part in x.split(tile)])


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x ** 2) + eps) * weight over the last dimension (Zhang & Sennrich 2019), float32 inside, `dtype` out."""
    return _RMSNorm.apply(x, weight, eps, dtype)  # type: ignore[no-any-return]


class _RMSNorm(torch.autograd.Function):
    """The weight is frozen: only x gets a gradient, and only x and one number a row are kept."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, scale = ctx.saved_tensors
        wide = x.float()
        weighted = grad.float() * weight
        inner = torch.linalg.vecdot(weighted, wide).unsqueeze(-1).div_(x.shape[-1]).mul_(scale).mul_(scale)
        return weighted.sub_(wide * inner).mul_(scale).to(x.dtype), None, None, None


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up (Shazeer 2020); silu is recomputed in the backward pass rather than kept."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def _layer(config: ModelConfig, weights: dict[str, Tensor], prefix: str) -> Layer:
    def linear(name: str) -> Linear:
        return Linear(weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

    def norm(name: str) -> Tensor:
        return weights[f"{prefix}{name}.weight"].float()

    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=(linear("self_attn.q_proj"), linear("self_attn.k_proj"), linear("self_attn.v_proj")),
        q_norm=norm("self_attn.q_norm") if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm") if config.qk_norm else None,
        o=linear("self_attn.o_proj"),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=(linear("mlp.gate_proj"), linear("mlp.up_proj")),
        down=linear("mlp.down_proj"),
    )
