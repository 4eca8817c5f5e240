"""A scan over the states of sequences in torch, for gated delta nets and Mamba-2 layers.

The scan is batch-invariant: each position is computed by the same elementwise operations and the
same sums over the size of a head.

Only the inputs of a layer are stored for the backward pass. The backward pass computes the states
again, starting at the roots of the prefix trees. At any time, it has the states of `BLOCK`
consecutive positions in memory. The gradient of a parent's state is the sum of its children's
gradients, in the order of the rows.

Shapes: T rows, n sequences that are computed at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from planish.model.kernels.reference.causal_conv import SequenceTaps, tree_segments, tree_taps
from planish.model.layers.recurrence import BLOCK, MAX_BLOCK_ELEMENTS, StateSegment
from planish.model.sequences.prefix_tree import MicroBatch

ScanInputs = tuple[Tensor, ...]
"""The inputs of a scan: float32 [T, ...]. Their order and sizes depend on the recurrence."""
Part = tuple[slice, ...]
"""The part of each row of a tensor that some heads use: an index of its dimensions after the rows.
"""


class ScanStep(Protocol):
    """The recurrence of one position, for n sequences."""

    def zero_state(self, scan_inputs: Sequence[Tensor]) -> Tensor:
        """Return the state before position 0, for inputs of these sizes."""
        ...

    def forward(self, state: Tensor, step_inputs: Sequence[Tensor]) -> Tensor:
        """Advance `state` [n, ...] in place by one position, and return the outputs [n, ...].

        `step_inputs`: the scan's inputs at the position, [n, ...] each.
        """
        ...

    def backward(
        self,
        state_before: Tensor,
        step_inputs: Sequence[Tensor],
        grad: Tensor,
        grad_state: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the inputs of one position.

        `state_before`: the state before the position. `grad`: the gradient of the output.
        `grad_state`: the gradient of the state after the position. It is replaced in place by the
        gradient of `state_before`.
        """
        ...

    def split(
        self, scan_inputs: Sequence[Tensor], max_elements: int
    ) -> Iterator[tuple[Sequence[Part], Part]]:
        """Yield groups of heads whose states have at most `max_elements` elements, or one head.

        A group is given by its part of each input, and its part of the output. Groups may share a
        part of an input that has fewer dimensions than the part of the output.
        """
        ...


@dataclass(frozen=True)
class Level:
    """Segments of rows that can be computed at the same time, the longest first."""

    indices: tuple[int, ...]
    """The indices of the segments in the batch."""
    first_rows: Tensor
    """int64 [n]: the first row of each segment."""
    lengths: tuple[int, ...]

    def num_active(self, step: int) -> int:
        """Return the number of segments that have a row at this step."""
        return sum(length > step for length in self.lengths)


def group_by_depth(spans: Sequence[tuple[int, int]], parents: Sequence[int]) -> list[Level]:
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
        levels.append(Level(tuple(indices), first_rows, lengths))
    return levels


class TreeRows:
    """The rows of a micro-batch of the trainer, for a convolution and a scan."""

    def __init__(self, micro_batch: MicroBatch, conv_width: int, device: torch.device) -> None:
        """Each segment of `micro_batch` starts from the final state of its parent."""
        self._spans, self._parents = tree_segments(micro_batch)
        self._levels = group_by_depth(self._spans, self._parents)
        tap_rows = tree_taps(self._spans, self._parents, len(micro_batch), conv_width)
        self._tap_rows = tap_rows.to(device)


class SequenceRows:
    """Rows that continue stored states, for a convolution and a scan."""

    def __init__(
        self,
        segments: Sequence[StateSegment],
        num_rows: int,
        conv_width: int,
        device: torch.device,
    ) -> None:
        """`segments`: all rows of the batch except padding. `num_rows`: the number of rows, T."""
        self._segments = segments
        self._taps = SequenceTaps(segments, num_rows, conv_width, device)
        self._parents = self._taps.parents
        self._spans = [(segment.start, segment.stop) for segment in segments]
        self._levels = group_by_depth(self._spans, self._parents)


def tree_scan(
    step: ScanStep, scan_inputs: ScanInputs, levels: Sequence[Level], parents: Sequence[int]
) -> Tensor:
    """Return the outputs of the rows of a prefix tree, with gradients.

    They have the shape of the third input. Each segment continues the state of its parent.
    """
    return _TreeScan.apply(step, levels, parents, *scan_inputs)  # type: ignore[no-any-return]


def continue_states(
    step: ScanStep,
    layer: int,
    scan_inputs: ScanInputs,
    levels: Sequence[Level],
    segments: Sequence[StateSegment],
    out: Tensor,
) -> None:
    """Compute the rows of all segments into `out`, and store the matrices after each.

    `levels`: the levels of these segments.
    """
    for level in levels:
        state = torch.stack(
            [segments[index].initial_state.matrices[layer] for index in level.indices]
        )
        _advance(step, level, state, scan_inputs, (0, level.lengths[0]), out)
        for final_matrices, index in zip(state, level.indices, strict=True):
            segments[index].final_state.matrices[layer] = final_matrices


def _advance(
    step: ScanStep,
    level: Level,
    state: Tensor,
    scan_inputs: Sequence[Tensor],
    span: tuple[int, int],
    out: Tensor | None,
    states_before: list[Tensor] | None = None,
) -> None:
    """Compute steps start .. stop - 1 of a level, `span` being (start, stop).

    `states_before` receives the states before each step.
    """
    first_rows = level.first_rows.to(state.device)
    for position in range(*span):
        num_active = level.num_active(position)
        rows = first_rows[:num_active] + position
        active_state = state[:num_active]
        if states_before is not None:
            states_before.append(active_state.clone())
        step_out = step.forward(active_state, [scan_input[rows] for scan_input in scan_inputs])
        if out is not None:
            out[rows] = step_out


class _TreeScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        step: ScanStep,
        levels: Sequence[Level],
        parents: Sequence[int],
        *scan_inputs: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*scan_inputs)
        ctx.step, ctx.levels, ctx.parents = step, levels, parents
        out = torch.zeros_like(scan_inputs[2])
        _scan_levels(step, levels, parents, scan_inputs, out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scan_inputs = ctx.saved_tensors
        grads = [torch.zeros_like(scan_input) for scan_input in scan_inputs]
        max_segments = max(len(level.indices) for level in ctx.levels)
        max_elements = MAX_BLOCK_ELEMENTS // (BLOCK * max_segments)
        for parts, out_part in ctx.step.split(scan_inputs, max_elements):
            totals = [total[:, *part] for total, part in zip(grads, parts, strict=True)]
            are_shared = [len(part) < len(out_part) for part in parts]
            own_grads = [
                torch.zeros_like(total) if is_shared else total
                for total, is_shared in zip(totals, are_shared, strict=True)
            ]
            _tree_backward(
                ctx.step,
                ctx.levels,
                ctx.parents,
                [tensor[:, *part] for tensor, part in zip(scan_inputs, parts, strict=True)],
                grad[:, *out_part],
                own_grads,
            )
            for total, own_grad, is_shared in zip(totals, own_grads, are_shared, strict=True):
                if is_shared:
                    total += own_grad
        return None, None, None, *grads


def _scan_levels(
    step: ScanStep,
    levels: Sequence[Level],
    parents: Sequence[int],
    scan_inputs: Sequence[Tensor],
    out: Tensor | None,
) -> list[Tensor]:
    """Compute all levels, with zero states at the roots; return each level's initial states."""
    zero_state = step.zero_state(scan_inputs)
    final_states: dict[int, Tensor] = {}
    initial_states = []
    for level in levels:
        parent_states = [
            final_states[parents[index]] if parents[index] >= 0 else zero_state
            for index in level.indices
        ]
        state = torch.stack(parent_states)
        initial_states.append(state.clone() if out is None else state)
        _advance(step, level, state, scan_inputs, (0, level.lengths[0]), out)
        final_states.update(zip(level.indices, state, strict=True))
    return initial_states


def _tree_backward(
    step: ScanStep,
    levels: Sequence[Level],
    parents: Sequence[int],
    scan_inputs: Sequence[Tensor],
    grad: Tensor,
    grads: Sequence[Tensor],
) -> None:
    """Write the gradients of `scan_inputs` into `grads`."""
    initial_states = _scan_levels(step, levels, parents, scan_inputs, None)
    state_grads: dict[int, Tensor] = {}
    for level, state in zip(reversed(levels), reversed(initial_states), strict=True):
        first_rows = level.first_rows.to(state.device)
        blocks = list(pairwise([*range(0, level.lengths[0], BLOCK), level.lengths[0]]))
        block_states = []
        for block in blocks:
            block_states.append(state.clone())
            _advance(step, level, state, scan_inputs, block, None)
        zero_grad = torch.zeros_like(state[0])
        grad_state = torch.stack([state_grads.pop(index, zero_grad) for index in level.indices])
        for (start, stop), block_state in zip(blocks[::-1], block_states[::-1], strict=True):
            states_before: list[Tensor] = []
            _advance(step, level, block_state, scan_inputs, (start, stop), None, states_before)
            for position in range(stop - 1, start - 1, -1):
                rows = first_rows[: level.num_active(position)] + position
                step_grads = step.backward(
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
