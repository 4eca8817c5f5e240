"""The kernels for quantized weights equal the kernels for the dequantized weights bit for bit."""

import pytest
import torch
from variants import slow_after

from planish.model.architecture.weight_sizes import SCHEMES
from planish.model.kernels.cpp.matmul import CppPackedWeight, WeightArena
from planish.model.kernels.cpp.quantized_matmul import CppQuantizedWeight, supports_quantized
from planish.model.layers.linear import DequantizedWeights, QuantizedLinear
from planish.model.layers.quantization import dequantized, quantize

pytestmark = pytest.mark.usefixtures("products")


@pytest.fixture(params=[torch.bfloat16, torch.float32])
def dtype(request):
    return request.param


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("sizes", "fan_in"),
    slow_after(2, [((16,), 64), ((96, 48, 32), 128), ((80, 80), 2112), ((2240,), 192)]),
    ids=str,
)
def test_forward_and_backward_equal_those_of_the_dequantized_weights(sizes, fan_in, scheme, dtype):
    """Panels of 16 to 64 outputs, joined weights, and more columns than a stretch of 2048."""
    weights = [quantize(torch.randn(size, fan_in) * 0.05, scheme) for size in sizes]
    panels, whole = CppQuantizedWeight(weights, WeightArena(0)), dequantized(weights, dtype)
    forward = CppPackedWeight(whole, WeightArena(0))
    backward = CppPackedWeight(whole, WeightArena(0), transposed=True)
    bias = torch.randn(sum(sizes)).to(dtype)
    for rows in (1, 6, 7, 130):
        x, grad = torch.randn(rows, fan_in).to(dtype), torch.randn(rows, sum(sizes)).to(dtype)
        assert torch.equal(panels.matmul(x, bias), forward.matmul(x, bias))
        assert torch.equal(panels.matmul_backward(grad), backward.matmul(grad, None))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_kernels_agree_with_torch(scheme, dtype):
    weights = [quantize(torch.randn(size, 128) * 0.1, scheme) for size in (64, 32)]
    biases = [torch.randn(64).to(dtype), torch.randn(32).to(dtype)]
    kernel = QuantizedLinear(weights, biases, CppQuantizedWeight(weights, WeightArena(0)))
    reference = QuantizedLinear(weights, biases, DequantizedWeights(weights, dtype))
    x, grad = torch.randn(9, 128).to(dtype), torch.randn(9, 96).to(dtype)
    allowed = 0.02 if dtype == torch.bfloat16 else 1e-5
    for found, expected in (
        (kernel.matmul(x), reference.matmul(x)),
        (kernel.matmul_backward(grad), reference.matmul_backward(grad)),
    ):
        assert (found - expected).abs().max() <= allowed * expected.abs().max()
    assert kernel.sizes == reference.sizes == [64, 32]
    assert kernel.is_batch_invariant
    assert not reference.is_batch_invariant


def test_packed_codes_take_the_bytes_of_the_formula():
    """The int8 panels have nothing beside codes and scales. nf4 adds 12 bytes for each output, and
    tables of 272 numbers.
    """
    weight = torch.randn(640, 576)
    assert CppQuantizedWeight([quantize(weight, "int8")], WeightArena(0)).nbytes == 640 * (576 + 4)
    blocks = 640 * 576 // 64
    expected = 32 * blocks + blocks + 4 * -(-blocks // 256) + 12 * 640 + 4 * 272
    assert CppQuantizedWeight([quantize(weight, "nf4")], WeightArena(0)).nbytes == expected


def test_sizes_that_the_kernels_lack_are_left_to_torch(dtype):
    for size, fan_in in ((24, 64), (32, 48)):
        assert not supports_quantized(size, fan_in, dtype)
    assert supports_quantized(48, 64, dtype)
