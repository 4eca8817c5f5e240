"""The sampler's attention on a GPU, which reads keys and values in place from their slots.

The reference implementation (reference/sampling_attention.py) gathers keys and values with torch.
Here tables tell the kernels (decode_kernels.py) which row attends to which positions of which slot.
All tables are sent to the device in one copy per step, for all layers. A layer then needs only a
few launches. In decoding, the tables and all other arguments of the launches have fixed addresses
and sizes. So a captured CUDA graph of a step serves every later step, after `DecodeTables.fill` has
updated the tables.

This attention is not batch-invariant: the division of a slot's positions into pieces, and thereby
the order in which a row's sums are added, depends on the whole batch.

Shapes: T rows, Hq query heads, H key heads, E head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from planish.model.device import on_device, pinned
from planish.model.sequences.kv_cache import (
    KVPool,
    KVPools,
    KVSpec,
    PrefillSpan,
    PromptSlot,
    SampleSlot,
    SlotOwner,
)
from planish.model.sequences.positions import SPAN, capacity_for

_PROGRAMS_PER_MULTIPROCESSOR = 8
"""The programs per multiprocessor.

A multiprocessor runs two or three programs at a time. It starts the next program when one of them
ends, so programs with short pieces leave no multiprocessor idle.
"""
_INTERPRETER_MULTIPROCESSORS = 2
"""The assumed number of multiprocessors if a CPU interprets the kernels."""
_MIN_PIECE_LENGTH = 128
"""The minimum number of positions of a piece, except for the last piece of a slot."""
_NUMBER_BYTES = 4
"""The bytes of a number (int32) in a table."""
_ALIGNMENT = 4
"""Each section of a table begins at a multiple of this many numbers (16 bytes)."""


class PoolBases:
    """A table on the device with the addresses of the pools' tensors.

    Each pool has a number, its index in the table, as long as the pool exists.
    """

    def __init__(self, shape: KVSpec, max_length: int) -> None:
        """`max_length`: the maximum length of a sequence, which limits the number of pools."""
        self.shape = shape
        # Prompts and samples each have one pool per capacity. The number is doubled, because a
        # failed step replaces all pools while the old ones may still be referenced.
        max_pools = 4 * (capacity_for(max_length) // SPAN + 1)
        self.table = torch.zeros(
            shape.num_layers, max_pools, 2, dtype=torch.int64, device=shape.device
        )
        """Addresses of each layer's keys and values [layers, pools, 2]."""
        self._numbers: WeakKeyDictionary[KVPool, int] = WeakKeyDictionary()
        self._known_reallocations = [-1] * max_pools

    def numbers(self, pools: Sequence[KVPool]) -> list[int]:
        """Return the pools' numbers, and update the table for these pools.

        The table is valid until one of the pools replaces its tensors.
        """
        numbers = [self._number(pool) for pool in pools]
        changed = {
            number: pool
            for number, pool in zip(numbers, pools, strict=True)
            if pool.reallocations != self._known_reallocations[number]
        }
        if changed:
            addresses = [
                [(pool.keys[layer].data_ptr(), pool.values[layer].data_ptr())
                 for pool in changed.values()]
                for layer in range(self.shape.num_layers)
            ]  # fmt: skip
            device = self.table.device
            self.table.index_copy_(
                1,
                on_device(list(changed), torch.int64, device),
                on_device(addresses, torch.int64, device),
            )
            for number, pool in changed.items():
                self._known_reallocations[number] = pool.reallocations
        return numbers

    def _number(self, pool: KVPool) -> int:
        if pool not in self._numbers:
            number = min(
                set(range(len(self._known_reallocations))).difference(self._numbers.values())
            )
            self._numbers[pool], self._known_reallocations[number] = number, -1
        return self._numbers[pool]


class GpuPrefill:
    """The causal attention of prompt rows.

    Each call stores the rows' keys and values in their prompts' slots. Each row attends to the
    positions up to its own.
    """

    def __init__(
        self,
        spans: Sequence[PrefillSpan],
        bases: PoolBases,
        q_heads: int,
        windows: Sequence[int | None] = (),
    ) -> None:
        """`spans`: the rows of each prompt. `q_heads`: the number of query heads Hq.

        `windows`: the attention window of each layer (see `ModelConfig.attention_windows`).
        """
        kernels = _kernels()
        self._windows = windows
        self._bases, self._heads = bases, _heads(bases.shape, q_heads)
        numbers = bases.numbers([span.pool for span in spans])
        size = self._heads.block_rows
        blocks = [
            (
                number,
                span.slot,
                span.pool.capacity,
                span.start + at,
                span.row + at,
                min(size, span.count - at),
            )
            for number, span in zip(numbers, spans, strict=True)
            for at in range(0, span.count, size)
        ]
        # Start with the blocks that attend to the most positions, so that the last programs are
        # short.
        blocks.sort(key=lambda block: -block[3])
        batch = max(span.row + span.count for span in spans)
        self._tables = _Tables(
            bases.shape.device, rows=(kernels.Row, batch), blocks=(kernels.Block, len(blocks))
        )
        self._tables["blocks"][:] = blocks
        for number, span in zip(numbers, spans, strict=True):
            rows = self._tables["rows"][span.row : span.row + span.count]
            rows["pool"], rows["slot"], rows["capacity"] = number, span.slot, span.pool.capacity
            rows["position"] = np.arange(span.start, span.start + span.count)
        self._tables.send()

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Return the attention output [T, Hq, E]; 0 for padding rows (see `Attend`)."""
        kernels, on_device, bases = _kernels(), self._tables.on_device, self._bases.table[layer]
        window = self._windows[layer] if self._windows else None
        kernels.keep(self._heads, on_device["rows"], bases, k, v)
        return kernels.prefill(self._heads, on_device["blocks"], bases, q, window, sinks)


class DecodeTables:
    """The attention of a decoding step. `fill` sets the samples of the step.

    An instance is an `Attend` of the decoder. The output of rows without a sample is 0.

    For a given number of rows, every call launches the same kernels with the same addresses. So a
    call can be captured in a CUDA graph.

    All layers with the same attention window share their tables.
    """

    def __init__(
        self,
        bases: PoolBases,
        max_rows: int,
        q_heads: int,
        windows: Sequence[int | None] = (),
    ) -> None:
        """`max_rows`: the maximum number of rows of a batch, including rows without a sample.

        `q_heads`: the number of query heads Hq. `windows`: the attention window of each layer (see
        `ModelConfig.attention_windows`).
        """
        kernels, shape, device = _kernels(), bases.shape, bases.shape.device
        self.max_rows = max_rows
        self._bases, self._heads = bases, _heads(shape, q_heads)
        multiprocessors = _common().multiprocessors(device, _INTERPRETER_MULTIPROCESSORS)
        self._programs = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
        # Each slot has one piece, and additional pieces if it is cut. `_piece_length` ensures this
        # maximum of additional pieces of all slots together.
        self._max_additional_pieces = max(1, self._programs // shape.num_heads)
        pieces, parts = (
            2 * max_rows + self._max_additional_pieces,
            2 * max_rows + self._heads.lane * self._max_additional_pieces,
        )
        self._windows = tuple(windows) or (None,) * shape.num_layers
        kinds = {
            "counts": (np.dtype(np.int32), 2),
            "rows": (kernels.Row, max_rows),
            "entries": (kernels.Entry, max_rows),
            "pieces": (kernels.Piece, pieces),
        }
        distinct = tuple(dict.fromkeys(self._windows))
        self._tables = _Tables(
            device,
            **{f"{kind}{i}": of for i in range(len(distinct)) for kind, of in kinds.items()},
        )
        values = torch.empty(parts, q_heads, shape.head_dim, device=device)
        stats = torch.empty(parts, q_heads, 2, device=device)
        self._work = {
            window: kernels.DecodeWork(
                window,
                **{kind: self._tables.on_device[f"{kind}{i}"] for kind in kinds},
                values=values,
                stats=stats,
            )
            for i, window in enumerate(distinct)
        }

    def fill(
        self,
        first_rows: dict[SlotOwner, int],
        prompt_pools: KVPools,
        sample_pools: KVPools,
        row_counts: Mapping[SlotOwner, int] | None = None,
    ) -> None:
        """Set the samples of the next calls. Do not call this during the capture of a graph.

        `first_rows`, `row_counts`: see `Backend.decode_attention`.
        """
        step = _Step.of(first_rows, prompt_pools, sample_pools, self._bases, row_counts or {})
        for i, window in enumerate(self._work):
            self._fill(step, window, str(i))
        self._tables.send()

    def _fill(self, step: _Step, window: int | None, suffix: str) -> None:
        """Write the tables of the layers with this window. `suffix`: of the names of the tables."""
        count = len(step.row)
        group_starts = np.flatnonzero(step.rank % self._heads.lane == 0)
        group_sizes = np.diff(group_starts, append=count)
        shared_first, own_first = step.first_visible(window)
        group_first = np.minimum.reduceat(shared_first, group_starts) if count else shared_first
        prompt_slots = step.shared.select(group_starts)
        prompt_visible = prompt_slots.count - group_first
        own_visible = step.own.count - own_first
        length = self._piece_length(int(prompt_visible.sum() + own_visible.sum()))
        prompt_parts = np.repeat(_num_pieces(prompt_visible, length), group_sizes)
        parts = prompt_parts + _num_pieces(own_visible, length)
        first = np.cumsum(parts) - parts
        pieces = self._tables[f"pieces{suffix}"]
        prompt_end = _cut(
            pieces,
            0,
            prompt_slots,
            group_first,
            length,
            entry=group_starts,
            entries=group_sizes,
            number=0,
        )
        end = _cut(
            pieces,
            prompt_end,
            step.own,
            own_first,
            length,
            entry=np.arange(count),
            entries=1,
            number=prompt_parts,
        )
        self._tables[f"counts{suffix}"][:] = prompt_end, end
        entries, records = self._tables[f"entries{suffix}"], self._tables[f"rows{suffix}"]
        entries["row"][:count], entries["part"][:count] = step.row, first
        entries["first"][:count] = shared_first
        records.fill(0)
        step.own.write_to(records, step.row)
        records["position"][step.row] = step.own.count - 1
        records["part"][step.row], records["parts"][step.row] = first, parts

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Return the attention output [T, Hq, E] (see `Attend`)."""
        assert len(q) <= self.max_rows
        kernels, bases = _kernels(), self._bases.table[layer]
        work = self._work[self._windows[layer]]
        kernels.keep(self._heads, work.rows, bases, k, v)
        return kernels.decode(self._heads, work, bases, q, self._programs, sinks)

    def _piece_length(self, positions: int) -> int:
        """Return the maximum number of positions of a piece, a power of two.

        `positions`: the positions of all slots together. The result is small enough that a few long
        slots occupy all programs. It is large enough that all slots together are cut into at most
        `_max_additional_pieces` additional pieces.
        """
        return max(_MIN_PIECE_LENGTH, 1 << (positions // self._max_additional_pieces).bit_length())


@dataclass(frozen=True)
class _Slots:
    """Slots of pools, as arrays with one entry per slot."""

    pool: np.ndarray
    slot: np.ndarray
    capacity: np.ndarray
    count: np.ndarray
    """The number of leading positions of each slot that rows attend to."""

    @classmethod
    def of(cls, pools: Sequence[KVPool], bases: PoolBases, counts: list[int]) -> _Slots:
        """Return all slots in use, in the order of the pools.

        `counts`: the number of leading positions of each slot that rows attend to.
        """
        sizes = [len(pool) for pool in pools]
        return cls(
            pool=np.repeat(np.array(bases.numbers(pools), np.int64), sizes),
            slot=np.array([owner.slot for pool in pools for owner in pool.owners], np.int64),
            capacity=np.repeat(np.array([pool.capacity for pool in pools], np.int64), sizes),
            count=np.array(counts, np.int64),
        )

    def select(self, index: np.ndarray) -> _Slots:
        """Return the slots at these indices."""
        return _Slots(self.pool[index], self.slot[index], self.capacity[index], self.count[index])

    def write_to(self, records: np.ndarray, where: np.ndarray | slice) -> None:
        """Write the pool, slot and capacity of each slot into `records[where]`."""
        records["pool"][where], records["slot"][where], records["capacity"][where] = (
            self.pool,
            self.slot,
            self.capacity,
        )


@dataclass(frozen=True)
class _Step:
    """The rows of a step, ordered by prompt, as arrays with one entry per row of a sample."""

    row: np.ndarray
    rank: np.ndarray
    """The index of each row among the rows of its prompt."""
    shared: _Slots
    """The slot of each row's prompt. `count` covers only the prompt's whole spans (see SPAN)."""
    own: _Slots
    """The slot of each row's sample. `count` ends with the row's own position."""

    def first_visible(self, window: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the first position of `shared` and of `own` that each row attends to.

        A row attends to the last `window` positions of its sequence, which continues from `shared`
        to `own`. None: to all positions.
        """
        if window is None:
            return np.zeros_like(self.shared.count), np.zeros_like(self.own.count)
        hidden = np.maximum(self.shared.count + self.own.count - window, 0)
        shared = np.minimum(hidden, self.shared.count)
        return shared, hidden - shared

    @classmethod
    def of(
        cls,
        first_rows: dict[SlotOwner, int],
        prompt_pools: KVPools,
        sample_pools: KVPools,
        bases: PoolBases,
        row_counts: Mapping[SlotOwner, int],
    ) -> _Step:
        """Return the rows of the samples in `first_rows` (see `Backend.decode_attention`)."""
        used_prompt_pools, used_sample_pools = (
            prompt_pools.pools_in_use(),
            sample_pools.pools_in_use(),
        )
        active = [
            prompt for pool in used_prompt_pools for prompt in cast("list[PromptSlot]", pool.owners)
        ]
        running = [
            sample for pool in used_sample_pools for sample in cast("list[SampleSlot]", pool.owners)
        ]
        index_of = {prompt: index for index, prompt in enumerate(active)}
        prompt = np.array([index_of[sample.prompt] for sample in running], np.int64)
        row = np.array([first_rows.get(sample, 0) for sample in running], np.int64)
        counts = np.array(
            [row_counts.get(sample, 1) if sample in first_rows else 0 for sample in running],
            np.int64,
        )
        sample_of = np.repeat(np.arange(len(running)), counts)
        number = np.arange(len(sample_of)) - np.repeat(np.cumsum(counts) - counts, counts)
        prompt, row = prompt[sample_of], row[sample_of] + number
        order = np.lexsort((row, prompt))
        own = _Slots.of(
            used_sample_pools, bases, [sample.num_stored + 1 for sample in running]
        ).select(sample_of)
        own.count[:] += number
        prompt = prompt[order]
        return cls(
            row=row[order],
            rank=np.arange(len(row)) - np.searchsorted(prompt, prompt),
            shared=_Slots.of(
                used_prompt_pools, bases, [prompt.length // SPAN * SPAN for prompt in active]
            ).select(prompt),
            own=own.select(order),
        )


class _Tables:
    """Records of several kinds, written on the host and sent to the device in one copy.

    The device tensors keep their addresses.
    """

    def __init__(self, device: torch.device, **sections: tuple[np.dtype, int]) -> None:
        """`sections`: the record type (int32 fields) and the number of records of each kind."""
        sizes = [record.itemsize // _NUMBER_BYTES * count for record, count in sections.values()]
        *starts, total = np.cumsum(
            [0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        ).tolist()
        self._host, self._device = (
            np.zeros(total, np.int32),
            torch.zeros(total, dtype=torch.int32, device=device),
        )
        self._records: dict[str, np.ndarray] = {}
        self.on_device: dict[str, Tensor] = {}
        """Each section as an int32 tensor [records, fields]."""
        for (name, (record, count)), start, size in zip(
            sections.items(), starts, sizes, strict=True
        ):
            self._records[name] = self._host[start : start + size].view(record)
            self.on_device[name] = self._device[start : start + size].view(count, -1)

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the records of a section on the host, for writing."""
        return self._records[name]

    def send(self) -> None:
        """Copy all sections to the device, asynchronously."""
        _send(self._host, self._device)


def _send(numbers: np.ndarray, target: Tensor) -> None:
    """Copy `numbers` to `target` asynchronously.

    The caller may overwrite `numbers` at once, because a pinned copy of it is sent.
    """
    target.copy_(pinned(torch.from_numpy(numbers), target.device), non_blocking=True)


def _cut(
    pieces: np.ndarray,
    start: int,
    slots: _Slots,
    first: np.ndarray,
    length: int,
    **of_slots: np.ndarray | int,
) -> int:
    """Write the pieces of these slots to `pieces` from index `start` on, and return the end index.

    The pieces of a slot begin at its position `first`. A piece has at most `length` positions.
    `of_slots`: the fields `entry`, `entries` and `number` of the pieces (see `Piece` in
    decode_kernels.py), each with one value per slot. The first piece of a slot gets the given
    `number`, and each later piece gets the next number.
    """
    counts = _num_pieces(slots.count - first, length)
    slot = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(slot)) - np.repeat(np.cumsum(counts) - counts, counts)
    stop = start + len(slot)
    written, slots = pieces[start:stop], slots.select(slot)
    slots.write_to(written, slice(None))
    begin = first[slot] + number * length
    written["first"], written["stop"] = begin, np.minimum(begin + length, slots.count)
    for name, values in of_slots.items():
        written[name] = np.broadcast_to(values, len(counts))[slot]
    written["number"] += number.astype(np.int32)
    return stop


def _num_pieces(counts: np.ndarray, length: int) -> np.ndarray:
    return -(-counts // length)


def _heads(shape: KVSpec, q_heads: int) -> Any:
    return _kernels().Heads(
        shape.num_heads,
        q_heads // shape.num_heads,
        shape.head_dim,
        shape.dtype,
        _common().shared_memory(shape.device),
    )


def _kernels() -> Any:
    # Triton comes with torch for CUDA and is absent elsewhere.
    return import_module("planish.model.kernels.triton.decode_kernels")


def _common() -> Any:
    return import_module("planish.model.kernels.triton.common")
