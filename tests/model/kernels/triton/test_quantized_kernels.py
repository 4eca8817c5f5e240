"""Matmuls with quantized weights by the Triton kernels, against torch with dequantized weights."""

import pytest
import torch
import torch.nn.functional as F
from hopper import Case, resources

pytest.importorskip("triton")
from variants import slow_after

from planish.model.kernels.triton import quantized_kernels
from planish.model.kernels.triton.quantized_kernels import MAX_ROWS, QuantizedCodes, supports
from planish.model.quantization import (
    Fp8Weight,
    Mxfp4Weight,
    QuantizedWeight,
    dequantized,
    quantize,
)

FAN_IN = 192


def weights_of(
    scheme: str, sizes: list[int], dtype: torch.dtype, device: torch.device
) -> list[QuantizedWeight]:
    generator = torch.Generator().manual_seed(0)
    found: list[QuantizedWeight] = []
    for size in sizes:
        weight = torch.randn(size, FAN_IN, generator=generator).to(device, dtype)
        if scheme.startswith("fp8"):
            codes = (weight.float() * 60).to(torch.float8_e4m3fn)
            grids = {"fp8 blocks": (-(-size // 128), 2), "fp8 channels": (size, 1), "fp8": (1, 1)}
            scales = torch.rand(grids[scheme], generator=generator).to(device) / 60
            found.append(Fp8Weight.from_stored(codes, scales, (128, 128)))
        elif scheme == "mxfp4":
            codes = torch.randint(256, (size, FAN_IN // 2), generator=generator)
            exponents = torch.randint(120, 128, (size, FAN_IN // 32), generator=generator)
            found.append(
                Mxfp4Weight(codes.to(device, torch.uint8), exponents.to(device, torch.uint8))
            )
        else:
            found.append(quantize(weight, scheme))
    return found


@pytest.mark.parametrize("dtype", slow_after(1, [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize(
    "scheme", slow_after(2, ["int8", "mxfp4", "nf4", "fp8 blocks", "fp8", "fp8 channels"])
)
def test_matmuls_equal_those_of_the_dequantized_weights(
    scheme: str, dtype: torch.dtype, device: torch.device
):
    sizes = [40, 150]
    weights = weights_of(scheme, sizes, dtype, device)
    assert supports(weights)
    dense, codes = dequantized(weights, dtype), QuantizedCodes(weights, dtype)
    bias = torch.randn(sum(sizes)).to(device, dtype)
    for rows, own in ((1, None), (3, bias), (37, None)):
        x = torch.randn(rows, FAN_IN).to(device, dtype)
        found = codes.matmul(x, own)
        expected = F.linear(x.double(), dense.double(), None if own is None else own.double())
        tolerance = 1e-4 if dtype == torch.float32 else 0.01
        assert found.dtype == dtype
        assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()
    assert torch.equal(codes.matmul(x[:0], None), x.new_empty(0, sum(sizes)))


@pytest.mark.parametrize("scheme", slow_after(2, ["int8", "mxfp4", "nf4", "fp8 blocks"]))
def test_a_tile_has_the_bits_of_the_dequantized_weight(scheme: str, device: torch.device):
    """A one-hot input selects a column of the weight, without rounding."""
    weights = weights_of(scheme, [40], torch.bfloat16, device)
    dense, codes = dequantized(weights, torch.bfloat16), QuantizedCodes(weights, torch.bfloat16)
    for first in range(0, FAN_IN, MAX_ROWS):
        x = torch.eye(FAN_IN, dtype=torch.bfloat16, device=device)[first : first + MAX_ROWS]
        assert torch.equal(codes.matmul(x, None).t(), dense[:, first : first + MAX_ROWS])


def test_every_code_of_fp8_is_decoded(device: torch.device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    weight = Fp8Weight.from_stored(codes[:, None], torch.ones(()), None)
    found = QuantizedCodes([weight], torch.float32).matmul(torch.ones(1, 1, device=device), None)[0]
    expected = codes.float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_torch_computes_many_rows_and_gradients(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
):
    weights = weights_of("int8", [40, 150], torch.float32, device)
    dense, codes = dequantized(weights, torch.float32), QuantizedCodes(weights, torch.float32)
    monkeypatch.setattr(quantized_kernels, "_matmul", None)
    x = torch.randn(MAX_ROWS + 1, FAN_IN, device=device)
    grad = torch.randn(2, 190, device=device)
    assert torch.equal(codes.matmul(x, None), F.linear(x, dense))
    assert torch.equal(codes.matmul_backward(grad), grad @ dense)


def test_blocks_that_the_kernel_cannot_read_are_left_to_torch():
    codes = torch.randn(64, 192).to(torch.float8_e4m3fn)
    assert not supports([Fp8Weight.from_stored(codes, torch.rand(2, 6), (32, 32))])


def eight_bit(dtype: str, block_rows: int, *, fp8: bool, bias: bool) -> Case:
    types = {"x": f"*{dtype}", "codes": "*u8" if fp8 else "*i8", "scales": "*fp32"}
    types |= {"out": f"*{dtype}"} | ({"bias": f"*{dtype}"} if bias else {})
    numbers = ("scale_stride", "out_stride", "rows", "fan_out", "fan_in")
    types |= dict.fromkeys((*numbers, "row_block", "column_block"), "i32")
    constants = {"FP8": fp8, "HAS_BIAS": bias, "BLOCK_ROWS": block_rows}
    constants |= {"BLOCK_OUT": 32, "BLOCK_IN": 32 if dtype == "fp32" else 128}
    constants |= {} if bias else {"bias": None}
    return Case("eight_bit_kernel", types, constants, multiples=("fan_in", "out_stride"))


def four_bit(dtype: str, block_rows: int, *, nf4: bool) -> Case:
    types = {"x": f"*{dtype}", "codes": "*u8", "values": "*fp32", "scale_codes": "*u8"}
    types |= {"scale_values": "*fp32", "out": f"*{dtype}"}
    types |= {"scale_scales": "*fp32", "offset": "*fp32"} if nf4 else {}
    types |= dict.fromkeys(("out_stride", "rows", "fan_out", "fan_in"), "i32")
    constants = {"NF4": nf4, "HAS_BIAS": False, "BLOCK_ROWS": block_rows, "bias": None}
    constants |= {"BLOCK_OUT": 32, "BLOCK_BYTES": 32 if nf4 else 16}
    constants |= {} if nf4 else {"scale_scales": None, "offset": None}
    return Case("four_bit_kernel", types, constants, multiples=("fan_in", "out_stride"))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_the_kernels_compile_for_gpus(architecture: int):
    cases = [
        case
        for dtype in ("bf16", "fp32")
        for rows in ((16, 32) if dtype == "bf16" else (16,))
        for case in (
            eight_bit(dtype, rows, fp8=False, bias=False),
            eight_bit(dtype, rows, fp8=True, bias=True),
            four_bit(dtype, rows, nf4=True),
            four_bit(dtype, rows, nf4=False),
        )
    ]
    target = ("cuda", architecture, 32)
    for found in resources("planish.model.kernels.triton.quantized_kernels", cases, target):
        assert found.spilled <= 8, found
        assert found.shared < 96 << 10, found
