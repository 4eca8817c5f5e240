"""KV pools: slots stay dense, move with their contents, and respect the memory budget."""

from dataclasses import dataclass

import pytest
import torch

from planish.model.sequences.kv_cache import (
    GappedKVPool,
    KVBudget,
    KVPool,
    KVPools,
    KVSpec,
    SeparateKVPool,
)
from planish.model.sequences.positions import (
    GPU_BLOCK,
    SPAN,
    capacity_for,
    grown_capacity,
    sample_capacity,
)

SHAPE = KVSpec(
    num_layers=2, num_heads=3, head_dim=4, dtype=torch.float32, device=torch.device("cpu")
)


@dataclass(eq=False)
class Owner:
    slot: int = -1


def fill(pool: KVPool, owner: Owner, value: float) -> None:
    for tensor in (*pool.keys, *pool.values):
        tensor[owner.slot] = value


def held(pool: KVPool, owner: Owner) -> set[float]:
    return {
        x for tensor in (*pool.keys, *pool.values) for x in tensor[owner.slot].unique().tolist()
    }


def test_slots_stay_dense_keep_their_contents_and_are_zeroed_when_freed():
    pool, owners = KVPool(SHAPE, 64), [Owner() for _ in range(40)]
    for number, owner in enumerate(owners):
        pool.allocate(owner)
        fill(pool, owner, number)
    kept = list(enumerate(owners))
    for number in (39, 0, 17, 1, *range(20, 38)):
        pool.free(owners[number])
        kept = [(n, owner) for n, owner in kept if n != number]
        assert sorted(owner.slot for _, owner in kept) == list(range(len(kept)))
        assert all(held(pool, owner) == {n} for n, owner in kept)
        assert not any(tensor[len(kept) :].any() for tensor in (*pool.keys, *pool.values))
        assert pool.num_slots <= 2 * len(kept) + 8
    for _, owner in kept:
        pool.free(owner)
    assert pool.num_slots == 0


def test_gaps_stay_open_until_most_slots_are_free():
    pool, owners = GappedKVPool(SHAPE, 64), [Owner() for _ in range(30)]
    for number, owner in enumerate(owners):
        pool.allocate(owner)
        fill(pool, owner, number)
    for number in (29, 0, 17, 1):
        pool.free(owners[number])
    kept = [(number, owner) for number, owner in enumerate(owners) if owner.slot >= 0]
    assert [owner.slot for _, owner in kept] == [number for number, _ in kept]
    new, replaced = [Owner() for _ in range(3)], pool.reallocations
    for number, owner in enumerate(new, 100):
        pool.allocate(owner)
        fill(pool, owner, number)
        kept.append((number, owner))
    assert [owner.slot for owner in new] == [0, 1, 17]
    assert pool.reallocations == replaced
    for number in (*range(2, 17), 18, 19, 20):
        pool.free(owners[number])
    kept = [(number, owner) for number, owner in kept if owner.slot >= 0]
    assert pool.num_slots == len(kept) == 11
    assert pool.reallocations == replaced + 1
    assert pool.owners == [owner for _, owner in kept]
    assert all(held(pool, owner) == {float(number)} for number, owner in kept)
    pool.ensure_free_slots(2)
    for owner in (extra := [Owner(), Owner()]):
        pool.allocate(owner)
    assert [owner.slot for owner in extra] == [len(kept), len(kept) + 1]
    for owner in list(pool.owners):
        pool.free(owner)
    assert pool.num_slots == 0


def test_reserve_allocates_exactly_the_reserved_slots():
    pools = KVPools(SHAPE)
    pools.ensure_free_slots([64, 256, 64, 64])
    assert (pools.pool_for(64).num_slots, pools.pool_for(256).num_slots) == (3, 1)
    for _ in range(3):
        pools.pool_for(64).allocate(Owner())
    assert pools.pool_for(64).num_slots == 3
    assert pools.pools_in_use() == [pools.pool_for(64)]


@pytest.mark.parametrize("kind", [KVPool, GappedKVPool])
def test_unused_slots_are_freed_for_other_pools(kind):
    """Long prompts end, and short samples begin, which cannot use the freed long slots."""
    budget = KVBudget(max_positions=9 * 256)
    prompts, samples = KVPools(SHAPE, kind, budget), KVPools(SHAPE, kind, budget)
    long = [Owner() for _ in range(8)]
    prompts.ensure_free_slots([256] * 8)
    for number, owner in enumerate(long):
        prompts.pool_for(256).allocate(owner)
        fill(prompts.pool_for(256), owner, number)
    prompts.pool_for(256).free(*long[1:4])
    assert (budget.allocated_positions, prompts.pool_for(256).num_slots) == (8 * 256, 8)
    samples.ensure_free_slots([128, 128, 64, 64])
    for capacity in (128, 128, 64, 64):
        samples.pool_for(capacity).allocate(Owner())
    assert (budget.allocated_positions, prompts.pool_for(256).num_slots) == (5 * 256 + 384, 5)
    kept = [(float(number), owner) for number, owner in enumerate(long) if owner.slot >= 0]
    assert len(kept) == 5
    assert all(held(prompts.pool_for(256), owner) == {number} for number, owner in kept)


@pytest.mark.parametrize("kind", [KVPool, GappedKVPool])
def test_removing_many_owners_reallocates_once(kind):
    pool, owners, stay = kind(SHAPE, 64), [Owner() for _ in range(40)], (3, 4, 8, 30, 31)
    for number, owner in enumerate(owners):
        pool.allocate(owner)
        fill(pool, owner, number)
    before = pool.reallocations
    gone = [owner for number, owner in enumerate(owners) if number not in stay]
    pool.free(*gone)
    assert all(owner.slot == -1 for owner in gone)
    assert pool.reallocations == before + 1
    assert all(held(pool, owners[number]) == {float(number)} for number in stay)
    pool.free(*(owners[number] for number in stay))
    assert pool.num_slots == 0


@pytest.mark.parametrize("kind", [KVPool, GappedKVPool])
@pytest.mark.parametrize(
    "moved", [[0], [5], [1, 4, 5], [5, 4, 3], [0, 1, 2], [2, 0, 5, 1], [0, 1, 2, 3, 4, 5]]
)
def test_moving_slots_to_a_larger_pool_keeps_their_contents(moved, kind):
    """The other owners fill the gaps in a KVPool, and keep their slots in a GappedKVPool."""
    pools, owners = KVPools(SHAPE, kind), [Owner() for _ in range(6)]
    small, large = pools.pool_for(64), pools.pool_for(128)
    before = Owner()
    large.allocate(before)
    fill(large, before, 9.0)
    for number, owner in enumerate(owners):
        small.allocate(owner)
        fill(small, owner, number + 1.0)
    small.move([owners[number] for number in moved], large)
    assert large.owners == [before, *(owners[number] for number in moved)]
    assert held(large, before) == {9.0}
    for slot, number in enumerate(moved, 1):
        assert owners[number].slot == slot
        assert {
            x
            for tensor in (*large.keys, *large.values)
            for x in tensor[slot, :, :64].unique().tolist()
        } == {number + 1.0}
        assert not large.keys[0][slot, :, 64:].any()
    stay = [number for number in range(6) if number not in moved]
    slots = list(range(len(stay))) if kind is KVPool or not stay else stay
    assert sorted(owners[number].slot for number in stay) == slots
    assert {id(owner) for owner in small.owners} == {id(owners[number]) for number in stay}
    assert all(held(small, owners[number]) == {number + 1.0} for number in stay)


def layer_values(pool: KVPool, slot: int, kind: int) -> torch.Tensor:
    """Return the keys (kind 0) or values (kind 1) of a slot: [layers, heads, capacity, head_dim]."""
    return torch.stack([pool.views(layer, slot)[kind] for layer in range(SHAPE.num_layers)])


@pytest.mark.parametrize("kind", [KVPool, GappedKVPool, SeparateKVPool])
def test_read_write_and_copy_touch_only_the_given_positions(kind):
    pool, target, owner, other = kind(SHAPE, 64), kind(SHAPE, 128), Owner(), Owner()
    pool.allocate(owner)
    target.allocate(other)
    for layer in range(2):
        keys, values = pool.views(layer, owner.slot)
        keys.copy_(torch.arange(64.0)[None, :, None])
        values.copy_(-torch.arange(64.0)[None, :, None])
    chunks = [pool.read(owner.slot, 8, 40), pool.read(owner.slot, 0, 32)]
    target.write(other.slot, chunks)
    assert layer_values(target, other.slot, 0)[1, 0, :32, 0].tolist() == list(range(8, 40))
    assert layer_values(target, other.slot, 0)[1, 0, 32:64, 0].tolist() == list(range(32))
    target.copy_from(pool, [owner.slot], [50], [other.slot], 10)
    assert layer_values(target, other.slot, 1)[0, 2, :10, 3].tolist() == [-x for x in range(50, 60)]
    assert layer_values(target, other.slot, 0)[1, 0, 32:64, 0].tolist() == list(range(32))
    # ten positions from 60 on exceed the source slot, so only four are copied
    target.copy_from(pool, [owner.slot], [60], [other.slot], 10)
    assert layer_values(target, other.slot, 1)[0, 2, :4, 3].tolist() == [-60, -61, -62, -63]


@pytest.mark.parametrize("kind", [KVPool, GappedKVPool, SeparateKVPool])
def test_addresses_are_those_of_the_slots(kind):
    pool, owners = kind(SHAPE, 64), [Owner() for _ in range(5)]
    for owner in owners:
        pool.allocate(owner)
    pool.free(owners.pop(1))
    keys, values = pool.addresses([owner.slot for owner in owners])
    for number, owner in enumerate(owners):
        for layer in range(SHAPE.num_layers):
            found = [x.data_ptr() for x in pool.views(layer, owner.slot)]
            assert found == [keys[number, layer], values[number, layer]]


def test_separate_slots_keep_their_contents_and_their_memory_is_freed_at_once():
    budget = KVBudget(max_positions=1024)
    pools, owners = KVPools(SHAPE, SeparateKVPool, budget), [Owner() for _ in range(6)]
    small, large = pools.pool_for(64), pools.pool_for(128)
    for number, owner in enumerate(owners, 1):
        small.allocate(owner)
        for x in small.views(0, owner.slot):
            x.fill_(number)
    kept = owners[2].slot
    small.move([owners[1], owners[4]], large)
    small.free(owners[0], owners[5])
    assert budget.allocated_positions == 2 * 64 + 2 * 128
    assert small.owners == [owners[2], owners[3]]
    assert large.owners == [owners[1], owners[4]]
    assert owners[2].slot == kept
    for pool, number in ((small, 2), (small, 3), (large, 1), (large, 4)):
        found = layer_values(pool, owners[number].slot, 1)
        assert found[0, :, :64].unique().tolist() == [number + 1]
        assert not found[0, :, 64:].any()
        assert not found[1].any()
    small.free(owners[2], owners[3])
    large.free(owners[1], owners[4])
    assert budget.allocated_positions == 0
    assert not pools.pools_in_use()


def test_slot_capacities_are_multiples_of_span():
    numbers = (0, 1, 64, 65, 128, 129, 257, 5000)
    assert [capacity_for(n) for n in numbers] == [64, 64, 64, 128, 128, 192, 320, 5056]
    assert [sample_capacity(prompt, 256) for prompt in (64, 65, 66, 127)] == [256, 256, 320, 320]


def test_a_growing_sample_wastes_at_most_a_fifth_of_a_long_slot():
    assert [grown_capacity(n, 320, SPAN) for n in (1, 64, 65, 129, 257, 320)] == [
        64, 64, 128, 256, 320, 320,
    ]  # fmt: skip
    for positions in range(257, 20_000, 7):
        capacity = grown_capacity(positions, 10**6, SPAN)
        assert 0 <= capacity - positions < capacity / 5
        assert capacity % SPAN == 0
        assert grown_capacity(capacity, 10**6, SPAN) == capacity


def test_slots_on_a_gpu_grow_by_whole_blocks():
    numbers = (1, 1024, 1025, 5000, 8192, 8193, 20_000)
    assert [grown_capacity(n, 10**6, GPU_BLOCK) for n in numbers] == [
        1024, 1024, 2048, 5120, 8192, 10_240, 20_480,
    ]  # fmt: skip
    assert grown_capacity(1025, 1600, GPU_BLOCK) == 1600


@pytest.mark.parametrize("kind", [KVPool, GappedKVPool])
def test_only_as_many_pools_are_trimmed_as_needed(kind):
    """The pool with the most unused positions is trimmed first. A pool keeps the slots it will
    need.
    """
    budget = KVBudget(max_positions=1024)
    pools = KVPools(SHAPE, kind, budget)
    owners = {capacity: [Owner() for _ in range(4)] for capacity in (64, 128)}
    for capacity, some in owners.items():
        pools.ensure_free_slots([capacity] * 4)
        for owner in some:
            pools.pool_for(capacity).allocate(owner)
        pools.pool_for(capacity).free(*some[1:])
    assert budget.allocated_positions == 4 * 64 + 4 * 128
    pools.ensure_free_slots([64, 64, 384])
    assert {pool.capacity: pool.num_slots for pool in budget.pools} == {64: 4, 128: 1, 384: 1}
    assert budget.allocated_positions <= budget.max_positions


def test_empty_pools_are_dropped_from_the_budget():
    budget = KVBudget()
    pools, owner = KVPools(SHAPE, GappedKVPool, budget), Owner()
    for capacity in (64, 128, 192):
        pools.ensure_free_slots([capacity])
        pools.pool_for(capacity).allocate(owner)
        pools.pool_for(capacity).free(owner)
    pools.ensure_free_slots([256])
    assert [pool.capacity for pool in budget.pools] == [256]
