"""The KV cache of a sampler: which memory holds the keys and values of each prompt and sample.

Every active prompt has a slot, and so does every sample after its first token. The slot of a sample
grows with the sample: the sample moves to a larger slot.

Only this module and the attention kernels know how the memory is divided. The other modules of the
sampler ask for space, copy positions of a prompt, and pass `PrefillSpan`s and `SampleSlots` on to
the kernels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planish.engine.sampling.requests import Prompt, RunningSample
from planish.model.sequences.kv_cache import (
    KVBudget,
    KVChunk,
    KVPool,
    KVPools,
    KVSpec,
    PrefillSpan,
    SlotOwner,
    max_pool_bytes,
)
from planish.model.sequences.positions import SPAN


@dataclass(frozen=True, eq=False)
class SampleSlots:
    """The slots that a decoding step reads and writes, and the rows of the samples in them."""

    first_rows: dict[SlotOwner, int]
    """The first batch row of each sample of the step. Slots of other samples are not read."""
    row_counts: Mapping[SlotOwner, int]
    """The number of consecutive rows of the samples that have more than one."""
    prompt_pools: KVPools
    sample_pools: KVPools


class Slots:
    """The slots of the active prompts and the running samples of one sampler."""

    def __init__(self, spec: KVSpec, kv_cache_bytes: int, pool_class: type[KVPool]) -> None:
        """Create a KV cache without slots.

        `kv_cache_bytes`: the maximum bytes that the scheduler reserves.
        """
        self.spec = spec
        self._max_positions = max_pool_bytes(kv_cache_bytes) // spec.bytes_per_position
        self._pool_class = pool_class
        self.reset()

    def reset(self) -> None:
        """Drop all slots."""
        self.budget = KVBudget(self._max_positions)
        self.prompt_pools, self.sample_pools = (
            KVPools(self.spec, self._pool_class, self.budget) for _ in range(2)
        )

    # Prompts

    def allocate(self, prompts: Sequence[Prompt]) -> None:
        """Assign a slot to each of these new prompts."""
        self.prompt_pools.ensure_free_slots(prompt.capacity for prompt in prompts)
        for prompt in prompts:
            self.prompt_pools.pool_for(prompt.capacity).allocate(prompt)

    def write(self, prompt: Prompt, chunks: Sequence[KVChunk]) -> None:
        """Store the keys and values of a prompt's first positions, one chunk after another."""
        self.prompt_pools.pool_for(prompt.capacity).write(prompt.slot, chunks)

    def read(self, prompt: Prompt, start: int, stop: int) -> KVChunk:
        """Return a copy of a prompt's keys and values at positions start .. stop - 1."""
        return self.prompt_pools.pool_for(prompt.capacity).read(prompt.slot, start, stop)

    def prefill_span(self, prompt: Prompt, row: int, count: int) -> PrefillSpan:
        """Return where the next `count` positions of a prompt are stored; the first is at `row`."""
        pool = self.prompt_pools.pool_for(prompt.capacity)
        start = prompt.num_computed_tokens
        stop = start + count
        blocks = tuple(b for b in prompt.input.blocks if b[1] > start and b[0] < stop)
        return PrefillSpan(pool, prompt.slot, row, start, count, blocks)

    def free_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Free the slots of these prompts."""
        _free(self.prompt_pools, prompts)

    # Samples

    def free_samples(self, samples: Sequence[RunningSample]) -> None:
        """Free the slots of these samples. A sample before its second token has none."""
        with_slots = [sample for sample in samples if sample.capacity]
        _free(self.sample_pools, with_slots)
        for sample in with_slots:
            sample.capacity = 0

    def ensure_space(self, samples: Sequence[RunningSample]) -> None:
        """Ensure that each sample has a slot of the capacity that the scheduler has reserved.

        A sample's first slot also receives a copy of the keys and values of the prompt's last
        `length % SPAN` positions. Samples share only whole spans of SPAN prompt positions.
        """
        growing = [sample for sample in samples if sample.capacity < sample.reserved_capacity]
        if not growing:
            return
        if self.budget.fits(sum(sample.reserved_capacity for sample in growing)):
            self._grow(growing)
            return
        # A sample being moved occupies its old and its new slot at the same time. Memory is short
        # here, so one eighth of the samples move at a time.
        self._grow([sample for sample in growing if not sample.capacity])
        moving = [sample for sample in growing if sample.capacity]
        size = max(1, len(moving) // 8)
        for first in range(0, len(moving), size):
            self._grow(moving[first : first + size])

    def _grow(self, growing: Sequence[RunningSample]) -> None:
        """Move each sample to a new slot of its reserved capacity, or assign its first slot."""
        self.sample_pools.ensure_free_slots(sample.reserved_capacity for sample in growing)
        new_groups: dict[tuple[int, int], list[RunningSample]] = {}
        moved_groups: dict[tuple[int, int], list[RunningSample]] = {}
        for sample in growing:
            capacity = sample.reserved_capacity
            if sample.capacity:
                moved_groups.setdefault((capacity, sample.capacity), []).append(sample)
            else:
                self.sample_pools.pool_for(capacity).allocate(sample)
                new_groups.setdefault((capacity, sample.prompt.capacity), []).append(sample)
            sample.capacity = capacity
        for (capacity, old_capacity), group in moved_groups.items():
            self.sample_pools.pool_for(old_capacity).move(
                group, self.sample_pools.pool_for(capacity)
            )
        for (capacity, prompt_capacity), group in new_groups.items():
            lengths = [sample.prompt.length for sample in group]
            self.sample_pools.pool_for(capacity).copy_from(
                self.prompt_pools.pool_for(prompt_capacity),
                [sample.prompt.slot for sample in group],
                [length - length % SPAN for length in lengths],
                [sample.slot for sample in group],
                max(length % SPAN for length in lengths),
            )

    def of_samples(
        self, samples: Sequence[RunningSample], first_rows: Sequence[int]
    ) -> SampleSlots:
        """Return the slots of a decoding step. `first_rows` has the first row of each sample."""
        return SampleSlots(
            dict(zip(samples, first_rows, strict=True)),
            {sample: sample.num_rows for sample in samples if sample.num_rows > 1},
            self.prompt_pools,
            self.sample_pools,
        )


def _free(pools: KVPools, owners: Sequence[Prompt] | Sequence[RunningSample]) -> None:
    """Remove all owners from their pools with one call per pool.

    Removing the owners one by one could move slots or copy the pool each time.
    """
    by_capacity: dict[int, list[Prompt | RunningSample]] = {}
    for owner in owners:
        by_capacity.setdefault(owner.capacity, []).append(owner)
    for capacity, owners_of_capacity in by_capacity.items():
        pools.pool_for(capacity).free(*owners_of_capacity)
