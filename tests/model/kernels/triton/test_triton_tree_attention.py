"""The GPU's prefix-tree attention equals attention with the T x T mask, in values and gradients.
The kernels are interpreted without a GPU.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from backends import load_on
from dense_attention import attention_mask, dense_mask_attention
from hypothesis import given, settings, strategies as st
from torch import Tensor
from variants import slow_after

from planish.engine.training.adapters import Adapter
from planish.engine.training.trainer import Trainer
from planish.engine.training.trainer_settings import TrainerSettings
from planish.model.decoder.decoder import Decoder
from planish.model.kernels.triton import parts, tree_attention
from planish.model.kernels.triton.tree_attention import (
    TritonTreeAttention,
    key_plan,
    query_plan,
)
from planish.model.layers.lora import LoraLayout
from planish.model.sequences.prefix_tree import MicroBatch, pack
from planish.testing import tiny_model
from planish.types import Datum, LoraConfig, ModelInput, TensorData

common = pytest.importorskip("planish.model.kernels.triton.common")
triton_forest = pytest.importorskip("planish.model.kernels.triton.tree_kernels")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pack_one(*sequences) -> MicroBatch:
    (micro_batch,) = pack([np.asarray(sequence) for sequence in sequences], 100_000)
    return micro_batch


def nested(seed: int, longest: int) -> MicroBatch:
    """Return sequences whose prompts share a prefix and whose completions share prefixes.

    Segments of one row occur, and one sequence shares nothing.
    """
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 50, longest)
    sequences = [rng.integers(50, 60, longest)]
    for _ in range(2):
        prompt = np.concatenate([shared, rng.integers(0, 50, rng.integers(1, longest))])
        sequences += [
            np.concatenate([prompt, rng.integers(0, 2, rng.integers(1, longest))]) for _ in range(3)
        ]
    return pack_one(*sequences)


FORESTS = {
    "nested": nested(0, 12),
    "one long": pack_one(np.arange(70)),
    "one row": pack_one([7]),
    "nothing shared": pack_one(*(np.full(n, n) for n in (3, 25, 17, 1, 13))),
    "single rows": pack_one(*([*range(20), 40 + n] for n in range(25))),
}


def tensors(
    rows: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = [(rows, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def gradients(attend, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of q, k, v. The last input is the output's gradient."""
    *qkv, upstream = inputs
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attend(0, *leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def assert_near(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        # a gradient may be 0
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1)


@pytest.mark.parametrize("name", slow_after(2, list(FORESTS)))
def test_gpu_prefix_tree_attention_equals_dense_masked_attention(name: str):
    micro_batch = FORESTS[name]
    inputs = tensors(len(micro_batch), 3, 1, 16)
    expected = gradients(dense_mask_attention(micro_batch, DEVICE), inputs)
    assert_near(gradients(TritonTreeAttention(micro_batch, DEVICE), inputs), expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype", "kib"),
    [
        (2, 2, 16, torch.float32, 227),
        (4, 1, 20, torch.float32, 227),
        (3, 1, 16, torch.bfloat16, 227),
        (8, 2, 128, torch.bfloat16, 227),
        (8, 2, 128, torch.bfloat16, 163),
        (3, 1, 80, torch.bfloat16, 99),
        (2, 1, 256, torch.bfloat16, 227),
        (2, 1, 256, torch.bfloat16, 99),
    ],
)
def test_every_group_head_size_and_dtype_equals_dense_attention(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, kib: int, monkeypatch
):
    monkeypatch.setattr(common, "shared_memory", lambda _: kib << 10)
    micro_batch = nested(1, 12)
    inputs = tensors(len(micro_batch), heads, kv_heads, size, dtype)
    expected = gradients(dense_mask_attention(micro_batch, DEVICE), inputs)
    assert_near(
        gradients(TritonTreeAttention(micro_batch, DEVICE), inputs),
        expected,
        1e-5 if dtype == torch.float32 else 0.03,
    )


@pytest.mark.parametrize(
    ("name", "window", "has_sinks"),
    slow_after(
        1,
        [
            ("nested", 7, True), ("one long", 20, False), ("single rows", 5, True),
            ("nothing shared", 300, True), ("nested", 1, False),
        ],
    ),
)  # fmt: skip
def test_windows_and_sinks_equal_dense_masked_attention(name: str, window: int, has_sinks: bool):
    """The second layer has no window."""
    micro_batch = FORESTS[name]
    inputs = tensors(len(micro_batch), 3, 1, 16)
    sinks = torch.tensor([-1.0, 0.5, 3.0], device=DEVICE) if has_sinks else None
    windows = (window, None)
    for layer in (0, 1) if name == "one long" else (0,):
        expected, found = (
            gradients(lambda _, q, k, v, a=attend, at=layer: a(at, q, k, v, sinks), inputs)
            for attend in (
                dense_mask_attention(micro_batch, DEVICE, windows),
                TritonTreeAttention(micro_batch, DEVICE, windows),
            )
        )
        assert_near(found, expected, 1e-5)


@pytest.mark.slow
def test_a_window_in_bfloat16_with_several_heads_and_split_sums(monkeypatch):
    monkeypatch.setattr(tree_attention, "_FEWEST_TILES", 2)
    micro_batch = nested(4, 40)
    inputs = tensors(len(micro_batch), 4, 2, 32, torch.bfloat16)
    sinks = torch.linspace(-2, 2, 4, device=DEVICE)
    expected, found = (
        gradients(lambda _, q, k, v, a=attend: a(0, q, k, v, sinks), inputs)
        for attend in (
            dense_mask_attention(micro_batch, DEVICE, (30,)),
            TritonTreeAttention(micro_batch, DEVICE, (30,)),
        )
    )
    assert_near(found, expected, 0.03)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=12
    ),
    window=st.integers(1, 35),
    fewest=st.sampled_from([1, 2, 16]),
)
def test_plans_with_a_window_contain_all_visible_pairs(
    sequences: list[list[int]], window: int, fewest: int
):
    """No pair of tiles occurs twice. A pair without a mask has only visible entries."""
    micro_batch = pack_one(*sequences)
    one = triton_forest.Launch(4, 8, 4, 1)
    tiles = triton_forest.Tiles(one, one, replace(one, keys=4))
    positions = micro_batch.positions
    given = (positions, window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "_FEWEST_TILES", fewest)
        queries = query_plan(micro_batch.subtree_end, tiles, 1, *given)
        keys = key_plan(micro_batch.subtree_end, tiles, 1, 2, *given)
    by_queries = [
        ((tile, int(queries.lists[n])), n < masked)
        for tile, first, masked, end in queries.items.tolist()
        for n in range(first, end)
    ]
    by_keys = [
        ((n, tile), full <= n < full_end)
        for tile, first, full, full_end, end, _ in keys.items.tolist()
        for n in range(first, end)
    ]
    near = positions[:, None] - positions < window
    for found, size in ((by_queries, 8), (by_keys, 4)):
        pairs = dict(found)
        assert len(pairs) == len(found)
        expected = tiles_of(micro_batch, 4, size, attention_mask(micro_batch) & near)
        assert pairs.keys() >= expected.keys()
        assert all(expected.get(pair) for pair, is_whole in found if is_whole)
    # Of a single sequence, the query tiles list exactly the pairs in the window.
    if len(sequences) == 1:
        assert (
            dict(by_queries).keys()
            == tiles_of(micro_batch, 4, 8, attention_mask(micro_batch) & near).keys()
        )


@pytest.mark.slow
def test_a_query_group_larger_than_a_tile_gets_a_larger_tile():
    micro_batch = pack_one(np.arange(5), [0, 1, 7])
    inputs = tensors(len(micro_batch), 33, 1, 16)
    expected = gradients(dense_mask_attention(micro_batch, DEVICE), inputs)
    assert_near(gradients(TritonTreeAttention(micro_batch, DEVICE), inputs), expected, 1e-5)


@pytest.mark.slow
def test_split_sums_are_added_deterministically(monkeypatch):
    """The queries of the first keys are split among several programs."""
    monkeypatch.setattr(tree_attention, "_FEWEST_TILES", 2)
    micro_batch = FORESTS["one long"]
    plan = key_plan(micro_batch.subtree_end, triton_forest.tiles_for(torch.float32, 16, 3), 3, 1)
    assert plan.sums[:, 2].max() > 2
    inputs = tensors(len(micro_batch), 3, 1, 16)
    first, second = (gradients(TritonTreeAttention(micro_batch, DEVICE), inputs) for _ in range(2))
    assert_near(first, gradients(dense_mask_attention(micro_batch, DEVICE), inputs), 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
def test_strided_rows_give_the_same_result():
    """v is a slice of a fused matmul's output, so its rows are strided."""
    micro_batch = nested(2, 10)
    inputs = tensors(len(micro_batch), 2, 2, 16)
    qkv = torch.cat(inputs[:3], 1)
    apart = [*qkv.split([2, 2, 2], 1), inputs[3].transpose(1, 2).contiguous().transpose(1, 2)]
    assert not any(x.is_contiguous() for x in apart)
    expected = gradients(TritonTreeAttention(micro_batch, DEVICE), inputs)
    found = gradients(TritonTreeAttention(micro_batch, DEVICE), apart)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
def test_other_trees_in_the_batch_change_only_rounding():
    own = np.arange(40)
    alone, among = pack_one(own), pack_one(own, [*range(15), *range(100, 110)], np.arange(200, 217))
    rows = torch.from_numpy(among.datum_rows[0])
    inputs = tensors(len(among), 3, 1, 16)
    inputs[3][[n for n in range(len(among)) if n not in set(rows.tolist())]] = 0
    expected = gradients(TritonTreeAttention(alone, DEVICE), [x[rows] for x in inputs])
    assert_near(
        [x[rows] for x in gradients(TritonTreeAttention(among, DEVICE), inputs)], expected, 1e-6
    )


def test_non_finite_values_stay_in_their_own_rows():
    micro_batch = nested(3, 10)
    q, k, v, _ = tensors(len(micro_batch), 3, 1, 16)
    clean = TritonTreeAttention(micro_batch, DEVICE)(0, q, k, v)
    q[-4] = torch.nan
    found = TritonTreeAttention(micro_batch, DEVICE)(0, q, k, v)
    assert found[-4].isnan().all()
    others = torch.arange(len(micro_batch)) != len(micro_batch) - 4
    assert torch.equal(found[others], clean[others])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=12
    ),
    group=st.sampled_from([1, 3, 4]),
    fewest=st.sampled_from([1, 2, 16]),
)
def test_plans_list_exactly_the_tiles_with_visible_pairs(
    sequences: list[list[int]], group: int, fewest: int
):
    """Each pair of tiles with a visible entry occurs once. It needs no mask if both tiles are whole
    and all entries are visible.
    """
    micro_batch = pack_one(*sequences)
    one = triton_forest.Launch(4, 8, 4, 1)
    tiles = triton_forest.Tiles(one, one, replace(one, keys=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "_FEWEST_TILES", fewest)
        queries, keys = (
            query_plan(micro_batch.subtree_end, tiles, group),
            key_plan(micro_batch.subtree_end, tiles, group, 2),
        )
    by_queries = {}
    for tile, first, masked, end in queries.items.tolist():
        assert sorted(set(queries.lists[first:end])) == sorted(queries.lists[first:end])
        by_queries |= {(tile, int(queries.lists[n])): n < masked for n in range(first, end)}
    assert by_queries == tiles_of(micro_batch, 4 // group, 8)
    by_keys = {}
    for tile, first, full, full_end, end, _ in keys.items.tolist():
        met = {(n, tile): full <= n < full_end for n in range(first, end)}
        assert not met.keys() & by_keys.keys()
        by_keys |= met
    assert by_keys == tiles_of(micro_batch, 4 // group, 4)
    places = sorted(item[5] for item in keys.items.tolist() if item[5] >= 0)
    assert places == list(range(keys.places))
    for tile, first, count in keys.sums.tolist():
        assert sorted(item[5] for item in keys.items.tolist() if item[0] == tile) == list(
            range(first, first + count)
        )


def tiles_of(
    micro_batch: MicroBatch, rows: int, keys: int, visible: np.ndarray | None = None
) -> dict[tuple[int, int], bool]:
    """Return the pairs of tiles with a visible entry, computed from the mask, and whether both
    tiles are whole and all entries visible. `visible`: the mask; by default that of the tree.
    """
    visible, found = attention_mask(micro_batch) if visible is None else visible, {}
    for query in range(0, len(micro_batch), rows):
        for key in range(0, len(micro_batch), keys):
            part = visible[query : query + rows, key : key + keys]
            if part.any():
                found[query // rows, key // keys] = bool(part.all()) and part.shape == (rows, keys)
    return found


@pytest.mark.slow
def test_the_trainer_gradient_with_gpu_attention_equals_the_reference(tmp_path, monkeypatch):
    directory = tiny_model(tmp_path, layers=1)
    decoder = load_on(directory, torch.float32, DEVICE)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50, 12)
    data = []
    for _ in range(3):
        tokens = np.concatenate([prompt, rng.integers(0, 50, rng.integers(2, 15))])
        targets = TensorData.from_numpy(np.roll(tokens, -1))
        weights = TensorData.from_numpy(np.ones(len(tokens), np.float32))
        data.append(
            Datum(
                ModelInput.from_ints(tokens.tolist()),
                {"target_tokens": targets, "weights": weights},
            )
        )
    expected = gradient(decoder, data)
    used = []
    monkeypatch.setenv("PLANISH_KERNELS", "triton")
    monkeypatch.setattr(
        parts,
        "TritonTreeAttention",
        lambda *given: used.append(given) or TritonTreeAttention(*given),
    )
    found = gradient(load_on(directory, torch.float32, DEVICE), data)
    assert used
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def gradient(decoder: Decoder, data: list[Datum]) -> Tensor:
    layout = LoraLayout(decoder.config, LoraConfig(rank=4))
    noise = torch.randn(layout.size, generator=torch.Generator().manual_seed(1))
    adapter = Adapter(layout, decoder.backend, (layout.init(0) + 0.02 * noise).to(decoder.device))
    for _ in Trainer(decoder, TrainerSettings()).forward_backward(adapter, data, "cross_entropy"):
        pass
    assert adapter.grad is not None
    return adapter.grad.clone()
