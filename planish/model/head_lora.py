"""The head's adapters of a batch's rows: their part of the logits, with one order of sums for
sampler and trainer.

In the CPU's own kernel all of them are one call; where it does not serve, torch multiplies one
after another.

Shapes: R rows, D hidden, V vocabulary, r rank, P (row, token) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planish.model.kernels.cpp.cpu_head import HeadTable
from planish.model.lora import Site

Member = tuple[int, int, Site]
"""Rows start .. stop - 1 have this adapter: A [r, D], B [V, r], the scaling multiplied into B."""


class HeadLora:
    def __init__(
        self, members: Sequence[Member], hidden: Tensor, low: Tensor | None = None
    ) -> None:
        """`low`: of these rows, if it is known."""
        self._members = members
        self.table = HeadTable(
            [(start, stop, site.bs[0].detach(), site.panels) for start, stop, site in members]
        )
        self.low = self._low(hidden) if low is None else low
        """What lies between A and B, in hidden's dtype: [R, r or more]; a row without an adapter
        has anything.
        """

    def _low(self, hidden: Tensor) -> Tensor:
        if self.table.is_served:
            return self.table.low(hidden.contiguous())
        low = hidden.new_empty(hidden.shape[0], self.table.width)
        for start, stop, site in self._members:
            low[start:stop, : len(site.a)] = hidden[start:stop] @ site.a.t()
        return low

    def add_(self, logits: Tensor) -> None:
        """Adds the adapters' part to logits [R, V], in place."""
        if self.table.is_served:
            self.table.add_(self.low, logits)
            return
        for start, stop, site in self._members:
            low, b = self.low[start:stop, : len(site.a)], site.bs[0]
            if logits.dtype == low.dtype:
                logits[start:stop].addmm_(low, b.t())
            else:
                logits[start:stop].add_(torch.mm(low, b.t(), out_dtype=logits.dtype))

    def add_single_(self, out: Tensor, rows: Tensor, tokens: Tensor) -> None:
        """Adds it to single logits [P], in their dtype."""
        for start, stop, site in self._members:
            mine = ((rows >= start) & (rows < stop)).nonzero().squeeze(1)
            low, b = self.low[rows[mine], : len(site.a)], site.bs[0][tokens[mine]]
            out[mine] += (low.to(out.dtype) * b.to(out.dtype)).sum(-1)
