"""Matmuls, attention and gradients of adapters with AMX, emulated on a CPU without AMX. The
emulator rejects what the instructions reject.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from planish.model.kernels.cpp import ops
from planish.model.kernels.cpp.matmul import CppPackedAdapter, CppPackedWeight, WeightArena

POSITIONS = 150
ROWS = range(0, POSITIONS, 16)
"""The first row of each block of a causal segment."""


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def sums_of_tiles(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [m, k] times weight [n, k] in float32, added in the order of AMX's tiles.

    A sum adds runs of 32 columns. Of a run, the even columns are added first to last, and so are
    the odd columns. Products of two bf16 numbers are exact in float32.
    """
    left, right = (given.float().numpy() for given in (x, weight))
    total = np.zeros((len(left), len(right)), np.float32)
    for start in range(0, left.shape[1], 32):
        run = np.zeros((2, *total.shape), np.float32)
        for column in range(start, min(start + 32, left.shape[1])):
            run[column % 2] += left[:, column, None] * right[None, :, column]
        total += run[0] + run[1]
    return torch.from_numpy(total)


def causal_plan(keys: Tensor, values: Tensor, window: int | None) -> ops.AttentionPlan:
    """Return a plan in which each of the rows attends to the rows before it and to itself."""
    blocks, stops = [], []
    for first in ROWS:
        stop = min(first + 16, len(keys))
        blocks.append((first, stop - first, len(stops), 1))
        stops.append(stop)
    return ops.AttentionPlan(
        np.array(blocks, ops.Block),
        ranges_of(keys, values, [(0, stop) for stop in stops]),
        np.arange(len(keys)),
        np.arange(len(keys)) + 1,
        windows=(window,),
    )


def ranges_of(keys: Tensor, values: Tensor, spans: list[tuple[int, int]]) -> np.ndarray:
    """Return one layer's ranges of keys and values [T, H, E], from (start, stop) of each."""
    _, heads, e = keys.shape
    found = np.zeros((1, len(spans)), ops.Range)
    for place, (start, stop) in zip(found[0], spans, strict=True):
        offset = start * heads * e * keys.itemsize
        place["k"], place["v"] = keys.data_ptr() + offset, values.data_ptr() + offset
        place["count"], place["row"], place["head"] = stop - start, heads * e, e
    return found


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(
    ("fan_out", "fan_in"), [(96, 576), (272, 2560), (64, 34), (176, 8), (16, 2)]
)
def test_amx_rows_are_batch_invariant(fan_out, fan_in):
    generator = torch.Generator().manual_seed(fan_in)
    weight, x, bias = (
        torch.randn(*n, generator=generator).bfloat16()
        for n in ((fan_out, fan_in), (70, fan_in), (fan_out,))
    )
    panels = CppPackedWeight(weight, WeightArena(0))
    whole = panels.matmul(x, bias)
    expected = x.double() @ weight.double().t() + bias.double()
    assert (whole.double() - expected).abs().max() <= 0.005 * expected.abs().max()
    for first, stop in ((0, 1), (15, 17), (3, 36), (69, 70)):
        assert torch.equal(panels.matmul(x[first:stop], bias), whole[first:stop])


def test_a_non_finite_row_does_not_change_other_amx_rows(products):
    x = torch.ones(33, 34, dtype=torch.bfloat16)
    x[16] = torch.nan
    found = CppPackedWeight(torch.ones(32, 34, dtype=torch.bfloat16), WeightArena(0)).matmul(
        x, None
    )
    assert found[16].isnan().all()
    others = torch.arange(33) != 16
    assert (found[others] == 34).all()


def test_the_self_test_of_amx_passes(emulated_tiles):
    library = ops.load_library()
    assert library is not None
    assert library.amx_self_test()


@pytest.mark.usefixtures("emulated_tiles")
@pytest.mark.parametrize(("group", "e"), [(1, 16), (3, 64), (6, 96), (8, 80)])
def test_scores_of_tiles_have_the_order_of_the_instruction(group, e):
    """A row that sees one key has the key's score as log-sum-exp."""
    rows, heads = 20, 2
    q, k = normal(rows, heads * group, e), normal(rows, heads, e)
    plan = ops.AttentionPlan(
        np.array([(row, 1, row, 1) for row in range(rows)], ops.Block),
        ranges_of(k, k, [(row, row + 1) for row in range(rows)]),
        np.arange(rows),
        np.ones(rows, np.int64),
    )
    lse = torch.empty(rows, heads * group)
    assert torch.equal(ops.attend(plan, 0, q, heads, lse), k.repeat_interleave(group, 1))
    per_ln = np.float32(1 / math.log(2))
    scale = np.float32(e**-0.5) * per_ln
    for head in range(heads * group):
        scores = sums_of_tiles(q[:, head], k[:, head // group]).diagonal()
        expected = scores.numpy() * scale / per_ln
        assert np.array_equal(lse[:, head].numpy(), expected)


@pytest.mark.usefixtures("emulated_tiles")
@pytest.mark.parametrize(("group", "e"), [(1, 16), (3, 64), (8, 80)])
def test_sums_of_values_by_tiles_have_the_order_of_the_instruction(group, e):
    """Queries of 0 give every visible value the weight 1."""
    k, v = normal(POSITIONS, 2, e), normal(POSITIONS, 2, e)
    q = torch.zeros(POSITIONS, 2 * group, e, dtype=torch.bfloat16)
    found = ops.attend(causal_plan(k, v, None), 0, q, 2, None)
    weights = torch.ones(POSITIONS, POSITIONS).tril()
    for head in range(2 * group):
        sums = sums_of_tiles(weights, v[:, head // group].t())
        expected = (sums * (1 / weights.sum(1, keepdim=True))).bfloat16()
        assert torch.equal(found[:, head], expected)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(("group", "e"), [(1, 16), (3, 64), (6, 128), (8, 80)])
@pytest.mark.parametrize("window", [None, 9, 100])
def test_a_decoded_row_has_the_bits_of_the_trained_row(group, e, window):
    """Decoded rows share a prefix of 64 or 128 positions. The other keys belong to one row."""
    q, k, v = normal(POSITIONS, 2 * group, e), normal(POSITIONS, 2, e), normal(POSITIONS + 1, 2, e)
    v, sinks = v[1:].contiguous(), normal(2 * group).float() if window else None
    trained = ops.attend(causal_plan(k, v, window), 0, q, 2, None, sinks)
    for prefix, first, size in ((64, 64, 1), (128, 128, 8), (128, 141, 3), (0, 0, 2)):
        rows = np.arange(first, min(POSITIONS, first + 22))
        blocks = [
            (start, min(size, len(rows) - start), 0, int(prefix > 0))
            for start in range(0, len(rows), size)
        ]
        plan = ops.AttentionPlan(
            np.array(blocks, ops.Block),
            ranges_of(k, v, [(0, prefix)] if prefix else []),
            rows,
            np.full(len(rows), prefix),
            ranges_of(k, v, [(prefix, row + 1) for row in rows.tolist()]),
            windows=(window,),
        )
        decoded = ops.attend(plan, 0, q, 2, None, sinks)
        assert torch.equal(decoded[rows], trained[rows])


@pytest.mark.parametrize(("group", "e"), [(1, 16), (3, 64), (8, 80)])
@pytest.mark.parametrize("window", [None, 30])
def test_gradients_of_attention_by_tiles_are_as_exact_as_by_vectors(group, e, window, request):
    q, k, v = normal(POSITIONS, 2 * group, e), normal(POSITIONS, 2, e), normal(POSITIONS + 1, 2, e)
    v, grad = v[1:].contiguous(), normal(POSITIONS + 2, 2 * group, e)[2:].contiguous()

    def gradients() -> tuple[Tensor, ...]:
        lse, ends = torch.empty(POSITIONS, 2 * group), np.array([3, len(ROWS)], np.int64)
        plan = causal_plan(k, v, window)
        out = ops.attend(plan, 0, q, 2, lse)
        sums = torch.empty(len(ends), 2, *k.shape)
        return (out, *ops.attend_backward(plan, ends, grad, q, out, lse, k, sums))

    inputs64 = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(group, 1) for x in inputs64[1:])
    scores = torch.einsum("qhe,khe->hqk", inputs64[0], keys) * e**-0.5
    distance = torch.arange(POSITIONS)[:, None] - torch.arange(POSITIONS)
    seen = (distance >= 0) & (distance < (window or POSITIONS))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khe->qhe", weights, values)
    exact = (expected.detach(), *torch.autograd.grad(expected, inputs64, grad.double()))

    def errors(found: tuple[Tensor, ...]) -> list[float]:
        return [
            float((own.double() - its).norm() / its.norm())
            for own, its in zip(found, exact, strict=True)
        ]

    by_vectors = errors(gradients())
    request.getfixturevalue("emulated_tiles")
    by_tiles = errors(gradients())
    assert max(by_tiles) <= 5e-3
    for own, its in zip(by_tiles, by_vectors, strict=True):
        assert own <= 1.02 * its


@pytest.mark.usefixtures("emulated_tiles")
@pytest.mark.parametrize(("rows", "rank"), [(1, 16), (33, 1), (70, 20), (1030, 8)])
def test_gradients_of_adapters_by_tiles_have_the_order_of_the_instruction(rows, rank):
    sizes, fan_in = (48, 272), 80
    a = normal(2 * rank, fan_in)
    b_matrices = [normal(size, rank) for size in sizes]
    site = CppPackedAdapter([(a, b_matrices)]).target(0)
    assert site is not None
    x, grad = normal(rows, fan_in), normal(rows, sum(sizes))
    lora_hidden = site.add_(x, torch.zeros_like(grad), sizes)
    hidden_grad = site.backward_(grad, None, sizes)
    grad_a, b_grads = site.gradients(x, lora_hidden, grad, hidden_grad, sizes)
    assert torch.equal(grad_a, sums_of_tiles(hidden_grad.t(), x.t()))
    parts = zip(b_grads, grad.split(sizes, 1), lora_hidden.chunk(2, 1), strict=True)
    for found, upstream, hidden in parts:
        assert torch.equal(found, sums_of_tiles(upstream.t(), hidden.t()))
