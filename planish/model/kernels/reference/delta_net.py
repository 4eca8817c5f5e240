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

import numpy as np
import torch
from torch import Tensor

from planish.model.config import DeltaNetConfig
from planish.model.delta_net import (
    BLOCK,
    BLOCK_ENTRIES,
    DeltaNetInputs,
    DeltaNetWeights,
    StateRun,
)
from planish.model.prefix_tree import MicroBatch

_EPS = 1e-6
"""The constant in the L2 norm of queries and keys."""


@dataclass(frozen=True)
class _Level:
    """Runs of rows that can be computed at the same time, the longest first."""

    runs: tuple[int, ...]
    """The indices of the runs in the batch."""
    starts: Tensor
    """int64 [n]: the first row of each run."""
    lengths: tuple[int, ...]

    def active(self, step: int) -> int:
        """Return the number of runs that have a row at this step."""
        return sum(length > step for length in self.lengths)


def _levels(spans: Sequence[tuple[int, int]], parents: Sequence[int]) -> list[_Level]:
    """Group runs by their number of ancestors, so that parents are computed before their children.

    `parents`: the index of each run's parent, or -1. It must be less than the run's own index.
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    found = []
    for depth in range(max(depths, default=-1) + 1):
        runs = [run for run, own in enumerate(depths) if own == depth]
        runs.sort(key=lambda run: (spans[run][0] - spans[run][1], run))
        starts = torch.tensor([spans[run][0] for run in runs])
        lengths = tuple(spans[run][1] - spans[run][0] for run in runs)
        found.append(_Level(tuple(runs), starts, lengths))
    return found


class TreeRecurrence:
    """The recurrence of a micro-batch of the trainer, with gradients (see `Recurrence`)."""

    def __init__(
        self, micro_batch: MicroBatch, config: DeltaNetConfig, device: torch.device
    ) -> None:
        """Each segment of `micro_batch` starts from the final state of its parent."""
        self._config = config
        spans = [(segment.start, segment.end) for segment in micro_batch.segments]
        run_of = {end - 1: run for run, (_, end) in enumerate(spans)}
        parents = [
            run_of[segment.ancestors[-1][1] - 1] if segment.ancestors else -1
            for segment in micro_batch.segments
        ]
        self._spans, self._parents = spans, parents
        self._levels = _levels(spans, parents)
        previous = np.arange(-1, len(micro_batch) - 1)
        for (start, _), parent in zip(spans, parents, strict=True):
            previous[start] = spans[parent][1] - 1 if parent >= 0 else -1
        self._taps = _taps(previous, config.conv_width).to(device)

    def __call__(self, layer: int, inputs: DeltaNetInputs) -> Tensor:
        """Return the outputs, float32 [T, Hv, Dv]."""
        weights = inputs.weights
        none = inputs.qkv.new_zeros(0, inputs.qkv.shape[1])
        mixed = _ConvSilu.apply(inputs.qkv, none, self._taps, weights.conv)
        return self._scan(_prepared(self._config, mixed, inputs.beta_decay, weights))

    def _scan(self, parts: Parts) -> Tensor:
        """Return the outputs, float32 [T, Hv, Dv], with gradients."""
        return _TreeScan.apply(*parts, self._levels, self._parents)  # type: ignore[no-any-return]


class SequenceRecurrence:
    """The recurrence of rows that continue stored states, without gradients (see `Recurrence`)."""

    def __init__(
        self, runs: Sequence[StateRun], num_rows: int, config: DeltaNetConfig, device: torch.device
    ) -> None:
        """`runs`: all rows of the batch except padding. `num_rows`: the number of rows, T."""
        self._runs, self._num_rows, self._config = runs, num_rows, config
        run_after = {id(run.after): index for index, run in enumerate(runs)}
        parents = [
            parent if (parent := run_after.get(id(run.before), index)) < index else -1
            for index, run in enumerate(runs)
        ]
        self._parents = parents
        self._levels = _levels([(run.start, run.stop) for run in runs], parents)
        # The convolution reads one tensor: first W - 1 rows per run, from the run's stored state,
        # and then the rows of the batch. previous[i] is the row with the position before that of
        # row i.
        width = config.conv_width - 1
        first = width * len(runs)
        previous = np.arange(-1, first + num_rows - 1)
        for index, run in enumerate(runs):
            parent = parents[index]
            previous[first + run.start] = (
                first + runs[parent].stop - 1 if parent >= 0 else width * (index + 1) - 1
            )
            previous[width * index] = -1
        self._taps = _taps(previous, config.conv_width)[first:].to(device)
        ends = [first + run.stop - 1 for run in runs]
        self._last_taps = _taps(previous, width + 1)[ends].to(device)

    def __call__(self, layer: int, inputs: DeltaNetInputs) -> Tensor:
        """Return the outputs, float32 [T, Hv, Dv], and store the new states. Padding rows get 0."""
        weights, runs = inputs.weights, self._runs
        windows = torch.cat([run.before.conv[layer] for run in runs])
        mixed = _ConvSilu.apply(inputs.qkv, windows, self._taps, weights.conv)
        parts = _prepared(self._config, mixed, inputs.beta_decay, weights)
        out = mixed.new_zeros(self._num_rows, self._config.num_value_heads, self._config.value_dim)
        # Append a row of zeros. The index -1, which stands for positions before 0, selects it.
        given = torch.cat([windows, inputs.qkv, inputs.qkv.new_zeros(1, inputs.qkv.shape[1])])
        ends = given[self._last_taps[:, 1:]]
        self._scan(layer, parts, out)
        for own, run in zip(ends, runs, strict=True):
            run.after.conv[layer] = own
        return out

    def _scan(self, layer: int, parts: Parts, out: Tensor) -> None:
        """Compute the rows of all runs into `out`, and store the matrices after each run."""
        runs = self._runs
        for level in self._levels:
            state = torch.stack([runs[run].before.matrices[layer] for run in level.runs])
            _advance(level, state, parts, 0, level.lengths[0], out)
            for own, run in zip(state, level.runs, strict=True):
                runs[run].after.matrices[layer] = own


def _taps(previous: np.ndarray, width: int) -> Tensor:
    """Return the indices of the W rows that the convolution reads for each row: int64 [T, W].

    The last index is the row itself. -1 stands for a position before 0. `previous`: for each row,
    the index of the row of the previous position, or -1.
    """
    found = [np.arange(len(previous))]
    for _ in range(width - 1):
        before = found[-1]
        found.append(np.where(before < 0, -1, previous[np.maximum(before, 0)]))
    return torch.from_numpy(np.stack(found[::-1], 1))


class _ConvSilu(torch.autograd.Function):
    """SiLU of the causal convolution, float32 [T, C]. Backward recomputes the convolution."""

    @staticmethod
    def forward(ctx, x: Tensor, windows: Tensor, taps: Tensor, weight: Tensor) -> Tensor:
        """`x`: [T, C]. `windows`: rows that precede `x`. `taps`: indices into the joint rows of
        `windows` and `x`; -1 stands for a row of zeros.
        """
        ctx.save_for_backward(x, taps, weight)
        found = _convolved(torch.cat([windows, x]), taps, weight)
        return found.mul_(sigmoid(found))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, taps, weight = ctx.saved_tensors
        found = _convolved(x, taps, weight)
        gate = sigmoid(found)
        grad = grad * (gate * (1 + found * (1 - gate)))
        # Positions before 0 have the index -1, which selects the additional last row. Their
        # gradients are discarded with that row.
        total = grad.new_zeros(x.shape[0] + 1, x.shape[1])
        for tap in range(taps.shape[1]):
            total.index_add_(0, taps[:, tap] % len(total), grad * weight[:, tap])
        return total[:-1].to(x.dtype), None, None, None


def _convolved(x: Tensor, taps: Tensor, weight: Tensor) -> Tensor:
    wide = torch.cat([x, x.new_zeros(1, x.shape[1])]).float()  # The index -1 selects the zeros.
    total = wide[taps[:, 0]] * weight[:, 0]
    for tap in range(1, taps.shape[1]):
        total += wide[taps[:, tap]] * weight[:, tap]
    return total


def sigmoid(x: Tensor) -> Tensor:
    """Return the float32 sigmoid with the same bits for every shape of `x`."""
    return _wide(x).sigmoid().float()


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.device.type == "cpu" else x.float()


Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k: float32 [T, Hv, Dk]. v: [T, Hv, Dv]. decay, beta: [T, Hv]."""


def _prepared(
    config: DeltaNetConfig, mixed: Tensor, beta_decay: Tensor, weights: DeltaNetWeights
) -> Parts:
    """Return the inputs of the recurrence, from the convolution's output `mixed` [T, C].

    q and k are divided by their L2 norms, and q is then multiplied by Dk ** -0.5.
    """
    keys = config.num_key_heads * config.key_dim
    q, k, v = mixed.split([keys, keys, mixed.shape[1] - 2 * keys], 1)
    q, k = (_unit(x.unflatten(1, (-1, config.key_dim))) for x in (q, k))
    group = config.num_value_heads // config.num_key_heads
    q, k = (x.repeat_interleave(group, 1) for x in (q * config.key_dim**-0.5, k))
    b, a = beta_decay.chunk(2, 1)
    beta = _wide(b).sigmoid().float()
    step = torch.nn.functional.softplus(_wide(a) + weights.decay_bias)
    decay = (step * weights.decay_rate).exp().float()
    return q, k, v.unflatten(1, (-1, config.value_dim)), decay, beta


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt()


def _advance(
    level: _Level,
    state: Tensor,
    parts: Sequence[Tensor],
    first: int,
    last: int,
    out: Tensor | None,
    kept: list[Tensor] | None = None,
) -> None:
    """Compute steps first .. last - 1 of a level. `kept` receives the states before each step."""
    starts = level.starts.to(state.device)
    for step in range(first, last):
        active = level.active(step)
        rows = starts[:active] + step
        own = state[:active]
        if kept is not None:
            kept.append(own.clone())
        q, k, v, decay, beta = (part[rows] for part in parts)
        found = _step(own, q, k, v, decay, beta)
        if out is not None:
            out[rows] = found


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Advance `state` [n, Hv, Dk, Dv] in place by one position; return the outputs [n, Hv, Dv]."""
    state.mul_(decay[..., None, None])
    delta = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
    state.add_(k[..., None] * delta[..., None, :])
    return (state * q[..., None]).sum(-2)


def _step_backward(
    before: Tensor,
    parts: Sequence[Tensor],
    grad: Tensor,
    grad_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, decay and beta of one position.

    `before`: the state before the position. `grad`: the gradient of the output. `grad_state`: the
    gradient of the state after the position. It is replaced in place by the gradient of `before`.
    """
    q, k, v, decay, beta = parts
    decayed = before * decay[..., None, None]
    error = v - (decayed * k[..., None]).sum(-2)
    delta = error * beta[..., None]
    after = decayed + k[..., None] * delta[..., None, :]
    grad_q = (after * grad[..., None, :]).sum(-1)
    grad_state += q[..., None] * grad[..., None, :]
    grad_delta = (grad_state * k[..., None]).sum(-2)
    grad_v = grad_delta * beta[..., None]
    grad_k = (grad_state * delta[..., None, :]).sum(-1) - (decayed * grad_v[..., None, :]).sum(-1)
    grad_state -= k[..., None] * grad_v[..., None, :]
    grad_decay = (grad_state * before).sum((-1, -2))
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
        parts = (q, k, v, decay, beta)
        ctx.save_for_backward(*parts)
        ctx.levels, ctx.parents = levels, parents
        out = torch.zeros_like(v)
        _scan_levels(levels, parents, parts, out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = ctx.saved_tensors
        grads = [torch.zeros_like(part) for part in parts]
        q, _, v, _, _ = parts
        most = max(len(level.runs) for level in ctx.levels)
        heads = max(1, BLOCK_ENTRIES // (BLOCK * most * q.shape[2] * v.shape[2]))
        for first in range(0, q.shape[1], heads):
            some = slice(first, first + heads)
            _tree_backward(
                ctx.levels,
                ctx.parents,
                [part[:, some] for part in parts],
                grad[:, some],
                [own[:, some] for own in grads],
            )
        return *grads, None, None


def _scan_levels(
    levels: Sequence[_Level], parents: Sequence[int], parts: Sequence[Tensor], out: Tensor | None
) -> list[Tensor]:
    """Compute all levels, with zero states at the roots; return each level's initial states."""
    _, heads, key_dim = parts[0].shape
    zero = parts[0].new_zeros(heads, key_dim, parts[2].shape[2])
    after: dict[int, Tensor] = {}
    initial = []
    for level in levels:
        before = [after[parents[run]] if parents[run] >= 0 else zero for run in level.runs]
        state = torch.stack(before)
        initial.append(state.clone() if out is None else state)
        _advance(level, state, parts, 0, level.lengths[0], out)
        after.update(zip(level.runs, state, strict=True))
    return initial


def _tree_backward(
    levels: Sequence[_Level],
    parents: Sequence[int],
    parts: Sequence[Tensor],
    grad: Tensor,
    grads: Sequence[Tensor],
) -> None:
    """Write the gradients of `parts` into `grads`."""
    initial = _scan_levels(levels, parents, parts, None)
    of_state: dict[int, Tensor] = {}
    for level, state in zip(reversed(levels), reversed(initial), strict=True):
        starts = level.starts.to(state.device)
        steps = [*range(0, level.lengths[0], BLOCK), level.lengths[0]]
        blocks = []
        for first, last in pairwise(steps):
            blocks.append(state.clone())
            _advance(level, state, parts, first, last, None)
        zero = torch.zeros_like(state[0])
        grad_state = torch.stack([of_state.pop(run, zero) for run in level.runs])
        for (first, last), own in zip(reversed(list(pairwise(steps))), blocks[::-1], strict=True):
            kept: list[Tensor] = []
            _advance(level, own, parts, first, last, None, kept)
            for step in range(last - 1, first - 1, -1):
                rows = starts[: level.active(step)] + step
                found = _step_backward(
                    kept.pop(),
                    [part[rows] for part in parts],
                    grad[rows],
                    grad_state[: len(rows)],
                )
                for total, part in zip(grads, found, strict=True):
                    total[rows] = part
        for run, own in sorted(zip(level.runs, grad_state, strict=True), key=lambda item: item[0]):
            parent = parents[run]
            if parent >= 0:
                of_state[parent] = of_state[parent] + own if parent in of_state else own
