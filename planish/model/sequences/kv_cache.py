"""The KV cache of running sequences: dense pools of slots that attention reads in place.

A `KVPool` has slots of one capacity. Its slots in use are always 0 .. n - 1: when a slot becomes
free, the last slot moves into the gap. So a whole pool is one matmul operand, and no gathering is
needed. Kernels that look up the address of each slot do not need this. On a GPU their pools leave
gaps open (`GappedKVPool`). On a CPU each slot has memory of its own (`SeparateKVPool`).

Attention sums the values of SPAN positions in one matmul, so capacities are multiples of SPAN
(model/sequences/positions.py). A sample with a full slot moves to a pool of a larger capacity
(`grown_capacity`).

Prompts and sampled tokens are in different pools, so that all samples of a prompt share its slot.
A span is never split between the two slots: samples share only the whole spans of the prompt, and
each sample's slot starts with a copy of the prompt's remaining positions. For example, let SPAN be
64 and the prompt have 150 tokens. All samples then read positions 0 .. 127 from the prompt's slot.
The slot of each sample starts with a copy of positions 128 .. 149, followed by the sampled tokens.

Keys and values have the model's dtype where matmuls accumulate in float32: on a GPU, and in
planish's own CPU kernels. With torch's CPU kernels they are float32, because torch's bf16 matmuls
would round scores and weighted sums to bf16.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from math import inf
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from planish.model.architecture.config import ModelConfig
from planish.model.device import on_device


class SlotOwner(Protocol):
    """A prompt or a sample that occupies one slot of a pool."""

    slot: int
    """The slot's index within the pool. The pool updates it when the slot moves."""


class PromptSlot(Protocol):
    """A prompt with a slot in a pool."""

    slot: int

    @property
    def length(self) -> int:
        """The number of tokens of the prompt."""
        ...


class SampleSlot(Protocol):
    """A running sample with a slot in a pool."""

    slot: int

    @property
    def num_stored(self) -> int:
        """The number of positions in the sample's slot before this step."""
        ...

    @property
    def prompt(self) -> PromptSlot:
        """The prompt that the sample continues."""
        ...


@dataclass(frozen=True)
class KVSpec:
    """The shape, dtype and device of the keys and values of one position."""

    num_layers: int
    """The number of layers with keys and values of their own."""
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> KVSpec:
        """Return the KV layout of a model whose keys and values are stored in `dtype`."""
        heads = (config.num_kv_heads, config.head_dim)
        return cls(len(config.kv_layers), *heads, dtype, device)

    @property
    def bytes_per_position(self) -> int:
        """The bytes of one position's keys and values over all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * self.dtype.itemsize


def max_pool_bytes(reserved: int) -> int:
    """Return the maximum bytes that the pools may allocate for `reserved` bytes of reservations.

    The result is `reserved` plus 1/8 of it for freed slots that stay allocated until another
    sample or prompt needs a slot of that capacity. Without this margin, another pool would
    often have to shrink before a pool can grow. Shrinking a pool copies all of its slots in use.
    """
    return reserved + reserved // 8


def max_reservable_bytes(pool_bytes: float) -> float:
    """Return the maximum reservation in bytes for pools that may allocate `pool_bytes`.

    This function is the inverse of `max_pool_bytes`.
    """
    return pool_bytes * 8 / 9


@dataclass(frozen=True, eq=False)
class KVChunk:
    """A copy of the keys and values of some positions over all layers."""

    keys: Tensor
    """[layers, heads, positions, head_dim]. `values` has the same shape."""
    values: Tensor


class KVPool:
    """A pool of KV cache slots, each with `capacity` positions.

    `keys[layer]` and `values[layer]` have the shape [slots, heads, capacity, head_dim]. The slots
    in use are 0 .. len(pool) - 1, except in a `GappedKVPool`.
    """

    def __init__(self, spec: KVSpec, capacity: int) -> None:
        """Create a pool without slots."""
        self.spec = spec
        self.capacity = capacity
        self.owners: list[SlotOwner] = []
        self.reallocations = 0
        """The number of times the tensors were reallocated. Code that caches their addresses must
        read them again when this number changes.
        """
        self.keys = [self._empty(0) for _ in range(spec.num_layers)]
        self.values = [self._empty(0) for _ in range(spec.num_layers)]

    def __len__(self) -> int:
        """Return the number of slots in use."""
        return len(self.owners)

    def ensure_free_slots(self, additional: int) -> None:
        """Allocate slots for this many additional owners, with at most one reallocation.

        Growing one slot at a time would copy the pool once per slot or leave unused slots.
        """
        if len(self.owners) + additional > self.num_slots:
            self._resize(len(self.owners) + additional)

    def allocate(self, owner: SlotOwner) -> None:
        """Assign a slot to `owner`, growing the pool if it is full."""
        if len(self.owners) == self.num_slots:
            self._resize(self.num_slots + max(4, self.num_slots // 8))
        owner.slot = len(self.owners)
        self.owners.append(owner)

    def free(self, *owners: SlotOwner) -> None:
        """Free the owners' slots. The pool shrinks if less than about half of it is in use.

        The last slots move into the freed ones, so the `slot` of other owners may change.
        """
        self._free_slots([owner.slot for owner in owners])
        for owner in owners:
            owner.slot = -1

    def trim(self) -> None:
        """Free the memory of unused slots."""
        if self.num_slots > len(self.owners):
            self._resize(len(self.owners))

    @property
    def num_slots(self) -> int:
        """The number of allocated slots, in use or not."""
        return self.keys[0].shape[0]

    def move(self, owners: Sequence[SlotOwner], target: KVPool) -> None:
        """Move owners and their contents from this pool to `target`, whose slots are larger."""
        old_slots = [owner.slot for owner in owners]
        target.ensure_free_slots(len(owners))
        for owner in owners:
            target.allocate(owner)
        new, old = (
            on_device(x, torch.int64, self.spec.device)
            for x in ([owner.slot for owner in owners], old_slots)
        )
        for target_tensor, source_tensor in zip(
            (*target.keys, *target.values), (*self.keys, *self.values), strict=True
        ):
            target_tensor[new, :, : self.capacity] = source_tensor[old]
        self._free_slots(old_slots)

    def views(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of a slot in one layer: [heads, capacity, head_dim]."""
        return self.keys[layer][slot], self.values[layer][slot]

    def addresses(self, slots: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the addresses of the keys and of the values of n slots: int64 [n, layers].

        They are valid until the pool changes.
        """
        spec = self.spec
        slot_bytes = spec.num_heads * self.capacity * spec.head_dim * spec.dtype.itemsize
        offsets = np.array(slots, np.int64)[:, None] * slot_bytes
        keys, values = (
            offsets + np.array([tensor.data_ptr() for tensor in tensors], np.int64)
            for tensors in (self.keys, self.values)
        )
        return keys, values

    def read(self, slot: int, start: int, stop: int) -> KVChunk:
        """Return a copy of positions start .. stop - 1 of one slot."""
        return KVChunk(
            torch.stack([keys[slot, :, start:stop] for keys in self.keys]),
            torch.stack([values[slot, :, start:stop] for values in self.values]),
        )

    def write(self, slot: int, chunks: Sequence[KVChunk]) -> None:
        """Write the results of earlier `read`s one after another into a slot, from position 0."""
        keys = torch.cat([chunk.keys for chunk in chunks], 2)
        values = torch.cat([chunk.values for chunk in chunks], 2)
        for layer in range(self.spec.num_layers):
            self.keys[layer][slot, :, : keys.shape[2]] = keys[layer]
            self.values[layer][slot, :, : keys.shape[2]] = values[layer]

    def copy_from(
        self,
        source_pool: KVPool,
        source_slots: Sequence[int],
        starts: Sequence[int],
        slots: Sequence[int],
        count: int,
    ) -> None:
        """Copy `count` positions per slot from another pool into this pool.

        Positions starts[i] .. starts[i] + count - 1 of slot source_slots[i] become the first
        positions of slots[i]. Positions beyond the end of a source slot get unspecified contents.
        """
        if not count:
            return
        sources, first_positions, targets = (
            on_device(x, torch.int64, self.spec.device) for x in (source_slots, starts, slots)
        )
        offsets = torch.arange(count, device=first_positions.device)
        positions = (first_positions[:, None] + offsets).clamp_(max=source_pool.capacity - 1)
        for target_tensor, source_tensor in zip(
            (*self.keys, *self.values), (*source_pool.keys, *source_pool.values), strict=True
        ):
            target_tensor[targets, :, :count] = source_tensor[
                sources[:, None], :, positions
            ].transpose(1, 2)

    def _free_slots(self, slots: Sequence[int]) -> None:
        """Free these slots by moving the last slots into them.

        Unused slots are set to zero again, because masked positions must stay finite (`_empty`).
        """
        freed, num_remaining = set(slots), len(self.owners) - len(slots)
        gaps = [slot for slot in slots if slot < num_remaining]
        last_slots = [slot for slot in range(num_remaining, len(self.owners)) if slot not in freed]
        if gaps:
            gap_slots, moved_slots = (
                on_device(x, torch.int64, self.spec.device) for x in (gaps, last_slots)
            )
            for tensor in (*self.keys, *self.values):
                tensor[gap_slots] = tensor[moved_slots]
        for gap, last in zip(gaps, last_slots, strict=True):
            self.owners[gap] = self.owners[last]
            self.owners[gap].slot = gap
        if not num_remaining or self._is_mostly_unused(num_remaining):
            self._resize(num_remaining)
        else:
            for tensor in (*self.keys, *self.values):
                tensor[num_remaining : len(self.owners)].zero_()
        del self.owners[num_remaining:]

    def _is_mostly_unused(self, count: int) -> bool:
        """Return whether the pool should shrink if `count` of its slots stay in use."""
        return self.num_slots > 2 * count + 8

    def _resize(self, num_slots: int) -> None:
        # The loop copies one layer at a time, so only one layer is in memory twice.
        for tensors in (self.keys, self.values):
            for layer, old_tensor in enumerate(tensors):
                tensors[layer] = self._empty(num_slots)
                num_copied = min(num_slots, old_tensor.shape[0])
                tensors[layer][:num_copied] = old_tensor[:num_copied]
        self.reallocations += 1

    def _empty(self, num_slots: int) -> Tensor:
        # Masked positions get weight 0, but 0 times NaN or inf is NaN, and uninitialised memory may
        # contain both. So the memory must be zeroed.
        size = (num_slots, self.spec.num_heads, self.capacity, self.spec.head_dim)
        return torch.zeros(size, dtype=self.spec.dtype, device=self.spec.device)


@dataclass(frozen=True)
class PrefillSpan:
    """A range of batch rows that belong to one prompt.

    Rows row .. row + count - 1 of the batch are positions start .. start + count - 1 of the prompt
    in slot `slot` of `pool`.
    """

    pool: KVPool
    slot: int
    row: int
    start: int
    count: int
    blocks: tuple[tuple[int, int], ...] = ()
    """Ranges of positions that also attend to one another: those of images (Gemma 3). The end of the
    span is in no block.
    """

    @cached_property
    def visible(self) -> np.ndarray:
        """int64 [count]: the number of positions of the prompt that each row attends to."""
        visible = np.arange(self.start + 1, self.start + self.count + 1)
        for start, stop in self.blocks:
            visible[max(0, start - self.start) : max(0, stop - self.start)] = stop
        return visible


class GappedKVPool(KVPool):
    """A pool whose owners keep their slots when other owners are removed.

    Slots change only when the pool shrinks. This class is for kernels that look up each slot's
    address. Closing a gap on a GPU would take more kernel launches than a decoding step. The
    contents of unused slots are undefined.
    """

    def __init__(self, spec: KVSpec, capacity: int) -> None:
        """Create a pool without slots."""
        super().__init__(spec, capacity)
        self._slots_in_use: list[int] = []
        """The slot of each of `owners` in this pool. `owner.slot` cannot replace this list: during
        a move it already has the index of the slot in the target pool.
        """
        self._gaps: list[int] = []
        """A heap of the freed slots, which `allocate` assigns again, the lowest first."""

    def allocate(self, owner: SlotOwner) -> None:
        """Assign the lowest freed slot to `owner`, or a new slot if there is none."""
        if not self._gaps:
            super().allocate(owner)
        else:
            owner.slot = heappop(self._gaps)
            self.owners.append(owner)
        self._slots_in_use.append(owner.slot)

    def _free_slots(self, slots: Sequence[int]) -> None:
        freed = set(slots)
        remaining = [
            (owner, slot)
            for owner, slot in zip(self.owners, self._slots_in_use, strict=True)
            if slot not in freed
        ]
        self.owners = [owner for owner, _ in remaining]
        self._slots_in_use = [slot for _, slot in remaining]
        for slot in slots:
            heappush(self._gaps, slot)
        if not remaining or self._is_mostly_unused(len(remaining)):
            self._close_gaps()

    def trim(self) -> None:
        """Free the memory of unused slots. Owners may get other slots."""
        if self.num_slots > len(self.owners):
            self._close_gaps()

    def _close_gaps(self) -> None:
        """Shrink the pool to one slot per owner. The n owners get the slots 0 .. n - 1."""
        count = len(self.owners)
        if not count:  # Indexing would launch a kernel per layer to copy nothing.
            self._slots_in_use, self._gaps = [], []
            self._resize(0)
            return
        slots_in_use = on_device(self._slots_in_use, torch.int64, self.spec.device)
        for tensors in (self.keys, self.values):
            for layer, old_tensor in enumerate(tensors):
                tensors[layer] = old_tensor[slots_in_use]
        for slot, owner in enumerate(self.owners):
            owner.slot = slot
        self._slots_in_use, self._gaps = list(range(count)), []
        self.reallocations += 1


class SeparateKVPool(KVPool):
    """A pool in main memory in which each slot is a tensor of its own.

    A slot that becomes free is deallocated at once, so no memory waits for the next owner, and a
    move or a new slot copies nothing but its own contents. This class is for kernels that look up
    each slot's address.
    """

    def __init__(self, spec: KVSpec, capacity: int) -> None:
        """Create a pool without slots."""
        super().__init__(spec, capacity)
        self._slots: dict[int, tuple[SlotOwner, Tensor]] = {}
        """The owner and the contents [2, layers, heads, capacity, head_dim] of each slot, the keys
        before the values.
        """
        self._slot_numbers = itertools.count()

    @property
    def num_slots(self) -> int:
        """The number of allocated slots, which are all in use."""
        return len(self._slots)

    def ensure_free_slots(self, additional: int) -> None:
        """Do nothing, because slots are allocated one by one."""

    def trim(self) -> None:
        """Do nothing, because there are no unused slots."""

    def allocate(self, owner: SlotOwner) -> None:
        """Allocate a slot for `owner`."""
        shape = (2, self.spec.num_layers, self.spec.num_heads, self.capacity, self.spec.head_dim)
        owner.slot = next(self._slot_numbers)
        self._slots[owner.slot] = owner, torch.zeros(shape, dtype=self.spec.dtype)
        self.owners.append(owner)

    def move(self, owners: Sequence[SlotOwner], target: KVPool) -> None:
        """Move owners and their contents from this pool to `target`, whose slots are larger."""
        assert isinstance(target, SeparateKVPool)
        for owner in owners:
            old_slot = owner.slot
            target.allocate(owner)
            target._contents(owner.slot)[..., : self.capacity, :] = self._contents(old_slot)
            del self._slots[old_slot]  # at once, so that few owners have two slots
        self._list_owners()

    def views(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of a slot in one layer: [heads, capacity, head_dim]."""
        contents = self._contents(slot)
        return contents[0, layer], contents[1, layer]

    def addresses(self, slots: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the addresses of the keys and of the values of n slots: int64 [n, layers]."""
        firsts = np.array([self._contents(slot).data_ptr() for slot in slots], np.int64)[:, None]
        half_bytes = self.capacity * self.spec.bytes_per_position // 2
        layers = np.arange(self.spec.num_layers) * (half_bytes // max(1, self.spec.num_layers))
        return firsts + layers, firsts + layers + half_bytes

    def read(self, slot: int, start: int, stop: int) -> KVChunk:
        """Return a copy of positions start .. stop - 1 of one slot."""
        keys, values = self._contents(slot)[..., start:stop, :]
        return KVChunk(keys.clone(), values.clone())

    def write(self, slot: int, chunks: Sequence[KVChunk]) -> None:
        """Write the results of earlier `read`s one after another into a slot, from position 0."""
        keys, values = self._contents(slot)
        start = 0
        for chunk in chunks:
            stop = start + chunk.keys.shape[2]
            keys[..., start:stop, :] = chunk.keys
            values[..., start:stop, :] = chunk.values
            start = stop

    def copy_from(
        self,
        source_pool: KVPool,
        source_slots: Sequence[int],
        starts: Sequence[int],
        slots: Sequence[int],
        count: int,
    ) -> None:
        """Copy `count` positions per slot from another pool into this pool (see `KVPool`)."""
        assert isinstance(source_pool, SeparateKVPool)
        for source_slot, start, slot in zip(source_slots, starts, slots, strict=True):
            source = source_pool._contents(source_slot)[..., start : start + count, :]
            self._contents(slot)[..., : source.shape[3], :] = source

    def _contents(self, slot: int) -> Tensor:
        return self._slots[slot][1]

    def _free_slots(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._slots[slot]
        self._list_owners()

    def _list_owners(self) -> None:
        self.owners = [owner for owner, _ in self._slots.values()]


class KVBudget:
    """A shared memory budget of several pools, counted in positions.

    Freed slots usually stay in their pool for the next owner. A pool deallocates them in two cases:
    when less than about half of its slots are in use (`KVPool.free`), and when the pools would
    together exceed `max_positions` (`reclaim_for`).
    """

    def __init__(self, max_positions: float = inf) -> None:
        """`max_positions`: the positions that the pools may allocate together."""
        self.max_positions = max_positions
        self.pools: list[KVPool] = []

    @property
    def allocated_positions(self) -> int:
        """The number of positions that the pools have allocated, in use or not."""
        return sum(pool.num_slots * pool.capacity for pool in self.pools)

    def fits(self, positions: int) -> bool:
        """Return whether `positions` more positions fit into the budget."""
        return self.allocated_positions + positions <= self.max_positions

    def reclaim_for(self, additional_slots: Mapping[KVPool, int]) -> None:
        """Deallocate unused slots until the additional slots fit into the budget.

        The keys of `additional_slots` are the pools that are about to grow, and the values are the
        numbers of their additional owners. Nothing is deallocated if all additional owners fit
        already. Trimming a pool copies its slots in use. So this method trims as few pools as
        possible: it starts with the pool that has the most unused positions.
        """
        spare_slots = {
            pool: pool.num_slots - len(pool) - additional_slots.get(pool, 0) for pool in self.pools
        }
        missing_positions = sum(-n * pool.capacity for pool, n in spare_slots.items() if n < 0)
        missing_positions -= self.max_positions - self.allocated_positions
        for pool in sorted(spare_slots, key=lambda pool: -spare_slots[pool] * pool.capacity):
            if missing_positions <= 0 or spare_slots[pool] <= 0:
                return
            missing_positions -= spare_slots[pool] * pool.capacity
            pool.trim()


class KVPools:
    """The pools of either prompts or samples: one pool per slot capacity, created on demand."""

    def __init__(
        self,
        spec: KVSpec,
        pool_factory: Callable[[KVSpec, int], KVPool] = KVPool,
        budget: KVBudget | None = None,
    ) -> None:
        """`pool_factory(spec, capacity)` makes a pool. `budget` may be shared with other pools."""
        self.spec = spec
        self._pool_factory = pool_factory
        self._budget = budget or KVBudget()
        self.pools: dict[int, KVPool] = {}
        """The pools by the capacity of their slots."""

    def pool_for(self, capacity: int) -> KVPool:
        """Return the pool whose slots have this capacity, creating it if necessary."""
        if capacity not in self.pools:
            self.pools[capacity] = self._pool_factory(self.spec, capacity)
            self._budget.pools.append(self.pools[capacity])
        return self.pools[capacity]

    def ensure_free_slots(self, capacities: Iterable[int]) -> None:
        """Allocate one additional slot for each of these capacities (which may repeat)."""
        self._drop_empty()
        additional_slots = {
            self.pool_for(capacity): count for capacity, count in Counter(capacities).items()
        }
        self._budget.reclaim_for(additional_slots)
        for pool, count in additional_slots.items():
            pool.ensure_free_slots(count)

    def _drop_empty(self) -> None:
        """Remove the pools that have no slots.

        Any multiple of SPAN can be a capacity, so a long-lived server would otherwise collect
        hundreds of empty pools.
        """
        for capacity, pool in list(self.pools.items()):
            if not pool.num_slots:
                del self.pools[capacity]
                self._budget.pools.remove(pool)

    def pools_in_use(self) -> list[KVPool]:
        """Return the pools that have an owner, in the order of their capacity."""
        return [
            self.pools[capacity] for capacity in sorted(self.pools) if len(self.pools[capacity])
        ]
