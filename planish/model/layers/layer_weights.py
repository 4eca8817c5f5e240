"""The frozen weights of a decoder layer.

Shapes: D hidden, N experts, I hidden size of an MLP or of an expert, Hq query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from planish.model.layers.linear import ExpertLinears, PackedLinear
from planish.model.layers.recurrence import DeltaNetWeights
from planish.model.layers.rope import RotaryEmbedding


@dataclass(frozen=True)
class Experts:
    """The frozen weights of one mixture of experts."""

    router: PackedLinear
    """[N, D] in float32."""
    gate_up: ExpertLinears
    """For each expert, the linears [I, D] of gate and up, or one linear [2 * I, D] of both."""
    down: ExpertLinears
    """For each expert, the linear [D, I]."""
    shared: SharedExpert | None = None


@dataclass(frozen=True)
class SharedExpert:
    """The frozen weights of the shared expert, an MLP that processes every token."""

    gate_up: PackedLinear
    down: PackedLinear
    output_gate: PackedLinear
    """The gate of the MLP's output: [1, D] in float32."""


@dataclass(frozen=True)
class DenseMLP:
    """The frozen weights of a layer's MLP without experts."""

    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True)
class Layer:
    """The frozen weights of one decoder layer. A norm is None if the model does not have it."""

    input_norm: Tensor | None
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: PackedLinear
    attn_output_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp: DenseMLP | Experts
    mlp_output_norm: Tensor | None
    rope: RotaryEmbedding
    """The RoPE table of this layer. Layers with the same RoPE settings share one table."""
    delta_net: DeltaNetWeights | None = None
    """The weights of a gated delta net; None in a layer with attention. In a gated delta-net layer,
    `qkv` computes the inputs of the convolution and of the output gate. `o` is the output
    projection, and `rope` is not used.
    """
    sinks: Tensor | None = None
    """The attention sinks of the query heads, float32 [Hq] (see `Attend`). None: no sinks."""
