"""Quantized weights follow the definitions of their schemes; sizes follow the formulas."""

import math
import weakref
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from backends import CONFIG
from torch.utils._python_dispatch import TorchDispatchMode

from planish.errors import UserError
from planish.model.architecture.weight_shapes import expected_shapes
from planish.model.architecture.weight_sizes import (
    SCHEMES,
    linear_bytes,
    quantized_shapes,
    weight_bytes,
)
from planish.model.layers import quantization
from planish.model.layers.quantization import (
    DEQUANTIZATION_BYTES,
    NF4_VALUES,
    Fp8Weight,
    Int8Weight,
    Mxfp4Weight,
    Nf4Weight,
    QuantizedWeight,
    check_quantizable,
    dequantized,
    dynamic_values,
    four_bit_values,
    mxfp4_scales,
    quantize,
)

NF4_CODES = (
    "79dfe30ea1f0f1ae03efd979dfe30ea1f0f1ae02efda8adfe21e91f0f18e12df"
    "ebacefd11e71f0f26f11cfedcdefb12f43e1e34f20affedeff803f25d1d62f50"
)
NF4_EVERY_31ST = (
    (0.0, -0.014543839730322361, 0.011753370054066181, -0.061613038182258606),
    (-0.014213768765330315, -0.15610942244529724, -0.15610942244529724, 0.03654714301228523),
    (0.0998404324054718, -0.2954599857330322, 0.2954599857330322, 0.36306944489479065),
    (-0.29983556270599365, -0.4306789040565491, -0.29983556270599365, 0.49997857213020325),
)


def test_int8_codes_are_the_nearest_multiples_of_a_channel_s_scale():
    weight = torch.randn(5, 96) * torch.tensor([[1e-3], [1.0], [30.0], [0.1], [7.0]])
    found = Int8Weight.quantize(weight)
    for channel, codes, scale in zip(weight, found.codes, found.scales, strict=True):
        assert scale == channel.abs().max() / 127
        assert codes.abs().max() == 127
        assert codes.tolist() == [round(x) for x in (channel / scale).tolist()]
    dequantized = found.codes.double() * found.scales.double()[:, None]
    assert torch.equal(found.dequantize(torch.float32), dequantized.float())
    assert torch.equal(found.dequantize(torch.bfloat16), dequantized.float().bfloat16())


def test_int8_channels_of_zeros_and_of_tiny_numbers_become_zero():
    weight = torch.stack([torch.zeros(32), torch.full((32,), 1e-36), torch.ones(32)])
    found = Int8Weight.quantize(weight)
    assert found.scales[:2].tolist() == [0.0, 0.0]
    assert not found.codes[:2].any()
    assert torch.equal(found.dequantize(torch.float32)[2], weight[2])


def test_nf4_has_the_recorded_codes_and_values_of_bitsandbytes():
    """bitsandbytes 0.50.2: quantize_4bit(blocksize=64, compress_statistics=True), in torch."""
    weight = torch.sin(torch.arange(512.0) ** 2 / 7).view(8, 64)
    weight = (weight * torch.linspace(0.02, 0.5, 8)[:, None]).view(4, 128)
    found = Nf4Weight.quantize(weight)
    assert bytes(found.codes.view(-1)[:64].tolist()).hex() == NF4_CODES
    assert found.scale_codes.view(-1).tolist() == [0, 20, 40, 61, 194, 214, 234, 255]
    assert found.offset.item() == pytest.approx(0.25958943367004395, rel=2e-7)
    assert found.scale_scales.tolist() == pytest.approx([0.2403891384601593], rel=2e-7)
    values = found.dequantize(torch.float32)[:, :100:31]
    assert torch.allclose(values, torch.tensor(NF4_EVERY_31ST), rtol=1e-6, atol=0)


def test_nf4_scales_are_within_their_quantization_error():
    weight = torch.randn(40, 640) * 0.02
    found = Nf4Weight.quantize(weight)
    maxima = weight.view(40, 10, 64).abs().amax(2)
    # The values of the scales' codes are at most 0.0141 apart, in units of the group's maximum.
    assert dynamic_values().diff().max() < 0.0142
    groups = found.scale_scales.repeat_interleave(256)[: maxima.numel()].view(maxima.shape)
    assert ((found.scales - maxima).abs() <= 0.0071 * groups + 1e-7).all()
    error = (found.dequantize(torch.float32) - weight).abs()
    gap = max(b - a for a, b in pairwise(NF4_VALUES)) / 2
    assert (error.view(40, 10, 64) <= (gap * maxima + 0.0071 * groups)[..., None] + 1e-6).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_joined_weights_are_quantized_one_by_one(scheme):
    weights = [torch.randn(size, 64) * scale for size, scale in ((48, 1.0), (16, 0.01))]
    quantized = [quantize(weight, scheme) for weight in weights]
    whole = dequantized(quantized, torch.float32)
    assert torch.equal(whole[48:], quantized[1].dequantize(torch.float32))
    assert (whole[48:] - weights[1]).abs().max() < 0.2 * weights[1].abs().max()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_size_formula_is_the_size_of_the_tensors(scheme):
    config = replace(CONFIG, hidden_size=128, intermediate_size=320)
    found = 0
    for shape in quantized_shapes(config).values():
        weight = quantize(torch.randn(shape), scheme)
        found += sum(x.nbytes for x in vars(weight).values() if x.ndim)
    assert linear_bytes(config, scheme) == found
    kept = sum(
        math.prod(shape)
        for name, shape in expected_shapes(config).items()
        if name not in quantized_shapes(config)
    )
    assert weight_bytes(config, 2, scheme) == 2 * kept + found
    assert not any("embed" in name or "norm" in name for name in quantized_shapes(config))


def test_nf4_rejects_widths_that_its_blocks_do_not_divide():
    config = replace(CONFIG, intermediate_size=96)
    with pytest.raises(UserError, match=r"quantize='nf4': .*down_proj.* has 96 inputs.*'int8'"):
        check_quantizable(config, "nf4")
    check_quantizable(config, "int8")
    check_quantizable(config, None)


def in_scheme(scheme: str, rows: int, fan_in: int) -> QuantizedWeight:
    """Return random weights [rows, fan_in]."""
    if scheme == "mxfp4":
        codes = torch.randint(256, (rows, fan_in // 2)).to(torch.uint8)
        return Mxfp4Weight(codes, torch.randint(110, 130, (rows, fan_in // 32)).to(torch.uint8))
    weight = torch.randn(rows, fan_in)
    if not scheme.startswith("fp8"):
        return quantize(weight, scheme)
    block = {"fp8": (16, 32), "fp8 per row": (1, fan_in), "fp8 per weight": (rows, fan_in)}[scheme]
    scales = torch.rand(-(-rows // block[0]), -(-fan_in // block[1]))
    return Fp8Weight(weight.to(torch.float8_e4m3fn), scales, block)


@pytest.mark.parametrize("scheme", ["int8", "nf4", "mxfp4", "fp8", "fp8 per row", "fp8 per weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_dequantized_in_parts_have_the_same_bits(scheme, dtype, monkeypatch):
    """A row of nf4 has 3 scales here, so whole groups of 256 scales end every 256 rows."""
    weights = [in_scheme(scheme, rows, 192) for rows in (300, 1, 777)]
    whole = torch.cat([weight.dequantize(dtype) for weight in weights])
    monkeypatch.setattr(quantization, "_DEQUANTIZED_AT_ONCE", 192 * 20)
    assert torch.equal(dequantized(weights, dtype), whole)
    assert torch.equal(dequantized(weights[2:], dtype), whole[301:])


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that torch operations create and that are still in use."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[tuple[int, int]] = Counter()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)} - {
            address for address, _ in self._counts
        }
        for tensor in out if isinstance(out, tuple | list) else (out,):
            storage = tensor.untyped_storage()
            key = (storage.data_ptr(), storage.nbytes())
            if key[0] not in known:  # no view of a tensor from outside
                self._counts[key] += 1
                weakref.finalize(tensor, self._drop, key)
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._counts))
        return out

    def _drop(self, key: tuple[int, int]) -> None:
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]


@pytest.mark.parametrize("scheme", ["int8", "nf4", "mxfp4", "fp8"])
def test_dequantizing_takes_no_more_memory_than_planned(scheme, monkeypatch):
    """The plan has the result, and DEQUANTIZATION_BYTES for temporary tensors."""
    at_once = 1 << 14
    monkeypatch.setattr(quantization, "_DEQUANTIZED_AT_ONCE", at_once)
    weights = [in_scheme(scheme, 512, 256) for _ in range(2)]
    # These tables are made once and kept.
    four_bit_values(type(weights[0]), torch.device("cpu"))
    mxfp4_scales()
    dynamic_values()
    with _LiveBytes() as counted:
        out = dequantized(weights, torch.bfloat16)
    planned = DEQUANTIZATION_BYTES // (1 << 23) * at_once
    assert out.nbytes < counted.peak <= out.nbytes + planned
