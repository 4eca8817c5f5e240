"""Rows of several adapters in one batch, and their logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.engine.row_tiling import RowTiling
from planish.engine.sending import on_device
from planish.model.decoder import Decoder
from planish.model.head import exact_logits, head_logits
from planish.model.head_lora import Member
from planish.model.lora import AdapterRows, LoraWeights


class RowLayout:
    """Where the rows of each member of a batch go: members of one adapter together, padded as the
    tiling asks.
    """

    def __init__(
        self,
        members: Sequence[tuple[LoraWeights | None, int]],
        tiling: RowTiling | None,
        multiple: int = 1,
    ) -> None:
        """`multiple`: of rows of one adapter, besides what the tiling asks."""
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
    """The output head over a batch whose rows are laid out by RowLayout; padded like it, so that
    bits do not depend on the batch.
    """

    def __init__(self, decoder: Decoder, tiling: RowTiling | None) -> None:
        self._head = decoder.head
        self._tiling = tiling or RowTiling()

    def logits(self, hidden: Tensor, adapters: list[AdapterRows]) -> Tensor:
        """float32 [R, V]; rows in the order of `hidden`. The base weights, the most of the work,
        are read once for all adapters.
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
        """Logits of tokens[i] at hidden row rows[i], as float32 dot products: float32 [B]."""
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
        """Logits of tokens[i], drawn at hidden row rows[i], of which `logits` [R, V] are: float32
        [B], as `exact` finds them.

        On a GPU, whose logits are exact already and whose bits are nobody's promise, without as
        many products as there are adapters.
        """
        if logits.device.type != "cpu" and self._tiling == RowTiling():
            return logits[on_device(rows, torch.int64, logits.device), tokens]
        return self.exact(hidden, torch.tensor(rows, device=hidden.device), tokens, adapters)

    def _tile(self, hidden: Tensor, weights: LoraWeights | None) -> Tensor:
        return head_logits(hidden, self._head, _members([AdapterRows(0, hidden.shape[0], weights)]))

    def _padded(
        self, hidden: Tensor, adapters: list[AdapterRows]
    ) -> tuple[Tensor, list[AdapterRows]]:
        """Rows of several adapters are padded by their layout already."""
        if len(adapters) > 1:
            return hidden, adapters
        (weights,) = (rows.weights for rows in adapters)
        missing = self._tiling.padded(hidden.shape[0], weights) - hidden.shape[0]
        hidden = F.pad(hidden, (0, 0, 0, missing)) if missing else hidden
        return hidden, [AdapterRows(0, hidden.shape[0], weights)]


def _members(adapters: list[AdapterRows]) -> list[Member]:
    """Those that have an adapter of the head."""
    sites = [
        (rows.start, rows.stop, rows.weights.head if rows.weights is not None else None)
        for rows in adapters
    ]
    return [(start, stop, site) for start, stop, site in sites if site is not None]
