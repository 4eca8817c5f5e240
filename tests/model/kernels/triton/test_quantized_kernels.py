"""Matmuls with quantized weights by the Triton kernels, against torch with dequantized weights."""

import pytest
import torch
import torch.nn.functional as F
from hopper import Case, resources
from quantized_weights import FAN_IN, weights_of

pytest.importorskip("triton")
from variants import slow_after

from planish.model.kernels.reference.matmuls import TorchPacker
from planish.model.kernels.triton import quantized_kernels
from planish.model.kernels.triton.parts import TritonPacker
from planish.model.kernels.triton.quantized_kernels import (
    MAX_ROWS,
    QuantizedCodes,
    WeightBuffer,
    can_multiply,
)
from planish.model.layers import linear
from planish.model.layers.quantization import (
    Fp8Weight,
    Int8Weight,
    QuantizedWeight,
    dequantized,
)

Constants = dict[str, int | bool | float | str | None]


def codes_of(weights: list[QuantizedWeight], dtype: torch.dtype, **options) -> QuantizedCodes:
    return QuantizedCodes(weights, dtype, WeightBuffer(dtype), **options)


@pytest.mark.parametrize("dtype", slow_after(1, [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize(
    "scheme", slow_after(2, ["int8", "mxfp4", "nf4", "fp8 blocks", "fp8", "fp8 channels"])
)
def test_matmuls_equal_those_of_the_dequantized_weights(
    scheme: str, dtype: torch.dtype, device: torch.device
):
    sizes = [40, 150]
    weights = weights_of(scheme, sizes, dtype, device)
    assert can_multiply(weights)
    dense, codes = dequantized(weights, dtype), codes_of(weights, dtype)
    bias = torch.randn(sum(sizes)).to(device, dtype)
    many = [(65, bias)] if dtype == torch.bfloat16 else []  # float32 has one tile for all rows
    for rows, own in ((3, bias), (37, None), *many):
        x = torch.randn(rows, FAN_IN).to(device, dtype)
        found = codes.matmul(x, own)
        expected = F.linear(x.double(), dense.double(), None if own is None else own.double())
        tolerance = 1e-4 if dtype == torch.float32 else 0.01
        assert found.dtype == dtype
        assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()
    for few in (torch.zeros(rows, FAN_IN, device=device, dtype=dtype) for rows in (0, 1)):
        assert torch.equal(codes.matmul(few, None), few.new_zeros(len(few), sum(sizes)))


@pytest.mark.parametrize("scheme", slow_after(2, ["int8", "mxfp4", "nf4", "fp8 blocks"]))
def test_a_tile_has_the_bits_of_the_dequantized_weight(scheme: str, device: torch.device):
    """A one-hot input selects a column of the weight, without rounding."""
    weights = weights_of(scheme, [40], torch.bfloat16, device)
    dense, codes = dequantized(weights, torch.bfloat16), codes_of(weights, torch.bfloat16)
    one_hot = torch.eye(FAN_IN, dtype=torch.bfloat16, device=device)
    for first, stop in ((0, 16), (16, 48), (48, 112), (0, FAN_IN)):
        assert torch.equal(codes.matmul(one_hot[first:stop], None).t(), dense[:, first:stop])


def test_every_code_of_fp8_is_decoded(device: torch.device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    weight = Fp8Weight.from_stored(codes[:, None], torch.ones(()), None)
    found = codes_of([weight], torch.float32).matmul(torch.ones(1, 1, device=device), None)[0]
    expected = codes.float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def odd_weights(scheme: str, device: torch.device) -> list[QuantizedWeight]:
    """Return two weights whose sizes are not multiples of a tile."""
    generator = torch.Generator().manual_seed(1)
    if scheme == "int8":
        dense = [torch.randn(size, 149, generator=generator).to(device) for size in (37, 70)]
        return [Int8Weight.quantize(weight) for weight in dense]
    if scheme != "fp8 small blocks":
        return weights_of(scheme, [37, 150], torch.float32, device)
    codes = torch.randn(70, 149, generator=generator).to(torch.float8_e4m3fn).to(device)
    return [Fp8Weight.from_stored(codes, torch.rand(3, 5, generator=generator), (32, 32))]


@pytest.mark.parametrize("dtype", slow_after(1, [torch.bfloat16, torch.float32]))
@pytest.mark.parametrize(
    "scheme",
    ["int8", "mxfp4", "nf4", "fp8 blocks", "fp8", "fp8 channels", "fp8 small blocks"],
)
def test_one_kernel_writes_the_dequantized_weight(
    scheme: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """Torch computes nothing but the matmul, for many rows and for gradients."""
    weights = odd_weights(scheme, device)
    dense, codes = dequantized(weights, dtype), codes_of(weights, dtype)
    monkeypatch.setattr(quantized_kernels, "_matmul", None)
    monkeypatch.setattr(linear, "dequantized", None)
    assert torch.equal(codes._dequantized(), dense)
    x = torch.randn(MAX_ROWS + 1, dense.shape[1], device=device).to(dtype)
    grad = torch.randn(2, len(dense), device=device).to(dtype)
    assert torch.equal(codes.matmul(x, None), F.linear(x, dense))
    assert torch.equal(codes.matmul_backward(grad), grad @ dense)


def test_the_linears_of_a_model_share_one_buffer(device: torch.device):
    """A CUDA graph contains the address of the buffer, so it must not change."""
    packer = TritonPacker(
        torch.float32, TorchPacker(torch.float32, device), is_batch_invariant=False
    )
    large = weights_of("int8", [40, 150], torch.float32, device)
    small = weights_of("nf4", [64], torch.float32, device)
    linears = [packer.pack_quantized(small), packer.pack_quantized(large)]
    grads = [torch.randn(2, 64, device=device), torch.randn(2, 190, device=device)]
    addresses = set()
    for packed, weights, grad in zip(linears * 2, (small, large) * 2, grads * 2, strict=True):
        expected = grad @ dequantized(weights, torch.float32)
        assert torch.equal(packed.matmul_backward(grad), expected)
        memory = packer._buffer._memory
        assert memory.numel() == 190 * FAN_IN
        addresses.add(memory.data_ptr())
    assert len(addresses) == 1
    with pytest.raises(AssertionError, match="already in use"):
        packer.pack_quantized(weights_of("int8", [191], torch.float32, device))


def test_a_batch_invariant_matmul_uses_the_buffer(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """In deterministic mode torch multiplies, so that its rows can be padded to one tile."""
    packer = TritonPacker(
        torch.float32, TorchPacker(torch.float32, device), is_batch_invariant=True
    )
    weights = weights_of("int8", [40], torch.float32, device)
    monkeypatch.setattr(quantized_kernels, "_matmul", None)
    x = torch.randn(3, FAN_IN, device=device)
    found = packer.pack_quantized(weights).matmul(x, None)
    assert torch.equal(found, F.linear(x, dequantized(weights, torch.float32)))


def test_blocks_that_the_matmul_kernel_cannot_read_use_the_buffer(device: torch.device):
    weights = odd_weights("fp8 small blocks", device)
    assert not can_multiply(weights)
    x = torch.randn(3, 149, device=device)
    expected = F.linear(x, dequantized(weights, torch.float32))
    assert torch.equal(codes_of(weights, torch.float32).matmul(x, None), expected)


def matmul_cases(scheme: str, dtype: str, rows: int, *, bias: bool) -> Case:
    tile = quantized_kernels._tile(rows, torch.float32 if dtype == "fp32" else torch.bfloat16)
    warps = tile.pop("num_warps")
    types = {"x": f"*{dtype}", "out": f"*{dtype}"} | ({"bias": f"*{dtype}"} if bias else {})
    types |= dict.fromkeys(("out_stride", "rows", "fan_out", "fan_in"), "i32")
    constants: Constants = {**tile, "HAS_BIAS": bias} | ({} if bias else {"bias": None})
    multiples = ("fan_in", "out_stride")
    if scheme in ("int8", "fp8"):
        types |= {"codes": "*u8" if scheme == "fp8" else "*i8", "scales": "*fp32"}
        types |= dict.fromkeys(("scale_stride", "row_block", "column_block"), "i32")
        constants |= {"FP8": scheme == "fp8"}
        return Case("eight_bit_kernel", types, constants, warps, multiples=multiples)
    del constants["BLOCK_IN"]
    four_types, four_constants = four_bit(nf4=scheme == "nf4")
    return Case("four_bit_kernel", types | four_types, constants | four_constants, warps,
                multiples=multiples)  # fmt: skip


def four_bit(*, nf4: bool) -> tuple[dict[str, str], Constants]:
    types = {"codes": "*u8", "values": "*fp32", "scale_codes": "*u8", "scale_values": "*fp32"}
    types |= {"scale_scales": "*fp32", "offset": "*fp32"} if nf4 else {}
    constants: Constants = {"NF4": nf4, "BLOCK_BYTES": 32 if nf4 else 16}
    return types, constants | ({} if nf4 else {"scale_scales": None, "offset": None})


def dequantize_case(scheme: str, dtype: str) -> Case:
    types = {"out": f"*{dtype}"}
    if scheme in ("int8", "fp8"):
        types |= {"codes": "*u8" if scheme == "fp8" else "*i8", "scales": "*fp32"}
        numbers = ("scale_stride", "fan_out", "fan_in", "row_block", "column_block")
        constants: Constants = {"FP8": scheme == "fp8", "BLOCK_OUT": 32, "BLOCK_IN": 128}
        types |= dict.fromkeys(numbers, "i32")
        return Case("dequantize_eight_bit_kernel", types, constants, multiples=("fan_in",))
    four_types, four_constants = four_bit(nf4=scheme == "nf4")
    constants = four_constants | {"BLOCKS": 64 if scheme == "nf4" else 128}
    return Case("dequantize_four_bit_kernel", types | four_types | {"blocks": "i32"}, constants)


@pytest.mark.slow
def test_the_kernels_compile_for_hopper():
    schemes = ("int8", "fp8", "nf4", "mxfp4")
    cases = [
        matmul_cases(scheme, "bf16", count, bias=scheme == "fp8")
        for scheme in schemes
        for count in (16, 128)
    ]
    cases += [dequantize_case(scheme, "bf16") for scheme in schemes]
    for found in resources("planish.model.kernels.triton.quantized_kernels", cases):
        assert found.spilled <= 8, found
        assert found.shared < 96 << 10, found
