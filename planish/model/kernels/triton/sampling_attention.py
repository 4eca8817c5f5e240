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

from planish.model.kernels.reference.sampling_attention import PrefillSpan, PromptSlot, SampleSlot
from planish.model.kv_cache import KVPool, KVPools, KVSpec, SlotOwner
from planish.model.positions import SPAN, capacity_for
from planish.model.transfer import on_device, staged

_PROGRAMS = 8
"""The programs per multiprocessor.

A multiprocessor runs two or three programs at a time. It starts the next program when one of them
ends, so programs with short pieces leave no multiprocessor idle.
"""
_INTERPRETED = 2
"""The assumed number of multiprocessors if a CPU interprets the kernels."""
_SHORTEST = 128
"""The minimum number of positions of a piece, except for the last piece of a slot."""
_NUMBER = 4
"""The bytes of a number (int32) in a table."""
_ALIGNED = 4
"""Each section of a table begins at a multiple of this many numbers (16 bytes)."""


class PoolBases:
    """A table on the device with the addresses of the pools' tensors.

    Each pool has a number, its index in the table, as long as the pool exists.
    """

    def __init__(self, shape: KVSpec, longest: int) -> None:
        """`longest`: the maximum length of a sequence, which limits the number of pools."""
        self.shape = shape
        # Prompts and samples each have one pool per capacity. The number is doubled, because a
        # failed step replaces all pools while the old ones may still be referenced.
        most = 4 * (capacity_for(longest) // SPAN + 1)
        self.table = torch.zeros(shape.layers, most, 2, dtype=torch.int64, device=shape.device)
        """Addresses of each layer's keys and values [layers, pools, 2]."""
        self._numbers: WeakKeyDictionary[KVPool, int] = WeakKeyDictionary()
        self._replaced = [-1] * most

    def numbers(self, pools: Sequence[KVPool]) -> list[int]:
        """Return the pools' numbers, and update the table for these pools.

        The table is valid until one of the pools replaces its tensors.
        """
        found = [self._number(pool) for pool in pools]
        changed = {
            number: pool
            for number, pool in zip(found, pools, strict=True)
            if pool.reallocations != self._replaced[number]
        }
        if changed:
            addresses = [
                [(pool.keys[layer].data_ptr(), pool.values[layer].data_ptr())
                 for pool in changed.values()]
                for layer in range(self.shape.layers)
            ]  # fmt: skip
            device = self.table.device
            self.table.index_copy_(
                1,
                on_device(list(changed), torch.int64, device),
                on_device(addresses, torch.int64, device),
            )
            for number, pool in changed.items():
                self._replaced[number] = pool.reallocations
        return found

    def _number(self, pool: KVPool) -> int:
        if pool not in self._numbers:
            number = min(set(range(len(self._replaced))).difference(self._numbers.values()))
            self._numbers[pool], self._replaced[number] = number, -1
        return self._numbers[pool]


class GpuPrefill:
    """The causal attention of prompt rows.

    Each call stores the rows' keys and values in their prompts' slots. Each row attends to the
    positions up to its own.
    """

    def __init__(self, spans: Sequence[PrefillSpan], bases: PoolBases, q_heads: int) -> None:
        """`spans`: the rows of each prompt. `q_heads`: the number of query heads Hq."""
        kernels = _kernels()
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
        assert sinks is None, "the kernels have no attention sinks"
        kernels, on_device, bases = _kernels(), self._tables.on_device, self._bases.table[layer]
        kernels.keep(self._heads, on_device["rows"], bases, k, v)
        return kernels.prefill(self._heads, on_device["blocks"], bases, q)


class DecodeTables:
    """The attention of a decoding step for the samples that the last `fill` named.

    An instance is an `Attend` of the decoder. The output of rows without a sample is 0.

    For a given number of rows, every call launches the same kernels with the same addresses. So a
    call can be captured in a CUDA graph.
    """

    def __init__(self, bases: PoolBases, max_rows: int, q_heads: int) -> None:
        """`max_rows`: the maximum number of rows of a batch, including rows without a sample.

        `q_heads`: the number of query heads Hq.
        """
        kernels, shape, device = _kernels(), bases.shape, bases.shape.device
        self._bases, self._heads = bases, _heads(shape, q_heads)
        self._programs = _PROGRAMS * _multiprocessors(device)
        # Each slot has one piece, and additional pieces if it is cut. `_cuts` is the maximum number
        # of additional pieces of all slots together. `_chunk` ensures this maximum.
        self._cuts = max(1, self._programs // shape.heads)
        pieces, parts = 2 * max_rows + self._cuts, 2 * max_rows + self._heads.lane * self._cuts
        self._tables = _Tables(
            device,
            counts=(np.dtype(np.int32), 2),
            rows=(kernels.Row, max_rows),
            entries=(kernels.Entry, max_rows),
            pieces=(kernels.Piece, pieces),
        )
        self._work = kernels.DecodeWork(
            **self._tables.on_device,
            values=torch.empty(parts, q_heads, shape.head_dim, device=device),
            stats=torch.empty(parts, q_heads, 2, device=device),
        )

    def fill(
        self,
        rows: dict[SlotOwner, int],
        prompts: KVPools,
        samples: KVPools,
        row_counts: Mapping[SlotOwner, int] | None = None,
    ) -> None:
        """Set the samples of the next calls. Do not call this during the capture of a graph.

        `rows`, `row_counts`: see `Backend.decode_attention`.
        """
        step = _Step.of(rows, prompts, samples, self._bases, row_counts or {})
        count = len(step.row)
        leads = np.flatnonzero(step.rank % self._heads.lane == 0)
        lanes = step.shared.at(leads)
        chunk = self._chunk(int(lanes.count.sum() + step.own.count.sum()))
        before = _pieces_of(step.shared.count, chunk)
        parts = before + _pieces_of(step.own.count, chunk)
        first = np.cumsum(parts) - parts
        wide = self._cut(
            0, lanes, chunk, entry=leads, entries=np.diff(leads, append=count), number=0
        )
        every = self._cut(wide, step.own, chunk, entry=np.arange(count), entries=1, number=before)
        self._tables["counts"][:] = wide, every
        entries, records = self._tables["entries"], self._tables["rows"]
        entries["row"][:count], entries["part"][:count] = step.row, first
        records.fill(0)
        step.own.name(records, step.row)
        records["position"][step.row] = step.own.count - 1
        records["part"][step.row], records["parts"][step.row] = first, parts
        self._tables.send()

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Return the attention output [T, Hq, E] (see `Attend`)."""
        assert sinks is None, "the kernels have no attention sinks"
        kernels, bases = _kernels(), self._bases.table[layer]
        kernels.keep(self._heads, self._work.rows, bases, k, v)
        return kernels.decode(self._heads, self._work, bases, q, self._programs)

    def _chunk(self, positions: int) -> int:
        """Return the maximum number of positions of a piece, a power of two.

        `positions`: the positions of all slots together. The result is small enough that a few long
        slots occupy all programs. It is large enough that cutting makes at most `_cuts` additional
        pieces.
        """
        return max(_SHORTEST, 1 << (positions // self._cuts).bit_length())

    def _cut(self, start: int, slots: _Slots, chunk: int, **of_slots: np.ndarray | int) -> int:
        """Write the pieces of these slots from index `start` on, and return the end index.

        `of_slots`: the values of other fields of the pieces, one value per slot. The value of the
        field `number` is for the slot's first piece. Each later piece gets the next number.
        """
        counts = _pieces_of(slots.count, chunk)
        slot = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(slot)) - np.repeat(np.cumsum(counts) - counts, counts)
        stop = start + len(slot)
        pieces, slots = self._tables["pieces"][start:stop], slots.at(slot)
        slots.name(pieces, slice(None))
        pieces["first"], pieces["stop"] = (
            number * chunk,
            np.minimum(number * chunk + chunk, slots.count),
        )
        for name, values in of_slots.items():
            pieces[name] = np.broadcast_to(values, len(counts))[slot]
        pieces["number"] += number.astype(np.int32)
        return stop


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
        """Return all slots in use, in the order of the pools. `counts`: the `count` of each."""
        sizes = [len(pool) for pool in pools]
        return cls(
            pool=np.repeat(np.array(bases.numbers(pools), np.int64), sizes),
            slot=np.array([owner.slot for pool in pools for owner in pool.owners], np.int64),
            capacity=np.repeat(np.array([pool.capacity for pool in pools], np.int64), sizes),
            count=np.array(counts, np.int64),
        )

    def at(self, index: np.ndarray) -> _Slots:
        """Return the slots at these indices."""
        return _Slots(self.pool[index], self.slot[index], self.capacity[index], self.count[index])

    def name(self, records: np.ndarray, where: np.ndarray | slice) -> None:
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

    @classmethod
    def of(
        cls,
        rows: dict[SlotOwner, int],
        prompts: KVPools,
        samples: KVPools,
        bases: PoolBases,
        row_counts: Mapping[SlotOwner, int],
    ) -> _Step:
        """Return the rows of the samples in `samples` (see `Backend.decode_attention`)."""
        read, kept = prompts.in_use(), samples.in_use()
        known = [prompt for pool in read for prompt in cast("list[PromptSlot]", pool.owners)]
        running = [sample for pool in kept for sample in cast("list[SampleSlot]", pool.owners)]
        places = {prompt: place for place, prompt in enumerate(known)}
        prompt = np.array([places[sample.prompt] for sample in running], np.int64)
        row = np.array([rows[sample] for sample in running], np.int64)
        counts = np.array([row_counts.get(sample, 1) for sample in running], np.int64)
        sample_of = np.repeat(np.arange(len(running)), counts)
        number = np.arange(len(sample_of)) - np.repeat(np.cumsum(counts) - counts, counts)
        prompt, row = prompt[sample_of], row[sample_of] + number
        order = np.lexsort((row, prompt))
        own = _Slots.of(kept, bases, [sample.stored + 1 for sample in running]).at(sample_of)
        own.count[:] += number
        prompt = prompt[order]
        return cls(
            row=row[order],
            rank=np.arange(len(row)) - np.searchsorted(prompt, prompt),
            shared=_Slots.of(read, bases, [prompt.length // SPAN * SPAN for prompt in known]).at(
                prompt
            ),
            own=own.at(order),
        )


class _Tables:
    """Records of several kinds, written on the host and sent to the device in one copy.

    The device tensors keep their addresses.
    """

    def __init__(self, device: torch.device, **sections: tuple[np.dtype, int]) -> None:
        """`sections`: the record type (int32 fields) and the number of records of each kind."""
        sizes = [record.itemsize // _NUMBER * count for record, count in sections.values()]
        *starts, total = np.cumsum(
            [0, *(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]
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
    target.copy_(staged(torch.from_numpy(numbers), target.device), non_blocking=True)


def _pieces_of(counts: np.ndarray, chunk: int) -> np.ndarray:
    return -(-counts // chunk)


def _multiprocessors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else _INTERPRETED
    )


def _heads(shape: KVSpec, q_heads: int) -> Any:
    return _kernels().Heads(
        shape.heads,
        q_heads // shape.heads,
        shape.head_dim,
        shape.dtype,
        shared_memory(shape.device),
    )


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use on this device."""
    return int(import_module("planish.model.kernels.triton.common").shared_memory(device))


def _kernels() -> Any:
    # Triton comes with torch for CUDA and is absent elsewhere.
    return import_module("planish.model.kernels.triton.decode_kernels")
