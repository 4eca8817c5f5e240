"""Rotary position embedding (Su et al. 2021), with the frequency scalings that the supported families use.

Angles and products are float32 whatever the model's dtype: a rotation is cheap, and its error would reach every logit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from planish.model.config import LinearRopeScaling, Llama3RopeScaling, RopeConfig
from planish.native import kernels


@dataclass(frozen=True)
class Rotation:
    """cos and sin of each row's angles: float32 [T, 1, E/2]."""

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """Angles of positions 0 .. max_context - 1, made once, looked up by position: cos and sin, float32 [max_context, E/2]."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_context: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_context, dtype=torch.float32), inverse_frequencies(rope, head_dim))
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)

    def __call__(self, positions: Tensor) -> Rotation:
        return Rotation(self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turns each pair (x[e], x[e + E/2]) of [T, H, E] by its row's angles; keeps the dtype."""
    if torch.is_grad_enabled():
        return _Rotate.apply(x, rotation.cos, rotation.sin)  # type: ignore[no-any-return]
    return _turn(x, rotation.cos, rotation.sin)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angular velocity of each pair, float32 [E/2]."""
    base = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.scaling is None:
        return base
    if isinstance(rope.scaling, LinearRopeScaling):
        return base / rope.scaling.factor
    return _llama3_frequencies(base, rope.scaling)


def _llama3_frequencies(base: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / base
    old = scaling.original_max_position_embeddings
    smooth = (old / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * base / scaling.factor + smooth * base
    stretched = torch.where(wavelength > old / scaling.low_freq_factor, base / scaling.factor, between)
    return torch.where(wavelength < old / scaling.high_freq_factor, base, stretched)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    own = kernels.serving(x)
    if own is not None:
        return own.rotate(x, cos, sin, back=back)
    sin = -sin if back else sin
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation by the opposite angle, so nothing but the angles is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _turn(grad.contiguous(), cos, sin, back=True), None, None
