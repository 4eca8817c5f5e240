"""Rotary position embedding (Su et al. 2021), with the supported families' frequency scalings.

Angles and rotations are computed in float32 for every model dtype. That costs little, and a
rounding error in a rotation would reach every logit.

Shapes: T rows, E head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.model.architecture.hf_config.rope_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeConfig,
    YarnRopeScaling,
)


@dataclass(frozen=True)
class Rotation:
    """The cos and sin of each row's angles: float32 [T, 1, E/2] each.

    Both are multiplied by the attention factor of YaRN or LongRoPE, if the model uses one of them.
    """

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """A table of cos and sin for positions 0 .. max_context - 1: float32 [max_context, E/2]."""

    def __init__(
        self,
        rope: RopeConfig | None,
        head_dim: int,
        max_context: int,
        device: torch.device,
        rotary_dims: int | None = None,
        mrope_section: Sequence[int] = (),
    ) -> None:
        """Compute the tables.

        If `rope` is None, every angle is 0, so queries and keys do not change. If `rotary_dims` is
        given, only the first rotary_dims / 2 pairs are rotated. The other pairs get the angle 0.
        `mrope_section`: the numbers of pairs that rotate by the time, height and width of an
        image's tokens, in turn (Qwen3.5). Pairs beyond these rotate by time. Empty: all pairs do.
        """
        self._axes = torch.zeros(head_dim // 2, dtype=torch.int64)
        for axis, num_pairs in enumerate(mrope_section):
            self._axes[axis : 3 * num_pairs : 3] = axis
        self._axes = self._axes.to(device)
        if rope is None:
            self.cos = torch.ones(max_context, head_dim // 2, device=device)
            self.sin = torch.zeros_like(self.cos)
            return
        angles = torch.outer(
            torch.arange(max_context, dtype=torch.float32),
            inverse_frequencies(rope, rotary_dims or head_dim),
        )
        factor = 1.0
        if isinstance(rope.scaling, YarnRopeScaling | LongRopeScaling):
            factor = rope.scaling.attention_factor
        unrotated_pairs = head_dim // 2 - angles.shape[1]
        self.cos = F.pad(angles.cos() * factor, (0, unrotated_pairs), value=1.0).to(device)
        self.sin = F.pad(angles.sin() * factor, (0, unrotated_pairs)).to(device)

    def __call__(self, positions: Tensor) -> Rotation:
        """Return the rotation of each row. `positions`: int64 [T], or [3, T] with the time, height
        and width of each row.
        """
        if positions.dim() == 2:
            pairs = torch.arange(len(self._axes), device=self._axes.device)
            # The kernels read cos and sin as contiguous tensors.
            position_of_pair = positions[self._axes].t().contiguous()  # [T, E/2]
            cos, sin = self.cos[position_of_pair, pairs], self.sin[position_of_pair, pairs]
            return Rotation(cos.unsqueeze(1), sin.unsqueeze(1))
        return Rotation(self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the angle per position of each dimension pair in radians: float32 [E/2]."""
    theta_powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    unscaled = 1.0 / theta_powers
    if rope.scaling is None:
        return unscaled
    if isinstance(rope.scaling, LinearRopeScaling):
        return unscaled / rope.scaling.factor
    if isinstance(rope.scaling, LongRopeScaling):
        return 1.0 / (torch.tensor(rope.scaling.factors, dtype=torch.float32) * theta_powers)
    if isinstance(rope.scaling, YarnRopeScaling):
        unscaled_share = _yarn_unscaled_share(rope.theta, rope.scaling, head_dim)
        return (
            1.0 / (rope.scaling.factor * theta_powers) * (1 - unscaled_share)
            + unscaled * unscaled_share
        )
    return _llama3_frequencies(unscaled, rope.scaling)


def half_pairing_order(head_dim: int, rotary_dims: int) -> Tensor:
    """Return a permutation of a head's dimensions that adapts partial RoPE to the kernels: int64
    [E].

    Partial RoPE pairs dimension i with i + rotary_dims / 2, and the kernels pair i with i +
    head_dim / 2. The permutation moves each rotated pair to positions that the kernels pair. The
    remaining dimensions form pairs with the angle 0. Permuting queries and keys alike does not
    change the attention scores.
    """
    rotated = torch.arange(rotary_dims).chunk(2)
    unrotated = torch.arange(rotary_dims, head_dim).chunk(2)
    return torch.cat([rotated[0], unrotated[0], rotated[1], unrotated[1]])


def query_scales(beta: float, interval: int, max_context: int) -> Tensor:
    """Return the factor of the queries at each position: float32 [max_context].

    The factor is 1 + beta * log(1 + floor(position / interval)) (Llama 4, Ministral 3).
    """
    return 1 + beta * torch.log(1 + torch.floor(torch.arange(max_context) / interval))


def _llama3_frequencies(unscaled: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Return Llama 3.1's scaled frequencies, given the frequencies `unscaled`: float32 [E/2].

    Long wavelengths are multiplied by `factor`, and short wavelengths are kept. The frequencies in
    between are interpolated.
    """
    wavelength = 2 * math.pi / unscaled
    original_context = scaling.original_max_position_embeddings
    smooth = (original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    interpolated = (1 - smooth) * unscaled / scaling.factor + smooth * unscaled
    scaled = torch.where(
        wavelength > original_context / scaling.low_freq_factor,
        unscaled / scaling.factor,
        interpolated,
    )
    return torch.where(wavelength < original_context / scaling.high_freq_factor, unscaled, scaled)


def _yarn_unscaled_share(theta: float, scaling: YarnRopeScaling, head_dim: int) -> Tensor:
    """Return YaRN's weight of the unscaled frequency for each dimension pair: float32 [E/2].

    The weight is 1 for pairs with at least `beta_fast` full rotations in the original context, and
    0 for pairs with at most `beta_slow`. In between it falls linearly with the pair's index.
    """

    def pair_index(num_rotations: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair_index(scaling.beta_fast), pair_index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # If the boundaries coincide, a tiny width turns the ramp into a step and avoids 0 / 0.
    width = high - low or 0.001
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
