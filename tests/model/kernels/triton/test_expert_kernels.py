"""The kernels for mixtures of experts compute what torch computes, one expert after another."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from backends import CONFIG

from planish.model.decoder.experts import expert_linears_backward, expert_matmuls
from planish.model.kernels.choose import reference_backend, triton_backend
from planish.model.kernels.triton import expert_kernels
from planish.model.kernels.triton.families import FAMILIES, supported_families
from planish.model.layers.expert_pairs import ExpertKernels, TokenExpertPairs
from planish.model.layers.linear import ExpertLinears, PackedLinear
from planish.model.layers.lora import LoraMatrices

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("rows", "experts", "k"), [(1, 3, 2), (13, 6, 3), (700, 5, 2), (9, 40, 8)])
def test_pairs_are_sorted_as_by_torch(device, rows, experts, k):
    chosen = torch.rand(rows, experts).argsort(1)[:, :k].contiguous().to(device)
    found = TokenExpertPairs(chosen, experts, expert_kernels)
    expected = TokenExpertPairs(chosen, experts)
    assert torch.equal(found.order, expected.order)
    assert torch.equal(found.row_indices, expected.row_indices)
    assert torch.equal(found.order[found.places], torch.arange(rows * k, device=device))
    assert found.expert_slices == expected.expert_slices
    for start, stop in ((0, rows), (rows // 3, rows - 1)):
        starts, stops = found.device_ranges(start, stop).tolist()
        ranges = expected.expert_ranges(start, stop)
        assert starts == ranges[0].tolist()
        assert stops == (ranges[0] + ranges[1]).tolist()


@pytest.mark.parametrize("normalizes", [True, False])
def test_experts_are_chosen_as_by_a_stable_sort(device, normalizes):
    logits = torch.randn(7, 37).mul(2).round().to(device)
    weights, chosen = expert_kernels.choose(logits, 5, normalizes=normalizes)
    expected, ranked = logits.softmax(1).sort(dim=1, descending=True, stable=True)
    expected = expected[:, :5]
    if normalizes:
        expected = expected / expected.sum(1, keepdim=True)
    assert torch.equal(chosen, ranked[:, :5])
    torch.testing.assert_close(weights, expected)


def test_a_nan_makes_the_weights_of_its_row_nan(device):
    logits = torch.zeros(2, 4, device=device)
    logits[0, 1] = float("nan")
    weights, chosen = expert_kernels.choose(logits, 2, normalizes=True)
    assert weights.isnan().tolist() == [[True, True], [False, False]]
    assert ((chosen >= 0) & (chosen < 4)).all()
    assert (chosen[:, 0] != chosen[:, 1]).all()


def linears_of(weights, biases):
    given = [None] * len(weights) if biases is None else biases
    return ExpertLinears(
        PackedLinear([weight], [bias], packer=lambda weights, transposed: None)
        for weight, bias in zip(weights, given, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "experts", "fan_out", "fan_in", "rank", "has_bias"),
    [(9, 4, 48, 80, 4, True), (5, 12, 33, 64, 16, False), (330, 4, 40, 24, 3, True)],
)
def test_matmuls_and_gradients_are_those_of_torch(
    device, dtype, rows, experts, fan_out, fan_in, rank, has_bias
):
    chosen = torch.rand(rows, experts).argsort(1)[:, :2].contiguous().to(device)
    weights, biases = torch.randn(experts, fan_out, fan_in), torch.randn(experts, fan_out)
    a, b = torch.randn(experts, rank, fan_in) * fan_in**-0.5, torch.randn(experts, fan_out, rank)
    x, grad = torch.randn(rows, fan_in), torch.randn(2 * rows, fan_out)
    weights, biases, a, b, x, grad = (
        value.to(device, dtype) for value in (weights * fan_in**-0.5, biases, a, b, x, grad)
    )
    found = []
    implementations: tuple[ExpertKernels | None, ...] = (expert_kernels, None)
    for kernels in implementations:
        wide = dtype if kernels else torch.float64
        backend = reference_backend(CONFIG, wide, device)
        pairs = TokenExpertPairs(chosen, experts, kernels)
        linears = linears_of(weights.to(wide), biases.to(wide) if has_bias else None)
        # Rows with a stride, as in slices of fused outputs.
        inputs = torch.cat([x, x], 1).to(wide)[pairs.row_indices][:, :fan_in]
        out = expert_matmuls(backend, inputs, linears, pairs, training=True)
        lora = LoraMatrices(a.to(wide), (b.to(wide),))
        adapted = out.clone()
        hidden = inputs @ a.to(wide).flatten(0, 1).t()
        own = hidden.unflatten(1, (experts, rank))[torch.arange(len(hidden)), pairs.sorted_experts]
        if kernels:
            hidden = expert_kernels.add_lora_(inputs, adapted, a, b, pairs.ranges)
            torch.testing.assert_close(hidden, own, rtol=0.02, atol=0.02)
        else:
            adapted += torch.einsum("pr,por->po", own, b.to(wide)[pairs.sorted_experts])
        grads = expert_linears_backward(backend, pairs, grad.to(wide), inputs, own, linears, lora)
        found.append([out, adapted, grads[0], *grads[1]])
    for ours, expected in zip(*found, strict=True):
        scale = expected.abs().max()
        limit = 0.02 if dtype == torch.bfloat16 else 1e-5
        assert (ours.double() - expected).abs().max() <= limit * scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_weighted_sum_is_that_of_torch(device, dtype):
    """Both add in float32 in the same order."""
    values, weights = torch.randn(3 * 11, 70).to(device, dtype), torch.rand(11, 3).to(device)
    chosen = torch.rand(11, 6).argsort(1)[:, :3].contiguous().to(device)
    pairs = TokenExpertPairs(chosen, 6, expert_kernels)
    for given in (None, weights):
        expected = torch.zeros(11, 70, device=device)
        for column in range(3):
            term = pairs.unsort(values)[:, column].float()
            expected += term if given is None else term * given[:, column, None]
        found = expert_kernels.weighted_sum(values, pairs.places, 3, given)
        torch.testing.assert_close(found, expected.to(dtype), rtol=1e-6, atol=1e-6)


def test_an_empty_batch_needs_no_launch(device):
    chosen = torch.empty(0, 2, dtype=torch.int64, device=device)
    pairs = TokenExpertPairs(chosen, 3, expert_kernels)
    assert pairs.ranges.tolist() == [[0, 0, 0], [0, 0, 0]]
    x, weights = torch.zeros(0, 4, device=device), torch.zeros(3, 5, 4, device=device)
    assert expert_kernels.matmul(x, weights, pairs.ranges, 5).shape == (0, 5)
    assert expert_kernels.weighted_sum(x, pairs.places, 2).shape == (0, 4)
    assert expert_kernels.choose(torch.zeros(0, 3), 2, normalizes=True)[0].shape == (0, 2)


def test_unaligned_packed_or_quantized_weights_have_no_addresses():
    weights = torch.randn(3, 4, 8)
    addresses = linears_of(weights, None).addresses
    assert addresses is not None
    assert addresses.tolist() == [w.data_ptr() for w in weights]
    assert linears_of(torch.randn(3, 4, 9)[..., 1:], None).addresses is None
    assert linears_of(torch.randn(3, 3, 3), None).addresses is None
    packed = PackedLinear([weights[0]], packer=lambda weights, transposed: object())  # type: ignore[arg-type, return-value]
    assert ExpertLinears([packed]).addresses is None
    two = PackedLinear([weights[0], weights[2]], (None, None), packer=lambda *_: None)
    assert ExpertLinears([two]).addresses is None


def test_the_kernels_are_used_if_they_passed_the_check(device):
    assert "experts" not in supported_families(CONFIG, has_experts=False)
    config = replace(CONFIG, num_experts=6, experts_per_token=2, expert_size=32)
    found = triton_backend(config, torch.float32, device, FAMILIES)
    assert found.expert_kernels is expert_kernels
    without = set(FAMILIES) - {"experts"}
    assert triton_backend(config, torch.float32, device, without).expert_kernels is None
