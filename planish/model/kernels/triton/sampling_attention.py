"""The sampler's attention on a GPU: keys and values are read in place from their slots, in a few
launches a layer.

What the twins of sampling_attention.py gather with torch, kernels (planish.model.kernels.triton.decode_kernels)
are told here by tables: which row sees which positions of which slot. A table goes to the device in
one copy, for all layers. When decoding, tables and all else that a launch names keep their
addresses and sizes, so the captured graph of a step serves every later step once
`DecodeTables.fill` has said what it is about.

How ranges are cut into pieces depends on all that is in the batch, and so does the order in which a
row's sums are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
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
"""Programs a multiprocessor, which runs two or three at a time: where pieces are short, the next
ones begin.
"""
_INTERPRETED = 2
"""Multiprocessors of a CPU that interprets the kernels."""
_SHORTEST = 128
"""Fewest positions that are cut from a range."""
_NUMBER = 4
"""Bytes."""
_ALIGNED = 4
"""Sections of a table begin at multiples of so many numbers."""


class PoolBases:
    """Where the tensors of pools begin on the device. A pool has a number, which it keeps while it
    lives.
    """

    def __init__(self, shape: KVSpec, longest: int) -> None:
        """`longest`: the most positions of a sequence, which bounds the number of pools."""
        self.shape = shape
        # One pool for each capacity, for prompts and for samples. Twice, because a failed step
        # replaces all pools while the old ones may still be referenced.
        most = 4 * (capacity_for(longest) // SPAN + 1)
        self.table = torch.zeros(shape.layers, most, 2, dtype=torch.int64, device=shape.device)
        """Addresses of each layer's keys and values [layers, pools, 2]."""
        self._numbers: WeakKeyDictionary[KVPool, int] = WeakKeyDictionary()
        self._replaced = [-1] * most

    def numbers(self, pools: Sequence[KVPool]) -> list[int]:
        """Return the pools' numbers. The table is valid for these pools until one of them replaces
        its tensors.
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
    """Prompts' own rows: keys and values go into the prompt's slot, each row sees the positions up
    to its own.
    """

    def __init__(self, spans: Sequence[PrefillSpan], bases: PoolBases, q_heads: int) -> None:
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
        # Those that see most first: what begins last is then soon done.
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

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernels, on_device, bases = _kernels(), self._tables.on_device, self._bases.table[layer]
        kernels.keep(self._heads, on_device["rows"], bases, k, v)
        return kernels.prefill(self._heads, on_device["blocks"], bases, q)


class DecodeTables:
    """An `Attend` for one new row of each running sample, as the last `fill` has it; rows without a
    sample yield zeros.

    With one number of rows a call launches the same on the same addresses, whatever the samples
    are: it can be captured in a CUDA graph.
    """

    def __init__(self, bases: PoolBases, max_rows: int, q_heads: int) -> None:
        """`max_rows`: most rows of a batch, with those that have no sample."""
        kernels, shape, device = _kernels(), bases.shape, bases.shape.device
        self._bases, self._heads = bases, _heads(shape, q_heads)
        self._programs = _PROGRAMS * _multiprocessors(device)
        # At most so many pieces more than there are ranges: _chunk sees to it.
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

    def fill(self, rows: dict[SlotOwner, int], prompts: KVPools, samples: KVPools) -> None:
        """Say what the next calls are about. Not while a graph is being captured.

        `rows`: the batch row of each sample. Every sample in `samples` has one.
        """
        step, count = _Step.of(rows, prompts, samples, self._bases), len(rows)
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

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernels, bases = _kernels(), self._bases.table[layer]
        kernels.keep(self._heads, self._work.rows, bases, k, v)
        return kernels.decode(self._heads, self._work, bases, q, self._programs)

    def _chunk(self, positions: int) -> int:
        """Most positions of a piece: few enough that a few long ranges keep all programs busy, more
        than what would make `_cuts` further pieces.
        """
        return max(_SHORTEST, 1 << (positions // self._cuts).bit_length())

    def _cut(self, start: int, slots: _Slots, chunk: int, **of_slots: np.ndarray | int) -> int:
        """Write slots' ranges as pieces from piece `start` on, and return where they end.

        `of_slots`: further fields, for each slot; `number` is that of its first piece.
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
    """Slots of pools, and how many of their positions are seen."""

    pool: np.ndarray
    slot: np.ndarray
    capacity: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, pools: Sequence[KVPool], bases: PoolBases, counts: list[int]) -> _Slots:
        """All in use, in the order of the pools."""
        sizes = [len(pool) for pool in pools]
        return cls(
            pool=np.repeat(np.array(bases.numbers(pools), np.int64), sizes),
            slot=np.array([owner.slot for pool in pools for owner in pool.owners], np.int64),
            capacity=np.repeat(np.array([pool.capacity for pool in pools], np.int64), sizes),
            count=np.array(counts, np.int64),
        )

    def at(self, index: np.ndarray) -> _Slots:
        return _Slots(self.pool[index], self.slot[index], self.capacity[index], self.count[index])

    def name(self, records: np.ndarray, where: np.ndarray | slice) -> None:
        """Write which slots they are into records."""
        records["pool"][where], records["slot"][where], records["capacity"][where] = (
            self.pool,
            self.slot,
            self.capacity,
        )


@dataclass(frozen=True)
class _Step:
    """Running samples; those of one prompt are neighbours."""

    row: np.ndarray
    rank: np.ndarray
    """Of a sample among those of its prompt."""
    shared: _Slots
    """The prompt's slot, and what is seen of it."""
    own: _Slots

    @classmethod
    def of(
        cls, rows: dict[SlotOwner, int], prompts: KVPools, samples: KVPools, bases: PoolBases
    ) -> _Step:
        read, kept = prompts.in_use(), samples.in_use()
        known = [prompt for pool in read for prompt in cast("list[PromptSlot]", pool.owners)]
        running = [sample for pool in kept for sample in cast("list[SampleSlot]", pool.owners)]
        places = {prompt: place for place, prompt in enumerate(known)}
        prompt = np.array([places[sample.prompt] for sample in running], np.int64)
        row = np.array([rows[sample] for sample in running], np.int64)
        order = np.lexsort((row, prompt))
        prompt = prompt[order]
        return cls(
            row=row[order],
            rank=np.arange(len(row)) - np.searchsorted(prompt, prompt),
            shared=_Slots.of(read, bases, [prompt.length // SPAN * SPAN for prompt in known]).at(
                prompt
            ),
            own=_Slots.of(kept, bases, [sample.stored + 1 for sample in running]).at(order),
        )


class _Tables:
    """Records of several kinds, written on the host and sent to the device in one copy. They keep
    their addresses.
    """

    def __init__(self, device: torch.device, **sections: tuple[np.dtype, int]) -> None:
        """`sections`: the record of each kind, of 32-bit integers, and how many there are."""
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
        """Each section as numbers [records, fields]."""
        for (name, (record, count)), start, size in zip(
            sections.items(), starts, sizes, strict=True
        ):
            self._records[name] = self._host[start : start + size].view(record)
            self.on_device[name] = self._device[start : start + size].view(count, -1)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._records[name]

    def send(self) -> None:
        _send(self._host, self._device)


def _send(numbers: np.ndarray, target: Tensor) -> None:
    """Copy without waiting for the device. `numbers` may be written to at once: what is sent is a
    copy.
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
    """Return how many bytes of shared memory a program of this device may have."""
    return int(import_module("planish.model.kernels.triton.common").shared_memory(device))


def _kernels() -> Any:
    # Triton comes with torch for CUDA and is absent elsewhere.
    return import_module("planish.model.kernels.triton.decode_kernels")
