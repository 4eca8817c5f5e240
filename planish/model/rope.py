"""Rotary position embedding (Su et al. 2021), with the frequency scalings that the supported
families use.

Angles and products are float32 whatever the model's dtype: a rotation is cheap, and its error would
reach every logit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from planish.model.config import LinearRopeScaling, Llama3RopeScaling, RopeConfig, YarnRopeScaling


@dataclass(frozen=True)
class Rotation:
    """cos and sin of each row's angles, times YaRN's attention factor: float32 [T, 1, E/2]."""

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """Angles of positions 0 .. max_context - 1, made once, looked up by position: cos and sin,
    float32 [max_context, E/2].
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_context: int, device: torch.device
    ) -> None:
        angles = torch.outer(
            torch.arange(max_context, dtype=torch.float32), inverse_frequencies(rope, head_dim)
        )
        factor = rope.scaling.attention_factor if isinstance(rope.scaling, YarnRopeScaling) else 1.0
        self.cos = (angles.cos() * factor).to(device)
        self.sin = (angles.sin() * factor).to(device)

    def __call__(self, positions: Tensor) -> Rotation:
        return Rotation(self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angular velocity of each pair, float32 [E/2]."""
    inverse = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    base = 1.0 / inverse
    if rope.scaling is None:
        return base
    if isinstance(rope.scaling, LinearRopeScaling):
        return base / rope.scaling.factor
    if isinstance(rope.scaling, YarnRopeScaling):
        kept = _yarn_kept(rope.theta, rope.scaling, head_dim)
        return 1.0 / (rope.scaling.factor * inverse) * (1 - kept) + base * kept
    return _llama3_frequencies(base, rope.scaling)


def _llama3_frequencies(base: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between
    interpolated.
    """
    wavelength = 2 * math.pi / base
    old = scaling.original_max_position_embeddings
    smooth = (old / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * base / scaling.factor + smooth * base
    stretched = torch.where(
        wavelength > old / scaling.low_freq_factor, base / scaling.factor, between
    )
    return torch.where(wavelength < old / scaling.high_freq_factor, base, stretched)


def _yarn_kept(theta: float, scaling: YarnRopeScaling, head_dim: int) -> Tensor:
    """How much of its velocity each pair keeps: from 1 where it makes beta_fast turns to 0 at
    beta_slow, linear in its number.
    """

    def pair(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # of one pair: a step
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
