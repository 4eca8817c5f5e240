"""The scan over the states of sequences with the C++ kernels (see kernels/reference/state_scan.py).

One thread computes one head of a prefix tree, position by position. In the sampler, each sequence
is a tree without branches. So a row's output does not depend on the rest of the batch.

Shapes: T rows, Hv value heads, Dk and Dv the sizes of a key and a value head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from planish.model.kernels.cpp import ops
from planish.model.layers.recurrence import StateSegment

LANES = 16
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
        *((name, ctypes.c_int64) for name in ("n_trees", "heads", "sharing", "keys", "values")),
    )


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


def continue_states(
    layer: int,
    scan_inputs: Sequence[Tensor],
    tables: SegmentTables,
    segments: Sequence[StateSegment],
    out: Tensor,
) -> None:
    """Compute the rows of all segments into `out`, and store the matrices after each.

    `scan_inputs`: see `scan`. `out`: float32 [T, Hv, Dv]. `tables`: those of `segments`.
    """
    records = tables.segments.copy()
    for name in ("initial_state", "final_state"):
        states = [getattr(segment, name) for segment in segments]
        records[name] = [state.matrices[layer].data_ptr() for state in states]
    contiguous = _contiguous(scan_inputs)
    arguments = _scan_arguments(contiguous, records, tables.trees)
    ops.call("delta_scan", torch.float32, ctypes.byref(arguments), out)


def scan(scan_inputs: Sequence[Tensor], tables: SegmentTables) -> Tensor:
    """Return the outputs of all rows, float32 [T, Hv, Dv], with gradients.

    `scan_inputs`: q, k, v, decay and beta of a gated delta net; without beta, there is no correction.
    Each segment continues the state of its parent, or a state of zeros.
    """
    return _Scan.apply(tables, *scan_inputs)  # type: ignore[no-any-return]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tables: SegmentTables, *scan_inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*scan_inputs)
        ctx.tables = tables
        return scan_forward(scan_inputs, tables)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *scan_backward(ctx.saved_tensors, ctx.tables, grad)


def scan_forward(scan_inputs: Sequence[Tensor], tables: SegmentTables) -> Tensor:
    """Return the outputs of `scan`, without gradients."""
    scan_inputs = _contiguous(scan_inputs)
    q, _, v, *_ = scan_inputs
    # Only segments that have children need a stored state after their last row.
    with_children = sorted({parent for parent in tables.parents if parent >= 0})
    final_states = q.new_empty(len(with_children), v.shape[1], q.shape[2], v.shape[2])
    address_of = {
        index: state.data_ptr() for index, state in zip(with_children, final_states, strict=True)
    }
    records = tables.segments.copy()
    records["initial_state"] = [address_of.get(parent, 0) for parent in tables.parents]
    records["final_state"] = [address_of.get(index, 0) for index in range(len(records))]
    out = torch.empty_like(v)
    arguments = _scan_arguments(scan_inputs, records, tables.trees)
    ops.call("delta_scan", torch.float32, ctypes.byref(arguments), out)
    return out


def scan_backward(
    scan_inputs: Sequence[Tensor], tables: SegmentTables, grad: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of the inputs of `scan`.

    Those of q and k are [T, Hv, Dk], also if heads share them. `grad`: that of the outputs.
    """
    scan_inputs = _contiguous(scan_inputs)
    q, _, v, *gates = scan_inputs
    grads = [q.new_zeros(*v.shape[:2], q.shape[2]) for _ in range(2)]
    grads += [torch.zeros_like(scan_input) for scan_input in (v, *gates)]
    arguments = _scan_arguments(scan_inputs, tables.segments, tables.trees)
    # The kernel has no gradient of beta without a correction.
    outputs = (*grads, grads[-1])[:5]
    ops.call(
        "delta_scan_backward",
        torch.float32,
        ctypes.byref(arguments),
        grad.contiguous(),
        *outputs,
    )
    return tuple(grads)


def _contiguous(scan_inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(scan_input.contiguous() for scan_input in scan_inputs)


def _scan_arguments(
    scan_inputs: Sequence[Tensor], segments: np.ndarray, trees: np.ndarray
) -> _ScanArguments:
    """Return the arguments of the kernels. They contain addresses, so `scan_inputs` and the
    arrays must outlive them.
    """
    q, _, v, *_ = scan_inputs
    addresses = [scan_input.data_ptr() for scan_input in scan_inputs]
    return _ScanArguments(
        *(*addresses, 0)[:5],
        segments.ctypes.data,
        trees.ctypes.data,
        len(trees) - 1,
        v.shape[1],
        v.shape[1] // q.shape[1],
        q.shape[2],
        v.shape[2],
    )
