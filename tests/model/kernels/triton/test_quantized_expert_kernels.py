"""The kernel for quantized experts computes what torch computes with dequantized weights."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from backends import CONFIG
from quantized_weights import FAN_IN, weights_of

from planish.model.decoder.experts import _expert_matmuls_backward, expert_matmuls
from planish.model.kernels.choose import reference_backend
from planish.model.kernels.triton import expert_kernels, quantized_kernels
from planish.model.kernels.triton.quantized_kernels import QuantizedCodes, WeightBuffer
from planish.model.layers import linear
from planish.model.layers.expert_pairs import TokenExpertPairs
from planish.model.layers.linear import DequantizedWeights, ExpertLinears, QuantizedLinear
from planish.model.layers.quantization import Fp8Weight, Int8Weight, QuantizedWeight, dequantized
from planish.model.layers.quantized_experts import QuantizedExperts

SCHEMES = ["nf4", "mxfp4", "int8", "fp8 blocks", "fp8 channels", "fp8"]
SIZE, PARTS = 40, 2


def weights_of_experts(
    scheme: str, number: int, device: torch.device
) -> list[list[QuantizedWeight]]:
    each = weights_of(scheme, [SIZE] * (number * PARTS), torch.float32, device)
    return [each[first : first + PARTS] for first in range(0, len(each), PARTS)]


def linears_of(
    weights: list[list[QuantizedWeight]], dtype: torch.dtype, biases: Tensor | None = None
) -> ExpertLinears:
    buffer = WeightBuffer(dtype)
    return ExpertLinears(
        QuantizedLinear(
            own,
            [None] * PARTS if biases is None else biases[index].split(SIZE),
            QuantizedCodes(own, dtype, buffer),
        )
        for index, own in enumerate(weights)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "dtype", "rows", "experts"),
    [
        *((scheme, torch.bfloat16, 3, 4) for scheme in SCHEMES[:4]),
        *((scheme, torch.float32, 3, 4) for scheme in ("int8", "nf4")),
        *((scheme, torch.bfloat16, 200, 3) for scheme in ("int8", "mxfp4")),
    ],
)
def test_matmuls_are_those_of_the_dequantized_experts(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    dtype: torch.dtype,
    rows: int,
    experts: int,
):
    """Some experts have no rows, or more than a tile. No expert is dequantized as a whole."""
    weights = weights_of_experts(scheme, experts, device)
    dense = torch.stack([dequantized(own, dtype) for own in weights])
    biases = torch.randn(experts, PARTS * SIZE).to(device, dtype)
    linears = linears_of(weights, dtype, biases)
    monkeypatch.setattr(linear, "dequantized", None)
    monkeypatch.setattr(quantized_kernels, "_dequantize", None)
    chosen = torch.rand(rows, experts - 1).argsort(1)[:, :2].contiguous().to(device)
    pairs = TokenExpertPairs(chosen, experts, expert_kernels)
    backend = reference_backend(CONFIG, dtype, device)
    # Rows with a stride, as in slices of fused outputs.
    x = torch.randn(2 * rows, 2 * FAN_IN).to(device, dtype)[:, :FAN_IN]
    grad = torch.randn(2 * rows, PARTS * SIZE).to(device, dtype)
    found = [
        expert_matmuls(backend, x, linears, pairs, training=True),
        _expert_matmuls_backward(backend, grad, FAN_IN, linears, pairs),
    ]
    own = dense.double()[pairs.sorted_experts]
    expected = [
        torch.einsum("pi,poi->po", x.double(), own) + biases.double()[pairs.sorted_experts],
        torch.einsum("po,poi->pi", grad.double(), own),
    ]
    limit = 0.01 if dtype == torch.bfloat16 else 1e-5
    for ours, right in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - right).abs().max() <= limit * right.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_tile_has_the_bits_of_the_dequantized_expert(device: torch.device, scheme: str):
    """A one-hot row selects a column or a row of the weight, without rounding."""
    weights = weights_of_experts(scheme, 2, device)
    linears, dtype = linears_of(weights, torch.bfloat16), torch.bfloat16
    ranges = torch.tensor([[0, 0], [0, FAN_IN]], dtype=torch.int32, device=device)
    one_hot = torch.eye(FAN_IN, dtype=dtype, device=device)
    quantized, dense = linears.quantized, dequantized(weights[1], dtype)
    assert quantized is not None
    found = expert_kernels.matmul(one_hot, quantized, ranges, PARTS * SIZE)
    assert torch.equal(found.t(), dense)
    rows = one_hot[: PARTS * SIZE, : PARTS * SIZE]
    ranges[1, 1] = len(rows)
    found = expert_kernels.matmul(rows, quantized, ranges, FAN_IN, transposed=True)
    assert torch.equal(found, dense)


def test_an_empty_batch_needs_no_launch(device: torch.device):
    quantized = linears_of(weights_of_experts("int8", 2, device), torch.float32).quantized
    assert quantized is not None
    ranges = torch.zeros(2, 2, dtype=torch.int32, device=device)
    x = torch.zeros(0, FAN_IN, device=device)
    assert expert_kernels.matmul(x, quantized, ranges, 80).shape == (0, 80)


def test_weights_that_the_kernel_cannot_read_are_multiplied_one_by_one(device: torch.device):
    int8 = weights_of_experts("int8", 2, device)
    assert QuantizedExperts.of(int8) is not None
    mixed = [int8[0], weights_of_experts("nf4", 1, device)[0]]
    assert QuantizedExperts.of(mixed) is None
    assert QuantizedExperts.of([int8[0], int8[1][:1]]) is None
    other = weights_of("int8", [SIZE, 2 * SIZE], torch.float32, device)
    assert QuantizedExperts.of([int8[0], other]) is None
    unaligned = torch.zeros(SIZE * FAN_IN + 1, dtype=torch.int8, device=device)[1:]
    scales = torch.ones(SIZE, device=device)
    assert QuantizedExperts.of([[Int8Weight(unaligned.view(SIZE, FAN_IN), scales)]]) is None
    codes = torch.randn(64, FAN_IN).to(torch.float8_e4m3fn)
    blocks = Fp8Weight.from_stored(codes, torch.rand(2, 6), (32, 32))
    assert QuantizedExperts.of([[blocks]]) is None
    plain = DequantizedWeights(int8[0], torch.float32)
    linears = ExpertLinears([QuantizedLinear(int8[0], [None] * PARTS, plain)])
    assert linears.quantized is linears.kernel_weights is None
