"""Which rows of a batch use which adapter, in tables on the device, for products of many adapters
at once (lora_kernels.py).

A captured CUDA graph runs with the addresses and sizes that it was captured with. So the tables
stay where they are and `fill` rewrites what is in them: tiles of rows, and for each adapter of the
batch a slot with the addresses of its matrices, which are used in place. LoraWeights never move or
change, so a slot is written once while its adapter stays; the tables hold on to the adapters of the
last batch, and to no others.

All is in the order of the current stream: `fill`, then the products, of one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from planish.model.config import ModelConfig
from planish.model.kernels.backend import LoraMatrices
from planish.model.lora import SITES, AdapterRows, LoraWeights

_MATRICES = 4
"""Of a site: A and up to three Bs."""
_ALIGNMENT = 16
"""Bytes that one instruction can load."""


class AdapterTables:
    """For batches of at most so many rows and adapters. A graph may be captured after the same
    calls were made once, which compiles.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_adapters: int,
        max_rank: int = 256,
    ) -> None:
        self._kernels = import_module(
            "planish.model.kernels.triton.lora_kernels"
        )  # only where there is Triton
        self._config = config
        self._dtype = dtype
        self._max_rows = max_rows
        self._max_rank = max_rank
        self._aligned = _keeps_aligned(config, dtype)
        sites = len(SITES) * config.num_layers + 1
        most_tiles = max_rows // self._kernels.TILE + max_adapters
        self._tiles = _Mirrored((1 + most_tiles, 4), torch.int32, device)
        self._pointers = _Mirrored((max_adapters, sites, _MATRICES), torch.int64, device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._parts: Tensor = self._kernels.scratch(
            max_rows, self._kernels.MOST_LINEARS * max_rank, device
        )
        self._slots: dict[LoraWeights, int] = {}

    def fill(self, adapters: Sequence[AdapterRows]) -> None:
        """From now on these are the rows with adapters, those of each together; all others have
        none. Without any, every adapter is let go of.
        """
        used = [
            (rows, rows.weights)
            for rows in adapters
            if rows.weights is not None and rows.stop > rows.start
        ]
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still read what is written here
        self._place([weights for _, weights in used])
        spans = [
            (rows.start, rows.stop, self._slots[weights], weights.layout.lora.rank)
            for rows, weights in used
        ]
        self._write_tiles(np.array(spans, np.int32).reshape(-1, 4))
        if self._copied is not None:
            self._copied.record()

    def add_(self, x: Tensor, out: Tensor, sizes: Sequence[int], layer: int, module: str) -> None:
        """Adds to `out` [T, sum(sizes)], the base model's linears of x [T, in] side by side, what
        the rows' adapters have at this site.
        """
        self._add(x, out, sizes, layer * len(SITES) + SITES.index(module))

    def add_head_(self, hidden: Tensor, logits: Tensor) -> None:
        """Adds to logits [R, V], float32, what the rows' adapters make of hidden [R, D]."""
        self._add(hidden, logits, [logits.shape[1]], len(SITES) * self._config.num_layers)

    def _add(self, x: Tensor, out: Tensor, sizes: Sequence[int], site: int) -> None:
        assert x.dtype == self._dtype
        tables = self._tiles.device, self._pointers.device, self._parts
        self._kernels.add_(x, out, sizes, site, *tables, aligned=self._aligned)

    def _place(self, members: Sequence[LoraWeights]) -> None:
        """A slot for each of them, and for nobody else."""
        known, self._slots = self._slots, {}
        for weights in members:
            if weights in known:
                self._slots[weights] = known[weights]
        free = set(range(len(self._pointers.host))).difference(self._slots.values())
        for weights in members:
            if weights not in self._slots:
                assert free, f"more than {len(self._pointers.host)} adapters in a batch"
                self._write_pointers(free.pop(), weights)

    def _write_pointers(self, slot: int, weights: LoraWeights) -> None:
        layout = weights.layout
        assert layout.model == self._config
        assert layout.lora.rank <= self._max_rank
        assert all(matrix.dtype == self._dtype for matrix in weights.leaves)
        addresses = self._pointers.host[slot]
        sites = [getattr(layer, name) for layer in weights.layers for name in SITES]
        addresses[:] = [_addresses(site) for site in (*sites, weights.head)]
        assert not (self._aligned and np.any(addresses % _ALIGNMENT))
        self._pointers.copy(slot, slot + 1)
        self._slots[weights] = slot

    def _write_tiles(self, spans: np.ndarray) -> None:
        """Cuts (start, stop, slot, rank) [n, 4] into tiles."""
        size = self._kernels.TILE
        starts, stops, slots, ranks = spans.T
        counts = -(-(stops - starts) // size)
        total = int(counts.sum())
        assert 1 + total <= len(self._tiles.host), "more rows than the tables are for"
        assert max(stops, default=0) <= self._max_rows
        number = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.repeat(starts, counts) + size * number
        last = np.minimum(first + size, np.repeat(stops, counts))
        self._tiles.host[0] = total, max(ranks, default=0), 0, 0
        self._tiles.host[1 : 1 + total] = np.stack(
            [first, last - first, np.repeat(slots, counts), np.repeat(ranks, counts)], 1
        )
        self._tiles.copy(0, 1 + total)


class _Mirrored:
    """A table on the device, and where the host writes what is to be copied into it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self._staged = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.host: np.ndarray = self._staged.numpy()

    def copy(self, start: int, stop: int) -> None:
        """Entries start .. stop - 1, without waiting for the device."""
        self.device[start:stop].copy_(self._staged[start:stop], non_blocking=True)


def _addresses(site: LoraMatrices | None) -> list[int]:
    found = [] if site is None else [site.a.data_ptr(), *(b.data_ptr() for b in site.bs)]
    return found + [0] * (_MATRICES - len(found))


def _keeps_aligned(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether every matrix of an adapter of any rank begins at a multiple of _ALIGNMENT, if its
    vector does: sizes are products of these and the rank.
    """
    heads = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim)
    sizes = (config.hidden_size, config.intermediate_size, *heads)
    return all(size * dtype.itemsize % _ALIGNMENT == 0 for size in sizes)
