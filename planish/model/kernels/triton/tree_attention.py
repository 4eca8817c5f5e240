"""The trainer's attention on a GPU: the plan of visible tiles for the kernels of tree_kernels.py.

Tiles are runs of consecutive rows; they ignore the borders of segments. Query i attends to key j if
j <= i < subtree_end[j] (sequences/prefix_tree.py), and if their positions differ by less than the
layer's attention window.

For a query tile and a key tile there are three cases: no (query, key) pair is visible, all pairs
are visible, or the kernel needs a mask. The case follows from the largest and the smallest
`subtree_end` of the key tile, and from the largest and smallest positions of both tiles. So no tree
traversal is necessary. The plan is one table, which is copied to the device asynchronously. All
layers with the same window and the backward pass use the same table.

In the backward pass, a key tile may have few query tiles or very many (a prefix that all sequences
share). A long run of query tiles is divided among programs, and their sums are added afterwards.

Shapes: T rows, Hq and Hkv heads, E head_dim, G = Hq / Hkv.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from planish.model.device import copy_async
from planish.model.sequences.prefix_tree import MicroBatch

if TYPE_CHECKING:
    from planish.model.kernels.triton.tree_kernels import Table, Tiles

_PROGRAMS = 528
"""The target number of programs that compute the gradients of all keys in one layer.

It is four for each multiprocessor of an H200.
"""
_FEWEST_TILES = 16
"""The minimum number of query tiles of a part, if a run of query tiles is divided.

With smaller parts, adding the sums would cost more time than the division saves.
"""
_ALIGNED = 4
"""Each array of the table begins at a multiple of this many entries.

Four entries have 16 bytes, the alignment for which Triton specializes kernels.
"""


class TritonTreeAttention:
    """The attention of the trainer for one micro-batch, with gradients (see `Attend`)."""

    def __init__(
        self,
        micro_batch: MicroBatch,
        device: torch.device,
        windows: Sequence[int | None] = (),
    ) -> None:
        """`windows`: the attention window of each layer (see `ModelConfig.attention_windows`)."""
        # Triton is absent on machines without a GPU.
        self._kernels = import_module("planish.model.kernels.triton.tree_kernels")
        self._subtree_end = micro_batch.subtree_end
        self._positions = micro_batch.positions
        self._device, self._windows = device, windows
        self._tables: dict[tuple[torch.dtype, torch.Size, int, int | None], Table] = {}

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Return the attention output [T, Hq, E] (see `Attend`)."""
        window = self._windows[layer] if self._windows else None
        return _Forest.apply(q, k, v, self, window, sinks)  # type: ignore[no-any-return]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output [T, Hq, E] and the log-sum-exp of the scores, float32 [T, Hq]."""
        return self._kernels.attend(q, k, v, self._table(q, k, window), sinks)

    def attend_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, given the gradient of the output."""
        return self._kernels.attend_backward(grad, q, k, v, out, lse, self._table(q, k, window))

    def _table(self, q: Tensor, k: Tensor, window: int | None) -> Table:
        """Return the table for this shape and window, which several layers share."""
        shape = (q.dtype, q.shape[1:], k.shape[1], window)
        if shape not in self._tables:
            group = q.shape[1] // k.shape[1]
            common = import_module("planish.model.kernels.triton.common")
            shared = common.shared_memory(self._device)
            tiles = self._kernels.tiles_for(q.dtype, q.shape[2], group, shared)
            queries, keys = (
                query_plan(self._subtree_end, tiles, group, self._positions, window),
                key_plan(self._subtree_end, tiles, group, k.shape[1], self._positions, window),
            )
            arrays = [
                self._subtree_end,
                queries.items,
                queries.lists,
                keys.items,
                keys.sums,
                self._positions,
            ]
            *tensors, positions = _on_device(arrays, self._device)
            self._tables[shape] = self._kernels.Table(
                tiles, *tensors, keys.places, positions, window
            )
        return self._tables[shape]


class _Forest(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        forest: TritonTreeAttention,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        out, lse = forest.attend(q, k, v, window, sinks)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.forest, ctx.window = forest, window
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grads = ctx.forest.attend_backward(grad, *ctx.saved_tensors, ctx.window)
        return *grads, None, None, None


@dataclass(frozen=True, eq=False)
class QueryPlan:
    """The query tiles and their key tiles: the fields `query_items` and `lists` of a `Table`."""

    items: np.ndarray
    lists: np.ndarray


@dataclass(frozen=True, eq=False)
class KeyPlan:
    """The key tiles and their query tiles: `key_items`, `sums` and `places` of a `Table`."""

    items: np.ndarray
    sums: np.ndarray
    places: int


def query_plan(
    subtree_end: np.ndarray,
    tiles: Tiles,
    group: int,
    positions: np.ndarray | None = None,
    window: int | None = None,
) -> QueryPlan:
    """Return the key tiles that each query tile attends to.

    Key tiles whose pairs are all visible come first. The others need a mask. `group`: G.
    `positions`: the position of each row, for a `window`.
    """
    rows = tiles.forward.queries // group
    first = np.arange(0, len(subtree_end), rows)[:, None]
    stop = first + rows
    keys = _KeyTiles.of(subtree_end, tiles.forward.keys)
    met = (keys.first < stop) & (keys.max_end > first)
    whole = met & (keys.last <= first) & (keys.min_end >= stop)
    if window is not None and positions is not None:
        near, inside = _in_window(positions, window, rows, tiles.forward.keys)
        met &= near
        whole &= inside
    counts, whole_counts = met.sum(1), whole.sum(1)
    lists = np.nonzero(np.hstack([whole, met & ~whole]))[1] % len(keys.first)
    ends = np.cumsum(counts)
    begins = ends - counts
    items = np.stack([np.arange(len(first)), begins, begins + whole_counts, ends], 1)
    return QueryPlan(items[np.argsort(-counts, kind="stable")], lists)


def key_plan(
    subtree_end: np.ndarray,
    tiles: Tiles,
    group: int,
    heads: int,
    positions: np.ndarray | None = None,
    window: int | None = None,
) -> KeyPlan:
    """Return the run of query tiles that attend to each key tile.

    The query tiles of a key tile are consecutive. A run that is too long for one program is
    divided. `group`: G. `heads`: Hkv. `positions`: the position of each row, for a `window`. With a
    window, the run ends with the last query tile that attends to the key tile. It may contain query
    tiles that do not, and all of its query tiles need a mask.
    """
    rows = tiles.backward_keys.queries // group
    keys = _KeyTiles.of(subtree_end, tiles.backward_keys.keys)
    begin, end = keys.first // rows, -(-keys.max_end // rows)
    full = -(-keys.last // rows)
    full_end = np.maximum(keys.min_end // rows, full)
    if window is not None and positions is not None:
        near, _ = _in_window(positions, window, rows, tiles.backward_keys.keys)
        tile_numbers = np.arange(len(near))[:, None]
        attends = near & (tile_numbers >= begin) & (tile_numbers < end)
        # Every row attends to itself, so each key tile has a query tile.
        end = len(near) - np.argmax(attends[::-1], axis=0)
        full = full_end = np.minimum(full, end)
    most = max(_FEWEST_TILES, -(-int((end - begin).sum()) * heads // _PROGRAMS))
    parts = -(-(end - begin) // most)
    tile = np.repeat(np.arange(len(parts)), parts)
    number = np.arange(len(tile)) - (np.cumsum(parts) - parts)[tile]
    length = -(-(end - begin) // parts)[tile]
    own_begin = np.minimum(begin[tile] + number * length, end[tile])
    own_end = np.minimum(own_begin + length, end[tile])
    own_full, own_full_end = (np.clip(x[tile], own_begin, own_end) for x in (full, full_end))
    divided = parts[tile] > 1
    place = np.where(divided, np.cumsum(divided) - 1, -1)
    items = np.stack([tile, own_begin, own_full, own_full_end, own_end, place], 1)
    many = np.flatnonzero(parts > 1)
    sums = np.stack([many, np.cumsum(parts[many]) - parts[many], parts[many]], 1)
    return KeyPlan(items[np.argsort(own_begin - own_end, kind="stable")], sums, int(divided.sum()))


def _in_window(
    positions: np.ndarray, window: int, query_rows: int, keys: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return whether some pairs of a query tile and a key tile may be in the window, and whether
    all are: bool [query tiles, key tiles].
    """
    first_query, first_key = (np.arange(0, len(positions), size) for size in (query_rows, keys))
    queries = positions[:, None]
    earliest, latest = (of.reduceat(queries, first_query) for of in (np.minimum, np.maximum))
    first, last = (of.reduceat(positions, first_key) for of in (np.minimum, np.maximum))
    return last > earliest - window, first > latest - window


@dataclass(frozen=True, eq=False)
class _KeyTiles:
    """The rows and the subtree ends of key tiles, as arrays with one entry per tile.

    `first`, `last`: the first and the last row. `last` may exceed the number of rows in the last
    tile. `max_end`, `min_end`: the largest and the smallest `subtree_end` of the tile's rows.
    """

    first: np.ndarray
    last: np.ndarray
    max_end: np.ndarray
    min_end: np.ndarray

    @classmethod
    def of(cls, subtree_end: np.ndarray, keys: int) -> _KeyTiles:
        """Return the tiles of `keys` rows each."""
        first = np.arange(0, len(subtree_end), keys)
        return cls(
            first,
            first + keys - 1,
            np.maximum.reduceat(subtree_end, first),
            np.minimum.reduceat(subtree_end, first),
        )


def _on_device(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return the integer arrays as int32 tensors, sent to the device in one asynchronous copy."""
    sizes = [-(-array.size // _ALIGNED) * _ALIGNED for array in arrays]
    joined = np.zeros(sum(sizes), np.int32)
    starts = np.cumsum([0, *sizes[:-1]])
    for start, array in zip(starts, arrays, strict=True):
        joined[start : start + array.size] = array.ravel()
    table = copy_async(torch.from_numpy(joined), device)
    return [table[s : s + a.size].view(a.shape) for s, a in zip(starts, arrays, strict=True)]
