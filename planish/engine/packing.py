"""Packing of datums into prefix forests: a token that several sequences share is a row once.

The tokens of a micro-batch are laid out as a forest in depth-first order; a shared prefix is a
parent. One integer a row describes it: `until[j]` is the end of row j's subtree, and query i
attends key j iff `j <= i < until[j]`. Sequences that share nothing are trees without branches, so
ordinary packing is the special case. Every position of every datum maps to a row, its last prompt
row included, so nothing is dropped.

The layout needs no tree building: sort the sequences, and each adds to the one before it what lies
beyond their common prefix. That costs one sort and one pass over the tokens, however long the
prefixes. Micro-batches are runs of the sorted sequences, so they depend on the datums alone, not
even on their order, and cuts fall where little is shared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

# What one more micro-batch costs, in tokens: every product reads the weights again.
_CUT_COST = 64
# Most datums of one micro-batch. Copies of one sequence add no row, yet their scores take memory.
_MAX_DATUMS = 512


@dataclass(frozen=True)
class Segment:
    """A run of rows without branches: rows start .. end - 1; its descendants are rows end .. until
    - 1.
    """

    start: int
    end: int
    until: int
    ancestors: tuple[tuple[int, int], ...]
    """Row ranges [start, end) of everything above, root first; adjacent ones are joined."""


@dataclass(frozen=True, eq=False)
class Packed:
    """One micro-batch. All arrays are int64; T rows."""

    tokens: np.ndarray
    """[T]"""
    positions: np.ndarray
    """[T]: position of the row in its sequences."""
    until: np.ndarray
    """[T]"""
    segments: tuple[Segment, ...]
    """In row order; together they cover all rows."""
    datums: tuple[int, ...]
    """Indices of the packed datums, rising."""
    rows: tuple[np.ndarray, ...]
    """For each of `datums`, the row of each of its positions."""

    def __len__(self) -> int:
        return len(self.tokens)

    def padded(self, rows: int) -> Packed:
        """With a tree behind that belongs to no datum, so that there are `rows` rows."""
        missing = rows - len(self)
        if missing <= 0:
            return self
        zeros = np.zeros(missing, np.int64)
        until = np.concatenate([self.until, np.full(missing, rows, np.int64)])
        tokens, positions = (
            np.concatenate([known, zeros]) for known in (self.tokens, self.positions)
        )
        return Packed(tokens, positions, until, _segments(until), self.datums, self.rows)


def pack(sequences: Sequence[np.ndarray], budget: int) -> list[Packed]:
    """Cut token sequences into micro-batches of at most `budget` rows each, ordered by their
    smallest datum.

    A sequence that is longer than the budget gets a micro-batch of its own, unless others add no
    row to it.
    """
    if budget < 1:
        raise ValueError(f"micro_batch_tokens={budget}: give at least 1")
    if any(len(sequence) == 0 for sequence in sequences):
        raise ValueError("an empty sequence cannot be packed")
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    # Bytes in big-endian order compare like the token lists, at the speed of memcmp.
    keys = [array.astype(">u4").tobytes() for array in arrays]
    order = sorted(range(len(arrays)), key=keys.__getitem__)
    shared = [0] * len(order)
    for i in range(1, len(order)):
        shared[i] = _common_prefix(arrays[order[i - 1]], arrays[order[i]])
    cuts = _cut([len(arrays[index]) for index in order], shared, budget)
    packed = [_layout(arrays, order[i:j], [0, *shared[i + 1 : j]]) for i, j in pairwise(cuts)]
    return sorted(packed, key=lambda part: part.datums[0])


def mask(packed: Packed) -> np.ndarray:
    """The definition, bool [T, T]: entry (i, j) is True where query i attends key j. For tests: it
    is quadratic.
    """
    row = np.arange(len(packed))
    return (row[None, :] <= row[:, None]) & (row[:, None] < packed.until[None, :])


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


def _cut(lengths: list[int], shared: list[int], budget: int) -> list[int]:
    """Borders of the micro-batches: those that cost least, where a cut costs the shared prefix that
    is computed again.

    What a micro-batch start .. stop - 1 adds to the cost depends on its start alone, and whether it
    fits on nothing but its rows, which grow at either end. So the starts that fit are a window that
    moves on, and its cheapest stays at the head of a queue: one pass.
    """
    n = len(lengths)
    total = [
        0,
        *accumulate(length - common for length, common in zip(lengths, shared, strict=True)),
    ]
    best, came_from = [0] * (n + 1), [0] * (n + 1)
    costs = [0] * n
    """Of everything up to stop, if the last micro-batch begins here."""
    starts: deque[int] = deque()
    for stop in range(1, n + 1):
        last = stop - 1
        costs[last] = best[last] + (shared[last] + _CUT_COST if last else 0)
        while starts and costs[starts[-1]] >= costs[last]:
            starts.pop()
        starts.append(last)
        # The last is the longest of those that add no row to one which is too long: the others are
        # its beginnings, or copies of it.
        most = max(budget, lengths[last])
        while (
            stop - starts[0] > _MAX_DATUMS
            or total[stop] - total[starts[0]] + shared[starts[0]] > most
        ):
            starts.popleft()
        best[stop], came_from[stop] = costs[starts[0]], starts[0]
    cuts = [n]
    while cuts[-1] > 0:
        cuts.append(came_from[cuts[-1]])
    return cuts[::-1]


def _layout(arrays: Sequence[np.ndarray], order: Sequence[int], shared: Sequence[int]) -> Packed:
    """The forest of the sequences `order`, sorted; each shares a prefix of `shared` tokens with the
    one before.
    """
    total = sum(len(arrays[index]) for index in order) - sum(shared)
    tokens, positions = np.empty(total, np.int64), np.empty(total, np.int64)
    until = np.full(total, total, np.int64)
    rows: dict[int, np.ndarray] = {}
    path = np.empty(0, np.int64)
    size = 0
    for index, keep in zip(order, shared, strict=True):
        sequence = arrays[index]
        new = slice(size, size + len(sequence) - keep)
        until[path[keep:]] = size
        tokens[new] = sequence[keep:]
        positions[new] = np.arange(keep, len(sequence))
        path = np.concatenate([path[:keep], np.arange(new.start, new.stop)])
        rows[index] = path
        size = new.stop
    datums = tuple(sorted(order))
    return Packed(
        tokens, positions, until, _segments(until), datums, tuple(rows[index] for index in datums)
    )


def _segments(until: np.ndarray) -> tuple[Segment, ...]:
    # Two neighbouring rows with one end of subtree are parent and only child; any other border is a
    # branch.
    starts = [0, *(np.flatnonzero(until[1:] != until[:-1]) + 1).tolist()]
    ends = [*starts[1:], len(until)]
    segments: list[Segment] = []
    above: list[Segment] = []
    for start, end in zip(starts, ends, strict=True):
        while above and above[-1].until <= start:
            above.pop()
        parent = above[-1] if above else None
        ancestors = _joined(parent.ancestors, (parent.start, parent.end)) if parent else ()
        segments.append(Segment(start, end, int(until[start]), ancestors))
        above.append(segments[-1])
    return tuple(segments)


def _joined(
    ranges: tuple[tuple[int, int], ...], last: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    if ranges and ranges[-1][1] == last[0]:
        return (*ranges[:-1], (ranges[-1][0], last[1]))
    return (*ranges, last)
