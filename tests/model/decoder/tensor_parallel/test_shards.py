"""The division of base models and adapters: two ranks in threads, over gloo, against one decoder."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from planish.errors import UnsupportedError, UserError
from planish.fleet.plan import check_replicas
from planish.model.architecture.config import ModelConfig
from planish.model.decoder.decoder import Decoder
from planish.model.decoder.tensor_parallel.collectives import Collectives, connect
from planish.model.decoder.tensor_parallel.decoder import weight_bytes
from planish.model.decoder.tensor_parallel.shards import (
    AdapterShards,
    Shard,
    ShardedWeights,
    check_shardable,
    shard_config,
)
from planish.model.kernels.choose import choose_backend
from planish.model.layers.lora import LoraLayout, LoraWeights
from planish.model.sequences.prefix_tree import pack
from planish.model.sources.weights import load_weights
from planish.testing import tiny_model
from planish.types import LoraConfig

CPU = torch.device("cpu")
FAMILIES = ("gemma3", "llama", "ministral3", "mistral", "qwen2", "qwen3", "smollm3")


@pytest.fixture(scope="module")
def llama_config(tmp_path_factory) -> ModelConfig:
    return ModelConfig.from_directory(tiny_model(tmp_path_factory.mktemp("llama")))


def decoders(directory: Path, num_shards: int, dtype: torch.dtype) -> list[Decoder]:
    """Return the decoder of each rank; the whole decoder if `num_shards` is 1."""
    config = ModelConfig.from_directory(directory)
    backend = choose_backend(shard_config(config, num_shards), dtype, CPU, None)
    weights = load_weights(directory, config)
    shards = [Shard(rank, num_shards) for rank in range(num_shards)]
    return [Decoder(ShardedWeights(weights, shard), backend) for shard in shards]


def run_ranks(shards: list[Decoder], path: Path, work: Callable[[Decoder, int], Tensor]):
    """Return what `work` returns on each rank, in threads that are connected over gloo."""

    def run(rank: int) -> Tensor:
        shard = Shard(rank, len(shards))
        shards[rank].collectives = Collectives(shard, connect(shard, path, "gloo"))
        return work(shards[rank], rank)

    with ThreadPoolExecutor(len(shards)) as executor:
        return list(executor.map(run, range(len(shards))))


def hidden_and_gradient(
    decoder: Decoder, weights: LoraWeights, layers_per_checkpoint: int
) -> tuple[Tensor, Tensor]:
    """Return the hidden states of some tokens, and the gradient of a function of them."""
    tokens = np.random.default_rng(0).integers(0, decoder.config.vocab_size, 40)
    (micro_batch,) = pack([tokens], 64)
    hidden = decoder.forward(
        torch.from_numpy(micro_batch.tokens),
        torch.from_numpy(micro_batch.positions),
        decoder.backend.tree_attention(micro_batch),
        weights,
        layers_per_checkpoint=layers_per_checkpoint,
    )
    (hidden.float() * torch.linspace(-1, 1, hidden.shape[1])).sum().backward()
    return hidden.detach(), weights.collect_grad()


@pytest.mark.parametrize(
    ("family", "layers_per_checkpoint"), [*((family, 0) for family in FAMILIES), ("qwen3", 2)]
)
def test_hidden_states_and_gradients_equal_those_of_the_whole_model(
    family, layers_per_checkpoint, tmp_path
):
    directory = tiny_model(tmp_path / "model", family, tied=family != "qwen3")
    (whole,) = decoders(directory, 1, torch.float32)
    lora = LoraConfig(rank=4, seed=0, train_unembed=False)
    layout = LoraLayout(whole.config, lora)
    master = layout.init(0) + 0.05 * torch.randn(
        layout.size, generator=torch.Generator().manual_seed(1)
    )
    hidden, gradient = hidden_and_gradient(
        whole, LoraWeights(layout, master, whole.backend, True), layers_per_checkpoint
    )

    adapter = AdapterShards(whole.config, lora, 2)
    parts = adapter.split(master)

    def work(decoder: Decoder, rank: int) -> Tensor:
        weights = LoraWeights(adapter.layout, parts[rank], decoder.backend, True)
        own_hidden, own_gradient = hidden_and_gradient(decoder, weights, layers_per_checkpoint)
        assert torch.allclose(own_hidden, hidden, rtol=1e-5, atol=1e-5)
        return own_gradient

    shards = decoders(directory, 2, torch.float32)
    gradients = run_ranks(shards, tmp_path / "store", work)
    merged = adapter.merge_gradients(gradients)
    assert gradient.abs().max() > 0.1
    assert torch.allclose(merged, gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
    assert [2 * weight_bytes(shard) for shard in shards] == [weight_bytes(whole)] * 2


def test_a_sum_is_added_in_float32_in_the_order_of_the_ranks(tmp_path):
    values = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)).bfloat16()

    def run(rank: int) -> Tensor:
        shard = Shard(rank, 3)
        collectives = Collectives(shard, connect(shard, tmp_path / "store", "gloo"))
        return collectives.sum(values[rank])

    with ThreadPoolExecutor(3) as executor:
        sums = list(executor.map(run, range(3)))
    expected = (values[0].float() + values[1].float() + values[2].float()).bfloat16()
    assert all(torch.equal(found, expected) for found in sums)


def test_an_adapter_that_is_divided_and_merged_is_the_same(llama_config):
    config = llama_config
    lora = LoraConfig(rank=3, seed=0)
    layout = LoraLayout(config, lora)
    vector = torch.arange(layout.size, dtype=torch.float32)
    shards = AdapterShards(config, lora, 2)
    parts = shards.split(vector)
    merged = layout.views(shards.merge_gradients(parts))
    assert parts[0].numel() == shards.rank0_layout.size
    assert parts[1].numel() == shards.layout.size
    for name, matrix in layout.views(vector).items():
        is_on_both = (".o_proj." in name or ".down_proj." in name) == name.endswith("lora_B")
        factor = 2 if is_on_both and "lm_head" not in name else 1
        assert torch.equal(merged[name], factor * matrix), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 6}, "num_attention_heads is 6, which is not a multiple of 4"),
        ({"num_heads": 8, "num_kv_heads": 2}, "num_key_value_heads is 2"),
        ({"num_heads": 8, "num_kv_heads": 4, "intermediate_size": 98}, "give one of 2"),
        ({"num_heads": 8, "num_kv_heads": 4, "vocab_size": 321}, "leave tensor_parallel out"),
        ({"num_experts": 4}, "tensor_parallel=4 does not support mixtures of experts"),
        ({"fused_projections": True}, "one matrix for queries, keys and values"),
        ({"joint_qk_norm": True}, "norms over all heads together"),
        ({"attention_sinks": True}, "attention sinks"),
    ],
)
def test_models_that_cannot_be_divided_are_rejected(changes, message, llama_config):
    with pytest.raises(UnsupportedError, match=message):
        check_shardable(replace(llama_config, **changes), 4)


def test_quantized_weights_are_rejected(llama_config):
    check_shardable(llama_config, 2)
    with pytest.raises(UnsupportedError, match="does not support quantize='nf4'"):
        check_shardable(llama_config, 2, "nf4")


def test_replicas_of_several_devices_are_rejected():
    check_replicas("auto", 2, 1)
    with pytest.raises(UserError, match="leave out either tensor_parallel, or replicas and ray"):
        check_replicas("auto", 2, 2)
