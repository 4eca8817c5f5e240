"""The KV cache of a follower, and the attention that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.interface.parts import Attend
from planish.model.layers.lora import LoraWeights
from planish.model.sequences.kv_cache import KVChunk, KVPool, KVPools, PrefillSpan, SlotOwner


@dataclass(eq=False)
class _Owner:
    """A prompt or a sample of rank 0 with a slot in the KV cache."""

    length: int
    prompt: _Owner | None
    slot: int = -1
    num_stored: int = 0


class FollowerCache:
    """One rank's part of the KV cache. All public methods but `attention` are commands of rank 0."""

    def __init__(self, backend: Backend, objects: dict[int, LoraWeights | KVChunk]) -> None:
        """`objects`: what rank 0 knows by numbers, with the keys and values of the prefix cache."""
        self._backend, self._objects = backend, objects
        self._pools: dict[int, KVPool] = {}
        self._owners: dict[int, _Owner] = {}

    def create_pool(self, number: int, capacity: int) -> None:
        """Create a pool of KV cache slots."""
        self._pools[number] = self._backend.pool_class(self._backend.kv_spec, capacity)

    def drop_pool(self, number: int) -> None:
        """Free a pool."""
        self._pools.pop(number, None)

    def ensure_free_slots(self, number: int, additional: int) -> None:
        """See `KVPool`."""
        self._pools[number].ensure_free_slots(additional)

    def allocate(self, number: int, owner: int, length: int, prompt: int | None) -> None:
        """Assign a slot to a new owner."""
        new_owner = _Owner(length, None if prompt is None else self._owners[prompt])
        self._owners[owner] = new_owner
        self._pools[number].allocate(new_owner)

    def free(self, number: int, owners: Sequence[int]) -> None:
        """See `KVPool`."""
        self._pools[number].free(*(self._owners.pop(owner) for owner in owners))

    def trim(self, number: int) -> None:
        """See `KVPool`."""
        self._pools[number].trim()

    def move(self, number: int, owners: Sequence[int], target: int) -> None:
        """See `KVPool`."""
        self._pools[number].move([self._owners[owner] for owner in owners], self._pools[target])

    def read(self, number: int, slot: int, start: int, stop: int, chunk: int) -> None:
        """Keep a copy of the keys and values of some positions."""
        self._objects[chunk] = self._pools[number].read(slot, start, stop)

    def write(self, number: int, slot: int, chunks: Sequence[int]) -> None:
        """See `KVPool`."""
        found = [self._objects[chunk] for chunk in chunks]
        self._pools[number].write(slot, [chunk for chunk in found if isinstance(chunk, KVChunk)])

    def copy_from(self, number: int, source: int, *args: Any) -> None:
        """See `KVPool`."""
        self._pools[number].copy_from(self._pools[source], *args)

    def attention(self, kind: str, *args: Any) -> Attend:
        """Return the attention of a pass: "tree", "prefill" or "decode"."""
        match kind:
            case "prefill":
                return self._prefill_attention(*args)
            case "decode":
                return self._decode_attention(*args)
            case _:
                return self._backend.tree_attention(*args)

    def _prefill_attention(self, spans: Sequence[tuple[int, int, int, int, int]]) -> Attend:
        return self._backend.prefill_attention(
            [
                PrefillSpan(self._pools[pool], slot, row, start, count)
                for pool, slot, row, start, count in spans
            ]
        )

    def _decode_attention(
        self,
        samples: Sequence[tuple[int, int, int, int]],
        prompt_pools: Sequence[int],
        sample_pools: Sequence[int],
    ) -> Attend:
        first_rows: dict[SlotOwner, int] = {}
        row_counts: dict[SlotOwner, int] = {}
        for number, row, num_stored, count in samples:
            owner = self._owners[number]
            owner.num_stored = num_stored
            first_rows[owner], row_counts[owner] = row, count
        pools = self._pools_of(prompt_pools), self._pools_of(sample_pools)
        return self._backend.decode_attention(first_rows, pools[0], pools[1], row_counts)

    def _pools_of(self, numbers: Sequence[int]) -> KVPools:
        pools = KVPools(self._backend.kv_spec)
        found = (self._pools[number] for number in numbers)
        pools.pools = {pool.capacity: pool for pool in found}
        return pools
