"""The recurrence of gated delta-net layers in torch, for training and for the sampler.

The recurrence is batch-invariant: each row is computed by the same elementwise operations and the
same sums over the size of a head. On a CPU, torch has two versions of `exp`, whose last bits
differ: one for whole vector registers and one for the remaining elements of a tensor. So on a CPU,
operations that call `exp` run in float64 and are rounded to float32, which hides the difference.

Only the inputs of a layer are stored for the backward pass. The backward pass recomputes the
states, starting at the roots of the prefix trees. At any time, it has the states of `BLOCK`
consecutive positions in memory. The gradient of a parent's state is the sum of its children's
gradients, in the order of the rows.

Shapes: T rows, C channels, W width of the convolution, Hk key heads, Hv value heads, Dk and Dv the
sizes of a key and a value head, n sequences that are computed at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from planish.model.architecture.hf_config.decoder_fields import DeltaNetConfig
from planish.model.kernels.reference.causal_conv import (
    SequenceTaps,
    convolve,
    convolve_backward,
    tree_segments,
    tree_taps,
)
from planish.model.layers.recurrence import (
    BLOCK,
    MAX_BLOCK_ELEMENTS,
    DeltaNetInputs,
    DeltaNetWeights,
    StateSegment,
)
from planish.model.sequences.prefix_tree import MicroBatch

_EPS = 1e-6
"""The constant in the L2 norm of queries and keys."""


@dataclass(frozen=True)
class _Level:
    """Segments of rows that can be computed at the same time, the longest first."""

    indices: tuple[int, ...]
    """The indices of the segments in the batch."""
    first_rows: Tensor
    """int64 [n]: the first row of each segment."""
    lengths: tuple[int, ...]

    def num_active(self, step: int) -> int:
        """Return the number of segments that have a row at this step."""
        return sum(length > step for length in self.lengths)


def _group_by_depth(spans: Sequence[tuple[int, int]], parents: Sequence[int]) -> list[_Level]:
    """Group segments by their number of ancestors. Parents are computed before their children.

    `parents`: the index of each segment's parent, or -1. It must be less than the segment's
    own index.
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    levels = []
    for depth in range(max(depths, default=-1) + 1):
        indices = [index for index, own_depth in enumerate(depths) if own_depth == depth]
        indices.sort(key=lambda index: (spans[index][0] - spans[index][1], index))
        first_rows = torch.tensor([spans[index][0] for index in indices])
        lengths = tuple(spans[index][1] - spans[index][0] for index in indices)
        levels.append(_Level(tuple(indices), first_rows, lengths))
    return levels


class TreeRecurrence:
    """The recurrence of a micro-batch of the trainer, with gradients (see `Recurrence`)."""

    def __init__(
        self, micro_batch: MicroBatch, config: DeltaNetConfig, device: torch.device
    ) -> None:
        """Each segment of `micro_batch` starts from the final state of its parent."""
        self._config = config
        self._spans, self._parents = tree_segments(micro_batch)
        self._levels = _group_by_depth(self._spans, self._parents)
        tap_rows = tree_taps(self._spans, self._parents, len(micro_batch), config.conv_width)
        self._tap_rows = tap_rows.to(device)

    def __call__(self, layer: int, inputs: DeltaNetInputs) -> Tensor:
        """Return the outputs, float32 [T, Hv, Dv]."""
        weights = inputs.weights
        no_rows = inputs.qkv.new_zeros(0, inputs.qkv.shape[1])
        conv_out = _ConvSilu.apply(inputs.qkv, no_rows, self._tap_rows, weights.conv)
        return self._scan(_scan_inputs(self._config, conv_out, inputs.beta_decay, weights))

    def _scan(self, scan_inputs: ScanInputs) -> Tensor:
        """Return the outputs, float32 [T, Hv, Dv], with gradients."""
        return _TreeScan.apply(*scan_inputs, self._levels, self._parents)  # type: ignore[no-any-return]


class SequenceRecurrence:
    """The recurrence of rows that continue stored states, without gradients (see `Recurrence`)."""

    def __init__(
        self,
        segments: Sequence[StateSegment],
        num_rows: int,
        config: DeltaNetConfig,
        device: torch.device,
    ) -> None:
        """`segments`: all rows of the batch except padding. `num_rows`: the number of rows, T."""
        self._segments, self._num_rows, self._config = segments, num_rows, config
        self._taps = SequenceTaps(segments, num_rows, config.conv_width, device)
        self._parents = self._taps.parents
        spans = [(segment.start, segment.stop) for segment in segments]
        self._levels = _group_by_depth(spans, self._parents)

    def __call__(self, layer: int, inputs: DeltaNetInputs) -> Tensor:
        """Return the outputs, float32 [T, Hv, Dv], and store the new states. Padding rows get 0."""
        weights, stored_rows = inputs.weights, self._taps.stored_rows(layer)
        conv_out = _ConvSilu.apply(inputs.qkv, stored_rows, self._taps.tap_rows, weights.conv)
        scan_inputs = _scan_inputs(self._config, conv_out, inputs.beta_decay, weights)
        out = conv_out.new_zeros(
            self._num_rows, self._config.num_value_heads, self._config.value_dim
        )
        self._taps.store(layer, stored_rows, inputs.qkv)
        self._scan(layer, scan_inputs, out)
        return out

    def _scan(self, layer: int, scan_inputs: ScanInputs, out: Tensor) -> None:
        """Compute the rows of all segments into `out`, and store the matrices after each."""
        segments = self._segments
        for level in self._levels:
            state = torch.stack(
                [segments[index].initial_state.matrices[layer] for index in level.indices]
            )
            _advance(level, state, scan_inputs, 0, level.lengths[0], out)
            for final_matrices, index in zip(state, level.indices, strict=True):
                segments[index].final_state.matrices[layer] = final_matrices


class _ConvSilu(torch.autograd.Function):
    """SiLU of the causal convolution, float32 [T, C]. Backward recomputes the convolution."""

    @staticmethod
    def forward(ctx, x: Tensor, preceding_rows: Tensor, tap_rows: Tensor, weight: Tensor) -> Tensor:
        """`x`: [T, C]. `preceding_rows`: rows that precede `x`. `tap_rows`: indices into the
        rows of `preceding_rows` followed by those of `x`; -1 stands for a row of zeros.
        """
        ctx.save_for_backward(x, tap_rows, weight)
        conv_out = convolve(torch.cat([preceding_rows, x]), tap_rows, weight)
        return conv_out.mul_(sigmoid(conv_out))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, tap_rows, weight = ctx.saved_tensors
        conv_out = convolve(x, tap_rows, weight)
        gate = sigmoid(conv_out)
        grad = grad * (gate * (1 + conv_out * (1 - gate)))
        return convolve_backward(grad, tap_rows, weight).to(x.dtype), None, None, None


def sigmoid(x: Tensor) -> Tensor:
    """Return the float32 sigmoid with the same bits for every shape of `x`."""
    return _promote_for_exp(x).sigmoid().float()


def _promote_for_exp(x: Tensor) -> Tensor:
    return x.double() if x.device.type == "cpu" else x.float()


ScanInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k: float32 [T, Hv, Dk]. v: [T, Hv, Dv]. decay, beta: [T, Hv]."""


def _scan_inputs(
    config: DeltaNetConfig, conv_out: Tensor, beta_decay: Tensor, weights: DeltaNetWeights
) -> ScanInputs:
    """Return the inputs of the recurrence, from the convolution's output `conv_out` [T, C].

    q and k are divided by their L2 norms, and q is then multiplied by Dk ** -0.5.
    """
    key_channels = config.num_key_heads * config.key_dim
    q, k, v = conv_out.split([key_channels, key_channels, conv_out.shape[1] - 2 * key_channels], 1)
    q, k = (_l2_normalize(x.unflatten(1, (-1, config.key_dim))) for x in (q, k))
    heads_per_key_head = config.num_value_heads // config.num_key_heads
    q, k = (x.repeat_interleave(heads_per_key_head, 1) for x in (q * config.key_dim**-0.5, k))
    b, a = beta_decay.chunk(2, 1)
    beta = _promote_for_exp(b).sigmoid().float()
    dt = torch.nn.functional.softplus(_promote_for_exp(a) + weights.decay_bias)
    decay = (dt * weights.decay_rate).exp().float()
    return q, k, v.unflatten(1, (-1, config.value_dim)), decay, beta


def _l2_normalize(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt()


def _advance(
    level: _Level,
    state: Tensor,
    scan_inputs: Sequence[Tensor],
    start: int,
    stop: int,
    out: Tensor | None,
    states_before: list[Tensor] | None = None,
) -> None:
    """Compute steps start .. stop - 1 of a level.

    `states_before` receives the states before each step.
    """
    first_rows = level.first_rows.to(state.device)
    for step in range(start, stop):
        num_active = level.num_active(step)
        rows = first_rows[:num_active] + step
        active_state = state[:num_active]
        if states_before is not None:
            states_before.append(active_state.clone())
        q, k, v, decay, beta = (scan_input[rows] for scan_input in scan_inputs)
        step_out = _step(active_state, q, k, v, decay, beta)
        if out is not None:
            out[rows] = step_out


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Advance `state` [n, Hv, Dk, Dv] in place by one position; return the outputs [n, Hv, Dv]."""
    state.mul_(decay[..., None, None])
    delta = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
    state.add_(k[..., None] * delta[..., None, :])
    return (state * q[..., None]).sum(-2)


def _step_backward(
    state_before: Tensor,
    scan_inputs: Sequence[Tensor],
    grad: Tensor,
    grad_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, decay and beta of one position.

    `state_before`: the state before the position. `grad`: the gradient of the output.
    `grad_state`: the gradient of the state after the position. It is replaced in place by the
    gradient of `state_before`.
    """
    q, k, v, decay, beta = scan_inputs
    decayed = state_before * decay[..., None, None]
    error = v - (decayed * k[..., None]).sum(-2)
    delta = error * beta[..., None]
    state_after = decayed + k[..., None] * delta[..., None, :]
    grad_q = (state_after * grad[..., None, :]).sum(-1)
    grad_state += q[..., None] * grad[..., None, :]
    grad_delta = (grad_state * k[..., None]).sum(-2)
    grad_v = grad_delta * beta[..., None]
    grad_k = (grad_state * delta[..., None, :]).sum(-1) - (decayed * grad_v[..., None, :]).sum(-1)
    grad_state -= k[..., None] * grad_v[..., None, :]
    grad_decay = (grad_state * state_before).sum((-1, -2))
    grad_state *= decay[..., None, None]
    return grad_q, grad_k, grad_v, grad_decay, (grad_delta * error).sum(-1)


class _TreeScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        levels: Sequence[_Level],
        parents: Sequence[int],
    ) -> Tensor:
        scan_inputs = (q, k, v, decay, beta)
        ctx.save_for_backward(*scan_inputs)
        ctx.levels, ctx.parents = levels, parents
        out = torch.zeros_like(v)
        _scan_levels(levels, parents, scan_inputs, out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scan_inputs = ctx.saved_tensors
        grads = [torch.zeros_like(scan_input) for scan_input in scan_inputs]
        q, _, v, _, _ = scan_inputs
        max_segments = max(len(level.indices) for level in ctx.levels)
        heads_per_pass = max(
            1, MAX_BLOCK_ELEMENTS // (BLOCK * max_segments * q.shape[2] * v.shape[2])
        )
        for first in range(0, q.shape[1], heads_per_pass):
            heads = slice(first, first + heads_per_pass)
            _tree_backward(
                ctx.levels,
                ctx.parents,
                [scan_input[:, heads] for scan_input in scan_inputs],
                grad[:, heads],
                [total[:, heads] for total in grads],
            )
        return *grads, None, None


def _scan_levels(
    levels: Sequence[_Level],
    parents: Sequence[int],
    scan_inputs: Sequence[Tensor],
    out: Tensor | None,
) -> list[Tensor]:
    """Compute all levels, with zero states at the roots; return each level's initial states."""
    _, heads, key_dim = scan_inputs[0].shape
    zero_state = scan_inputs[0].new_zeros(heads, key_dim, scan_inputs[2].shape[2])
    final_states: dict[int, Tensor] = {}
    initial_states = []
    for level in levels:
        parent_states = [
            final_states[parents[index]] if parents[index] >= 0 else zero_state
            for index in level.indices
        ]
        state = torch.stack(parent_states)
        initial_states.append(state.clone() if out is None else state)
        _advance(level, state, scan_inputs, 0, level.lengths[0], out)
        final_states.update(zip(level.indices, state, strict=True))
    return initial_states


def _tree_backward(
    levels: Sequence[_Level],
    parents: Sequence[int],
    scan_inputs: Sequence[Tensor],
    grad: Tensor,
    grads: Sequence[Tensor],
) -> None:
    """Write the gradients of `scan_inputs` into `grads`."""
    initial_states = _scan_levels(levels, parents, scan_inputs, None)
    state_grads: dict[int, Tensor] = {}
    for level, state in zip(reversed(levels), reversed(initial_states), strict=True):
        first_rows = level.first_rows.to(state.device)
        block_bounds = [*range(0, level.lengths[0], BLOCK), level.lengths[0]]
        block_states = []
        for start, stop in pairwise(block_bounds):
            block_states.append(state.clone())
            _advance(level, state, scan_inputs, start, stop, None)
        zero_grad = torch.zeros_like(state[0])
        grad_state = torch.stack([state_grads.pop(index, zero_grad) for index in level.indices])
        for (start, stop), block_state in zip(
            reversed(list(pairwise(block_bounds))), block_states[::-1], strict=True
        ):
            states_before: list[Tensor] = []
            _advance(level, block_state, scan_inputs, start, stop, None, states_before)
            for step in range(stop - 1, start - 1, -1):
                rows = first_rows[: level.num_active(step)] + step
                step_grads = _step_backward(
                    states_before.pop(),
                    [scan_input[rows] for scan_input in scan_inputs],
                    grad[rows],
                    grad_state[: len(rows)],
                )
                for total, step_grad in zip(grads, step_grads, strict=True):
                    total[rows] = step_grad
        by_index = sorted(zip(level.indices, grad_state, strict=True), key=lambda item: item[0])
        for index, initial_grad in by_index:
            parent = parents[index]
            if parent in state_grads:
                state_grads[parent] = state_grads[parent] + initial_grad
            elif parent >= 0:
                state_grads[parent] = initial_grad
