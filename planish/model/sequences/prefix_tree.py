"""Packing of datums into prefix trees, in which a shared prefix is computed once.

The tokens of a micro-batch form a forest (a set of prefix trees) in depth-first order, one row per
token. A shared prefix is a parent of its continuations. One integer per row describes the forest:
`subtree_end[j]` is the end of the subtree of row j. Query i attends to key j if and only if
`j <= i < subtree_end[j]`. Sequences without a common prefix are trees without branches, so
ordinary packing is a special case. Every position of every datum maps to a row, so no token is
dropped.

The layout does not build trees. It sorts the sequences; each sequence then adds only the tokens
after its common prefix with the previous sequence. That costs one sort and one pass over the
tokens, for any prefix length. A micro-batch is a run of consecutive sorted sequences, so it depends
on the datums alone and not on their order. `_micro_batch_borders` prefers borders where
neighbouring sequences share short prefixes, because both micro-batches compute the prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

# Cost of one more micro-batch, in tokens: every matmul has to read the weights again.
_CUT_COST = 64
# Maximum number of datums per micro-batch. Copies of a sequence add no row, but their scores need
# memory.
_MAX_DATUMS = 512


@dataclass(frozen=True)
class Segment:
    """A run of rows without branches: rows start .. end - 1.

    The descendants of the segment are rows end .. subtree_end - 1.
    """

    start: int
    end: int
    subtree_end: int
    ancestors: tuple[tuple[int, int], ...]
    """Row ranges [start, end) of all ancestors, root first, with adjacent ranges merged."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch of T rows. All arrays are int64."""

    tokens: np.ndarray
    """[T]: token of each row."""
    positions: np.ndarray
    """[T]: position of each row in its sequences."""
    subtree_end: np.ndarray
    """[T]: end of the subtree of each row."""
    segments: tuple[Segment, ...]
    """The segments in row order; together they cover all rows."""
    datums: tuple[int, ...]
    """Indices of the packed datums, in ascending order."""
    datum_rows: tuple[np.ndarray, ...]
    """For each of `datums`, an array with the row of each of its positions."""
    blocks: tuple[tuple[int, int], ...] = ()
    """Ranges of rows that also attend to one another: those of images (Gemma 3). The rows of a block
    are consecutive positions of one segment.
    """

    @cached_property
    def visible(self) -> np.ndarray:
        """[T]: the number of positions of its sequence that each row attends to."""
        visible = self.positions + 1
        for start, stop in self.blocks:
            visible[start:stop] = visible[stop - 1]
        return visible

    def with_blocks(self, blocks: Sequence[Sequence[tuple[int, int]]]) -> MicroBatch:
        """Return a micro-batch with blocks. `blocks`: those of each of `datums`, as positions."""
        row_ranges = {
            (int(rows[start]), int(rows[stop - 1]) + 1)
            for rows, of_datum in zip(self.datum_rows, blocks, strict=True)
            for start, stop in of_datum
        }
        return replace(self, blocks=tuple(sorted(row_ranges)))

    def __len__(self) -> int:
        """Return the number of rows, T."""
        return len(self.tokens)


def pack(sequences: Sequence[np.ndarray], budget: int) -> list[MicroBatch]:
    """Pack token sequences into micro-batches of at most `budget` rows each.

    The micro-batches are ordered by their smallest datum index. A sequence that is longer than the
    budget shares its micro-batch only with its own prefixes and copies, which add no row.

    Raises ValueError if the budget is below 1 or a sequence is empty.
    """
    if budget < 1:
        raise ValueError(f"micro_batch_tokens={budget}: give at least 1")
    if any(len(sequence) == 0 for sequence in sequences):
        raise ValueError("an empty sequence cannot be packed")
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    # Bytes in big-endian order compare like the token lists, at the speed of memcmp. The token ids
    # of images need 8 bytes.
    is_wide = any(int(array.max()) >> 32 for array in arrays)
    keys = [array.astype(">u8" if is_wide else ">u4").tobytes() for array in arrays]
    order = sorted(range(len(arrays)), key=keys.__getitem__)
    shared_lengths = [0] * len(order)
    for i in range(1, len(order)):
        shared_lengths[i] = _common_prefix_length(arrays[order[i - 1]], arrays[order[i]])
    borders = _micro_batch_borders([len(arrays[index]) for index in order], shared_lengths, budget)
    micro_batches = [
        _layout(arrays, order[i:j], [0, *shared_lengths[i + 1 : j]]) for i, j in pairwise(borders)
    ]
    return sorted(micro_batches, key=lambda micro_batch: micro_batch.datums[0])


def _common_prefix_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two token sequences."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


def _micro_batch_borders(lengths: list[int], shared_lengths: list[int], budget: int) -> list[int]:
    """Return the borders of the micro-batches with the lowest total cost.

    A cut costs `_CUT_COST` plus the length of the shared prefix, which must be computed again.

    This is a dynamic program over `stop`, the end of a micro-batch. It chooses the cheapest start
    of that micro-batch. The cost of a start does not depend on `stop`. The starts whose rows fit
    into the budget form a sliding window, which only moves forward as `stop` grows. A monotonic
    queue has the cheapest start of the window at its head, so one pass over the sequences is
    enough.
    """
    n = len(lengths)
    row_offsets = [
        0,
        *accumulate(
            length - common for length, common in zip(lengths, shared_lengths, strict=True)
        ),
    ]
    best, came_from = [0] * (n + 1), [0] * (n + 1)
    costs = [0] * n
    """For each start: the lowest cost of all cuts up to and including the one at this start."""
    starts: deque[int] = deque()
    for stop in range(1, n + 1):
        last = stop - 1
        costs[last] = best[last] + (shared_lengths[last] + _CUT_COST if last else 0)
        while starts and costs[starts[-1]] >= costs[last]:
            starts.pop()
        starts.append(last)
        # If sequence `last` exceeds the budget, the maximum is its own length. Then only its
        # prefixes and copies fit beside it, because they add no row.
        max_rows = max(budget, lengths[last])
        while (
            stop - starts[0] > _MAX_DATUMS
            or row_offsets[stop] - row_offsets[starts[0]] + shared_lengths[starts[0]] > max_rows
        ):
            starts.popleft()
        best[stop], came_from[stop] = costs[starts[0]], starts[0]
    borders = [n]
    while borders[-1] > 0:
        borders.append(came_from[borders[-1]])
    return borders[::-1]


def _layout(
    arrays: Sequence[np.ndarray], order: Sequence[int], shared_lengths: Sequence[int]
) -> MicroBatch:
    """Return the forest of the sequences `order`, which are sorted by their tokens.

    `shared_lengths`: length of the common prefix of each sequence with the previous one.
    """
    total_rows = sum(len(arrays[index]) for index in order) - sum(shared_lengths)
    tokens, positions = np.empty(total_rows, np.int64), np.empty(total_rows, np.int64)
    subtree_end = np.full(total_rows, total_rows, np.int64)
    datum_rows: dict[int, np.ndarray] = {}
    path = np.empty(0, np.int64)
    num_rows = 0
    for index, shared_length in zip(order, shared_lengths, strict=True):
        sequence = arrays[index]
        new = slice(num_rows, num_rows + len(sequence) - shared_length)
        subtree_end[path[shared_length:]] = num_rows
        tokens[new] = sequence[shared_length:]
        positions[new] = np.arange(shared_length, len(sequence))
        path = np.concatenate([path[:shared_length], np.arange(new.start, new.stop)])
        datum_rows[index] = path
        num_rows = new.stop
    datums = tuple(sorted(order))
    return MicroBatch(
        tokens,
        positions,
        subtree_end,
        _segments(subtree_end),
        datums,
        tuple(datum_rows[index] for index in datums),
    )


def _segments(subtree_end: np.ndarray) -> tuple[Segment, ...]:
    """Return the segments of a forest, given the subtree end of each row."""
    # Two adjacent rows whose subtrees have the same end are a parent and its only child. If the
    # ends differ, a new segment begins.
    starts = [0, *(np.flatnonzero(subtree_end[1:] != subtree_end[:-1]) + 1).tolist()]
    ends = [*starts[1:], len(subtree_end)]
    segments: list[Segment] = []
    open_segments: list[Segment] = []
    for start, end in zip(starts, ends, strict=True):
        while open_segments and open_segments[-1].subtree_end <= start:
            open_segments.pop()
        parent = open_segments[-1] if open_segments else None
        ancestors = _joined(parent.ancestors, (parent.start, parent.end)) if parent else ()
        segments.append(Segment(start, end, int(subtree_end[start]), ancestors))
        open_segments.append(segments[-1])
    return tuple(segments)


def _joined(
    ranges: tuple[tuple[int, int], ...], last: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Append the range `last` to `ranges`; merge it with the last range if they are adjacent."""
    if ranges and ranges[-1][1] == last[0]:
        return (*ranges[:-1], (ranges[-1][0], last[1]))
    return (*ranges, last)
