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

from planish.model.config import DeltaNetConfig
from planish.model.kernels.cpp import ops
from planish.model.kernels.reference.delta_net import Parts, SequenceRecurrence, TreeRecurrence

_LANES = 16
"""The number of columns of a state must be a multiple of this, the size of a SIMD vector."""
_Run = np.dtype([(name, np.int64) for name in ("start", "stop", "parent", "before", "after")])
"""`struct DeltaRun` of src/delta_net.h. `before` and `after` are addresses of states, or 0."""


class _Delta(ctypes.Structure):
    """`struct Delta` of src/delta_net.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "decay", "beta", "runs", "trees")),
        *((name, ctypes.c_int64) for name in ("n_trees", "heads", "keys", "values")),
    )


def supports_delta_net(config: DeltaNetConfig) -> bool:
    """Return whether the kernels support gated delta nets of these sizes."""
    return ops.is_supported("delta_net") and config.value_dim % _LANES == 0


class Runs:
    """The runs of rows of one batch, as tables for the kernels."""

    def __init__(self, spans: Sequence[tuple[int, int]], parents: Sequence[int]) -> None:
        """`spans`: the rows start .. stop - 1 of each run. `parents`: the run that each run
        continues, or -1. The runs of a tree are neighbours, and parents come first.
        """
        self.parents = parents
        self.table = np.zeros(len(spans), _Run)
        """[n] of _Run, without addresses."""
        self.table["start"], self.table["stop"] = np.array(spans, np.int64).T
        self.table["parent"] = parents
        roots = [run for run, parent in enumerate(parents) if parent < 0]
        self.trees = np.array([*roots, len(parents)], np.int64)
        """The first run of each tree, and the number of runs."""
        # One thread computes a tree in order, so the tree must contain the parents of its runs.
        first = np.repeat(self.trees[:-1], np.diff(self.trees)).tolist()
        assert all(p < 0 or s <= p < i for i, (p, s) in enumerate(zip(parents, first, strict=True)))


class CppTreeRecurrence(TreeRecurrence):
    """The recurrence of a micro-batch of the trainer, with gradients (see `Recurrence`)."""

    @cached_property
    def _runs(self) -> Runs:
        return Runs(self._spans, self._parents)

    def _scan(self, parts: Parts) -> Tensor:
        return scan(parts, self._runs)


class CppSequenceRecurrence(SequenceRecurrence):
    """The recurrence of rows that continue stored states, without gradients (see `Recurrence`)."""

    @cached_property
    def _tables(self) -> Runs:
        return Runs([(run.start, run.stop) for run in self._runs], self._parents)

    def _scan(self, layer: int, parts: Parts, out: Tensor) -> None:
        table = self._tables.table.copy()
        table["before"] = [run.before.matrices[layer].data_ptr() for run in self._runs]
        table["after"] = [run.after.matrices[layer].data_ptr() for run in self._runs]
        given = _contiguous(parts)
        arguments = _delta(given, table, self._tables.trees)
        ops.call("delta_scan", torch.float32, ctypes.byref(arguments), out)


def scan(parts: Sequence[Tensor], runs: Runs) -> Tensor:
    """Return the outputs of all rows, float32 [T, Hv, Dv], with gradients.

    `parts`: q, k, v, decay and beta (see `Parts`). Each run continues the state of its parent, or a
    state of zeros.
    """
    return _Scan.apply(*parts, runs)  # type: ignore[no-any-return]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, runs: Runs
    ) -> Tensor:
        parts = _contiguous((q, k, v, decay, beta))
        ctx.save_for_backward(*parts)
        ctx.runs = runs
        # Only runs that have children need a stored state after their last row.
        inner = sorted({parent for parent in runs.parents if parent >= 0})
        ends = q.new_empty(len(inner), q.shape[1], q.shape[2], v.shape[2])
        address = {run: end.data_ptr() for run, end in zip(inner, ends, strict=True)}
        table = runs.table.copy()
        table["before"] = [address.get(parent, 0) for parent in runs.parents]
        table["after"] = [address.get(run, 0) for run in range(len(table))]
        out = torch.empty_like(parts[2])
        arguments = _delta(parts, table, runs.trees)
        ops.call("delta_scan", torch.float32, ctypes.byref(arguments), out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        parts, runs = ctx.saved_tensors, ctx.runs
        grads = [torch.zeros_like(part) for part in parts]
        arguments = _delta(parts, runs.table, runs.trees)
        ops.call(
            "delta_scan_backward",
            torch.float32,
            ctypes.byref(arguments),
            grad.contiguous(),
            *grads,
        )
        return *grads, None


def _contiguous(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(part.contiguous() for part in parts)


def _delta(parts: Sequence[Tensor], runs: np.ndarray, trees: np.ndarray) -> _Delta:
    """Return the arguments of the kernels. They contain addresses, so `parts` and the arrays must
    outlive them.
    """
    q, _, v, _, _ = parts
    return _Delta(
        *(part.data_ptr() for part in parts),
        runs.ctypes.data,
        trees.ctypes.data,
        len(trees) - 1,
        q.shape[1],
        q.shape[2],
        v.shape[2],
    )
