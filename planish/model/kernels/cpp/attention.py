"""The attention of trainer and sampler with the C++ kernels.

The classes of this module describe which rows attend to which keys, as an `AttentionPlan` of
cpp/ops.py. They cover the segments of prefix trees (training), prompt rows (prefill), and the new
rows of samples (decoding). The kernel has one interface for all three. A block of query rows
attends to shared key ranges, and each row may then attend to one range of its own. A row's output
does not depend on how rows form blocks, so sampler and trainer agree bit for bit.

The reference implementations are attention.py, sampling_attention.py and ordered_attention.py in
kernels/reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from planish.model.kernels.cpp import ops
from planish.model.kernels.cpp.ops import AttentionPlan, StoringAttention
from planish.model.kernels.interface.parts import Attend
from planish.model.kernels.reference.sampling_attention import ATTENDED_ROWS
from planish.model.sequences.kv_cache import (
    KVPool,
    KVPools,
    PrefillSpan,
    SampleSlot,
    SeparateKVPool,
    SlotOwner,
)
from planish.model.sequences.positions import SPAN
from planish.model.sequences.prefix_tree import MicroBatch

_LANE = 8
"""The maximum number of rows of one prompt in a block.

With larger blocks, a few prompts would not have enough blocks to keep all threads busy. The size of
the CPU's cache would allow larger blocks.
"""
_WORK_UNITS = 24
"""The approximate number of work units of a backward pass.

The number is fixed, so that sums do not depend on the number of threads.
"""


class CppTreeAttention:
    """The attention of the trainer for one micro-batch, with gradients (see `Attend`)."""

    def __init__(self, micro_batch: MicroBatch, windows: Sequence[int | None] = ()) -> None:
        """`windows`: the attention window of each layer (see `ModelConfig.attention_windows`)."""
        blocks, ranges = [], []
        for segment in micro_batch.segments:
            for start in range(segment.start, segment.end, ATTENDED_ROWS):
                stop = min(start + ATTENDED_ROWS, segment.end)
                last = stop - 1
                num_later = micro_batch.visible[last] - micro_batch.positions[last] - 1
                spans = [*segment.ancestors, (segment.start, stop + num_later)]
                blocks.append((start, stop - start, len(ranges), len(spans)))
                ranges += spans
        self._spans = np.array(ranges, np.int64)
        self._plan = AttentionPlan(
            blocks=np.array(blocks, ops.Block),
            ranges=np.zeros((1, len(ranges)), ops.Range),
            rows=np.arange(len(micro_batch)),
            visible=micro_batch.visible,
            windows=windows,
            window_ends=micro_batch.positions + 1 if micro_batch.blocks else None,
        )
        self._sums: Tensor | None = None

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Return the attention output [T, Hq, E] (see `Attend`)."""
        return _TreeAttention.apply(q, k, v, self, layer, sinks)  # type: ignore[no-any-return]

    def plan(self, keys: Tensor, values: Tensor, layer: int) -> AttentionPlan:
        """Return a plan for one layer, whose ranges point into `keys` and `values`.

        `keys`, `values`: contiguous [T, H, E]. They must outlive the plan.
        """
        _, heads, e = keys.shape
        ranges = self._plan.ranges.copy()
        first, counts = (
            self._spans[:, 0] * heads * e * keys.itemsize,
            self._spans[:, 1] - self._spans[:, 0],
        )
        ranges["k"], ranges["v"] = keys.data_ptr() + first, values.data_ptr() + first
        ranges["count"], ranges["row"], ranges["head"] = counts, heads * e, e
        windows = self._plan.windows[layer : layer + 1]
        return replace(self._plan, ranges=ranges, windows=windows)

    def sums(self, num_units: int, keys: Tensor) -> Tensor:
        """Return scratch memory for a backward pass, float32 [parts, 2, T, H, E].

        All layers share the memory, because allocating it takes longer than computing the sums.
        """
        if self._sums is None:
            self._sums = torch.empty(num_units, 2, *keys.shape)
        return self._sums

    def unit_ends(self, heads: int) -> np.ndarray:
        """Divide the blocks into units of about equal work, and return the end of each unit.

        `heads`: the number of key-value heads. The result is int64 [n].
        """
        blocks = self._plan.blocks
        work = np.cumsum([block["count"] * self._plan.visible[block["first"]] for block in blocks])
        num_units = min(len(blocks), math.ceil(_WORK_UNITS / heads))
        ends = np.searchsorted(work, work[-1] * np.arange(1, num_units + 1) / num_units) + 1
        return np.unique(np.minimum(ends, len(blocks))).astype(np.int64)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention: CppTreeAttention,
        layer: int,
        sinks: Tensor | None,
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        lse = torch.empty(q.shape[:2])
        out = ops.attend(attention.plan(k, v, layer), 0, q, k.shape[1], lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.attention, ctx.layer = attention, layer
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        plan, ends = ctx.attention.plan(k, v, ctx.layer), ctx.attention.unit_ends(k.shape[1])
        sums = ctx.attention.sums(len(ends), k)
        grads = ops.attend_backward(plan, ends, grad.contiguous(), q, out, lse, k, sums)
        return *grads, None, None, None


class CppPrefillAttention:
    """The causal attention of prompt rows.

    Each call stores the rows' keys and values in their prompts' slots. Each row attends to the
    positions up to its own.
    """

    def __init__(self, spans: Sequence[PrefillSpan], windows: Sequence[int | None] = ()) -> None:
        """`windows`: the attention window of each layer (see `ModelConfig.attention_windows`)."""
        self._spans = spans
        blocks, owners, rows = [], [], []
        for span in spans:
            for first in range(0, span.count, ATTENDED_ROWS):
                count = min(ATTENDED_ROWS, span.count - first)
                blocks.append((len(rows), count, len(owners), 1))
                owners.append((span.pool, span.slot, int(span.visible[first + count - 1])))
                rows += range(span.row + first, span.row + first + count)
        positions = [np.arange(span.start, span.start + span.count) for span in spans]
        has_blocks = any(span.blocks for span in spans)
        self._plan = AttentionPlan(
            blocks=np.array(blocks, ops.Block),
            ranges=_ranges(owners),
            rows=np.array(rows, np.int64),
            visible=_joined([span.visible for span in spans]),
            windows=windows,
            window_ends=_joined(positions) + 1 if has_blocks else None,
        )

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Return the attention output [T, Hq, E]; 0 for padding rows (see `Attend`)."""
        for span in self._spans:
            rows, positions = (
                slice(span.row, span.row + span.count),
                slice(span.start, span.start + span.count),
            )
            keys, values = span.pool.views(layer, span.slot)
            keys[:, positions] = k[rows].transpose(0, 1)
            values[:, positions] = v[rows].transpose(0, 1)
        return ops.attend(self._plan, layer, q.contiguous(), k.shape[1], None, sinks)


class CppDecodeAttention(StoringAttention):
    """The attention of a decoding step, with new rows for the samples of the step."""

    def __init__(
        self,
        first_rows: dict[SlotOwner, int],
        prompt_pools: KVPools,
        sample_pools: KVPools,
        windows: Sequence[int | None] = (),
        row_counts: Mapping[SlotOwner, int] | None = None,
    ) -> None:
        """`first_rows`, `row_counts`: see `Backend.decode_attention`.

        `windows`: the attention window of each layer (see `ModelConfig.attention_windows`).
        """
        # The kernel stores the keys and values of all rows first. So each row of a sample is an
        # entry of its own, which attends to one position more than the previous row.
        found = [
            (sample, pool, number)
            for pool in sample_pools.pools_in_use()
            for sample in cast("list[SampleSlot]", pool.owners)
            if sample in first_rows
            for number in range(row_counts.get(sample, 1) if row_counts else 1)
        ]
        # A block contains samples of one prompt, so sort them next to each other.
        found.sort(key=lambda item: (id(item[0].prompt), first_rows[item[0]], item[2]))
        pool_of = {owner: pool for pool in prompt_pools.pools_in_use() for owner in pool.owners}
        blocks, shared, visible = [], [], []
        for entry, (sample, _, _) in enumerate(found):
            prompt = sample.prompt
            seen = prompt.length // SPAN * SPAN
            if blocks and blocks[-1][1] < _LANE and found[entry - 1][0].prompt is prompt:
                blocks[-1][1] += 1
            else:
                blocks.append([entry, 1, len(shared), int(seen > 0)])
                shared += [(pool_of[prompt], prompt.slot, seen)] if seen else []
            visible.append(seen)
        plan = AttentionPlan(
            blocks=np.array([tuple(block) for block in blocks], ops.Block),
            ranges=_ranges(shared),
            rows=np.array([first_rows[sample] + number for sample, _, number in found], np.int64),
            visible=np.array(visible, np.int64),
            own=_ranges(
                [
                    (pool, sample.slot, sample.num_stored + 1 + number)
                    for sample, pool, number in found
                ]
            ),
            windows=windows,
        )
        super().__init__(plan)


class CppAttention:
    """The attention of trainer and sampler (see `Attention`)."""

    attention_is_batch_invariant = True
    pool_class: type[KVPool] = SeparateKVPool

    def __init__(self, dtype: torch.dtype, windows: Sequence[int | None]) -> None:
        """`dtype`: the dtype of the model. `windows`: see `ModelConfig.attention_windows`."""
        self.kv_dtype, self._windows = dtype, windows

    def tree_attention(self, micro_batch: MicroBatch) -> Attend:
        """Return the attention of a micro-batch of the trainer, with gradients."""
        return CppTreeAttention(micro_batch, self._windows)

    def prefill_attention(self, spans: Sequence[PrefillSpan]) -> Attend:
        """Return the causal attention of prompt rows, which stores their keys and values."""
        return CppPrefillAttention(spans, self._windows)

    def decode_attention(
        self,
        first_rows: dict[SlotOwner, int],
        prompt_pools: KVPools,
        sample_pools: KVPools,
        row_counts: Mapping[SlotOwner, int] | None = None,
    ) -> Attend:
        """Return the attention of a decoding step with new rows for each sample."""
        return CppDecodeAttention(first_rows, prompt_pools, sample_pools, self._windows, row_counts)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return arrays of int64 one after another."""
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _ranges(owners: Sequence[tuple[KVPool, int, int]]) -> np.ndarray:
    """Return a key range for each slot in each layer: [L, n] of Range.

    `owners`: (pool, slot, count) of each of the n slots. A range consists of the first `count`
    positions of its slot. The ranges contain addresses, so they are valid until a pool reallocates
    its tensors.
    """
    if not owners:
        return np.zeros((1, 0), ops.Range)
    indices_of_pool: dict[KVPool, list[int]] = {}
    for index, (pool, _, _) in enumerate(owners):
        indices_of_pool.setdefault(pool, []).append(index)
    spec = owners[0][0].spec
    ranges = np.zeros((spec.num_layers, len(owners)), ops.Range)
    for pool, indices in indices_of_pool.items():
        keys, values = pool.addresses([owners[index][1] for index in indices])
        ranges["k"][:, indices], ranges["v"][:, indices] = keys.T, values.T
        ranges["head"][:, indices] = pool.capacity * spec.head_dim
    ranges["count"] = [count for _, _, count in owners]
    ranges["row"] = spec.head_dim
    return ranges
