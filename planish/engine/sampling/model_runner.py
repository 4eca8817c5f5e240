"""The sampler's model runners: they turn rows of tokens into hidden states and logits.

`EagerRunner` is the eager model runner for any device. cuda_graph_runner.py has the model runner
with CUDA graphs, for GPUs on which planish's Triton kernels support the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from planish.engine.sampling.sampling_head import RowLayout, SamplingHead
from planish.model.decoder import Attend, Decoder
from planish.model.kernels.cpp import cpu
from planish.model.kernels.cpp.attention import NativeDecode, NativePrefill
from planish.model.kernels.reference.adapter_stacks import ROWS, AdapterStacks
from planish.model.kernels.reference.row_tiling import RowTiling
from planish.model.kernels.reference.sampling_attention import (
    DecodeAttention,
    PrefillAttention,
    PrefillSpan,
)
from planish.model.kv_cache import KVPools
from planish.model.lora import AdapterRows, StackRows, adapts_in_panels


@dataclass(frozen=True, eq=False)
class Rows:
    """The T rows of one pass through the decoder, including padding rows.

    Row i has token tokens[i] at position positions[i] of its sequence. `layout` groups the rows by
    adapter.
    """

    tokens: list[int]
    positions: list[int]
    layout: RowLayout


class ModelRunner(Protocol):
    """The interface of a model runner.

    Hidden states are [T, D] in the model's dtype, and logits are float32 [T, V]. Both results are
    valid only until the next pass, which may overwrite them.
    """

    def multiple(self, adapters: int) -> int:
        """Return the multiple to which each adapter's rows should be padded.

        `adapters` is the number of adapters of the decoding step.
        """
        ...

    def prefill(self, rows: Rows, spans: Sequence[PrefillSpan]) -> Tensor:
        """Return the hidden states of prompt rows.

        The rows' keys and values are stored in the slots that `spans` name.
        """
        ...

    def decode(
        self, rows: Rows, row_of: dict[int, int], prompts: KVPools, samples: KVPools
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states and logits of a decoding step.

        The step has one row for each sample in `samples`. `row_of` maps id(sample) to its row.
        """
        ...

    def release_adapters(self) -> None:
        """Free cached adapter weights, because no request is running."""
        ...


class EagerRunner:
    """The eager model runner, for any device. It is batch-invariant if `tiling` is given."""

    def __init__(self, decoder: Decoder, tiling: RowTiling | None, head: SamplingHead) -> None:
        """Create a model runner for `decoder` whose logits come from `head`."""
        self._decoder = decoder
        self._tiling = tiling
        self._head = head
        self._stacks = AdapterStacks()
        grouped = adapts_in_panels(decoder.config, decoder.dtype, decoder.device)
        self._can_stack = not grouped
        self._native = cpu.attends(decoder.config.head_dim, decoder.dtype, decoder.device)

    def multiple(self, adapters: int) -> int:
        """Return the multiple at which several adapters can share a batched matmul."""
        return ROWS if self._can_stack and adapters > 1 else 1

    def prefill(self, rows: Rows, spans: Sequence[PrefillSpan]) -> Tensor:
        """Return the hidden states [T, D] of prompt rows, and store their keys and values."""
        return self._hidden(
            rows,
            NativePrefill(spans) if self._native else PrefillAttention(spans),
            rows.layout.adapters,
        )

    def decode(
        self, rows: Rows, row_of: dict[int, int], prompts: KVPools, samples: KVPools
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states [T, D] and float32 logits [T, V] of a decoding step."""
        adapters = rows.layout.adapters
        given: Sequence[AdapterRows | StackRows] = adapters
        if self.multiple(len(adapters)) > 1:
            given = self._stacks.of(adapters, self._tiling.stacks if self._tiling else _always)
        else:
            self._stacks.forget()
        hidden = self._hidden(rows, self._decode_attention(row_of, prompts, samples), given)
        return hidden, self._head.logits(hidden, adapters)

    def release_adapters(self) -> None:
        """Free the stacked adapter weights."""
        self._stacks.forget()

    def _decode_attention(
        self, row_of: dict[int, int], prompts: KVPools, samples: KVPools
    ) -> Attend:
        if self._native:
            return NativeDecode(row_of, prompts, samples)
        query_rows = self._tiling.query_rows if self._tiling else 1
        return DecodeAttention(row_of, prompts, samples, query_rows, self._decoder.device)

    def _hidden(
        self, rows: Rows, attention: Attend, adapters: Sequence[AdapterRows | StackRows]
    ) -> Tensor:
        device = self._decoder.device
        tile = self._tiling.tile if self._tiling else None
        tokens, positions = (
            torch.tensor(numbers, device=device) for numbers in (rows.tokens, rows.positions)
        )
        return self._decoder.hidden(tokens, positions, attention, adapters, tile=tile)


def _always(_rank: int) -> bool:
    return True
