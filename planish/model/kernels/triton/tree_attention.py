"""Attention of the trainer on a GPU: which tiles of queries and keys of a forest meet, for the
kernels of tree_kernels.py.

Tiles are runs of rows, cut without regard to segments. A tile of keys is seen by rows from its
first to the largest `until` in it, so two numbers a tile, its largest and its smallest `until`,
tell which pairs of tiles have nothing visible, which all, and which need the mask. No tree is
walked, whatever its form. One table, copied to the device once without waiting for it, serves all
layers and the backward pass.

The queries of a key tile may be many (a prefix shared by all) or few, so long runs are divided, and
the parts added up afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from planish.model.prefix_tree import Packed
from planish.model.transfer import sent

if TYPE_CHECKING:
    from planish.model.kernels.triton.tree_kernels import Table, Tiles

_PROGRAMS = 528
"""How many programs the queries of all keys are to be divided among, at least: four for each
multiprocessor of an H200.
"""
_FEWEST_TILES = 16
"""Query tiles of a part, at least: fewer would not pay for adding it."""
_ALIGNED = 4
"""Entries to which a part of the table is padded: 16 bytes, by which Triton loads and specializes.
"""


class GpuForest:
    """An `Attend` of the decoder for one micro-batch, with gradients, in Triton's kernels."""

    def __init__(self, packed: Packed, device: torch.device) -> None:
        # Triton is absent on machines without a GPU.
        self._kernels = import_module("planish.model.kernels.triton.tree_kernels")
        self._until = packed.subtree_end
        self._device = device
        self._tables: dict[tuple[torch.dtype, torch.Size, int], Table] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Forest.apply(q, k, v, self)  # type: ignore[no-any-return]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernels.attend(q, k, v, self._table(q, k))

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._kernels.attend_backward(grad, q, k, v, out, lse, self._table(q, k))

    def _table(self, q: Tensor, k: Tensor) -> Table:
        """All layers of a model have one shape, so there is one table."""
        shape = (q.dtype, q.shape[1:], k.shape[1])
        if shape not in self._tables:
            group = q.shape[1] // k.shape[1]
            common = import_module("planish.model.kernels.triton.common")
            shared = common.shared_memory(self._device)
            tiles = self._kernels.tiles_for(q.dtype, q.shape[2], group, shared)
            queries, keys = (
                query_plan(self._until, tiles, group),
                key_plan(self._until, tiles, group, k.shape[1]),
            )
            arrays = [self._until, queries.items, queries.lists, keys.items, keys.sums]
            self._tables[shape] = self._kernels.Table(
                tiles, *_on_device(arrays, self._device), keys.places
            )
        return self._tables[shape]


class _Forest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, forest: GpuForest) -> Tensor:
        out, lse = forest.attend(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.forest = forest
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *ctx.forest.attend_backward(grad, *ctx.saved_tensors), None


def visible_pairs(packed: Packed) -> int:
    """How many (query, key) pairs of the forest there are, in one head: the useful work of its
    attention.
    """
    return int((packed.subtree_end - np.arange(len(packed))).sum())


@dataclass(frozen=True, eq=False)
class QueryPlan:
    """`query_items` and `lists` of a Table."""

    items: np.ndarray
    lists: np.ndarray


@dataclass(frozen=True, eq=False)
class KeyPlan:
    """`key_items`, `sums` and `places` of a Table."""

    items: np.ndarray
    sums: np.ndarray
    places: int


def query_plan(until: np.ndarray, tiles: Tiles, group: int) -> QueryPlan:
    """For each tile of queries, the key tiles that it meets: those that it sees whole, then the
    others.
    """
    rows = tiles.forward.queries // group
    first = np.arange(0, len(until), rows)[:, None]
    stop = first + rows
    keys = _KeyTiles.of(until, tiles.forward.keys)
    met = (keys.first < stop) & (keys.longest > first)
    whole = met & (keys.last <= first) & (keys.shortest >= stop)
    counts, whole_counts = met.sum(1), whole.sum(1)
    lists = np.nonzero(np.hstack([whole, met & ~whole]))[1] % len(keys.first)
    ends = np.cumsum(counts)
    begins = ends - counts
    items = np.stack([np.arange(len(first)), begins, begins + whole_counts, ends], 1)
    return QueryPlan(items[np.argsort(-counts, kind="stable")], lists)


def key_plan(until: np.ndarray, tiles: Tiles, group: int, heads: int) -> KeyPlan:
    """For each tile of keys, the query tiles that it meets: all from one to another, divided where
    they are too many for one program.
    """
    rows = tiles.backward_keys.queries // group
    keys = _KeyTiles.of(until, tiles.backward_keys.keys)
    begin, end = keys.first // rows, -(-keys.longest // rows)
    full = -(-keys.last // rows)
    full_end = np.maximum(keys.shortest // rows, full)
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


@dataclass(frozen=True, eq=False)
class _KeyTiles:
    """Of each tile of keys: its first row, its last row were it whole, and the largest and smallest
    `until`.
    """

    first: np.ndarray
    last: np.ndarray
    longest: np.ndarray
    shortest: np.ndarray

    @classmethod
    def of(cls, until: np.ndarray, keys: int) -> _KeyTiles:
        first = np.arange(0, len(until), keys)
        return cls(
            first,
            first + keys - 1,
            np.maximum.reduceat(until, first),
            np.minimum.reduceat(until, first),
        )


def _on_device(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Integers as int32, in one copy that the host does not wait for."""
    sizes = [-(-array.size // _ALIGNED) * _ALIGNED for array in arrays]
    joined = np.zeros(sum(sizes), np.int32)
    starts = np.cumsum([0, *sizes[:-1]])
    for start, array in zip(starts, arrays, strict=True):
        joined[start : start + array.size] = array.ravel()
    table = sent(torch.from_numpy(joined), device)
    return [table[s : s + a.size].view(a.shape) for s, a in zip(starts, arrays, strict=True)]
