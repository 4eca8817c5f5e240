"""The row layout of a batch with several adapters, and the LM head over such a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.model.decoder import Decoder
from planish.model.head import exact_logits, head_logits
from planish.model.head_lora import Member
from planish.model.kernels.reference.row_tiling import RowTiling
from planish.model.lora import AdapterRows, LoraWeights
from planish.model.transfer import on_device


class RowLayout:
    """The batch rows of each member (a prompt or a sample), grouped by adapter.

    Each adapter's rows are padded as the row tiling requires. `starts` has each member's first row,
    and `total` is the number of rows including padding.
    """

    def __init__(
        self,
        members: Sequence[tuple[LoraWeights | None, int]],
        tiling: RowTiling | None,
        multiple: int = 1,
    ) -> None:
        """Lay out members, each given as (weights, number of rows).

        Members of one adapter must be neighbours. Each adapter's rows are also padded to a multiple
        of `multiple`.
        """
        tiling = tiling or RowTiling()
        self.starts: list[int] = []
        self.adapters: list[AdapterRows] = []
        row = first = 0
        for index, (weights, count) in enumerate(members):
            self.starts.append(row)
            row += count
            if index + 1 == len(members) or members[index + 1][0] is not weights:
                size = tiling.padded(row - first, weights)
                row = first + size + -size % multiple
                self.adapters.append(AdapterRows(first, row, weights))
                first = row
        self.total = row


class SamplingHead:
    """The LM head over a batch whose rows are in a `RowLayout`.

    With a tiling, the rows are padded as in the layout, so that logits are batch-invariant.
    """

    def __init__(self, decoder: Decoder, tiling: RowTiling | None) -> None:
        """Use the LM head of `decoder`. Logits are batch-invariant if `tiling` is given."""
        self._head = decoder.head
        self._tiling = tiling or RowTiling()

    def logits(self, hidden: Tensor, adapters: list[AdapterRows]) -> Tensor:
        """Return the float32 logits [R, V] of hidden states [R, D].

        The base weights, which cause most of the work, are read once for all adapters.
        """
        tile = self._tiling.tile
        if tile is None:
            padded, adapters = self._padded(hidden, adapters)
            return head_logits(padded, self._head, _members(adapters))[: hidden.shape[0]]
        parts = []
        for rows in adapters:
            mine, _ = self._padded(hidden[rows.start : rows.stop], [rows])
            parts += [self._tile(piece, rows.weights) for piece in mine.split(tile)]
        return torch.cat(parts)[: hidden.shape[0]]

    def exact(
        self, hidden: Tensor, rows: Tensor, tokens: Tensor, adapters: list[AdapterRows]
    ) -> Tensor:
        """Return the logits [B] of tokens[i] at row rows[i] of `hidden`: float32 dot products."""
        hidden, adapters = self._padded(hidden, adapters)
        return exact_logits(hidden, self._head, rows, tokens, _members(adapters))

    def drawn(
        self,
        hidden: Tensor,
        logits: Tensor,
        rows: list[int],
        tokens: Tensor,
        adapters: list[AdapterRows],
    ) -> Tensor:
        """Return the float32 logits [B] of sampled tokens; tokens[i] comes from row rows[i].

        The result equals that of `exact`. `logits` [R, V] are the logits of `hidden`. On a GPU
        without a tiling they are exact already and are read directly. This saves one matmul per
        adapter, and no bitwise reproducibility is promised there.
        """
        if logits.device.type != "cpu" and self._tiling == RowTiling():
            return logits[on_device(rows, torch.int64, logits.device), tokens]
        return self.exact(hidden, torch.tensor(rows, device=hidden.device), tokens, adapters)

    def _tile(self, hidden: Tensor, weights: LoraWeights | None) -> Tensor:
        return head_logits(hidden, self._head, _members([AdapterRows(0, hidden.shape[0], weights)]))

    def _padded(
        self, hidden: Tensor, adapters: list[AdapterRows]
    ) -> tuple[Tensor, list[AdapterRows]]:
        """Pad the rows of a single adapter as the tiling requires.

        Rows of several adapters are already padded by their layout.
        """
        if len(adapters) > 1:
            return hidden, adapters
        (weights,) = (rows.weights for rows in adapters)
        missing = self._tiling.padded(hidden.shape[0], weights) - hidden.shape[0]
        hidden = F.pad(hidden, (0, 0, 0, missing)) if missing else hidden
        return hidden, [AdapterRows(0, hidden.shape[0], weights)]


def _members(adapters: list[AdapterRows]) -> list[Member]:
    """Return (start, stop, head adapter) of the adapters that adapt the LM head."""
    sites = [
        (rows.start, rows.stop, rows.weights.head if rows.weights is not None else None)
        for rows in adapters
    ]
    return [(start, stop, site) for start, stop, site in sites if site is not None]
