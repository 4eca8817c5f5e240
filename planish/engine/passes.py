"""The sampler's passes through the model: rows in, hidden states and logits out, on what the device
does best.

`PlainPasses` runs on any device, call by call; graph_passes.py has the same for GPUs on which
Triton serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from planish.engine.adapter_stacks import ROWS, AdapterStacks
from planish.engine.kv_cache import KVPools
from planish.engine.native_attention import NativeDecode, NativePrefill
from planish.engine.row_tiling import RowTiling
from planish.engine.sampling_attention import DecodeAttention, PrefillAttention, PrefillSpan
from planish.engine.sampling_head import RowLayout, SamplingHead
from planish.model.decoder import Attend, Decoder
from planish.model.lora import AdapterRows, StackRows, adapts_in_panels
from planish.native import cpu


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one pass: `tokens` at `positions` of their sequences, laid out by adapter; T of
    them, padding included.
    """

    tokens: list[int]
    positions: list[int]
    layout: RowLayout


class Passes(Protocol):
    """Hidden states are [T, D] in the model's dtype, logits float32 [T, V]; both good until the
    next pass.
    """

    def multiple(self, adapters: int) -> int:
        """Of how many rows those of each adapter should be a multiple, where a decoding step has so
        many adapters.
        """
        ...

    def prefill(self, rows: Rows, spans: Sequence[PrefillSpan]) -> Tensor:
        """Hidden states of prompts' rows, whose keys and values go into their slots."""
        ...

    def decode(
        self, rows: Rows, row_of: dict[int, int], prompts: KVPools, samples: KVPools
    ) -> tuple[Tensor, Tensor]:
        """Hidden states and logits of one row for each sample in `samples`; `row_of`: by
        id(sample).
        """
        ...

    def rest(self) -> None:
        """Nothing runs for now: let go of what was kept for the next step."""
        ...


class PlainPasses:
    def __init__(self, decoder: Decoder, tiling: RowTiling | None, head: SamplingHead) -> None:
        self._decoder = decoder
        self._tiling = tiling
        self._head = head
        self._stacks = AdapterStacks()
        grouped = adapts_in_panels(decoder.config, decoder.dtype, decoder.device)
        self._can_stack = not grouped
        self._native = cpu.attends(decoder.config.head_dim, decoder.dtype, decoder.device)

    def multiple(self, adapters: int) -> int:
        return ROWS if self._can_stack and adapters > 1 else 1

    def prefill(self, rows: Rows, spans: Sequence[PrefillSpan]) -> Tensor:
        return self._hidden(
            rows,
            NativePrefill(spans) if self._native else PrefillAttention(spans),
            rows.layout.adapters,
        )

    def decode(
        self, rows: Rows, row_of: dict[int, int], prompts: KVPools, samples: KVPools
    ) -> tuple[Tensor, Tensor]:
        adapters = rows.layout.adapters
        given: Sequence[AdapterRows | StackRows] = adapters
        if self.multiple(len(adapters)) > 1:
            given = self._stacks.of(adapters, self._tiling.stacks if self._tiling else _always)
        else:
            self._stacks.forget()
        hidden = self._hidden(rows, self._decode_attention(row_of, prompts, samples), given)
        return hidden, self._head.logits(hidden, adapters)

    def rest(self) -> None:
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
