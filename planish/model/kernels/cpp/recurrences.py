"""The recurrences of gated delta nets and Mamba-2 layers with the C++ kernels.

The kernels compute the scan over the states. The reference implementations, delta_net.py and
mamba2.py in kernels/reference, also compute the convolution and the gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from planish.model.architecture.config import Mamba2Config, RecurrenceConfig
from planish.model.architecture.hf_config.decoder_fields import DeltaNetConfig
from planish.model.kernels.cpp import ops
from planish.model.kernels.cpp.state_scan import (
    LANES,
    SegmentTables,
    continue_states,
    scan,
    scan_backward,
    scan_forward,
)
from planish.model.kernels.reference.causal_conv import Spans
from planish.model.kernels.reference.delta_net import SequenceRecurrence, TreeRecurrence
from planish.model.kernels.reference.mamba2 import (
    Mamba2SequenceRecurrence,
    Mamba2Step,
    Mamba2TreeRecurrence,
)
from planish.model.kernels.reference.state_scan import ScanInputs
from planish.model.layers.recurrence import MAX_BLOCK_ELEMENTS, Recurrence, StateSegment
from planish.model.sequences.prefix_tree import MicroBatch


def supports_scan(config: RecurrenceConfig) -> bool:
    """Return whether the kernels support the states of these layers."""
    return ops.is_supported("delta_net") and config.matrix_shape[2] % LANES == 0


class _KernelRows:
    """The segments of `TreeRows` or `SequenceRows` as tables for the kernels."""

    _spans: Spans
    _parents: Sequence[int]

    @cached_property
    def _tables(self) -> SegmentTables:
        return SegmentTables(self._spans, self._parents)


class CppTreeRecurrence(_KernelRows, TreeRecurrence):
    """The delta nets of a micro-batch of the trainer, with gradients (see `Recurrence`)."""

    def _scan(self, scan_inputs: ScanInputs) -> Tensor:
        return scan(scan_inputs, self._tables)


class CppSequenceRecurrence(_KernelRows, SequenceRecurrence):
    """The delta nets of rows that continue stored states, without gradients (see `Recurrence`)."""

    def _scan(self, layer: int, scan_inputs: ScanInputs, out: Tensor) -> None:
        continue_states(layer, scan_inputs, self._tables, self._segments, out)


class CppMamba2TreeRecurrence(_KernelRows, Mamba2TreeRecurrence):
    """The Mamba-2 layers of a micro-batch of the trainer, with gradients (see `Recurrence`)."""

    def _scan(self, scan_inputs: ScanInputs) -> Tensor:
        return _GroupedScan.apply(self._tables, *scan_inputs)  # type: ignore[no-any-return]


class CppMamba2SequenceRecurrence(_KernelRows, Mamba2SequenceRecurrence):
    """The Mamba-2 layers of rows that continue stored states, without gradients (see
    `Recurrence`).
    """

    def _scan(self, layer: int, scan_inputs: ScanInputs, out: Tensor) -> None:
        by_head = _without_groups(*scan_inputs)
        continue_states(layer, by_head, self._tables, self._segments, out.flatten(1, 2))


class _GroupedScan(torch.autograd.Function):
    """The scan of Mamba-2 layers: [T, G, R, P] for the inputs of `Mamba2Step`."""

    @staticmethod
    def forward(
        ctx, tables: SegmentTables, c: Tensor, b: Tensor, v: Tensor, decay: Tensor
    ) -> Tensor:
        ctx.save_for_backward(c, b, v, decay)
        ctx.tables = tables
        return scan_forward(_without_groups(c, b, v, decay), tables).view(v.shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scan_inputs = ctx.saved_tensors
        grads = [torch.zeros_like(scan_input) for scan_input in scan_inputs]
        # The kernel writes the gradients of C and B for each head, so some heads are computed at a
        # time.
        num_rows, head_dim = len(grad), grad.shape[3]
        max_elements = MAX_BLOCK_ELEMENTS // (2 * num_rows) * head_dim
        for parts, out_part in Mamba2Step().split(scan_inputs, max_elements):
            own = [tensor[:, *part] for tensor, part in zip(scan_inputs, parts, strict=True)]
            of_part = scan_backward(
                _without_groups(*own), ctx.tables, grad[:, *out_part].flatten(1, 2)
            )
            for total, part, of_heads in zip(grads, parts, of_part, strict=True):
                is_shared = len(part) == 1
                group_grad = of_heads.sum(1, keepdim=True) if is_shared else of_heads[:, None]
                total[:, *part] += group_grad
        return None, *grads


def _without_groups(c: Tensor, b: Tensor, v: Tensor, decay: Tensor) -> tuple[Tensor, ...]:
    """Return the inputs of `scan`: v [T, H, P] and decay [T, H] instead of [T, G, R, ...]."""
    return c, b, v.flatten(1, 2), decay.flatten(1, 2)


class CppRecurrences:
    """The recurrences of layers with matrices in their states (see `Recurrences`)."""

    def __init__(self, config: DeltaNetConfig | Mamba2Config, device: torch.device) -> None:
        self._config, self._device = config, device

    def tree_recurrence(self, micro_batch: MicroBatch) -> Recurrence:
        """Return the recurrence of a micro-batch of the trainer, with gradients."""
        if isinstance(self._config, Mamba2Config):
            return CppMamba2TreeRecurrence(micro_batch, self._config, self._device)
        return CppTreeRecurrence(micro_batch, self._config, self._device)

    def sequence_recurrence(self, segments: Sequence[StateSegment], num_rows: int) -> Recurrence:
        """Return the recurrence of rows that continue stored states, without gradients."""
        if isinstance(self._config, Mamba2Config):
            return CppMamba2SequenceRecurrence(segments, num_rows, self._config, self._device)
        return CppSequenceRecurrence(segments, num_rows, self._config, self._device)
