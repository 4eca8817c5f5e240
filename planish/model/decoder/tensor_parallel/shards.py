"""The division of a base model and its adapters among the ranks of tensor parallelism.

Column shards divide the outputs of a linear, and row shards its inputs (Shoeybi et al. 2019). The
projections of queries, keys and values, gate and up have column shards, so a rank has some of the
attention heads and some of the MLP's hidden units. The output projections of attention and MLP have
row shards: the sum of the ranks' outputs is the output of the layer. Embedding and head are divided
by the vocabulary. Norms are on every rank.

LoRA follows the linears. In a column shard, A is whole and B is divided; in a row shard, A is
divided and B is whole. The adapter of the head is on rank 0 only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from planish.errors import UnsupportedError
from planish.model.architecture.config import ModelConfig
from planish.model.layers.lora import LoraLayout, MatrixSpec
from planish.types import LoraConfig

_COLUMN_LINEARS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROW_LINEARS = ("o_proj", "down_proj")
_VOCABULARY_WEIGHTS = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Shard:
    """The part of a base model that one rank has."""

    rank: int
    num_shards: int

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor that is divided along `dim`, as a view."""
        size = tensor.shape[dim] // self.num_shards
        return tensor.narrow(dim, self.rank * size, size)


def check_shardable(config: ModelConfig, num_shards: int, quantize: str | None = None) -> None:
    """Raise UnsupportedError if the model cannot be divided among `num_shards` ranks.

    `quantize`: the scheme of `EngineSettings.quantize`.
    """
    option = f"tensor_parallel={num_shards}"
    unsupported = {
        "layers computed by the code of transformers": config.hf is not None,
        "mixtures of experts": config.num_experts > 0,
        "gated delta nets": config.delta_net is not None,
        "one matrix for queries, keys and values": config.fused_projections,
        "norms over all heads together": config.joint_qk_norm,
        "attention sinks": config.attention_sinks,
        "images": config.vision is not None,
        "output gates": config.output_gate,
        "weights in fp8": config.fp8 is not None,
        f"quantize={quantize!r}": quantize is not None,
    }
    for feature, is_present in unsupported.items():
        if is_present:
            raise UnsupportedError(
                f"{option} does not support {feature} (this model is {config.family}); leave "
                "tensor_parallel out, or use another base model"
            )
    sizes = {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    for name, size in sizes.items():
        if size % num_shards:
            divisors = [n for n in range(2, 9) if not any(s % n for s in sizes.values())]
            raise UnsupportedError(
                f"{option}: {name} is {size}, which is not a multiple of {num_shards}; "
                + (
                    f"give one of {', '.join(map(str, divisors))}"
                    if divisors
                    else "leave tensor_parallel out"
                )
            )


def shard_config(config: ModelConfig, num_shards: int) -> ModelConfig:
    """Return the config of one rank's layers. Its vocabulary is the whole one."""
    return replace(
        config,
        num_heads=config.num_heads // num_shards,
        num_kv_heads=config.num_kv_heads // num_shards,
        intermediate_size=config.intermediate_size // num_shards,
    )


class ShardedWeights(Mapping[str, Tensor]):
    """The weights of one rank by name, as parts of the checkpoint's weights."""

    def __init__(self, weights: Mapping[str, Tensor], shard: Shard) -> None:
        self._weights, self._shard = weights, shard

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        module, _, part = name.rpartition(".")
        linear = module.rpartition(".")[2]
        if name in _VOCABULARY_WEIGHTS or linear in _COLUMN_LINEARS:
            return self._shard.part(weight, 0)
        if linear not in _ROW_LINEARS:
            return weight
        if part == "bias":
            # The ranks' outputs are added, so one rank has the bias.
            return weight if self._shard.rank == 0 else torch.zeros_like(weight)
        return self._shard.part(weight, 1).contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class AdapterShards:
    """The division of an adapter's flat vectors among the ranks."""

    def __init__(self, config: ModelConfig, lora_config: LoraConfig, num_shards: int) -> None:
        """`config`: the config of the whole base model."""
        self._layout = LoraLayout(config, lora_config)
        self._num_shards = num_shards
        local = shard_config(config, num_shards)
        self.rank0_layout = LoraLayout(local, lora_config)
        """The layout of rank 0's part, with the adapter of the head."""
        self.layout = LoraLayout(local, lora_config, has_head=False)
        """The layout of every other rank's part. It is the beginning of `rank0_layout`."""

    def split(self, master: Tensor) -> list[Tensor]:
        """Return each rank's part of a flat vector [size] of the whole adapter."""
        views = self._layout.views(master)
        parts: list[Tensor] = []
        for rank in range(self._num_shards):
            layout = self.rank0_layout if rank == 0 else self.layout
            shard = Shard(rank, self._num_shards)
            matrices = [
                views[entry.name]
                if (dim := _divided_dim(entry)) is None
                else shard.part(views[entry.name], dim)
                for entry in layout.entries
            ]
            parts.append(_concatenate(matrices, master))
        return parts

    def merge_gradients(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the gradient of the whole adapter [size], given each rank's gradient.

        A matrix that all ranks have gets the sum of their gradients, because each of them has only
        its part of the layer's outputs or inputs.
        """
        rank0_views = self.rank0_layout.views(parts[0])
        views = [rank0_views, *(self.layout.views(part) for part in parts[1:])]
        matrices: list[Tensor] = []
        for entry in self._layout.entries:
            if entry.target.endswith("lm_head"):
                matrices.append(rank0_views[entry.name])
                continue
            grads = [view[entry.name] for view in views]
            dim = _divided_dim(entry)
            if dim is None:
                matrices.append(sum(grads[1:], grads[0]))
            else:
                matrices.append(torch.cat(grads, dim))
        return _concatenate(matrices, parts[0])


def _concatenate(matrices: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([m.reshape(-1) for m in matrices]) if matrices else like.new_zeros(0)


def _divided_dim(entry: MatrixSpec) -> int | None:
    """Return the dimension along which a matrix is divided, or None if every rank has all of it."""
    linear = entry.target.rpartition(".")[2]
    if linear in _COLUMN_LINEARS:
        return 0 if entry.is_b else None
    if linear in _ROW_LINEARS:
        return None if entry.is_b else 1
    return None
