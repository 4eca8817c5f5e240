"""Rows of several adapters in one batch, and their logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.engine.row_tiling import RowTiling
from planish.model.decoder import Decoder
from planish.model.head import Lora, base_product, exact_logits, head_logits
from planish.model.lora import AdapterRows, LoraWeights


class RowLayout:
    """Where the rows of each member of a batch go: members of one adapter together, padded as the tiling asks."""

    def __init__(
        self, members: Sequence[tuple[LoraWeights | None, int]], tiling: RowTiling | None, multiple: int = 1
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
    """The output head over a batch whose rows are laid out by RowLayout; padded like it, so that bits do not depend on the batch."""

    def __init__(self, decoder: Decoder, tiling: RowTiling | None) -> None:
        self._head = decoder.head
        self._tiling = tiling or RowTiling()

    def logits(self, hidden: Tensor, adapters: list[AdapterRows]) -> Tensor:
        """float32 [R, V]; rows in the order of `hidden`. The base weights, the most of the work, are read once for all adapters."""
        tile = self._tiling.tile
        if len(adapters) == 1:
            (rows,) = adapters
            return self._tiled(self._padded(hidden, rows.weights), rows.weights)[: hidden.shape[0]]
        if tile is not None:
            return torch.cat([self._tiled(hidden[rows.start : rows.stop], rows.weights) for rows in adapters])
        base = base_product(hidden, self._head)
        out = torch.empty(base.shape, dtype=torch.float32, device=base.device)
        for rows in adapters:
            mine = slice(rows.start, rows.stop)
            out[mine] = head_logits(hidden[mine], self._head, _lora(rows.weights), base[mine])
        return out

    def exact(self, hidden: Tensor, rows: Tensor, tokens: Tensor, adapters: list[AdapterRows]) -> Tensor:
        """Logits of tokens[i] at hidden row rows[i], as float32 dot products: float32 [B]."""
        out = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
        for segment in adapters:
            mine = ((rows >= segment.start) & (rows < segment.stop)).nonzero().squeeze(1)
            if len(mine):
                states = self._padded(hidden[segment.start : segment.stop], segment.weights)
                at = rows[mine] - segment.start
                out[mine] = exact_logits(states, self._head, _lora(segment.weights), at, tokens[mine])
        return out

    def drawn(
        self, hidden: Tensor, logits: Tensor, rows: list[int], tokens: Tensor, adapters: list[AdapterRows]
    ) -> Tensor:
        """Logits of tokens[i], drawn at hidden row rows[i], whose logits are logits[i]: float32 [B], as `exact` finds them.

        On a GPU, whose logits are exact already and whose bits are nobody's promise, without as many products as there are adapters.
        """
        if logits.device.type != "cpu" and self._tiling == RowTiling():
            return logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return self.exact(hidden, torch.tensor(rows, device=hidden.device), tokens, adapters)

    def _tiled(self, hidden: Tensor, weights: LoraWeights | None) -> Tensor:
        pieces = hidden.split(self._tiling.tile) if self._tiling.tile else (hidden,)
        parts = [head_logits(piece, self._head, _lora(weights)) for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _padded(self, hidden: Tensor, weights: LoraWeights | None) -> Tensor:
        missing = self._tiling.padded(hidden.shape[0], weights) - hidden.shape[0]
        return F.pad(hidden, (0, 0, 0, missing)) if missing else hidden


def _lora(weights: LoraWeights | None) -> Lora | None:
    return weights.head if weights is not None else None
