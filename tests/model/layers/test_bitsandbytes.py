"""nf4 has the codes of bitsandbytes."""

import pytest
import torch

from planish.model.layers.quantization import NF4_VALUES, Nf4Weight, dynamic_values

functional = pytest.importorskip("bitsandbytes.functional", reason="make test-extras runs it")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 64), (100, 192), (576, 576)])
def test_nf4_codes_and_values_are_those_of_bitsandbytes(shape, dtype):
    """The library's CPU code rounds a few of a thousand scale codes to the second nearest value."""
    weight = (torch.randn(*shape) * 0.02).to(dtype)
    codes, state = functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    found = Nf4Weight.quantize(weight)
    assert torch.equal(state.code, torch.tensor(NF4_VALUES))
    assert torch.equal(state.state2.code, dynamic_values())
    assert torch.equal(codes.view(found.codes.shape), found.codes)
    difference = state.absmax.view(found.scale_codes.shape).int() - found.scale_codes.int()
    assert difference.abs().max() <= 1
    assert (difference != 0).float().mean() < 0.01
    assert torch.allclose(state.state2.absmax, found.scale_scales, rtol=1e-5)
    assert float(state.offset) == pytest.approx(float(found.offset), rel=3e-7)
    equal = (difference == 0).repeat_interleave(64, 1)
    theirs, ours = functional.dequantize_4bit(codes, state), found.dequantize(dtype)
    error = 2**-7 if dtype == torch.bfloat16 else 2e-6
    assert torch.allclose(theirs[equal].float(), ours[equal].float(), rtol=error, atol=1e-8)
