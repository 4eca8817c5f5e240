"""The attention of trainer and sampler in torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from planish.model.architecture.config import ModelConfig
from planish.model.kernels.interface.parts import Attend, Attention
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


class LayeredAttention:
    """Attention in which an image's tokens attend to later ones in some layers only (Gemma 4)."""

    def __init__(self, attention: Attention, two_way: Collection[int]) -> None:
        """`attention`: the attention of all layers. `two_way`: the numbers of these layers."""
        self.kv_dtype, self.pool_class = attention.kv_dtype, attention.pool_class
        self.attention_is_batch_invariant = attention.attention_is_batch_invariant
        self.decode_attention = attention.decode_attention
        self._attention, self._two_way = attention, frozenset(two_way)

    def tree_attention(self, micro_batch: MicroBatch) -> Attend:
        """Return the attention of a micro-batch of the trainer, with gradients."""
        attend = self._attention.tree_attention(micro_batch)
        if not micro_batch.blocks:
            return attend
        causal = self._attention.tree_attention(replace(micro_batch, blocks=()))
        return _LayeredAttend(attend, causal, self._two_way)

    def prefill_attention(self, spans: Sequence[PrefillSpan]) -> Attend:
        """Return the attention of prompt rows, which stores their keys and values."""
        attend = self._attention.prefill_attention(spans)
        if not any(span.blocks for span in spans):
            return attend
        causal = self._attention.prefill_attention([replace(span, blocks=()) for span in spans])
        return _LayeredAttend(attend, causal, self._two_way)


@dataclass(frozen=True)
class _LayeredAttend:
    """Attention with the blocks of images in the layers `two_way`, and causal in the others."""

    with_blocks: Attend
    causal: Attend
    two_way: frozenset[int]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, /
    ) -> Tensor:
        """Return the attention output [T, Hq, E] (see `Attend`)."""
        attend = self.with_blocks if layer in self.two_way else self.causal
        return attend(layer, q, k, v, sinks)


def layered(attention: Attention, config: ModelConfig) -> Attention:
    """Return the attention of a model whose layers differ in the direction of images."""
    two_way_layers = () if config.vision is None else config.vision.two_way_layers
    numbers = [n for n, layer in enumerate(config.kv_layers) if layer in two_way_layers]
    differs = 0 < len(numbers) < len(config.kv_layers)
    return LayeredAttention(attention, numbers) if differs else attention


def score_bytes(config: ModelConfig) -> int:
    """Return the bytes of the attention scores of all threads of a CPU."""
    group = config.num_heads // config.num_kv_heads
    return 4 * ATTENDED_ROWS * group * config.max_context * (os.cpu_count() or 1)
