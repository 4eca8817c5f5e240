"""The recurrence of gated delta-net layers in torch, for training and for the sampler.

Shapes: T rows, C channels, W width of the convolution, Hk key heads, Hv value heads, Dk and Dv the
sizes of a key and a value head, n sequences that are computed at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from planish.model.architecture.hf_config.decoder_fields import DeltaNetConfig
from planish.model.kernels.reference.conv_silu import conv_silu, promote_for_exp
from planish.model.kernels.reference.state_scan import (
    Part,
    ScanInputs,
    SequenceRows,
    TreeRows,
    continue_states,
    tree_scan,
)
from planish.model.layers.recurrence import DeltaNetInputs, DeltaNetWeights, StateSegment
from planish.model.sequences.prefix_tree import MicroBatch

_EPS = 1e-6
"""The constant in the L2 norm of queries and keys."""


class TreeRecurrence(TreeRows):
    """The recurrence of a micro-batch of the trainer, with gradients (see `Recurrence`)."""

    def __init__(
        self, micro_batch: MicroBatch, config: DeltaNetConfig, device: torch.device
    ) -> None:
        super().__init__(micro_batch, config.conv_width, device)
        self._config = config

    def __call__(self, layer: int, inputs: DeltaNetInputs) -> Tensor:
        """Return the outputs, float32 [T, Hv, Dv]."""
        weights = inputs.weights
        no_rows = inputs.qkv.new_zeros(0, inputs.qkv.shape[1])
        conv_out = conv_silu(inputs.qkv, no_rows, self._tap_rows, weights.conv)
        return self._scan(_scan_inputs(self._config, conv_out, inputs.beta_decay, weights))

    def _scan(self, scan_inputs: ScanInputs) -> Tensor:
        """Return the outputs, float32 [T, Hv, Dv], with gradients."""
        return tree_scan(DeltaNetStep(), scan_inputs, self._levels, self._parents)


class SequenceRecurrence(SequenceRows):
    """The recurrence of rows that continue stored states, without gradients (see `Recurrence`)."""

    def __init__(
        self,
        segments: Sequence[StateSegment],
        num_rows: int,
        config: DeltaNetConfig,
        device: torch.device,
    ) -> None:
        super().__init__(segments, num_rows, config.conv_width, device)
        self._config = config

    def __call__(self, layer: int, inputs: DeltaNetInputs) -> Tensor:
        """Return the outputs, float32 [T, Hv, Dv], and store the new states. Padding rows get 0."""
        weights, stored_rows = inputs.weights, self._taps.stored_rows(layer)
        conv_out = conv_silu(inputs.qkv, stored_rows, self._taps.tap_rows, weights.conv)
        scan_inputs = _scan_inputs(self._config, conv_out, inputs.beta_decay, weights)
        out = torch.zeros_like(scan_inputs[2])
        self._taps.store(layer, stored_rows, inputs.qkv)
        self._scan(layer, scan_inputs, out)
        return out

    def _scan(self, layer: int, scan_inputs: ScanInputs, out: Tensor) -> None:
        """Compute the rows of all segments into `out`, and store the matrices after each."""
        continue_states(DeltaNetStep(), layer, scan_inputs, self._levels, self._segments, out)


def _scan_inputs(
    config: DeltaNetConfig, conv_out: Tensor, beta_decay: Tensor, weights: DeltaNetWeights
) -> ScanInputs:
    """Return the inputs of the recurrence, from the convolution's output `conv_out` [T, C].

    They are q and k, float32 [T, Hv, Dk], v [T, Hv, Dv], and decay and beta [T, Hv]. q and k are
    divided by their L2 norms, and q is then multiplied by Dk ** -0.5.
    """
    key_channels = config.num_key_heads * config.key_dim
    q, k, v = conv_out.split([key_channels, key_channels, conv_out.shape[1] - 2 * key_channels], 1)
    q, k = (_l2_normalize(x.unflatten(1, (-1, config.key_dim))) for x in (q, k))
    heads_per_key_head = config.num_value_heads // config.num_key_heads
    q, k = (x.repeat_interleave(heads_per_key_head, 1) for x in (q * config.key_dim**-0.5, k))
    b, a = beta_decay.chunk(2, 1)
    beta = promote_for_exp(b).sigmoid().float()
    dt = torch.nn.functional.softplus(promote_for_exp(a) + weights.decay_bias)
    decay = (dt * weights.decay_rate).exp().float()
    return q, k, v.unflatten(1, (-1, config.value_dim)), decay, beta


def _l2_normalize(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt()


class DeltaNetStep:
    """The gated delta rule (see `ScanStep`). The inputs are q, k, v, decay and beta."""

    def zero_state(self, scan_inputs: Sequence[Tensor]) -> Tensor:
        """Return the state before position 0, float32 [Hv, Dk, Dv]."""
        q, _, v, _, _ = scan_inputs
        return q.new_zeros(*q.shape[1:], v.shape[2])

    def forward(self, state: Tensor, step_inputs: Sequence[Tensor]) -> Tensor:
        """Advance `state` [n, Hv, Dk, Dv] in place; return the outputs [n, Hv, Dv]."""
        q, k, v, decay, beta = step_inputs
        state.mul_(decay[..., None, None])
        delta = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
        state.add_(k[..., None] * delta[..., None, :])
        return (state * q[..., None]).sum(-2)

    def backward(
        self,
        state_before: Tensor,
        step_inputs: Sequence[Tensor],
        grad: Tensor,
        grad_state: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, decay and beta of one position."""
        q, k, v, decay, beta = step_inputs
        decayed = state_before * decay[..., None, None]
        error = v - (decayed * k[..., None]).sum(-2)
        delta = error * beta[..., None]
        state_after = decayed + k[..., None] * delta[..., None, :]
        grad_q = (state_after * grad[..., None, :]).sum(-1)
        grad_state += q[..., None] * grad[..., None, :]
        grad_delta = (grad_state * k[..., None]).sum(-2)
        grad_v = grad_delta * beta[..., None]
        grad_k = (grad_state * delta[..., None, :]).sum(-1)
        grad_k -= (decayed * grad_v[..., None, :]).sum(-1)
        grad_state -= k[..., None] * grad_v[..., None, :]
        grad_decay = (grad_state * state_before).sum((-1, -2))
        grad_state *= decay[..., None, None]
        return grad_q, grad_k, grad_v, grad_decay, (grad_delta * error).sum(-1)

    def split(
        self, scan_inputs: Sequence[Tensor], max_elements: int
    ) -> Iterator[tuple[Sequence[Part], Part]]:
        """Yield groups of heads."""
        q, _, v, _, _ = scan_inputs
        num_heads = max(1, max_elements // (q.shape[2] * v.shape[2]))
        for first in range(0, q.shape[1], num_heads):
            part = (slice(first, first + num_heads),)
            yield [part] * len(scan_inputs), part
