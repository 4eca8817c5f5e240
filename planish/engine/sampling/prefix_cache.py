"""A prefix cache: an LRU cache of prompt prefixes in chunks of a fixed number of tokens.

The key of a chunk is (namespace, number of the previous chunk, tokens of the chunk). The sampler's
namespaces are pairs: the version of the weights, and the owner of the prefixes, such as a server's
tenant. Keys are compared exactly, never by a hash alone. A lookup walks from the start of a prompt.

The least recently used chunks are evicted first. A chunk always counts as more recently used than
the chunks that follow it. So no chunk ever stays in the cache without its predecessors. The caller
chooses the type `V` of the stored values; the sampler stores keys, values and hidden states.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

V = TypeVar("V")

ChunkKey = tuple[Hashable, int, tuple[int, ...]]


@dataclass(frozen=True)
class _Chunk(Generic[V]):
    number: int
    value: V


class PrefixCache(Generic[V]):
    """An LRU cache of at most `capacity` prefix chunks of `chunk_size` tokens each."""

    def __init__(self, chunk_size: int, capacity: int) -> None:
        """Create an empty cache."""
        self.chunk_size = chunk_size
        self.capacity = capacity
        self._chunks: OrderedDict[ChunkKey, _Chunk[V]] = OrderedDict()
        self._next_number = 1  # 0 stands for the start of every prompt.

    def __len__(self) -> int:
        """Return the number of chunks in the cache."""
        return len(self._chunks)

    def find(self, namespace: Hashable, tokens: Sequence[int]) -> list[V]:
        """Return the values of the longest cached prefix of `tokens`, one per chunk.

        The prefix never includes the last token. So every prompt computes at least one token, which
        yields the prompt's last hidden state.
        """
        cached = self._walk(namespace, tokens, (len(tokens) - 1) // self.chunk_size)
        for key, _ in reversed(cached):
            self._chunks.move_to_end(key)
        return [chunk.value for _, chunk in cached]

    def missing_chunks(self, namespace: Hashable, tokens: Sequence[int]) -> range:
        """Return the indices of the whole chunks of `tokens` that are not in the cache."""
        num_whole_chunks = len(tokens) // self.chunk_size
        return range(len(self._walk(namespace, tokens, num_whole_chunks)), num_whole_chunks)

    def add(self, namespace: Hashable, tokens: Sequence[int], values: Sequence[V]) -> None:
        """Store `values` for the chunks that `missing_chunks` returned.

        Then evict the least recently used chunks beyond `capacity`.
        """
        num_whole_chunks = len(tokens) // self.chunk_size
        cached = self._walk(namespace, tokens, num_whole_chunks)
        parent_number = cached[-1][1].number if cached else 0
        keys = [key for key, _ in cached]
        for index, value in zip(range(len(cached), num_whole_chunks), values, strict=True):
            key = (namespace, parent_number, self._chunk_tokens(tokens, index))
            self._chunks[key] = _Chunk(self._next_number, value)
            parent_number = self._next_number
            self._next_number += 1
            keys.append(key)
        for key in reversed(keys):
            self._chunks.move_to_end(key)
        while len(self._chunks) > self.capacity:
            self._chunks.popitem(last=False)

    def evict(self, is_unused: Callable[[Any], bool]) -> None:
        """Evict every chunk of the namespaces for which `is_unused` is true."""
        for key in [key for key in self._chunks if is_unused(key[0])]:
            del self._chunks[key]

    def _walk(
        self, namespace: Hashable, tokens: Sequence[int], max_chunks: int
    ) -> list[tuple[ChunkKey, _Chunk[V]]]:
        """Walk through the first `max_chunks` chunks of `tokens` until one is not in the cache.

        Return the keys and chunks before it.
        """
        cached: list[tuple[ChunkKey, _Chunk[V]]] = []
        parent_number = 0
        for index in range(max_chunks):
            key = (namespace, parent_number, self._chunk_tokens(tokens, index))
            chunk = self._chunks.get(key)
            if chunk is None:
                break
            cached.append((key, chunk))
            parent_number = chunk.number
        return cached

    def _chunk_tokens(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self.chunk_size : (index + 1) * self.chunk_size])
