"""The row layout of a batch with several adapters, and the LM head over such a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from planish.model.decoder import Decoder
from planish.model.head import exact_logits, head_logits, token_logprobs
from planish.model.lora import AdapterRange, HeadAdapterRange, LoraWeights
from planish.model.transfer import on_device


class RowLayout:
    """The batch rows of each sequence (a prompt or a sample), grouped by adapter.

    `first_rows` has each sequence's first row, and `num_rows` is the number of rows including
    padding.
    """

    def __init__(
        self, sequences: Sequence[tuple[LoraWeights | None, int]], row_multiple: int = 1
    ) -> None:
        """Lay out sequences, each given as (weights, number of rows).

        Sequences of one adapter must be neighbours. After the last sequence of each adapter,
        padding rows round the adapter's rows up to a multiple of `row_multiple`.
        """
        self.first_rows: list[int] = []
        self.adapters: list[AdapterRange] = []
        row = first = 0
        for index, (weights, count) in enumerate(sequences):
            self.first_rows.append(row)
            row += count
            if index + 1 == len(sequences) or sequences[index + 1][0] is not weights:
                row += -(row - first) % row_multiple
                self.adapters.append(AdapterRange(first, row, weights))
                first = row
        self.num_rows = row


class SamplingHead:
    """The LM head over a batch whose rows are in a `RowLayout`."""

    def __init__(self, decoder: Decoder) -> None:
        """Use the LM head of `decoder`."""
        self._head, self._backend = decoder.head, decoder.backend

    def logits(self, hidden: Tensor, adapters: list[AdapterRange]) -> Tensor:
        """Return the float32 logits [R, V] of hidden states [R, D].

        The base weights, which cause most of the work, are read once for all adapters.
        """
        return head_logits(self._backend, hidden, self._head, _head_adapter_ranges(adapters))

    def token_logits(
        self, hidden: Tensor, rows: Tensor, tokens: Tensor, adapters: list[AdapterRange]
    ) -> Tensor:
        """Return single logits, computed as float32 dot products: float32 [B].

        Logit i is that of token tokens[i] at row rows[i] of `hidden`.
        """
        head_adapters = _head_adapter_ranges(adapters)
        return exact_logits(self._backend, hidden, self._head, rows, tokens, head_adapters)

    def sampled_logits(
        self,
        hidden: Tensor,
        logits: Tensor,
        rows: list[int],
        tokens: Tensor,
        adapters: list[AdapterRange],
    ) -> Tensor:
        """Return the float32 logits [B] of sampled tokens; tokens[i] comes from row rows[i].

        The result equals that of `token_logits`. `logits` [R, V] are the logits of `hidden`. If
        `Backend.logits_are_exact`, the result is read from `logits`, which saves one matmul per
        adapter.
        """
        row_index = on_device(rows, torch.int64, logits.device)
        if self._backend.logits_are_exact:
            return logits[row_index, tokens]
        return self.token_logits(hidden, row_index, tokens, adapters)

    def listed_logprobs(
        self,
        hidden: Tensor,
        logits: Tensor,
        rows: list[int],
        ids_by_row: Sequence[Sequence[int]],
        normalizer: Tensor,
        temperature: Tensor,
        adapters: list[AdapterRange],
    ) -> list[list[float]]:
        """Return the logprobs of the tokens ids_by_row[i] at row rows[i], computed as the logprob
        of a sampled token is. `normalizer` and `temperature` are [len(rows)].
        """
        ids = [token for tokens in ids_by_row for token in tokens]
        if not ids:
            return [[] for _ in rows]
        owners = [i for i, tokens in enumerate(ids_by_row) for _ in tokens]
        index = on_device(owners, torch.int64, logits.device)
        token_logits = self.sampled_logits(
            hidden,
            logits,
            [rows[i] for i in owners],
            on_device(ids, torch.int64, logits.device),
            adapters,
        )
        values = token_logprobs(token_logits / temperature[index], normalizer[index]).tolist()
        ends = [*accumulate(map(len, ids_by_row), initial=0)]
        return [values[begin:end] for begin, end in pairwise(ends)]


def _head_adapter_ranges(adapters: list[AdapterRange]) -> list[HeadAdapterRange]:
    """Return (start, stop, head adapter) of the adapters that adapt the LM head."""
    ranges = [
        (rows.start, rows.stop, rows.weights.head if rows.weights is not None else None)
        for rows in adapters
    ]
    return [(start, stop, head) for start, stop, head in ranges if head is not None]
