"""Keys and values of running sequences, kept dense so that attention reads them in place.

A `KVPool` holds slots of one capacity; the slots in use are always 0 .. n - 1 (the last moves into
a gap), so a whole pool is one operand of a matmul, without gathering. Capacities are multiples of
SPAN, so a slot wastes less than one span. On a CPU a full slot moves to a pool of about twice the
capacity; on a GPU a sample gets its final slot at once. Prompts and sampled tokens live in
different pools, so that the samples of a prompt share its slot. A sample's slot begins at the last
multiple of SPAN within the prompt, with a copy of the prompt's positions from there on, so that
spans of the attention never lie across two slots. The GPU's kernels look up the address of each
slot, so their pools leave gaps open (`GappedKVPool`).

They are in the model's dtype where products add up in float32: on a GPU, and in the CPU's own
kernels. Elsewhere on a CPU they are float32, for torch's products of bf16 operands would round
scores and weighted sums to bf16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Protocol

import torch
from torch import Tensor

from planish.engine.sending import on_device
from planish.model.config import ModelConfig
from planish.native import cpu, kernels


class SlotOwner(Protocol):
    slot: int


@dataclass(frozen=True)
class KVShape:
    """What one position costs."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> KVShape:
        narrow = (
            device.type != "cpu"
            or kernels.triton_serves(device, "attention")
            or cpu.attends(config.head_dim, dtype, device)
        )
        kept = dtype if narrow else torch.float32
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, kept, device)

    @property
    def bytes_per_position(self) -> int:
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize


def held_bytes(reserved: int) -> int:
    """Most memory of pools whose owners have reserved so much: a slot that is left may wait for the
    next who has its capacity, and giving all of it back each time would copy what is in use as
    often.
    """
    return reserved + reserved // 8


def fitting_bytes(held: float) -> float:
    """What may be reserved so that pools take no more than `held`."""
    return held * 8 / 9


class KVPool:
    """Slots of `capacity` positions. `keys[layer]`, `values[layer]`: [slots, heads, capacity,
    head_dim].
    """

    def __init__(self, shape: KVShape, capacity: int) -> None:
        self.shape = shape
        self.capacity = capacity
        self.owners: list[SlotOwner] = []
        self.replaced = 0
        """How often the tensors were replaced: who keeps their addresses has to look them up again.
        """
        self.keys = [self._empty(0) for _ in range(shape.layers)]
        self.values = [self._empty(0) for _ in range(shape.layers)]

    def __len__(self) -> int:
        return len(self.owners)

    def reserve(self, more: int) -> None:
        """Make room for `more` owners at once: growing one by one would copy the pool as often, or
        leave room that nobody uses.
        """
        if len(self.owners) + more > self.slots:
            self._resize(len(self.owners) + more)

    def add(self, owner: SlotOwner) -> None:
        """Give `owner` a slot."""
        if len(self.owners) == self.slots:
            self._resize(self.slots + max(4, self.slots // 8))
        owner.slot = len(self.owners)
        self.owners.append(owner)

    def remove(self, *owners: SlotOwner) -> None:
        """Free their slots; the last slots move into them. A pool of which little is in use gives
        memory back.
        """
        self._free([owner.slot for owner in owners])
        for owner in owners:
            owner.slot = -1

    def trim(self) -> None:
        """Give back what nobody owns."""
        if self.slots > len(self.owners):
            self._resize(len(self.owners))

    @property
    def slots(self) -> int:
        """Slots that there is memory for."""
        return self.keys[0].shape[0]

    def move(self, owners: Sequence[SlotOwner], target: KVPool) -> None:
        """Move owners with their contents to a pool of larger slots."""
        sources = [owner.slot for owner in owners]
        target.reserve(len(owners))
        for owner in owners:
            target.add(owner)
        theirs, mine = (
            on_device(x, torch.int64, self.shape.device)
            for x in ([o.slot for o in owners], sources)
        )
        for to, of in zip((*target.keys, *target.values), (*self.keys, *self.values), strict=True):
            to[theirs, :, : self.capacity] = of[mine]
        self._free(sources)

    def read(self, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """A copy of positions start .. stop - 1 of all layers: keys and values [layers, heads, stop
        - start, head_dim].
        """
        return (
            torch.stack([keys[slot, :, start:stop] for keys in self.keys]),
            torch.stack([values[slot, :, start:stop] for values in self.values]),
        )

    def write(self, slot: int, start: int, chunk: tuple[Tensor, Tensor]) -> None:
        """Put what `read` gave at positions from `start`."""
        for layer in range(self.shape.layers):
            stop = start + chunk[0].shape[2]
            self.keys[layer][slot, :, start:stop] = chunk[0][layer]
            self.values[layer][slot, :, start:stop] = chunk[1][layer]

    def copy(
        self,
        slots: Sequence[int],
        source: KVPool,
        sources: Sequence[int],
        starts: Sequence[int],
        count: int,
    ) -> None:
        """Put `count` positions from starts[i] of slot sources[i] of `source` at the beginning of
        slots[i]; what lies beyond their end is of no meaning.
        """
        if not count:
            return
        mine, theirs, first = (
            on_device(x, torch.int64, self.shape.device) for x in (slots, sources, starts)
        )
        places = (first[:, None] + torch.arange(count, device=first.device)).clamp_(
            max=source.capacity - 1
        )
        for to, of in zip((*self.keys, *self.values), (*source.keys, *source.values), strict=True):
            to[mine, :, :count] = of[theirs[:, None], :, places].transpose(1, 2)

    def _free(self, slots: Sequence[int]) -> None:
        """The last slots move into those that are free. Slots of nobody hold zeros again, whatever
        their owners had computed (`_empty`).
        """
        gone, count = set(slots), len(self.owners) - len(slots)
        holes = [slot for slot in slots if slot < count]
        lasts = [slot for slot in range(count, len(self.owners)) if slot not in gone]
        if holes:
            to, of = (on_device(x, torch.int64, self.shape.device) for x in (holes, lasts))
            for tensor in (*self.keys, *self.values):
                tensor[to] = tensor[of]
        for hole, last in zip(holes, lasts, strict=True):
            self.owners[hole] = self.owners[last]
            self.owners[hole].slot = hole
        if not count or self._has_many_too_many(count):
            self._resize(count)
        else:
            for tensor in (*self.keys, *self.values):
                tensor[count : len(self.owners)].zero_()
        del self.owners[count:]

    def _has_many_too_many(self, count: int) -> bool:
        return self.slots > 2 * count + 8

    def _resize(self, slots: int) -> None:
        # Layer by layer, so that only one layer is there twice.
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = self._empty(slots)
                kept = min(slots, old.shape[0])
                tensors[layer][:kept] = old[:kept]
        self.replaced += 1

    def _empty(self, slots: int) -> Tensor:
        # Zeros: masked positions get weight 0, and 0 times what uninitialised memory may hold is
        # not always 0.
        size = (slots, self.shape.heads, self.capacity, self.shape.head_dim)
        return torch.zeros(size, dtype=self.shape.dtype, device=self.shape.device)


class GappedKVPool(KVPool):
    """Owners stay where they are when others leave, for kernels that look slots up: closing a gap
    is more launches than a step. What nobody owns holds anything.
    """

    def __init__(self, shape: KVShape, capacity: int) -> None:
        super().__init__(shape, capacity)
        self._taken: list[int] = []
        """The slot of each of `owners`, also while one of them is given another in another pool."""
        self._gaps: list[int] = []
        """A heap."""

    def add(self, owner: SlotOwner) -> None:
        if not self._gaps:
            super().add(owner)
        else:
            owner.slot = heappop(self._gaps)
            self.owners.append(owner)
        self._taken.append(owner.slot)

    def _free(self, slots: Sequence[int]) -> None:
        gone = set(slots)
        kept = [
            (owner, slot)
            for owner, slot in zip(self.owners, self._taken, strict=True)
            if slot not in gone
        ]
        self.owners, self._taken = [owner for owner, _ in kept], [slot for _, slot in kept]
        for slot in slots:
            heappush(self._gaps, slot)
        if not kept or self._has_many_too_many(len(kept)):
            self._close_gaps()

    def trim(self) -> None:
        if self.slots > len(self.owners):
            self._close_gaps()

    def _close_gaps(self) -> None:
        count = len(self.owners)
        if not count:  # without a launch for each layer
            self._taken, self._gaps = [], []
            self._resize(0)
            return
        taken = on_device(self._taken, torch.int64, self.shape.device)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = old[taken]
        for slot, owner in enumerate(self.owners):
            owner.slot = slot
        self._taken, self._gaps = list(range(count)), []
        self.replaced += 1


class KVRoom:
    """What pools take together. What owners have left stays in its pool for others, until all would
    take more than `most` positions.
    """

    def __init__(self, most: float = inf) -> None:
        self.most = most
        self.pools: list[KVPool] = []

    @property
    def taken(self) -> int:
        """Positions that there is memory for."""
        return sum(pool.slots * pool.capacity for pool in self.pools)

    def has(self, positions: int) -> bool:
        return self.taken + positions <= self.most

    def make(self, wanted: Mapping[KVPool, int]) -> None:
        """Before each pool of `wanted` gets room for so many more owners: give back unowned slots
        until all of it fits, if it does not fit already.

        The pool that gives back most comes first. Trimming a pool copies what its owners hold, so
        as few pools as possible are trimmed.
        """
        spare = {pool: pool.slots - len(pool) - wanted.get(pool, 0) for pool in self.pools}
        missing = sum(-n * pool.capacity for pool, n in spare.items() if n < 0)
        missing -= self.most - self.taken
        for pool in sorted(spare, key=lambda pool: -spare[pool] * pool.capacity):
            if missing <= 0 or spare[pool] <= 0:
                return
            missing -= spare[pool] * pool.capacity
            pool.trim()


class KVPools:
    """The pools of one kind, by capacity."""

    def __init__(
        self,
        shape: KVShape,
        make: Callable[[KVShape, int], KVPool] = KVPool,
        room: KVRoom | None = None,
    ) -> None:
        """`room`: that of pools of other kinds too."""
        self.shape = shape
        self._make = make
        self._room = room or KVRoom()
        self._pools: dict[int, KVPool] = {}

    def of(self, capacity: int) -> KVPool:
        if capacity not in self._pools:
            self._pools[capacity] = self._make(self.shape, capacity)
            self._room.pools.append(self._pools[capacity])
        return self._pools[capacity]

    def reserve(self, capacities: Iterable[int]) -> None:
        """Make room for one owner of each of these capacities."""
        self._drop_empty()
        wanted = {self.of(capacity): count for capacity, count in Counter(capacities).items()}
        self._room.make(wanted)
        for pool, count in wanted.items():
            pool.reserve(count)

    def _drop_empty(self) -> None:
        """Forget the pools that hold no memory. There is one capacity for every SPAN positions, so
        a long-lived server would otherwise collect hundreds of empty pools.
        """
        for capacity, pool in list(self._pools.items()):
            if not pool.slots:
                del self._pools[capacity]
                self._room.pools.remove(pool)

    def in_use(self) -> list[KVPool]:
        return [
            self._pools[capacity] for capacity in sorted(self._pools) if len(self._pools[capacity])
        ]
