"""The short causal convolutions of recurrent layers in torch, for training and for the sampler.

A convolution of width W reads each row and the rows of the W - 1 previous positions. The rows of a
batch belong to many sequences, so tables name the rows that each row reads. Each output is the sum
of W products in the order of positions. So the results are batch-invariant, and have the same bits
if the computation continues from a stored state.

Shapes: T rows, C channels, W width of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from planish.model.layers.recurrence import ShortConvInputs, StateSegment
from planish.model.sequences.prefix_tree import MicroBatch

Spans = Sequence[tuple[int, int]]
"""The rows start .. stop - 1 of each segment of a batch."""


def tree_segments(micro_batch: MicroBatch) -> tuple[Spans, list[int]]:
    """Return the segments of a micro-batch, and the index of each segment's parent or -1."""
    spans = [(segment.start, segment.end) for segment in micro_batch.segments]
    index_by_last_row = {end - 1: index for index, (_, end) in enumerate(spans)}
    parents = [
        index_by_last_row[segment.ancestors[-1][1] - 1] if segment.ancestors else -1
        for segment in micro_batch.segments
    ]
    return spans, parents


def segment_parents(segments: Sequence[StateSegment]) -> list[int]:
    """Return the index of the segment that each segment continues within the batch, or -1."""
    index_by_final_state = {
        id(segment.final_state): index for index, segment in enumerate(segments)
    }
    return [
        parent
        if (parent := index_by_final_state.get(id(segment.initial_state), index)) < index
        else -1
        for index, segment in enumerate(segments)
    ]


def tree_taps(spans: Spans, parents: Sequence[int], num_rows: int, width: int) -> Tensor:
    """Return the rows that the convolution reads for each row of a micro-batch (see `_tap_rows`).

    The first row of a segment follows the last row of its parent.
    """
    previous_rows = np.arange(-1, num_rows - 1)
    for (start, _), parent in zip(spans, parents, strict=True):
        previous_rows[start] = spans[parent][1] - 1 if parent >= 0 else -1
    return _tap_rows(previous_rows, width)


class SequenceTaps:
    """The rows that the convolutions of a batch of continued sequences read.

    A convolution reads one tensor: first the W - 1 rows of each segment's stored state, and then
    the T rows of the batch.
    """

    def __init__(
        self, segments: Sequence[StateSegment], num_rows: int, width: int, device: torch.device
    ) -> None:
        """`segments`: all rows of the batch except padding. `num_rows`: the number of rows, T."""
        self._segments = segments
        self.parents = segment_parents(segments)
        stored_per_segment = width - 1
        num_stored = stored_per_segment * len(segments)
        # previous_rows[i] is the row with the position before that of row i.
        previous_rows = np.arange(-1, num_stored + num_rows - 1)
        for index, segment in enumerate(segments):
            parent = self.parents[index]
            previous_rows[num_stored + segment.start] = (
                num_stored + segments[parent].stop - 1
                if parent >= 0
                else stored_per_segment * (index + 1) - 1
            )
            previous_rows[stored_per_segment * index] = -1
        self.tap_rows = _tap_rows(previous_rows, width)[num_stored:].to(device)
        """int64 [T, W] (see `_tap_rows`)."""
        last_rows = [num_stored + segment.stop - 1 for segment in segments]
        self._last_tap_rows = _tap_rows(previous_rows, stored_per_segment + 1)[last_rows].to(device)

    def stored_rows(self, layer: int) -> Tensor:
        """Return the W - 1 stored rows of all segments, one segment after another."""
        return torch.cat([segment.initial_state.conv[layer] for segment in self._segments])

    def store(self, layer: int, stored_rows: Tensor, x: Tensor) -> None:
        """Store the last W - 1 rows of each segment. `x`: the rows of the batch [T, C]."""
        # Append a row of zeros. The index -1, which stands for positions before 0, selects it.
        rows = torch.cat([stored_rows, x, x.new_zeros(1, x.shape[1])])
        final_rows = rows[self._last_tap_rows[:, 1:]]
        for segment, of_segment in zip(self._segments, final_rows, strict=True):
            segment.final_state.conv[layer] = of_segment


def _tap_rows(previous_rows: np.ndarray, width: int) -> Tensor:
    """Return the indices of the W rows that the convolution reads for each row: int64 [T, W].

    The last index is the row itself. -1 stands for a position before 0. `previous_rows`: for
    each row, the index of the row of the previous position, or -1.
    """
    columns = [np.arange(len(previous_rows))]
    for _ in range(width - 1):
        next_rows = columns[-1]
        columns.append(np.where(next_rows < 0, -1, previous_rows[np.maximum(next_rows, 0)]))
    return torch.from_numpy(np.stack(columns[::-1], 1))


def convolve(x: Tensor, tap_rows: Tensor, weight: Tensor) -> Tensor:
    """Return the outputs of the convolution, float32 [len(tap_rows), C].

    `x`: the rows that `tap_rows` indexes. `weight`: float32 [C, W].
    """
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])]).float()  # The index -1 selects the zeros.
    conv_out = padded[tap_rows[:, 0]] * weight[:, 0]
    for tap in range(1, tap_rows.shape[1]):
        conv_out += padded[tap_rows[:, tap]] * weight[:, tap]
    return conv_out


def convolve_backward(grad: Tensor, tap_rows: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of `x` [T, C] in `convolve`. `grad`: float32 [T, C], of its output."""
    # Positions before 0 have the index -1, which selects the additional last row. Their
    # gradients are discarded with that row.
    grad_rows = grad.new_zeros(len(grad) + 1, grad.shape[1])
    for tap in range(tap_rows.shape[1]):
        grad_rows.index_add_(0, tap_rows[:, tap] % len(grad_rows), grad * weight[:, tap])
    return grad_rows[:-1]


class _TreeConv(torch.autograd.Function):
    """The convolution of a micro-batch, float32 [T, C]. Only the table is stored for backward."""

    @staticmethod
    def forward(ctx, x: Tensor, tap_rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tap_rows, weight)
        ctx.dtype = x.dtype
        return convolve(x, tap_rows, weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return convolve_backward(grad, *ctx.saved_tensors).to(ctx.dtype), None, None


class TreeConvolution:
    """The short convolutions of a micro-batch of the trainer, with gradients (see `Recurrence`)."""

    def __init__(self, micro_batch: MicroBatch, width: int, device: torch.device) -> None:
        segments = tree_segments(micro_batch)
        self._tap_rows = tree_taps(*segments, len(micro_batch), width).to(device)

    def __call__(self, layer: int, inputs: ShortConvInputs) -> Tensor:
        """Return the outputs [T, C] in the dtype of the inputs."""
        return _output(_TreeConv.apply(inputs.x, self._tap_rows, inputs.weight), inputs)


class SequenceConvolution:
    """The short convolutions of rows that continue stored states, without gradients (see
    `Recurrence`).
    """

    def __init__(
        self, segments: Sequence[StateSegment], num_rows: int, width: int, device: torch.device
    ) -> None:
        """`segments`: all rows of the batch except padding. `num_rows`: the number of rows, T."""
        self._taps = SequenceTaps(segments, num_rows, width, device)

    def __call__(self, layer: int, inputs: ShortConvInputs) -> Tensor:
        """Return the outputs [T, C] in the dtype of the inputs, and store the new states."""
        stored_rows = self._taps.stored_rows(layer)
        out = convolve(torch.cat([stored_rows, inputs.x]), self._taps.tap_rows, inputs.weight)
        self._taps.store(layer, stored_rows, inputs.x)
        return _output(out, inputs)


def _output(conv_out: Tensor, inputs: ShortConvInputs) -> Tensor:
    """Return the sum of a convolution's output and its bias, in the dtype of the inputs."""
    if inputs.bias is not None:
        conv_out = conv_out + inputs.bias
    return conv_out.to(inputs.x.dtype)
