"""The recurrence of gated delta nets with the C++ kernels, for trainer and sampler.

One thread computes one head of a prefix tree, position by position. In the sampler, each sequence
is a tree without branches. So a row's output does not depend on the rest of the batch.
The reference implementation is kernels/reference/delta_net.py, which also computes the convolution
and the gates.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from planish.model.architecture.hf_config.decoder_fields import DeltaNetConfig
from planish.model.kernels.cpp import ops
from planish.model.kernels.reference.delta_net import ScanInputs, SequenceRecurrence, TreeRecurrence
from planish.model.layers.recurrence import Recurrence, StateSegment
from planish.model.sequences.prefix_tree import MicroBatch

_LANES = 16
"""The number of columns of a state must be a multiple of this, the size of a SIMD vector."""
_SegmentRecord = np.dtype(
    [(name, np.int64) for name in ("start", "stop", "parent", "initial_state", "final_state")]
)
"""`struct DeltaSegment` of src/delta_net.h. The states are addresses, or 0."""


class _ScanArguments(ctypes.Structure):
    """`struct DeltaScan` of src/delta_net.h."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "k", "v", "decay", "beta", "segments", "trees")
        ),
        *((name, ctypes.c_int64) for name in ("n_trees", "heads", "keys", "values")),
    )


def supports_delta_net(config: DeltaNetConfig) -> bool:
    """Return whether the kernels support gated delta nets of these sizes."""
    return ops.is_supported("delta_net") and config.value_dim % _LANES == 0


class SegmentTables:
    """The segments of rows of one batch, as tables for the kernels."""

    def __init__(self, spans: Sequence[tuple[int, int]], parents: Sequence[int]) -> None:
        """`spans`: the rows start .. stop - 1 of each segment. `parents`: the segment that each
        segment continues, or -1. The segments of a tree are neighbours, and parents come first.
        """
        self.parents = parents
        self.segments = np.zeros(len(spans), _SegmentRecord)
        """[n] of _SegmentRecord, without addresses."""
        self.segments["start"], self.segments["stop"] = np.array(spans, np.int64).T
        self.segments["parent"] = parents
        roots = [index for index, parent in enumerate(parents) if parent < 0]
        self.trees = np.array([*roots, len(parents)], np.int64)
        """The first segment of each tree, and the number of segments."""
        # One thread computes a tree in order, so the tree must contain its segments' parents.
        root_of = np.repeat(self.trees[:-1], np.diff(self.trees)).tolist()
        assert all(
            parent < 0 or root <= parent < index
            for index, (parent, root) in enumerate(zip(parents, root_of, strict=True))
        )


class CppTreeRecurrence(TreeRecurrence):
    """The recurrence of a micro-batch of the trainer, with gradients (see `Recurrence`)."""

    @cached_property
    def _tables(self) -> SegmentTables:
        return SegmentTables(self._spans, self._parents)

    def _scan(self, scan_inputs: ScanInputs) -> Tensor:
        return scan(scan_inputs, self._tables)


class CppSequenceRecurrence(SequenceRecurrence):
    """The recurrence of rows that continue stored states, without gradients (see `Recurrence`)."""

    @cached_property
    def _tables(self) -> SegmentTables:
        spans = [(segment.start, segment.stop) for segment in self._segments]
        return SegmentTables(spans, self._parents)

    def _scan(self, layer: int, scan_inputs: ScanInputs, out: Tensor) -> None:
        records = self._tables.segments.copy()
        for name in ("initial_state", "final_state"):
            states = [getattr(segment, name) for segment in self._segments]
            records[name] = [state.matrices[layer].data_ptr() for state in states]
        contiguous = _contiguous(scan_inputs)
        arguments = _scan_arguments(contiguous, records, self._tables.trees)
        ops.call("delta_scan", torch.float32, ctypes.byref(arguments), out)


def scan(scan_inputs: Sequence[Tensor], tables: SegmentTables) -> Tensor:
    """Return the outputs of all rows, float32 [T, Hv, Dv], with gradients.

    `scan_inputs`: q, k, v, decay and beta (see `ScanInputs`). Each segment continues the state of
    its parent, or a state of zeros.
    """
    return _Scan.apply(*scan_inputs, tables)  # type: ignore[no-any-return]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, tables: SegmentTables
    ) -> Tensor:
        scan_inputs = _contiguous((q, k, v, decay, beta))
        ctx.save_for_backward(*scan_inputs)
        ctx.tables = tables
        # Only segments that have children need a stored state after their last row.
        with_children = sorted({parent for parent in tables.parents if parent >= 0})
        final_states = q.new_empty(len(with_children), q.shape[1], q.shape[2], v.shape[2])
        address_of = {
            index: state.data_ptr()
            for index, state in zip(with_children, final_states, strict=True)
        }
        records = tables.segments.copy()
        records["initial_state"] = [address_of.get(parent, 0) for parent in tables.parents]
        records["final_state"] = [address_of.get(index, 0) for index in range(len(records))]
        out = torch.empty_like(scan_inputs[2])
        arguments = _scan_arguments(scan_inputs, records, tables.trees)
        ops.call("delta_scan", torch.float32, ctypes.byref(arguments), out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scan_inputs, tables = ctx.saved_tensors, ctx.tables
        grads = [torch.zeros_like(scan_input) for scan_input in scan_inputs]
        arguments = _scan_arguments(scan_inputs, tables.segments, tables.trees)
        ops.call(
            "delta_scan_backward",
            torch.float32,
            ctypes.byref(arguments),
            grad.contiguous(),
            *grads,
        )
        return *grads, None


def _contiguous(scan_inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(scan_input.contiguous() for scan_input in scan_inputs)


def _scan_arguments(
    scan_inputs: Sequence[Tensor], segments: np.ndarray, trees: np.ndarray
) -> _ScanArguments:
    """Return the arguments of the kernels. They contain addresses, so `scan_inputs` and the
    arrays must outlive them.
    """
    q, _, v, _, _ = scan_inputs
    return _ScanArguments(
        *(scan_input.data_ptr() for scan_input in scan_inputs),
        segments.ctypes.data,
        trees.ctypes.data,
        len(trees) - 1,
        q.shape[1],
        q.shape[2],
        v.shape[2],
    )


class CppRecurrences:
    """The recurrences of gated delta-net layers (see `Recurrences`)."""

    def __init__(self, config: DeltaNetConfig, device: torch.device) -> None:
        self._config, self._device = config, device

    def tree_recurrence(self, micro_batch: MicroBatch) -> Recurrence:
        """Return the recurrence of a micro-batch of the trainer, with gradients."""
        return CppTreeRecurrence(micro_batch, self._config, self._device)

    def sequence_recurrence(self, segments: Sequence[StateSegment], num_rows: int) -> Recurrence:
        """Return the recurrence of rows that continue stored states, without gradients."""
        return CppSequenceRecurrence(segments, num_rows, self._config, self._device)
