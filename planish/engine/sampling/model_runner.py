"""The sampler's model runners: they turn rows of tokens into hidden states and logits.

`EagerRunner` is the eager model runner for any device. cuda_graph_runner.py has the model runner
with CUDA graphs, for GPUs on which planish's Triton kernels support the model. Both have the same
methods. Hidden states are [T, D] in the model's dtype, and logits are float32 [T, V]. Both results
are valid only until the next pass, which may overwrite them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planish.engine.sampling.sampling_head import RowLayout, SamplingHead
from planish.model.decoder import Decoder
from planish.model.delta_net import Recurrence
from planish.model.kernels.reference.adapter_stacks import ROWS, AdapterStacks
from planish.model.kv_cache import KVPools, PrefillSpan, SlotOwner
from planish.model.lora import AdapterRange, AdapterStackRange


@dataclass(frozen=True, eq=False)
class InputBatch:
    """The T rows of one pass through the decoder, including padding rows.

    Row i has token tokens[i] at position positions[i] of its sequence. `layout` groups the rows by
    adapter.
    """

    tokens: list[int]
    positions: list[int]
    layout: RowLayout
    recurrence: Recurrence | None = None
    """The recurrence of the rows; None if the model has no gated delta-net layers."""


class EagerRunner:
    """The eager model runner, for any device. It is batch-invariant if the backend is."""

    def __init__(self, decoder: Decoder, head: SamplingHead) -> None:
        """Create a model runner for `decoder` whose logits come from `head`."""
        self._decoder, self._backend = decoder, decoder.backend
        self._head = head
        self._stacks = AdapterStacks()
        self._decode_pass = decoder.backend.decode_pass(decoder) or decoder.forward

    def row_multiple(self, num_adapters: int) -> int:
        """Return the multiple to which the caller should pad the rows of each adapter.

        `num_adapters`: the number of adapters in the decoding step. Adapters with the same number
        of rows can share a batched matmul, and padding makes this likelier. The result is 1 (no
        padding) for a single adapter, and if a compiled kernel applies the adapters.
        """
        return ROWS if num_adapters > 1 and not self._backend.packs_layer_adapters else 1

    def prefill(self, batch: InputBatch, spans: Sequence[PrefillSpan]) -> Tensor:
        """Return the hidden states [T, D] of prompt rows.

        The rows' keys and values are stored in the slots that `spans` name.
        """
        attention = self._backend.prefill_attention(spans)
        adapter_batch = self._backend.adapter_batch(batch.layout.adapters)
        tokens_and_positions = self._tokens_and_positions(batch)
        return self._decoder.forward(
            *tokens_and_positions, attention, adapter_batch, recurrence=batch.recurrence
        )

    def decode(
        self,
        batch: InputBatch,
        first_rows: dict[SlotOwner, int],
        prompt_pools: KVPools,
        sample_pools: KVPools,
        row_counts: Mapping[SlotOwner, int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states [T, D] and float32 logits [T, V] of a decoding step.

        `first_rows` maps each sample in `sample_pools` to its first row. `row_counts` has the
        number of consecutive rows of each sample; samples that it does not contain have one row.
        """
        adapters = batch.layout.adapters
        decode_adapters: Sequence[AdapterRange | AdapterStackRange] = adapters
        if self.row_multiple(len(adapters)) > 1:
            decode_adapters = self._stacks.of(adapters, self._backend.can_stack)
        else:
            self._stacks.forget()
        attention = self._backend.decode_attention(
            first_rows, prompt_pools, sample_pools, row_counts
        )
        adapter_batch = self._backend.adapter_batch(decode_adapters)
        tokens_and_positions = self._tokens_and_positions(batch)
        if batch.recurrence is not None:
            hidden = self._decoder.forward(
                *tokens_and_positions, attention, adapter_batch, recurrence=batch.recurrence
            )
        else:
            hidden = self._decode_pass(*tokens_and_positions, attention, adapter_batch)
        return hidden, self._head.logits(hidden, adapters)

    def release_adapters(self) -> None:
        """Free the stacked adapter weights. The sampler calls this when no request is running."""
        self._stacks.forget()

    def _tokens_and_positions(self, batch: InputBatch) -> tuple[Tensor, Tensor]:
        """Return the tokens and positions of the rows, int64 [T] each."""
        device = self._backend.device
        return torch.tensor(batch.tokens, device=device), torch.tensor(
            batch.positions, device=device
        )
