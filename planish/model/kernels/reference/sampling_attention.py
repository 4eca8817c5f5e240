"""The sampler's attention in torch, which reads the KV cache slots in place.

Samples that share a prompt attend to its keys in one matmul. Each row then attends to the keys in
its sample's own slot. The sums of the second part continue those of the first, in the order that
ordered_attention.py defines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.model.device import copy_async
from planish.model.kernels.reference.ordered_attention import (
    Sums,
    add_spans,
    attend,
    attention_scores,
    row_max,
)
from planish.model.sequences.kv_cache import (
    KVPool,
    KVPools,
    PrefillSpan,
    PromptSlot,
    SampleSlot,
    SlotOwner,
)
from planish.model.sequences.positions import SPAN, round_up_to_spans

ATTENDED_ROWS = 16
"""The maximum number of query rows that one thread of the C++ kernels processes at a time.

The thread keeps their float32 scores in memory, for one group of heads and all visible positions.
"""
_QUERY_BLOCK = 256
"""The maximum number of prompt rows in one matmul of the prefill."""
_MAX_ROWS_PER_SLOT = 8
"""The maximum number of rows of one prompt in one matmul. A small number limits padding if some
prompts of a pool have one sample and others have many.
"""


class PrefillAttention:
    """The causal attention of prompt rows.

    Each call stores the rows' keys and values in their prompts' slots. Each row attends to the
    positions up to its own.
    """

    def __init__(
        self,
        spans: Sequence[PrefillSpan],
        windows: Sequence[int | None] = (),
        cap: float | None = None,
    ) -> None:
        """`spans` names the rows of each prompt; rows outside of them are padding.

        `windows`: the attention window of each layer (see `ModelConfig.attention_windows`). `cap`:
        the limit of scores (see `ModelConfig.score_cap`).
        """
        self._spans, self._windows, self._cap = spans, windows, cap
        self._visible: list[Tensor] | None = None
        """`PrefillSpan.visible` of each span on the device, copied there in the first layer."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Return the attention output of one layer, with the shape and dtype of `q`.

        `q`, `k` and `v` are [T, heads, head_dim]. `sinks`: float32 [Hq], or None (see `Attend`).
        The output of padding rows is 0.
        """
        if self._visible is None:
            self._visible = [copy_async(torch.from_numpy(s.visible), q.device) for s in self._spans]
        out = torch.zeros_like(q)
        for span, visible in zip(self._spans, self._visible, strict=True):
            rows = slice(span.row, span.row + span.count)
            self._attend(span, visible, layer, q[rows], k[rows], v[rows], out[rows], sinks)
        return out

    def _attend(
        self,
        span: PrefillSpan,
        visible: Tensor,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        keys, values = span.pool.views(layer, span.slot)
        keys[:, span.start : span.start + span.count] = k.transpose(0, 1)
        values[:, span.start : span.start + span.count] = v.transpose(0, 1)
        heads, group = k.shape[1], q.shape[1] // k.shape[1]
        for first in range(0, span.count, _QUERY_BLOCK):
            part = q[first : first + _QUERY_BLOCK]
            ends = span.start + first + torch.arange(1, len(part) + 1, device=q.device)
            seen = visible[first : first + len(part)]
            width = round_up_to_spans(int(span.visible[first + len(part) - 1]))
            queries = part.unflatten(1, (heads, group)).permute(1, 2, 0, 3).flatten(1, 2)
            attended, _ = attend(
                queries[None],
                keys[None, :, :width],
                values[None, :, :width],
                seen.repeat(group)[None, None],
                self._windows[layer] if self._windows else None,
                None if sinks is None else sinks.view(heads, group).repeat_interleave(len(part), 1),
                self._cap,
                ends.repeat(group)[None, None],
            )
            rows = attended[0].unflatten(1, (group, len(part))).permute(2, 0, 1, 3).flatten(1, 2)
            out[first : first + len(part)] = rows.to(out.dtype)


class DecodeAttention:
    """The attention of a decoding step, with new rows for the samples of the step."""

    def __init__(
        self,
        first_rows: dict[SlotOwner, int],
        prompt_pools: KVPools,
        sample_pools: KVPools,
        query_rows: int,
        device: torch.device,
        windows: Sequence[int | None] = (),
        row_counts: Mapping[SlotOwner, int] | None = None,
        cap: float | None = None,
    ) -> None:
        """`first_rows`, `row_counts`: see `Backend.decode_attention`.

        `query_rows` is the minimum number of rows of a matmul; fewer rows are padded. `windows`:
        the attention window of each layer (see `ModelConfig.attention_windows`). `cap`: as in
        `PrefillAttention`.
        """
        self._query_rows, self._windows, self._cap = query_rows, windows, cap
        rows_of = {
            sample: range(row, row + (row_counts.get(sample, 1) if row_counts else 1))
            for sample, row in first_rows.items()
        }
        self._own_groups = [
            slot_group
            for pool in sample_pools.pools_in_use()
            for slot_group in _sample_groups(pool, rows_of, device)
        ]
        shared_groups = [
            slot_group
            for pool in prompt_pools.pools_in_use()
            for slot_group in _prompt_groups(pool, sample_pools, rows_of, device)
        ]
        self._groups = [*shared_groups, *self._own_groups]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Return the attention output of one layer, with the shape and dtype of `q`.

        `q`, `k` and `v` are [T, heads, head_dim]. `sinks`: float32 [Hq], or None (see `Attend`).
        The output of padding rows is 0.
        """
        for slot_group in self._own_groups:
            slot_group.store(layer, k, v)
        grouped = q.unflatten(1, (k.shape[1], -1))
        window = self._windows[layer] if self._windows else None
        group_scores = []
        for slot_group in self._groups:
            by_slot = self._gather_by_slot(slot_group, grouped)
            first = (
                None
                if window is None
                else slot_group.window_starts(window, grouped.shape[2], by_slot)
            )
            group_scores.append(
                attention_scores(
                    by_slot, slot_group.keys(layer), slot_group.visible, first, self._cap
                )
            )
        accum_dtype = group_scores[0].dtype
        maxima = torch.full(
            (*grouped.shape[:-1], 1),
            torch.finfo(accum_dtype).min,
            dtype=accum_dtype,
            device=q.device,
        )
        sums = Sums(torch.zeros_like(grouped, dtype=accum_dtype), torch.zeros_like(maxima))
        group_rows = [
            slot_group.rows if slot_group.span is None else slot_group.span
            for slot_group in self._groups
        ]
        for slot_group, rows, scores in zip(self._groups, group_rows, group_scores, strict=True):
            maxima[rows] = torch.maximum(
                maxima[rows], slot_group.gather_rows(row_max(scores), grouped.shape[2])
            )
        if sinks is not None:
            sinks = sinks.view(1, *grouped.shape[1:3], 1)
            maxima = torch.maximum(maxima, sinks)
        for slot_group, rows, scores in zip(self._groups, group_rows, group_scores, strict=True):
            # A row attends to its prompt's slot first, in one group, and to its sample's own slot
            # afterwards. So only the groups of samples' own slots continue earlier sums.
            before = None
            if slot_group in self._own_groups:
                before = Sums(
                    self._gather_by_slot(slot_group, sums.values),
                    self._gather_by_slot(slot_group, sums.weights),
                )
            after = add_spans(
                scores, self._gather_by_slot(slot_group, maxima), slot_group.values(layer), before
            )
            sums.values[rows] = slot_group.gather_rows(after.values, grouped.shape[2])
            sums.weights[rows] = slot_group.gather_rows(after.weights, grouped.shape[2])
        if sinks is not None:
            sums.weights.add_((sinks - maxima).exp_())
        # Padding rows have no keys, so their weights sum to 0 and the clamp avoids 0 / 0.
        return (
            (sums.values / sums.weights.clamp_(min=torch.finfo(accum_dtype).tiny))
            .flatten(1, 2)
            .to(q.dtype)
        )

    def _gather_by_slot(self, slot_group: _SlotGroup, x: Tensor) -> Tensor:
        return slot_group.gather_by_slot(x, self._query_rows)


@dataclass(frozen=True, eq=False)
class _SlotGroup:
    """Several slots of one pool and the batch rows that attend to them.

    The n slots form one batched matmul. Each slot has `rows_per_slot` places for batch rows.
    """

    pool: KVPool
    slots: Tensor | None
    """The n slots. None: the slots 0 .. n - 1, which need no gathering."""
    table: Tensor
    """The batch row at each place of each slot: [n, lane]. Unused places refer to row 0."""
    used_places: Tensor | None
    """The indices of the used places within the flattened table. None: all places are used."""
    rows: Tensor
    """The batch rows at the used places, in the order of the places."""
    visible: Tensor
    """The number of positions that the rows of each slot attend to: [n, 1, 1]."""
    ends: Tensor
    """The end of each row's window: [n, lane]. The end is the position after the row's own
    position. Position 0 is the first position of the slot.
    """
    width: int
    """The number of positions to read from every slot, at least the maximum of `visible`."""
    span: slice | None = None
    """The rows as a slice, if each slot has exactly one row and the rows are consecutive in slot
    order. Then no rows need to be gathered.
    """

    def keys(self, layer: int) -> Tensor:
        """Return the keys of the slots: [n, H, width, head_dim]."""
        return self._read_slots(self.pool.keys[layer])

    def values(self, layer: int) -> Tensor:
        """Return the values of the slots: [n, H, width, head_dim]."""
        return self._read_slots(self.pool.values[layer])

    def _read_slots(self, cache: Tensor) -> Tensor:
        chosen = cache[: len(self.table)] if self.slots is None else cache[self.slots]
        return chosen[:, :, : self.width]

    def gather_by_slot(self, x: Tensor, query_rows: int) -> Tensor:
        """Arrange x [T, H, group, E] by slot and return it as [n, H, M, E].

        M is lane * group, padded with zeros to at least `query_rows`.
        """
        by_slot = x[self.table].transpose(1, 2).flatten(2, 3) if self.span is None else x[self.span]
        return F.pad(by_slot, (0, 0, 0, max(0, query_rows - by_slot.shape[2])))

    def window_starts(self, window: int, group: int, by_slot: Tensor) -> Tensor:
        """Return the first position of each row's window in its slot: [n, 1, M].

        `by_slot`: the queries, as `gather_by_slot` returned them. `group`: the query heads per
        key head.
        """
        first = (self.ends - window).repeat_interleave(group, 1)
        return F.pad(first, (0, by_slot.shape[2] - first.shape[1])).unsqueeze(1)

    def gather_rows(self, x: Tensor, group: int) -> Tensor:
        """Undo `gather_by_slot` for the used places.

        Turn [n, H, M, E] into [len(rows), H, group, E].
        """
        if self.span is not None:
            return x[:, :, :group]
        rows_per_slot = self.table.shape[1]
        places = (
            x[:, :, : rows_per_slot * group]
            .unflatten(2, (rows_per_slot, group))
            .transpose(1, 2)
            .flatten(0, 1)
        )
        return places if self.used_places is None else places[self.used_places]

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the rows' new keys and values at the last visible position of their slots."""
        slots, last = self.slots, self.visible.flatten() - 1
        if slots is None:
            slots = torch.arange(len(self.rows), device=k.device)
        rows = self.rows if self.span is None else self.span
        self.pool.keys[layer][slots, :, last] = k[rows].to(self.pool.spec.dtype)
        self.pool.values[layer][slots, :, last] = v[rows].to(self.pool.spec.dtype)


def _sample_groups(
    pool: KVPool, rows_of: dict[SlotOwner, range], device: torch.device
) -> list[_SlotGroup]:
    """Return the groups of the samples' own slots in `pool`.

    The first group has the first row of every sample of the step. The next one has the second row
    of the samples that have one, and so on.
    """
    samples = cast("list[SampleSlot]", pool.owners)
    rows = [rows_of.get(sample, range(0)) for sample in samples]
    groups = []
    for number in range(max(map(len, rows))):
        slots = [slot for slot, of_sample in enumerate(rows) if len(of_sample) > number]
        numbers = [rows[slot][number] for slot in slots]
        visible = [samples[slot].num_stored + 1 + number for slot in slots]
        in_order = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        batch_rows = torch.tensor(numbers, device=device)
        groups.append(
            _SlotGroup(
                pool=pool,
                slots=torch.tensor(slots, device=device) if len(slots) < len(samples) else None,
                table=batch_rows.unsqueeze(1),
                used_places=None,
                rows=batch_rows,
                visible=torch.tensor(visible, device=device)[:, None, None],
                ends=torch.tensor(visible, device=device)[:, None],
                width=round_up_to_spans(max(visible)),
                span=slice(numbers[0], numbers[0] + len(numbers)) if in_order else None,
            )
        )
    return groups


def _prompt_groups(
    pool: KVPool, sample_pools: KVPools, rows_of: dict[SlotOwner, range], device: torch.device
) -> list[_SlotGroup]:
    """Return the groups of the slots of prompts in `pool` that samples attend to.

    A group has up to `_MAX_ROWS_PER_SLOT` rows per prompt, so a prompt with more samples is in
    several groups. Samples attend to the whole spans of the prompt only. Their own slots contain a
    copy of the positions after these.
    """
    prompts = cast("list[PromptSlot]", pool.owners)
    rows_of_slot: list[list[tuple[int, int]]] = [[] for _ in prompts]
    for sample in (
        sample
        for sample_pool in sample_pools.pools_in_use()
        for sample in cast("list[SampleSlot]", sample_pool.owners)
    ):
        slot = sample.prompt.slot
        if slot < len(prompts) and prompts[slot] is sample.prompt and sample.prompt.length >= SPAN:
            rows_of_slot[slot] += [
                (row, sample.num_stored + 1 + number)
                for number, row in enumerate(rows_of.get(sample, range(0)))
            ]
    groups = []
    for first in range(0, max(map(len, rows_of_slot)), _MAX_ROWS_PER_SLOT):
        slots = [slot for slot, slot_rows in enumerate(rows_of_slot) if len(slot_rows) > first]
        group_rows = [rows_of_slot[slot][first : first + _MAX_ROWS_PER_SLOT] for slot in slots]
        table = [[row for row, _ in slot_rows] for slot_rows in group_rows]
        rows_per_slot = max(map(len, table))
        visible = [prompts[slot].length // SPAN * SPAN for slot in slots]
        groups.append(
            _SlotGroup(
                pool=pool,
                slots=None
                if slots == list(range(len(slots)))
                else torch.tensor(slots, device=device),
                table=torch.tensor(
                    [row + [0] * (rows_per_slot - len(row)) for row in table], device=device
                ),
                used_places=torch.tensor(
                    [i * rows_per_slot + j for i, row in enumerate(table) for j in range(len(row))],
                    device=device,
                ),
                rows=torch.tensor([row for slot_rows in table for row in slot_rows], device=device),
                visible=torch.tensor(visible, device=device)[:, None, None],
                ends=torch.tensor(
                    [
                        [seen + own for _, own in slot_rows]
                        + [seen] * (rows_per_slot - len(slot_rows))
                        for seen, slot_rows in zip(visible, group_rows, strict=True)
                    ],
                    device=device,
                ),
                width=max(visible),
            )
        )
    return groups
