"""AdapterTables apply all adapters of a batch on the GPU, equal to one adapter at a time, and do
not keep adapters alive.
"""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from variants import slow_after

from planish.model.architecture.config import ModelConfig
from planish.model.architecture.hf_config.rope_config import RopeConfig
from planish.model.architecture.linears import FUSED_MODULES, linear_shape
from planish.model.kernels.choose import reference_backend
from planish.model.kernels.triton.adapters import AdapterTables
from planish.model.layers.lora import AdapterRange, LoraLayout, LoraWeights
from planish.types import LoraConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = ModelConfig(
    "qwen3", 150, 48, 72, 2, 4, 2, 16, 1e-6, RopeConfig(1e4), 128, True, True, False, ()
)
ODD = replace(CONFIG, hidden_size=30, intermediate_size=45)
"""Sizes that leave the matrices unaligned."""
SITES = dict(zip(("attn_in", "attn_out", "mlp_in", "mlp_out"), FUSED_MODULES, strict=True))
DTYPES = [torch.float32, torch.bfloat16]


def noise(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def adapter(
    lora: LoraConfig, dtype: torch.dtype, seed: int = 0, config: ModelConfig = CONFIG
) -> LoraWeights:
    layout = LoraLayout(config, lora)
    master = noise(layout.size, seed=seed, dtype=torch.float32) * 0.2
    return LoraWeights(layout, master, reference_backend(config, dtype, DEVICE), True)


def placed(*members: tuple[LoraWeights | None, int], first: int = 0) -> list[AdapterRange]:
    found = []
    for weights, count in members:
        found.append(AdapterRange(first, first + count, weights))
        first += count
    return found


def seven(dtype: torch.dtype) -> list[AdapterRange]:
    """Return seven adapters of various ranks and trained parts, with rows of the base model
    between.
    """
    ones = [
        adapter(LoraConfig(1), dtype, 1),
        adapter(LoraConfig(8, train_mlp=False), dtype, 2),
        adapter(LoraConfig(32, train_attn=False), dtype, 3),
        adapter(LoraConfig(40, train_unembed=False), dtype, 4),
        adapter(LoraConfig(8), dtype, 5),
        adapter(LoraConfig(12, train_attn=False, train_mlp=False), dtype, 6),
        adapter(LoraConfig(20), dtype, 7),
    ]
    return placed(
        (ones[0], 2),
        (None, 3),
        (ones[1], 17),
        (ones[2], 1),
        (ones[3], 4),
        (ones[4], 0),
        (None, 1),
        (ones[5], 2),
        (ones[6], 3),
        first=1,
    )


def tables(
    dtype: torch.dtype, config: ModelConfig = CONFIG, max_adapters: int = 7
) -> AdapterTables:
    return AdapterTables(config, dtype, DEVICE, max_rows=48, max_adapters=max_adapters, max_rank=64)


def close(found: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    near = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(found, right, rtol=near, atol=near)


def assert_like_the_loop(
    own: AdapterTables,
    adapters: list[AdapterRange],
    dtype: torch.dtype,
    config: ModelConfig = CONFIG,
) -> None:
    """Assert that the tables equal a loop over the adapters, in the last layer and the head."""
    rows = max((one.stop for one in adapters), default=0) + 2
    layer = config.num_layers - 1
    for site, names in SITES.items():
        shapes = [linear_shape(config, name) for name in names]
        sizes = [fan_out for fan_out, _ in shapes]
        x, out = (
            noise(rows, shapes[0][1], seed=1, dtype=dtype),
            noise(rows, sum(sizes), seed=2, dtype=dtype),
        )
        found, right = out.clone(), out.clone()
        own.add_(x, found, sizes, layer, site)
        reference = reference_backend(config, dtype, DEVICE).adapter_batch(adapters)
        reference.add_(x, right, sizes, layer, site)
        close(found, right, dtype)
        assert torch.equal(found.eq(out).all(1), right.eq(out).all(1)), (
            f"{site}: other rows than those of its adapters"
        )
    hidden = noise(rows, config.hidden_size, seed=3, dtype=dtype)
    logits = noise(rows, config.vocab_size, seed=4, dtype=torch.float32)
    right = logits.clone()
    own.add_head_(hidden, logits)
    for one in adapters:
        if one.weights is not None and one.weights.head is not None:
            a, (b,) = one.weights.head.a, one.weights.head.b_matrices
            right[one.start : one.stop] += (
                hidden[one.start : one.stop] @ a.t()
            ).float() @ b.float().t()
    close(logits, right, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_batched_adapters_equal_one_adapter_at_a_time(dtype: torch.dtype):
    own = tables(dtype)
    first, second = adapter(LoraConfig(8), dtype, 1), adapter(LoraConfig(32), dtype, 2)
    for adapters in (placed((first, 3)), placed((second, 1), (first, 2)), seven(dtype)):
        own.fill(adapters)
        assert_like_the_loop(own, adapters, dtype)


@pytest.mark.slow
@torch.no_grad()
def test_odd_matrix_sizes_give_the_same_result():
    dtype = torch.bfloat16
    own = tables(dtype, ODD)
    adapters = placed(
        (adapter(LoraConfig(3), dtype, 1, ODD), 2), (adapter(LoraConfig(8), dtype, 2, ODD), 1)
    )
    own.fill(adapters)
    assert_like_the_loop(own, adapters, dtype, ODD)


@pytest.mark.slow
@torch.no_grad()
def test_adapter_tables_are_reused_by_the_next_batch():
    """The next batches have fewer tiles, slots that other adapters had, an adapter that returns,
    and an adapter with rows in two places.
    """
    dtype = torch.float32
    a, b, c = (
        adapter(lora, dtype, i)
        for i, lora in enumerate((LoraConfig(4, train_mlp=False), LoraConfig(9), LoraConfig(16)))
    )
    own = tables(dtype, max_adapters=2)
    for adapters in (
        placed((a, 20), (b, 1)),
        placed((c, 1), (None, 2)),
        placed((b, 2), (a, 2), first=5),
        placed((None, 1), (c, 1), (None, 1), (c, 18)),
        placed((None, 3)),
    ):
        own.fill(adapters)
        assert_like_the_loop(own, adapters, dtype)


@torch.no_grad()
def test_adapter_tables_keep_their_addresses():
    """A captured graph contains the addresses of the tables."""
    own = tables(torch.float32)
    where = [tensor.data_ptr() for tensor in (own._tiles.device, own._pointers.device, own._parts)]
    own.fill(seven(torch.float32))
    own.fill([])
    assert [
        tensor.data_ptr() for tensor in (own._tiles.device, own._pointers.device, own._parts)
    ] == where


def test_an_adapter_is_copied_once_while_it_stays_in_the_batch(monkeypatch: pytest.MonkeyPatch):
    own = tables(torch.float32, max_adapters=3)
    a, b, c = (adapter(LoraConfig(4), torch.float32, seed) for seed in range(3))
    written = []
    write = own._write_pointers
    monkeypatch.setattr(
        own,
        "_write_pointers",
        lambda slot, weights: (written.append(weights), write(slot, weights)),
    )
    own.fill(placed((a, 1), (b, 1)))
    own.fill(placed((b, 3), (c, 1), (a, 1)))
    assert written == [a, b, c]
    own.fill(placed((b, 1)))
    own.fill(placed((a, 1), (b, 1)))
    assert written == [a, b, c, a]


@pytest.mark.slow
def test_an_adapter_that_left_the_batch_is_not_referenced():
    own = tables(torch.float32)
    kept, left = adapter(LoraConfig(4), torch.float32, 1), adapter(LoraConfig(4), torch.float32, 2)
    gone = weakref.ref(left)
    own.fill(placed((kept, 1), (left, 1)))
    own.fill(placed((kept, 2)))
    del left
    gc.collect()
    assert gone() is None
    gone = weakref.ref(kept)
    own.fill([])
    del kept
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("dtype", slow_after(1, DTYPES))
@torch.no_grad()
def test_gpu_adapter_output_is_batch_invariant(dtype: torch.dtype):
    crowd = seven(dtype)
    own, x = tables(dtype), noise(40, 48, seed=1, dtype=dtype)
    together, hidden = (noise(40, 144, seed=2, dtype=dtype) for _ in range(2))
    own.fill(crowd)
    own.add_(x, together, [72, 72], 0, "mlp_in")
    for one in crowd:
        if one.weights is not None and one.stop > one.start:
            own.fill([AdapterRange(1, 2, one.weights)])
            alone, row = hidden[[one.stop - 1] * 3], x[[one.stop - 1] * 3]
            own.add_(row, alone, [72, 72], 0, "mlp_in")
            assert torch.equal(alone[1], together[one.stop - 1])


def test_exceeding_the_capacity_of_the_tables_raises():
    own = tables(torch.float32, max_adapters=1)
    a, b = (adapter(LoraConfig(4), torch.float32, seed) for seed in range(2))
    with pytest.raises(AssertionError, match="more than 1 adapters"):
        own.fill(placed((a, 1), (b, 1)))
    with pytest.raises(AssertionError, match="more row tiles than"):
        own.fill(placed((a, 65)))


@pytest.mark.gpu
@torch.no_grad()
def test_a_captured_adapter_graph_serves_other_batches():
    dtype = torch.bfloat16
    own, base = tables(dtype), noise(40, 144, seed=2, dtype=dtype)
    x, out = noise(40, 48, seed=1, dtype=dtype), base.clone()
    own.add_(x, out, [72, 72], 1, "mlp_in")  # compile now, because a capture does not allow it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own.add_(x, out, [72, 72], 1, "mlp_in")
    crowd = seven(dtype)
    for adapters in (crowd, placed((crowd[3].weights, 20)), [], crowd[2:]):
        own.fill(adapters)
        right = base.clone()
        own.add_(x, right, [72, 72], 1, "mlp_in")
        out.copy_(base)
        graph.replay()
        assert torch.equal(out, right)
        assert torch.equal(out, base) == (not adapters)
