"""Which prefixes are known: token chunks of one fixed size, found by walking from the start of a
prompt.

A chunk is identified by (version of the weights, chunk before it, its tokens), compared exactly,
never by a hash alone. Least recently used chunks leave first; a chunk is always more recently used
than those that follow it, so no chunk is ever kept without the ones before it. What is stored for a
chunk is the caller's business (`V`: keys and values).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

V = TypeVar("V")

ChunkKey = tuple[Hashable, int, tuple[int, ...]]


@dataclass(frozen=True)
class _Chunk(Generic[V]):
    number: int
    value: V


class PrefixCache(Generic[V]):
    """Least-recently-used store of prefix chunks; `capacity` counts chunks."""

    def __init__(self, chunk_tokens: int, capacity: int) -> None:
        self.chunk_tokens = chunk_tokens
        self.capacity = capacity
        self._chunks: OrderedDict[ChunkKey, _Chunk[V]] = OrderedDict()
        self._next_number = 1  # 0 is the start of every prompt

    def __len__(self) -> int:
        return len(self._chunks)

    def find(self, version: Hashable, tokens: Sequence[int]) -> list[V]:
        """What is stored for the longest known prefix of `tokens`, chunk by chunk.

        At least one token is always left over, so that every prompt has something to compute, which
        ends in its last hidden state.
        """
        found = self._walk(version, tokens, (len(tokens) - 1) // self.chunk_tokens)
        for key, _ in reversed(found):
            self._chunks.move_to_end(key)
        return [chunk.value for _, chunk in found]

    def missing(self, version: Hashable, tokens: Sequence[int]) -> range:
        """Numbers of the whole chunks of `tokens` that are not stored yet."""
        whole = len(tokens) // self.chunk_tokens
        return range(len(self._walk(version, tokens, whole)), whole)

    def add(self, version: Hashable, tokens: Sequence[int], values: Sequence[V]) -> None:
        """Store `values` for the chunks that `missing` named, then forget the least recently used
        beyond `capacity`.
        """
        whole = len(tokens) // self.chunk_tokens
        known = self._walk(version, tokens, whole)
        parent = known[-1][1].number if known else 0
        keys = [key for key, _ in known]
        for index, value in zip(range(len(known), whole), values, strict=True):
            key = (version, parent, self._tokens(tokens, index))
            self._chunks[key] = _Chunk(self._next_number, value)
            parent = self._next_number
            self._next_number += 1
            keys.append(key)
        for key in reversed(keys):
            self._chunks.move_to_end(key)
        while len(self._chunks) > self.capacity:
            self._chunks.popitem(last=False)

    def forget(self, version: Hashable) -> None:
        """Drop every chunk of one version of the weights."""
        for key in [key for key in self._chunks if key[0] == version]:
            del self._chunks[key]

    def _walk(
        self, version: Hashable, tokens: Sequence[int], limit: int
    ) -> list[tuple[ChunkKey, _Chunk[V]]]:
        found: list[tuple[ChunkKey, _Chunk[V]]] = []
        parent = 0
        for index in range(limit):
            key = (version, parent, self._tokens(tokens, index))
            chunk = self._chunks.get(key)
            if chunk is None:
                break
            found.append((key, chunk))
            parent = chunk.number
        return found

    def _tokens(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self.chunk_tokens : (index + 1) * self.chunk_tokens])
