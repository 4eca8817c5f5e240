"""The KV cache of running sequences: dense pools of slots that attention reads in place.

A `KVPool` has slots of one capacity. Its slots in use are always 0 .. n - 1, because the last slot
moves into any gap. So a whole pool is one matmul operand, and no gathering is needed. The GPU
kernels look up the address of each slot, so a GPU's pools leave gaps open (`GappedKVPool`).

Capacities are multiples of SPAN. On a CPU a full slot moves to a pool of about twice the capacity.
On a GPU a sample gets a slot of its final capacity at once.

Prompts and sampled tokens are in different pools, so that all samples of a prompt share its slot.
A sample's slot begins at the last multiple of SPAN within the prompt. It starts with a copy of the
prompt's positions after that multiple, so no attention span lies across two slots.

Keys and values have the model's dtype where matmuls accumulate in float32: on a GPU, and in
planish's own CPU kernels. Elsewhere on a CPU they are float32, because torch's bf16 matmuls would
round scores and weighted sums to bf16.
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

from planish.model.config import ModelConfig
from planish.model.kernels import choose
from planish.model.kernels.cpp import cpu
from planish.model.transfer import on_device


class SlotOwner(Protocol):
    """A prompt or a sample that occupies one slot of a pool."""

    slot: int
    """The slot's index within the pool. The pool updates it when the slot moves."""


@dataclass(frozen=True)
class KVShape:
    """The shape, dtype and device of the keys and values of one position."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> KVShape:
        """Return the KV layout of a model with this config whose weights have this dtype."""
        narrow = (
            device.type != "cpu"
            or choose.triton_serves(device, "attention")
            or cpu.attends(config.head_dim, dtype, device)
        )
        kept = dtype if narrow else torch.float32
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, kept, device)

    @property
    def bytes_per_position(self) -> int:
        """The bytes of one position's keys and values over all layers."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize


def held_bytes(reserved: int) -> int:
    """Return the maximum bytes that the pools may allocate for `reserved` bytes of reservations.

    The result is 1/8 more than `reserved`, because a freed slot stays allocated for the next owner
    of its capacity. Shrinking the pool at every free would copy all slots in use each time.
    """
    return reserved + reserved // 8


def fitting_bytes(held: float) -> float:
    """Return the maximum reservation in bytes for pools that may allocate `held` bytes.

    This function is the inverse of `held_bytes`.
    """
    return held * 8 / 9


class KVPool:
    """A pool of KV cache slots, each with `capacity` positions.

    `keys[layer]` and `values[layer]` have the shape [slots, heads, capacity, head_dim]. The slots
    in use are 0 .. len(pool) - 1, except in a `GappedKVPool`.
    """

    def __init__(self, shape: KVShape, capacity: int) -> None:
        """Create a pool without slots."""
        self.shape = shape
        self.capacity = capacity
        self.owners: list[SlotOwner] = []
        self.replaced = 0
        """The number of times the tensors were reallocated. Code that caches their addresses must
        read them again when this number changes.
        """
        self.keys = [self._empty(0) for _ in range(shape.layers)]
        self.values = [self._empty(0) for _ in range(shape.layers)]

    def __len__(self) -> int:
        """Return the number of slots in use."""
        return len(self.owners)

    def reserve(self, more: int) -> None:
        """Allocate slots for `more` additional owners with at most one reallocation.

        Growing one slot at a time would copy the pool once per slot or leave unused slots.
        """
        if len(self.owners) + more > self.slots:
            self._resize(len(self.owners) + more)

    def add(self, owner: SlotOwner) -> None:
        """Assign a slot to `owner`, growing the pool if it is full."""
        if len(self.owners) == self.slots:
            self._resize(self.slots + max(4, self.slots // 8))
        owner.slot = len(self.owners)
        self.owners.append(owner)

    def remove(self, *owners: SlotOwner) -> None:
        """Free the owners' slots. The pool shrinks if less than about half of it is in use.

        The last slots move into the freed ones, so the `slot` of other owners may change.
        """
        self._free([owner.slot for owner in owners])
        for owner in owners:
            owner.slot = -1

    def trim(self) -> None:
        """Free the memory of unused slots."""
        if self.slots > len(self.owners):
            self._resize(len(self.owners))

    @property
    def slots(self) -> int:
        """The number of allocated slots, in use or not."""
        return self.keys[0].shape[0]

    def move(self, owners: Sequence[SlotOwner], target: KVPool) -> None:
        """Move owners and their contents from this pool to `target`, whose slots are larger."""
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
        """Return a copy of positions start .. stop - 1 of one slot over all layers.

        The keys and the values have the shape [layers, heads, stop - start, head_dim].
        """
        return (
            torch.stack([keys[slot, :, start:stop] for keys in self.keys]),
            torch.stack([values[slot, :, start:stop] for values in self.values]),
        )

    def write(self, slot: int, start: int, chunk: tuple[Tensor, Tensor]) -> None:
        """Store the keys and values that `read` returned at the positions from `start` on."""
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
        """Copy `count` positions per slot from the pool `source` into this pool.

        Positions starts[i] .. starts[i] + count - 1 of slot sources[i] become the first positions
        of slots[i]. Positions beyond the end of the source slot get unspecified contents.
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
        """Free these slots by moving the last slots into them.

        Unused slots are set to zero again, because masked positions must stay finite (`_empty`).
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
        # The loop copies one layer at a time, so only one layer is in memory twice.
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = self._empty(slots)
                kept = min(slots, old.shape[0])
                tensors[layer][:kept] = old[:kept]
        self.replaced += 1

    def _empty(self, slots: int) -> Tensor:
        # Masked positions get weight 0, but uninitialised memory may contain NaN or inf, and 0
        # times those is NaN. So the memory must be zeroed.
        size = (slots, self.shape.heads, self.capacity, self.shape.head_dim)
        return torch.zeros(size, dtype=self.shape.dtype, device=self.shape.device)


class GappedKVPool(KVPool):
    """A pool whose owners keep their slots when other owners are removed.

    Slots change only when the pool shrinks. This class is for kernels that look up each slot's
    address. Closing a gap on a GPU would take more kernel launches than a decoding step. The
    contents of unused slots are undefined.
    """

    def __init__(self, shape: KVShape, capacity: int) -> None:
        """Create a pool without slots."""
        super().__init__(shape, capacity)
        self._taken: list[int] = []
        """The slot of each of `owners` in this pool. During a move to another pool, the owner's
        `slot` attribute already names the new slot.
        """
        self._gaps: list[int] = []
        """A heap of the freed slots, which `add` assigns again, the lowest first."""

    def add(self, owner: SlotOwner) -> None:
        """Assign the lowest freed slot to `owner`, or a new slot if there is none."""
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
        """Free the memory of unused slots. Owners may get other slots."""
        if self.slots > len(self.owners):
            self._close_gaps()

    def _close_gaps(self) -> None:
        """Reallocate the pool for the owners only, in slots 0 .. n - 1."""
        count = len(self.owners)
        if not count:  # Indexing would launch a kernel per layer to copy nothing.
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
    """A shared memory budget of several pools, counted in positions.

    Freed slots stay in their pool for the next owner. They are deallocated only when the pools
    would together exceed `most` positions.
    """

    def __init__(self, most: float = inf) -> None:
        """`most` is the maximum number of positions that the pools may allocate together."""
        self.most = most
        self.pools: list[KVPool] = []

    @property
    def taken(self) -> int:
        """The number of positions that the pools have allocated, in use or not."""
        return sum(pool.slots * pool.capacity for pool in self.pools)

    def has(self, positions: int) -> bool:
        """Return whether `positions` more positions fit into the budget."""
        return self.taken + positions <= self.most

    def make(self, wanted: Mapping[KVPool, int]) -> None:
        """Deallocate unused slots until the wanted slots fit into the budget.

        `wanted` maps each pool that is about to grow to its number of additional owners. Nothing
        is deallocated if all of them fit already. Trimming a pool copies its slots in use. So the
        pools with the most unused positions are trimmed first, and as few pools as possible.
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
    """The pools of either prompts or samples: one pool per slot capacity, created on demand."""

    def __init__(
        self,
        shape: KVShape,
        make: Callable[[KVShape, int], KVPool] = KVPool,
        room: KVRoom | None = None,
    ) -> None:
        """`make` creates a pool of a given capacity; `room` is a budget shared with other pools."""
        self.shape = shape
        self._make = make
        self._room = room or KVRoom()
        self._pools: dict[int, KVPool] = {}

    def of(self, capacity: int) -> KVPool:
        """Return the pool whose slots have this capacity, creating it if necessary."""
        if capacity not in self._pools:
            self._pools[capacity] = self._make(self.shape, capacity)
            self._room.pools.append(self._pools[capacity])
        return self._pools[capacity]

    def reserve(self, capacities: Iterable[int]) -> None:
        """Allocate one additional slot for each of these capacities (which may repeat)."""
        self._drop_empty()
        wanted = {self.of(capacity): count for capacity, count in Counter(capacities).items()}
        self._room.make(wanted)
        for pool, count in wanted.items():
            pool.reserve(count)

    def _drop_empty(self) -> None:
        """Remove the pools that have no slots.

        Any multiple of SPAN can be a capacity, so a long-lived server would otherwise collect
        hundreds of empty pools.
        """
        for capacity, pool in list(self._pools.items()):
            if not pool.slots:
                del self._pools[capacity]
                self._room.pools.remove(pool)

    def in_use(self) -> list[KVPool]:
        """Return the pools that have an owner, in the order of their capacity."""
        return [
            self._pools[capacity] for capacity in sorted(self._pools) if len(self._pools[capacity])
        ]
