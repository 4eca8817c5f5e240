"""Layers with a recurrent state in the place of keys and values: their states and their inputs.

There are three kinds. A short convolution (LFM2) multiplies the last W inputs of each channel by W
weights and adds them up. So the state of a sequence is the last W - 1 inputs. A gated delta net (Yang
et al. 2024, Qwen3.5) has a short convolution too, and one matrix per head. At each position, the
matrix decays and is corrected towards the position's value:

    S = decay * S;  S = S + k (beta * (v - S^T k))^T;  output = S^T q

A Mamba-2 layer (Dao and Gu 2024; Nemotron-H, Granite 4) has a short convolution and one matrix per
head, which only decays:

    S = exp(dt * A) * S + B (dt * x)^T;  output = S^T C + D * x

Sampler and trainer compute these recurrences position by position, in the same order of operations.
So the results are batch-invariant. They also have the same bits if the computation continues from a
stored state.

Shapes: T rows, C channels of the convolution, W its width, Hk key heads, Hv value heads, Dk and Dv
the sizes of a key and a value head. Of a Mamba-2 layer: H heads of the size P, G groups of heads that
share B and C, N the size of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from planish.model.architecture.config import ModelConfig, RecurrenceConfig
from planish.model.layers.linear import PackedLinear
from planish.model.sequences.positions import STATE_CHUNK

BLOCK = 32
"""The number of consecutive positions per block. The backward pass stores the states of one block.
"""
MAX_BLOCK_ELEMENTS = 1 << 26
"""The maximum number of elements of the states of one block. If the states of all heads have more
elements, the backward pass processes the heads in groups.
"""


@dataclass(frozen=True)
class DeltaNetWeights:
    """The frozen weights of one gated delta-net layer, except the linears that adapters train."""

    beta_decay: PackedLinear
    """The linears in_proj_b and in_proj_a, with the outputs [T, 2 * Hv]. Beta and the decay are
    computed from these outputs.
    """
    conv: Tensor
    """float32 [C, W]; the last column belongs to a row's own position."""
    decay_rate: Tensor
    """-exp(A_log): float32 [Hv]."""
    decay_bias: Tensor
    """dt_bias: float32 [Hv]."""
    norm: Tensor
    """The weight of the norm of each head's output: float32 [Dv]."""


@dataclass(frozen=True)
class Mamba2Weights:
    """The frozen weights of one Mamba-2 layer, except its linears and its norm. All are float32."""

    conv: Tensor
    """[C, W]; the last column belongs to a row's own position."""
    conv_bias: Tensor | None
    """[C]."""
    decay_rate: Tensor
    """A, which is -exp(A_log): [H]."""
    dt_bias: Tensor
    """[H]."""
    skip: Tensor
    """D: [H]."""
    dt_limits: tuple[float, float]
    """The smallest and the largest dt."""


class RecurrentState:
    """The state of one sequence after some position, in all layers with a recurrent state."""

    def __init__(self, config: RecurrenceConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Create the state before position 0, all zeros. `dtype`: the dtype of the model."""
        num_layers = len(config.layers)
        self.conv = torch.zeros(
            num_layers, config.conv_width - 1, config.channels, dtype=dtype, device=device
        )
        """[layers, W - 1, C]: the inputs of the convolution at the last W - 1 positions."""
        self.matrices = torch.zeros(num_layers, *config.matrix_shape, device=device)
        """float32 [layers, Hv, Dk, Dv] or [layers, H, N, P]; empty in a model of short convolutions."""

    def copy(self) -> RecurrentState:
        """Return a copy, which can be changed independently."""
        state = RecurrentState.__new__(RecurrentState)
        state.conv, state.matrices = self.conv.clone(), self.matrices.clone()
        return state


def state_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the recurrent state of one sequence; 0 if the model has none."""
    recurrence = config.recurrence
    if recurrence is None:
        return 0
    conv_bytes = dtype.itemsize * (recurrence.conv_width - 1) * recurrence.channels
    return len(recurrence.layers) * (conv_bytes + 4 * prod(recurrence.matrix_shape))


def sampling_workspace_bytes(
    config: ModelConfig, dtype: torch.dtype, max_samples: int, max_rows: int
) -> int:
    """Return the estimated bytes of recurrent states in a sampler step.

    `max_samples`: the maximum number of samples in a decoding step. `max_rows`: the maximum number
    of rows in a prefill. The states are three matrices per head of each sequence, and those at the
    ends of the prefill's chunks.
    """
    recurrence = config.recurrence
    if recurrence is None:
        return 0
    matrix_bytes = 4 * 3 * max_samples * prod(recurrence.matrix_shape)
    return matrix_bytes + max_rows // STATE_CHUNK * state_bytes(config, dtype)


def sampling_bytes_per_row(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the estimated bytes that a gated delta net needs in a prefill, per row.

    They are the residual stream, the inputs of the layer and of the recurrence, and the float32
    tensors of the convolution. The result is 0 for a model without gated delta nets.
    """
    if config.delta_net is None:
        return 0
    channels, (num_heads, _, value_dim) = config.delta_net.channels, config.delta_net.matrix_shape
    num_inputs = 2 * config.hidden_size + channels + num_heads * value_dim
    return 4 * (2 * config.hidden_size + 5 * channels) + dtype.itemsize * num_inputs


def activation_bytes_per_row(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the estimated bytes that a recurrent layer stores for the backward pass, per row.

    They are the inputs and outputs of the recurrence in float32, and the inputs of the convolution,
    of the output gate and of the output projection in the model's `dtype`. The result is 0 for a
    model without matrices in its states.
    """
    delta_net, mamba2 = config.delta_net, config.mamba2
    if mamba2 is not None:
        inner_size = mamba2.num_heads * mamba2.head_dim
        # The scan's inputs and outputs, and the gated norm.
        float32_size = mamba2.channels + 6 * inner_size + 4 * mamba2.num_heads
        return 4 * float32_size + dtype.itemsize * (mamba2.channels + 2 * inner_size)
    if delta_net is None:
        return 0
    key_size = delta_net.num_value_heads * delta_net.key_dim
    value_size = delta_net.num_value_heads * delta_net.value_dim
    float32_size = delta_net.channels + 2 * key_size + value_size
    return 4 * float32_size + dtype.itemsize * (delta_net.channels + 4 * value_size)


def backward_bytes(config: ModelConfig, num_rows: int, *, is_sequence: bool) -> int:
    """Return the estimated bytes of the states that the backward pass of one layer recomputes.

    `num_rows`: the rows of the micro-batch. `is_sequence`: whether they are one sequence. The
    result is 0 for a model without matrices in its states.
    """
    recurrence = config.recurrence
    matrix_size = 0 if recurrence is None else prod(recurrence.matrix_shape)
    block_rows = BLOCK if is_sequence else num_rows
    num_elements = min(block_rows * matrix_size, MAX_BLOCK_ELEMENTS)
    # A step needs up to eight matrices per state beside those of the block.
    return 4 * (num_elements * 5 // 4 + num_rows // BLOCK * matrix_size)


@dataclass(frozen=True)
class StateSegment:
    """Rows start .. stop - 1 of a batch, which are consecutive positions of one sequence.

    The segment starts from `initial_state`. `final_state` receives the state after its last row.
    Both may be the same object. A segment whose `initial_state` is the `final_state` of an earlier
    segment is computed after that segment.
    """

    start: int
    stop: int
    initial_state: RecurrentState
    final_state: RecurrentState


@dataclass(frozen=True)
class DeltaNetInputs:
    """The inputs of the recurrence of one layer, after the projections."""

    qkv: Tensor
    """[T, C] in the model's dtype, before the convolution."""
    beta_decay: Tensor
    """[T, 2 * Hv] in the model's dtype."""
    weights: DeltaNetWeights


@dataclass(frozen=True)
class ShortConvInputs:
    """The inputs of the short convolution of one layer."""

    x: Tensor
    """[T, C] in the model's dtype."""
    weight: Tensor
    """float32 [C, W]; the last column belongs to a row's own position."""
    bias: Tensor | None
    """float32 [C]."""


@dataclass(frozen=True)
class Mamba2Inputs:
    """The inputs of the recurrence of one Mamba-2 layer, after the input projection."""

    xbc: Tensor
    """x, B and C: [T, C] in the model's dtype, before the convolution."""
    dt: Tensor
    """[T, H] in the model's dtype, before the softplus."""
    weights: Mamba2Weights


Recurrence = Callable[[int, Any], Tensor]
"""The recurrence of one forward pass: (number of the recurrent layer, inputs) -> outputs.

The inputs of a gated delta net are `DeltaNetInputs`, and its outputs are float32 [T, Hv, Dv]. The
inputs of a short convolution are `ShortConvInputs`, and its outputs are [T, C] in the model's dtype.
The inputs of a Mamba-2 layer are `Mamba2Inputs`, and its outputs are float32 [T, H, P].
The function knows which rows are consecutive positions, and where the states are stored.
"""
