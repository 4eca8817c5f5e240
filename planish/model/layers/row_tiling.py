"""The row counts for which torch's matmuls are batch-invariant.

kernels/reference/probe.py finds the `RowTiling` of a model on this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_ROWS = 16
"""Minimum number of rows of the matmuls of torch's attention in the trainer, where padding costs
almost nothing.

No machine tested so far needed more rows for batch invariance.
"""
FIXED_TILE = 32
"""Rows per tile if no number of rows is batch-invariant."""


@dataclass(frozen=True)
class LoraRowRule:
    """The row counts that make an adapter's LoRA matmuls in torch batch-invariant."""

    min_rows: int | None
    """Minimum number of rows. None: no tested number of rows is batch-invariant."""
    multiple: int = 1
    """The number of rows must be a multiple of this. Some matrix-vector products of rank 1 need 4.
    """
    can_stack: bool = False
    """Whether one batched matmul of several adapters is bit-identical to separate matmuls."""


@dataclass(frozen=True)
class RowTiling:
    """The padding of row counts that makes matmuls batch-invariant."""

    multiple: int = 1
    """The number of rows of each matmul is padded to a multiple of this."""
    tile: int | None = None
    """If given, every matmul runs in tiles of exactly this many rows."""
    query_rows: int = QUERY_ROWS
    """Minimum number of rows of torch's float32 matmuls in the attention."""
    min_rows: int = 1
    """Minimum number of rows of matmuls with the base weights."""
    lora: Callable[[int], LoraRowRule] | None = None
    """Maps a rank to the rule for its adapters. None: adapters need no more than the base weights.
    """

    def padded(self, num_rows: int, rank: int | None = None) -> int:
        """Return the padded number of rows of a matmul with base weights or LoRA of `rank`."""
        min_rows, multiple = self.min_rows, self.multiple
        if rank is not None and self.lora is not None:
            rule = self.lora(rank)
            min_rows, multiple = max(min_rows, rule.min_rows or 1), max(multiple, rule.multiple)
        num_rows = max(num_rows, min_rows)
        return num_rows + -num_rows % multiple  # each of _MULTIPLES divides the next

    def run(
        self, function: Callable[..., Tensor], *tensors: Tensor, rank: int | None = None
    ) -> Tensor:
        """Return function(*tensors), computed with batch-invariant numbers of rows.

        `tensors` and the result are matrices with T rows, one per row of the batch. The function
        may modify every tensor except the first in place. `rank`: the LoRA rank if the function
        computes LoRA matmuls, else None.
        """
        num_rows = tensors[0].shape[0]
        missing = self.padded(num_rows, rank) - num_rows
        given = tuple(F.pad(x, (0, 0, 0, missing)) for x in tensors) if missing else tensors
        if self.tile is None:
            found = function(*given)
        else:
            tiles = zip(*(x.split(self.tile) for x in given), strict=True)
            found = torch.cat([function(*tile) for tile in tiles])
        if not missing:
            return found
        for x, padded in zip(tensors[1:], given[1:], strict=True):
            x.copy_(padded[:num_rows])
        return found[:num_rows]

    def is_invariant(self, rank: int) -> bool:
        """Return whether samples of adapters of this rank are batch-invariant."""
        return self.lora is None or self.lora(rank).min_rows is not None

    def can_stack(self, rank: int) -> bool:
        """Return whether batched matmuls of several adapters of this rank are bit-identical to
        separate ones.
        """
        return self.lora is not None and self.lora(rank).can_stack


FIXED = RowTiling(multiple=FIXED_TILE, tile=FIXED_TILE)
ANY_ROWS = RowTiling()
"""No padding: every number of rows is used as it is."""


class RowTilings:
    """The row tilings of one model's matmuls, in the sampler and in the trainer."""

    def __init__(self, tiling: RowTiling | None) -> None:
        """`tiling`: the row counts that make matmuls batch-invariant, or None for any rows."""
        self._tiling = tiling
        self.sampling = ANY_ROWS if tiling is None else tiling
        # Fixed tiles are too slow for the many rows of the trainer.
        self._training = ANY_ROWS if self.sampling.tile else self.sampling

    def of(self, *, training: bool) -> RowTiling:
        """Return the tiling of the trainer or of the sampler."""
        return self._training if training else self.sampling

    @property
    def query_rows(self) -> int:
        """The minimum number of query rows of torch's attention in a decoding step."""
        return 1 if self._tiling is None else self._tiling.query_rows

    def can_stack(self, rank: int) -> bool:
        """Return whether one batched matmul may compute several adapters of this rank."""
        return self._tiling is None or self._tiling.can_stack(rank)


def row_slices(total: int, size: int) -> list[slice]:
    """Return slices of at most `size` that cover range(total)."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
