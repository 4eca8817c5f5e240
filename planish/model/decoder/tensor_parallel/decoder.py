"""The decoder of rank 0: it runs every pass together with the other ranks.

The sampler and the trainer run on rank 0 as they do without tensor parallelism. This module wraps
what they use of the model: the decoder, the attention with its KV cache, the adapters and the head.
Each wrapper does rank 0's part and has the other ranks do theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planish.model.architecture.config import ModelConfig
from planish.model.decoder.decoder import Decoder
from planish.model.decoder.tensor_parallel.collectives import Collectives
from planish.model.decoder.tensor_parallel.group import FollowerOptions, ShardGroup
from planish.model.decoder.tensor_parallel.shards import AdapterShards, Shard, ShardedWeights
from planish.model.kernels.interface.backend import Backend, KernelUse
from planish.model.kernels.interface.parts import (
    AdapterBatch,
    Attend,
    Attention,
    ExactLogits,
    Head,
    HeadAdapters,
    Lora,
)
from planish.model.kernels.reference.head import recomputed_top_logits
from planish.model.layers.expert_pairs import TokenExpertPairs
from planish.model.layers.layer_weights import DenseMLP
from planish.model.layers.linear import PackedLinear
from planish.model.layers.lora import (
    AdapterRange,
    AdapterStackRange,
    LoraLayout,
    LoraWeights,
)
from planish.model.layers.recurrence import Recurrence
from planish.model.sequences.kv_cache import (
    KVChunk,
    KVPool,
    KVPools,
    KVSpec,
    PrefillSpan,
    SlotOwner,
)
from planish.model.sequences.prefix_tree import MicroBatch
from planish.model.sources.weights import load_weights
from planish.model.vision.image_tokens import ImageRegistry
from planish.model.vision.tower import VisionTower


class ShardedDecoder:
    """A frozen base model that is divided among several processes (see `BaseDecoder`)."""

    images: ImageRegistry | None = None
    vision: VisionTower | None = None

    def __init__(
        self, directory: Path, config: ModelConfig, backend: Backend, group: ShardGroup
    ) -> None:
        """Load rank 0's part of the model in `directory`, and wait for the other ranks.

        `config`: that of the whole model. `backend`: that of one rank's part (`shard_config`).
        """
        shard = Shard(0, config.num_heads // backend.config.num_heads)
        weights = ShardedWeights(load_weights(directory, config), shard)
        self._decoder = Decoder(weights, backend)
        self._group = group
        collectives = self._decoder.collectives = self._collectives = group.connect()
        self.config = config
        self.head: PackedLinear = _ShardedVocabulary(self._decoder.head, group, collectives)
        self.backend: Backend = _ShardedBackend(backend, config, group, collectives, self._decoder)
        self.weight_bytes = [weight_bytes(self._decoder), *group.weight_bytes]
        """The bytes of the frozen weights of each rank."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and matmuls."""
        return self.backend.dtype

    @property
    def device(self) -> torch.device:
        """The device of rank 0."""
        return self.backend.device

    @property
    def is_lost(self) -> bool:
        """Whether a rank has failed, so that every further pass fails."""
        return self._group.is_lost

    def close(self) -> None:
        """End the processes of the other ranks."""
        self._group.end()

    def decode_pass(self) -> None:
        """Return None, because the ranks must meet in every layer."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        adapters: LoraWeights | AdapterBatch | None,
        *,
        layers_per_checkpoint: int = 0,
        recurrence: Recurrence | None = None,
    ) -> Tensor:
        """Return the last hidden states [T, D] (see `BaseDecoder`)."""
        assert isinstance(attend, _ShardedAttend)
        assert recurrence is None
        adapter_ids: int | Sequence[tuple[int, int, int | None]] | None = None
        if isinstance(adapters, ShardedLoraWeights):
            adapter_ids = adapters.shard_id
        elif isinstance(adapters, _ShardedAdapterBatch):
            adapter_ids, adapters = adapters.ids, adapters.local
        has_grad = torch.is_grad_enabled()
        message = (tokens.tolist(), positions.tolist(), attend.message, adapter_ids)
        with self._group.running("forward", *message, layers_per_checkpoint, has_grad):
            hidden = self._decoder.forward(
                tokens,
                positions,
                attend.local,
                adapters,
                layers_per_checkpoint=layers_per_checkpoint,
            )
        if not hidden.requires_grad:
            return hidden
        return _Backward.apply(hidden, self._group, self._collectives)  # type: ignore[no-any-return]


class _Backward(torch.autograd.Function):
    """The identity. Its backward pass starts those of the other ranks."""

    @staticmethod
    def forward(ctx, hidden: Tensor, group: ShardGroup, collectives: Collectives) -> Tensor:
        ctx.group, ctx.collectives = group, collectives
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with ctx.group.running("backward"):
            ctx.group.is_backward_open = True
            grad = ctx.collectives.broadcast(grad)
        return grad, None, None


class _ShardedBackend(Backend):
    """The backend of rank 0."""

    def __init__(
        self,
        local: Backend,
        config: ModelConfig,
        group: ShardGroup,
        collectives: Collectives,
        decoder: Decoder,
    ) -> None:
        """`local`: the backend of rank 0's part. `config`: the config of the whole model."""
        parts = replace(
            local.parts,
            attention=_ShardedAttention(local.parts.attention, group),
            head=_ShardedHead(local.parts.head, decoder.head, group, collectives),
            lora=_ShardedLora(local.parts.lora),
            decode_passes=None,
        )
        use = KernelUse(
            local.name, local.families, local.torch_families, local.uses_compiled_kernels
        )
        super().__init__(
            local.config,
            local.dtype,
            local.device,
            local.tiling,
            parts,
            use,
            local.workspace_bytes,
        )
        self._whole_config, self._group, self._collectives = config, group, collectives

    def lora_weights(
        self, layout: LoraLayout, master: Tensor, requires_grad: bool = False
    ) -> LoraWeights:
        """Return the compute copy of an adapter, divided among the ranks."""
        shards = AdapterShards(
            self._whole_config, layout.lora_config, self._collectives.shard.num_shards
        )
        return ShardedLoraWeights(
            shards, master, self, requires_grad, self._group, self._collectives
        )


# Adapters


class ShardedLoraWeights(LoraWeights):
    """The immutable compute copy of one version of an adapter, of which each rank has a part."""

    def __init__(
        self,
        shards: AdapterShards,
        master: Tensor,
        backend: Backend,
        requires_grad: bool,
        group: ShardGroup,
        collectives: Collectives,
    ) -> None:
        """`master`: the flat float32 vector of the whole adapter."""
        own_part, *other_parts = shards.split(master.detach())
        super().__init__(shards.rank0_layout, own_part, backend, requires_grad)
        self._shards, self._group, self._collectives = shards, group, collectives
        self.shard_id = group.new_id()
        """The number by which the other ranks know this version."""
        lora_config = shards.layout.lora_config
        parts = [part.cpu().numpy() for part in other_parts]
        group.record("add_adapter", self.shard_id, lora_config, parts, requires_grad)
        weakref.finalize(self, group.record, "drop", self.shard_id).atexit = False

    def end_training(self) -> None:
        """Free the packed copies that only the backward pass needs, on all ranks."""
        super().end_training()
        self._group.record("end_training", self.shard_id)

    def collect_grad(self) -> Tensor:
        """Return the gradient with respect to the whole master, float32, and clear the gradients
        of all ranks.
        """
        self._group.is_backward_open = False
        local = super().collect_grad()
        with self._group.running("collect_grad", self.shard_id):
            size = self._shards.layout.size
            _, *others = self._collectives.gather(local[:size]) if size else (local,)
        return self._shards.merge_gradients([local, *others])

    def drop_grad(self) -> None:
        """Clear the gradients of all ranks, after an error."""
        super().drop_grad()
        if self._group.is_backward_open:
            self._group.lose("rank 0 failed in a backward pass")
        self._group.record("drop_grad", self.shard_id)


@dataclass(frozen=True)
class _ShardedAdapterBatch:
    """The adapters of the rows of a batch (see `AdapterBatch`)."""

    local: AdapterBatch
    ids: Sequence[tuple[int, int, int | None]]
    """The first row, the row after the last, and the version of each range of rows."""

    def add_(self, x: Tensor, out: Tensor, sizes: Sequence[int], layer: int, module: str) -> None:
        """Add rank 0's part of the LoRA outputs of one target module to `out`."""
        self.local.add_(x, out, sizes, layer, module)

    def add_expert_(
        self, x: Tensor, out: Tensor, pairs: TokenExpertPairs, layer: int, module: str
    ) -> None:
        """Raise an error, because models with experts are not divided."""
        raise NotImplementedError


class _ShardedLora:
    """Matmuls with adapters (see `Lora`). Rank 0 knows each version by its number."""

    def __init__(self, local: Lora) -> None:
        self.packs_layer_adapters = local.packs_layer_adapters
        self.packs_head_adapters = local.packs_head_adapters
        self.pack_adapter, self.packed_adapter_sizes = (
            local.pack_adapter,
            local.packed_adapter_sizes,
        )
        self.add_lora_, self.lora_backward_ = local.add_lora_, local.lora_backward_
        self._local = local

    def can_stack(self, rank: int) -> bool:
        """Return False, because the other ranks do not keep stacks of adapters."""
        return False

    def adapter_batch(self, adapters: Sequence[AdapterRange | AdapterStackRange]) -> AdapterBatch:
        """Return an `AdapterBatch` of these adapters, each with the rows that it applies to."""
        ids: list[tuple[int, int, int | None]] = []
        for rows in adapters:
            assert isinstance(rows, AdapterRange)
            weights = rows.weights
            assert weights is None or isinstance(weights, ShardedLoraWeights)
            ids.append((rows.start, rows.stop, None if weights is None else weights.shard_id))
        return _ShardedAdapterBatch(self._local.adapter_batch(adapters), ids)


# Attention and its KV cache


@dataclass(frozen=True)
class _ShardedAttend:
    """The attention of one pass, and the call that makes it on the other ranks."""

    local: Attend
    message: tuple[Any, ...]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, /
    ) -> Tensor:
        """Return rank 0's part of the attention output."""
        return self.local(layer, q, k, v) if sinks is None else self.local(layer, q, k, v, sinks)


class _ShardedAttention:
    """The attention of trainer and sampler (see `Attention`). Each rank has some of the heads."""

    def __init__(self, local: Attention, group: ShardGroup) -> None:
        self._local = local
        self.kv_dtype = local.kv_dtype
        self.attention_is_batch_invariant = local.attention_is_batch_invariant
        self.pool_class = mirrored_pool_class(local.pool_class, group)

    def tree_attention(self, micro_batch: MicroBatch) -> Attend:
        """Return the attention of a micro-batch of the trainer, with gradients."""
        return _ShardedAttend(self._local.tree_attention(micro_batch), ("tree", micro_batch))

    def prefill_attention(self, spans: Sequence[PrefillSpan]) -> Attend:
        """Return the causal attention of prompt rows, which stores their keys and values."""
        described = [(id_of(s.pool), s.slot, s.row, s.start, s.count) for s in spans]
        return _ShardedAttend(self._local.prefill_attention(spans), ("prefill", described))

    def decode_attention(
        self,
        first_rows: dict[SlotOwner, int],
        prompt_pools: KVPools,
        sample_pools: KVPools,
        row_counts: Mapping[SlotOwner, int] | None = None,
    ) -> Attend:
        """Return the attention of a decoding step with new rows for some or all samples."""
        local = self._local.decode_attention(first_rows, prompt_pools, sample_pools, row_counts)
        samples = [
            (id(sample), row, getattr(sample, "num_stored"), (row_counts or {}).get(sample, 1))  # noqa: B009
            for sample, row in first_rows.items()
        ]
        pools = [
            [id_of(pool) for pool in pools.pools_in_use()] for pools in (prompt_pools, sample_pools)
        ]
        return _ShardedAttend(local, ("decode", samples, *pools))


def id_of(pool: KVPool) -> int:
    """Return the number by which the other ranks know a pool."""
    return int(getattr(pool, "shard_id"))  # noqa: B009


def mirrored_pool_class(base: type[KVPool], group: ShardGroup) -> type[KVPool]:
    """Return a class of KV cache pools whose changes the other ranks repeat.

    A pool chooses slots by its earlier changes only, so the slots are the same on every rank. An
    owner is known by its address, because it is alive while it has a slot.
    """

    class MirroredPool(base):
        def __init__(self, spec: KVSpec, capacity: int) -> None:
            self.shard_id = group.new_id()
            with group.recorded("create_pool", self.shard_id, capacity):
                super().__init__(spec, capacity)
            weakref.finalize(self, group.record, "drop_pool", self.shard_id).atexit = False

        def ensure_free_slots(self, additional: int) -> None:
            with group.recorded("ensure_free_slots", self.shard_id, additional):
                super().ensure_free_slots(additional)

        def allocate(self, owner: SlotOwner) -> None:
            prompt = getattr(owner, "prompt", None)
            length = getattr(owner, "length", 0)
            with group.recorded(
                "allocate", self.shard_id, id(owner), length, prompt and id(prompt)
            ):
                super().allocate(owner)

        def free(self, *owners: SlotOwner) -> None:
            with group.recorded("free", self.shard_id, [id(owner) for owner in owners]):
                super().free(*owners)

        def trim(self) -> None:
            with group.recorded("trim", self.shard_id):
                super().trim()

        def move(self, owners: Sequence[SlotOwner], target: KVPool) -> None:
            ids = [id(owner) for owner in owners]
            with group.recorded("move", self.shard_id, ids, id_of(target)):
                super().move(owners, target)

        def read(self, slot: int, start: int, stop: int) -> KVChunk:
            number = group.new_id()
            with group.recorded("read", self.shard_id, slot, start, stop, number):
                chunk = super().read(slot, start, stop)
            mirrored = _MirroredChunk(chunk.keys, chunk.values, number)
            weakref.finalize(mirrored, group.record, "drop", number).atexit = False
            return mirrored

        def write(self, slot: int, chunks: Sequence[KVChunk]) -> None:
            numbers = [chunk.shard_id for chunk in chunks if isinstance(chunk, _MirroredChunk)]
            with group.recorded("write", self.shard_id, slot, numbers):
                super().write(slot, chunks)

        def copy_from(
            self,
            source_pool: KVPool,
            source_slots: Sequence[int],
            starts: Sequence[int],
            slots: Sequence[int],
            count: int,
        ) -> None:
            args = (source_slots, starts, slots, count)
            with group.recorded("copy_from", self.shard_id, id_of(source_pool), *args):
                super().copy_from(source_pool, *args)

    return MirroredPool


@dataclass(frozen=True, eq=False)
class _MirroredChunk(KVChunk):
    """Rank 0's part of cached keys and values."""

    shard_id: int
    """The number by which the other ranks know their parts."""


# The head


class _ShardedVocabulary(PackedLinear):
    """The output head, whose vocabulary is divided among the ranks."""

    def __init__(self, local: PackedLinear, group: ShardGroup, collectives: Collectives) -> None:
        self._local, self._group, self._collectives = local, group, collectives
        self.sizes = [local.sizes[0] * collectives.shard.num_shards]
        self.bias = None

    def matmul_backward(self, grad: Tensor) -> Tensor:
        """Return the gradient of the hidden states [R, D], given that of the logits [R, V]."""
        parts = [p.contiguous() for p in grad.chunk(self._collectives.shard.num_shards, 1)]
        with self._group.running("logits_backward", len(grad)):
            own = self._collectives.scatter(torch.empty_like(parts[0]), parts)
            return self._collectives.sum(self._local.matmul_backward(own))


class _ShardedHead:
    """The logits of the LM head (see `Head`). Each rank computes those of its vocabulary.

    Rank 0 gathers them, so sampling and losses are those of one process. It applies the adapters of
    the head.
    """

    def __init__(
        self, local: Head, head: PackedLinear, group: ShardGroup, collectives: Collectives
    ) -> None:
        """`head`: rank 0's part of the head's weights."""
        self._local, self._head, self._group, self._collectives = local, head, group, collectives
        self.logits_dtype, self.head_rows = local.logits_dtype, local.head_rows
        self.training_logits_dtype = local.training_logits_dtype
        self.head_adapters = local.head_adapters

    def base_logits(self, hidden: Tensor, head: PackedLinear, *, training: bool = False) -> Tensor:
        """Return the logits [R, V] of the base model. `hidden`: [R, D]."""
        with self._group.running("base_logits", len(hidden), training):
            hidden = self._collectives.broadcast(hidden)
            logits = self._local.base_logits(hidden, self._head, training=training)
            return torch.cat(self._collectives.gather(logits), 1)

    def top_logits(
        self,
        hidden: Tensor,
        head: PackedLinear,
        adapters: HeadAdapters | None,
        logits: Tensor,
        k: int,
        float32_logits: Tensor | None = None,
    ) -> ExactLogits:
        """Find the k largest `logits` of each row, and return them recomputed in float32."""
        return recomputed_top_logits(
            lambda rows, tokens: self.token_logits(hidden, head, adapters, rows, tokens),
            logits,
            k,
            float32_logits,
        )

    def token_logits(
        self,
        hidden: Tensor,
        head: PackedLinear,
        adapters: HeadAdapters | None,
        rows: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        """Return single logits [P] in float32 or wider. `rows`, `tokens`: int64 [P]."""
        message = (len(hidden), rows.tolist(), tokens.tolist())
        with self._group.running("token_logits", *message):
            hidden = self._collectives.broadcast(hidden)
            out = own_token_logits(self._local, self._collectives, hidden, self._head, rows, tokens)
        if adapters is not None:
            adapters.add_single_(out, rows, tokens)
        return out


def own_token_logits(
    local: Head,
    collectives: Collectives,
    hidden: Tensor,
    head: PackedLinear,
    rows: Tensor,
    tokens: Tensor,
) -> Tensor:
    """Return single logits [P] of the base model. Every rank must call this function."""
    index, is_own = collectives.own_tokens(tokens, head.sizes[0])
    # Each logit is in one part of the vocabulary, and the others add 0.
    logits = local.token_logits(hidden, head, None, rows, index)
    return collectives.sum(torch.where(is_own, logits, 0.0))


def weight_bytes(decoder: Decoder) -> int:
    """Return the bytes of one copy of the embedding, the head and the layers' linears."""
    dense = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, DenseMLP)]
    linears = [linear for layer in decoder.layers for linear in (layer.qkv, layer.o)]
    linears += [linear for mlp in dense for linear in (mlp.gate_up, mlp.down)]
    num_values = sum(sum(linear.sizes) * linear.fan_in for linear in linears)
    num_values += decoder.embedding.numel() * (1 if decoder.config.tied_head else 2)
    return num_values * decoder.dtype.itemsize


def start_shards(
    directory: Path,
    config: ModelConfig,
    backend: Backend,
    devices: Sequence[torch.device],
    make_backend: Callable[..., Backend],
) -> ShardedDecoder:
    """Load the model in `directory`, one part on each of `devices`. This process is rank 0.

    `config`: the config of the whole model. `backend`: that of one rank's part, on devices[0].
    `make_backend`: see `FollowerOptions`.
    """
    options = FollowerOptions(
        Shard(0, len(devices)),
        directory,
        devices[0],
        backend.dtype,
        backend.tiling,
        make_backend,
        max(1, torch.get_num_threads() // len(devices)),
        Path(),
        "nccl" if len(set(devices)) > 1 else "gloo",
    )
    group = ShardGroup(options, devices[1:], backend.name)
    try:
        return ShardedDecoder(directory, config, backend, group)
    except BaseException:
        group.end()
        raise
