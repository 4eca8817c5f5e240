"""Tables on the GPU that tell the LoRA kernels which rows use which adapter (lora_kernels.py).

A captured CUDA graph runs with the addresses and sizes of its capture. So the tables have fixed
addresses, and `fill` overwrites their contents. One table lists tiles of rows. The other has a slot
for each adapter of the batch, with the addresses of its matrices. `LoraWeights` never move or
change, so an adapter's slot is written only when the adapter joins the batch. The tables keep
references only to the adapters of the last batch.

Call `fill` and then the matmuls from one thread and on one stream.

Shapes: T rows, `in` columns of the input, R rows of the head, D hidden, V vocabulary, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from planish.model.architecture.config import ModelConfig
from planish.model.layers.expert_pairs import TokenExpertPairs
from planish.model.layers.lora import FUSED_MODULE_NAMES, AdapterRange, LoraMatrices, LoraWeights

_MATRICES = 4
"""The number of matrices of a target module: A and up to three Bs."""
_ALIGNMENT = 16
"""The bytes that the widest load instruction reads. Its address must be a multiple of this number.
"""


class AdapterTables:
    """The adapters of the rows of a batch, for LoRA matmuls that a CUDA graph can capture.

    Call each method once before capturing a graph, because the first call compiles its kernels.
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
        """`max_rows`, `max_adapters`, `max_rank`: the maximum sizes of a batch."""
        self._kernels = import_module(
            "planish.model.kernels.triton.lora_kernels"
        )  # Triton is absent on machines without a GPU.
        self._config = config
        self._dtype = dtype
        self._max_rows = max_rows
        self._max_rank = max_rank
        self._aligned = _keeps_aligned(config, dtype)
        modules = len(FUSED_MODULE_NAMES) * config.num_layers + 1
        most_tiles = max_rows // self._kernels.TILE + max_adapters
        self._tiles = _Mirrored((1 + most_tiles, 4), torch.int32, device)
        self._pointers = _Mirrored((max_adapters, modules, _MATRICES), torch.int64, device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._parts: Tensor = self._kernels.scratch(
            max_rows, self._kernels.MAX_FUSED_LINEARS * max_rank, device
        )
        self._slots: dict[LoraWeights, int] = {}
        self._ranges: list[tuple[int, int, LoraWeights]] = []
        """The adapters in the tables, with their first row and the row after their last one."""

    def fill(self, adapters: Sequence[AdapterRange]) -> None:
        """Set the adapters of the next batch. Rows outside of `adapters` use none.

        The rows of one adapter must be consecutive. An empty list drops the references to all
        adapters.
        """
        used = [
            (rows.start, rows.stop, rows.weights)
            for rows in adapters
            if rows.weights is not None and rows.stop > rows.start
        ]
        if used == self._ranges:
            return
        if self._copied is not None:
            # The previous asynchronous copy may still read the host tables.
            self._copied.synchronize()
        self._place([weights for *_, weights in used])
        spans = [
            (start, stop, self._slots[weights], weights.layout.lora_config.rank)
            for start, stop, weights in used
        ]
        self._write_tiles(np.array(spans, np.int32).reshape(-1, 4))
        if self._copied is not None:
            self._copied.record()
        self._ranges = used

    def add_(self, x: Tensor, out: Tensor, sizes: Sequence[int], layer: int, module: str) -> None:
        """Add the LoRA outputs of one target module for x [T, in] to `out` [T, sum(sizes)].

        `module`: a name in `fused_module_names`.
        """
        self._add(x, out, sizes, layer * len(FUSED_MODULE_NAMES) + FUSED_MODULE_NAMES.index(module))

    def add_expert_(
        self, x: Tensor, out: Tensor, pairs: TokenExpertPairs, layer: int, module: str
    ) -> None:
        """Raise NotImplementedError: models with experts do not use these tables."""
        raise NotImplementedError("the LoRA kernels of a GPU do not cover experts")

    def add_head_(self, hidden: Tensor, logits: Tensor) -> None:
        """Add the outputs of the head adapters for hidden [R, D] to `logits` [R, V], float32."""
        self._add(
            hidden, logits, [logits.shape[1]], len(FUSED_MODULE_NAMES) * self._config.num_layers
        )

    def _add(self, x: Tensor, out: Tensor, sizes: Sequence[int], module: int) -> None:
        assert x.dtype == self._dtype
        tables = self._tiles.device, self._pointers.device, self._parts
        self._kernels.add_(x, out, sizes, module, *tables, aligned=self._aligned)

    def _place(self, members: Sequence[LoraWeights]) -> None:
        """Give each of these adapters a slot and free the slots of all others."""
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
        assert layout.model_config == self._config
        assert layout.lora_config.rank <= self._max_rank
        assert all(matrix.dtype == self._dtype for matrix in weights.leaves)
        addresses = self._pointers.host[slot]
        modules = [
            layer.matrices_of(name) for layer in weights.layers for name in FUSED_MODULE_NAMES
        ]
        addresses[:] = [_addresses(module) for module in (*modules, weights.head)]
        assert not (self._aligned and np.any(addresses % _ALIGNMENT))
        self._pointers.copy(slot, slot + 1)
        self._slots[weights] = slot

    def _write_tiles(self, spans: np.ndarray) -> None:
        """Divide the row ranges `spans`, (start, stop, slot, rank) [n, 4], into tiles."""
        size = self._kernels.TILE
        starts, stops, slots, ranks = spans.T
        counts = -(-(stops - starts) // size)
        total = int(counts.sum())
        assert 1 + total <= len(self._tiles.host), "more row tiles than the tables have entries"
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
    """A table on the device, with a host copy in which new contents are prepared."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self._staged = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.host: np.ndarray = self._staged.numpy()

    def copy(self, start: int, stop: int) -> None:
        """Copy entries start .. stop - 1 to the device, asynchronously."""
        self.device[start:stop].copy_(self._staged[start:stop], non_blocking=True)


def _addresses(module: LoraMatrices | None) -> list[int]:
    found = (
        [] if module is None else [module.a.data_ptr(), *(b.data_ptr() for b in module.b_matrices)]
    )
    return found + [0] * (_MATRICES - len(found))


def _keeps_aligned(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Return whether all matrices of every adapter begin at multiples of _ALIGNMENT.

    `LoraWeights` stores the matrices of an adapter one after another in a flat vector. The size of
    each matrix is the rank times one of the sizes below. So all matrices are aligned for any rank,
    if the flat vector begins at an aligned address.
    """
    heads = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim)
    sizes = (config.hidden_size, config.intermediate_size, *heads)
    return all(size * dtype.itemsize % _ALIGNMENT == 0 for size in sizes)
