"""The recurrence of Mamba-2 layers in torch, for training and for the sampler.

The heads of a group read the same B and C. So the scan's tensors have the dimensions G and R = H / G
in the place of H.

Shapes: T rows, H heads, P the size of a head, G groups, N the size of the state, n sequences that
are computed at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.model.architecture.config import Mamba2Config
from planish.model.kernels.reference.conv_silu import conv_silu, promote_for_exp
from planish.model.kernels.reference.state_scan import (
    Part,
    ScanInputs,
    SequenceRows,
    TreeRows,
    continue_states,
    tree_scan,
)
from planish.model.layers.recurrence import Mamba2Inputs, Mamba2Weights, StateSegment
from planish.model.sequences.prefix_tree import MicroBatch


class Mamba2TreeRecurrence(TreeRows):
    """The recurrence of a micro-batch of the trainer, with gradients (see `Recurrence`)."""

    def __init__(self, micro_batch: MicroBatch, config: Mamba2Config, device: torch.device) -> None:
        super().__init__(micro_batch, config.conv_width, device)
        self._config = config

    def __call__(self, layer: int, inputs: Mamba2Inputs) -> Tensor:
        """Return the outputs, float32 [T, H, P]."""
        weights = inputs.weights
        no_rows = inputs.xbc.new_zeros(0, inputs.xbc.shape[1])
        conv_out = conv_silu(inputs.xbc, no_rows, self._tap_rows, weights.conv, weights.conv_bias)
        x, scan_inputs = _scan_inputs(self._config, conv_out, inputs.dt, weights)
        return _with_skip(self._scan(scan_inputs), x, weights)

    def _scan(self, scan_inputs: ScanInputs) -> Tensor:
        """Return the outputs of the scan, float32 [T, G, R, P], with gradients."""
        return tree_scan(Mamba2Step(), scan_inputs, self._levels, self._parents)


class Mamba2SequenceRecurrence(SequenceRows):
    """The recurrence of rows that continue stored states, without gradients (see `Recurrence`)."""

    def __init__(
        self,
        segments: Sequence[StateSegment],
        num_rows: int,
        config: Mamba2Config,
        device: torch.device,
    ) -> None:
        super().__init__(segments, num_rows, config.conv_width, device)
        self._config = config

    def __call__(self, layer: int, inputs: Mamba2Inputs) -> Tensor:
        """Return the outputs, float32 [T, H, P], and store the new states."""
        weights, stored_rows = inputs.weights, self._taps.stored_rows(layer)
        conv_out = conv_silu(
            inputs.xbc, stored_rows, self._taps.tap_rows, weights.conv, weights.conv_bias
        )
        x, scan_inputs = _scan_inputs(self._config, conv_out, inputs.dt, weights)
        self._taps.store(layer, stored_rows, inputs.xbc)
        out = torch.zeros_like(scan_inputs[2])  # Padding rows keep 0.
        self._scan(layer, scan_inputs, out)
        return _with_skip(out, x, weights)

    def _scan(self, layer: int, scan_inputs: ScanInputs, out: Tensor) -> None:
        """Compute the rows of all segments into `out`, and store the matrices after each."""
        continue_states(Mamba2Step(), layer, scan_inputs, self._levels, self._segments, out)


def _scan_inputs(
    config: Mamba2Config, conv_out: Tensor, dt: Tensor, weights: Mamba2Weights
) -> tuple[Tensor, ScanInputs]:
    """Return x, float32 [T, H, P], and the inputs of the scan (see `Mamba2Step`).

    `conv_out`: the output of the convolution, float32 [T, C]. `dt`: [T, H].
    """
    group_channels = config.num_groups * config.state_size
    x, b, c = conv_out.split(
        [conv_out.shape[1] - 2 * group_channels, group_channels, group_channels], 1
    )
    x = x.unflatten(1, (config.num_heads, config.head_dim))
    b, c = (part.unflatten(1, (config.num_groups, config.state_size)) for part in (b, c))
    time_steps = F.softplus(promote_for_exp(dt) + weights.dt_bias).clamp(*weights.dt_limits)
    decay = (time_steps * weights.decay_rate).exp().float()
    v = x * time_steps.float()[..., None]
    by_group = (config.num_groups, -1)
    return x, (c, b, v.unflatten(1, by_group), decay.unflatten(1, by_group))


def _with_skip(out: Tensor, x: Tensor, weights: Mamba2Weights) -> Tensor:
    """Return out + D * x, float32 [T, H, P]. `out`: [T, G, R, P]."""
    return out.flatten(1, 2) + weights.skip[:, None] * x


class Mamba2Step:
    """S = decay * S + B (dt * x)^T with the output S^T C (see `ScanStep`).

    The inputs are C and B [T, G, N], dt * x [T, G, R, P] and decay [T, G, R], all float32. The
    states are kept per head, [H, N, P].
    """

    def zero_state(self, scan_inputs: Sequence[Tensor]) -> Tensor:
        """Return the state before position 0, float32 [H, N, P]."""
        c, _, v, _ = scan_inputs
        return c.new_zeros(v.shape[1] * v.shape[2], c.shape[2], v.shape[3])

    def forward(self, state: Tensor, step_inputs: Sequence[Tensor]) -> Tensor:
        """Advance `state` [n, H, N, P] in place; return the outputs [n, G, R, P]."""
        c, b, v, decay = step_inputs
        grouped = state.unflatten(1, v.shape[1:3])
        grouped.mul_(decay[..., None, None])
        grouped.add_(b[:, :, None, :, None] * v[..., None, :])
        return (grouped * c[:, :, None, :, None]).sum(-2)

    def backward(
        self,
        state_before: Tensor,
        step_inputs: Sequence[Tensor],
        grad: Tensor,
        grad_state: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of C, B, dt * x and decay of one position."""
        c, b, v, decay = step_inputs
        heads = v.shape[1:3]
        before, grouped_grad = (x.unflatten(1, heads) for x in (state_before, grad_state))
        after = before * decay[..., None, None] + b[:, :, None, :, None] * v[..., None, :]
        grad_c = (after * grad[..., None, :]).sum((2, 4))
        grouped_grad += c[:, :, None, :, None] * grad[..., None, :]
        grad_b = (grouped_grad * v[..., None, :]).sum((2, 4))
        grad_v = (grouped_grad * b[:, :, None, :, None]).sum(-2)
        grad_decay = (grouped_grad * before).sum((-1, -2))
        grouped_grad *= decay[..., None, None]
        return grad_c, grad_b, grad_v, grad_decay

    def split(
        self, scan_inputs: Sequence[Tensor], max_elements: int
    ) -> Iterator[tuple[Sequence[Part], Part]]:
        """Yield groups of heads that share a B and a C."""
        c, _, v, _ = scan_inputs
        num_heads = max(1, max_elements // (c.shape[2] * v.shape[3]))
        for group in range(v.shape[1]):
            shared = (slice(group, group + 1),)
            for first in range(0, v.shape[2], num_heads):
                own = (*shared, slice(first, first + num_heads))
                yield (shared, shared, own, own), own
