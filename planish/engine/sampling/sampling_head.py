"""The LM head over a batch whose rows have several adapters."""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Sequence

import torch
from torch import Tensor

from planish.model.decoder.base_decoder import BaseDecoder
from planish.model.decoder.head import exact_logits, head_logits, token_logprobs
from planish.model.device import on_device
from planish.model.layers.lora import AdapterRange, HeadAdapterRange


class SamplingHead:
    """The LM head over a batch whose rows have several adapters."""

    def __init__(self, decoder: BaseDecoder) -> None:
        """Use the LM head of `decoder`."""
        self._head, self._backend = decoder.head, decoder.backend

    def logits(self, hidden: Tensor, adapters: Sequence[AdapterRange]) -> Tensor:
        """Return the float32 logits [R, V] of hidden states [R, D].

        The base weights, which cause most of the work, are read once for all adapters.
        """
        return head_logits(self._backend, hidden, self._head, _head_adapter_ranges(adapters))

    def token_logits(
        self, hidden: Tensor, rows: Tensor, tokens: Tensor, adapters: Sequence[AdapterRange]
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
        rows: Sequence[int],
        tokens: Tensor,
        adapters: Sequence[AdapterRange],
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
        rows: Sequence[int],
        ids_by_row: Sequence[Sequence[int]],
        normalizer: Tensor,
        temperature: Tensor,
        adapters: Sequence[AdapterRange],
    ) -> Tensor:
        """Return the logprobs of the tokens ids_by_row[i] at row rows[i], one row after another,
        computed as the logprob of a sampled token is: float32. `normalizer` and `temperature` are
        [len(rows)].
        """
        ids = [token for tokens in ids_by_row for token in tokens]
        owners = [i for i, tokens in enumerate(ids_by_row) for _ in tokens]
        index = on_device(owners, torch.int64, logits.device)
        token_logits = self.sampled_logits(
            hidden,
            logits,
            [rows[i] for i in owners],
            on_device(ids, torch.int64, logits.device),
            adapters,
        )
        return token_logprobs(token_logits / temperature[index], normalizer[index])


def _head_adapter_ranges(adapters: Sequence[AdapterRange]) -> list[HeadAdapterRange]:
    """Return (start, stop, head adapter) of the adapters that adapt the LM head."""
    ranges = [
        (rows.start, rows.stop, rows.weights.head if rows.weights is not None else None)
        for rows in adapters
    ]
    return [(start, stop, head) for start, stop, head in ranges if head is not None]
