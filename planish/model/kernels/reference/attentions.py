"""The attention of trainer and sampler in torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from planish.model.architecture.config import ModelConfig
from planish.model.kernels.interface.parts import Attend
from planish.model.kernels.reference.attention import TorchTreeAttention
from planish.model.kernels.reference.sampling_attention import (
    ATTENDED_ROWS,
    DecodeAttention,
    PrefillAttention,
)
from planish.model.layers.row_tiling import RowTilings
from planish.model.sequences.kv_cache import KVPool, KVPools, PrefillSpan, SlotOwner
from planish.model.sequences.prefix_tree import MicroBatch


class TorchAttention:
    """The attention of trainer and sampler (see `Attention`)."""

    attention_is_batch_invariant = False
    pool_class: type[KVPool] = KVPool

    def __init__(
        self,
        config: ModelConfig,
        kv_dtype: torch.dtype,
        device: torch.device,
        tilings: RowTilings,
    ) -> None:
        self.kv_dtype = kv_dtype
        self._windows, self._device, self._tilings = config.attention_windows, device, tilings
        self._cap = config.score_cap

    def tree_attention(self, micro_batch: MicroBatch) -> Attend:
        """Return the attention of a micro-batch of the trainer, with gradients."""
        return TorchTreeAttention(micro_batch, self._device, windows=self._windows, cap=self._cap)

    def prefill_attention(self, spans: Sequence[PrefillSpan]) -> Attend:
        """Return the causal attention of prompt rows, which stores their keys and values."""
        return PrefillAttention(spans, self._windows, self._cap)

    def decode_attention(
        self,
        first_rows: dict[SlotOwner, int],
        prompt_pools: KVPools,
        sample_pools: KVPools,
        row_counts: Mapping[SlotOwner, int] | None = None,
    ) -> Attend:
        """Return the attention of a decoding step with new rows for each running sample."""
        return DecodeAttention(
            first_rows,
            prompt_pools,
            sample_pools,
            self._tilings.query_rows,
            self._device,
            self._windows,
            row_counts,
            self._cap,
        )


def score_bytes(config: ModelConfig) -> int:
    """Return the bytes of the attention scores of all threads of a CPU."""
    group = config.num_heads // config.num_kv_heads
    return 4 * ATTENDED_ROWS * group * config.max_context * (os.cpu_count() or 1)
