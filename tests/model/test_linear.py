"""FrozenLinear equals separate linears in one matmul, in values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from planish.model import linear as module
from planish.model.kernels.cpp.cpu_products import multiplies
from planish.model.kernels.reference.row_tiling import cancelling
from planish.model.linear import FrozenLinear, onednn_multiplies_bfloat16

SIZES = (64, 16, 16)


def linears(
    dtype: torch.dtype, biased: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    weights = [torch.randn(size, 64).to(dtype) for size in SIZES]
    return weights, [torch.randn(size).to(dtype) if biased else None for size in SIZES]


@pytest.fixture(params=["own", "onednn", "plain"])
def route(request, monkeypatch):
    """Select each implementation of the matmul that this machine has; return the class of its
    weights.
    """
    if request.param == "own":
        if not multiplies(64, 64, torch.bfloat16, torch.device("cpu")):
            pytest.skip("this machine has no kernels of our own")
        return "PanelWeight"
    monkeypatch.setattr(module, "multiplies", lambda *_: False)
    if request.param == "onednn":
        return "_BlockedWeight"
    monkeypatch.setattr(module, "_packs", lambda device, dtype: False)
    return "NoneType"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("keeps", [False, True])
def test_joined_linears_equal_separate_linears(dtype, biased, rows, keeps, route):
    weights, biases = linears(dtype, biased)
    frozen = FrozenLinear(weights, biases, keeps=keeps)
    x, grad = (
        torch.randn(rows, 64).to(dtype).requires_grad_(),
        torch.randn(rows, sum(SIZES)).to(dtype),
    )
    each = torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], 1)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(
        frozen.product(x.detach()), each.detach(), rtol=tolerance, atol=tolerance
    )
    (expected,) = torch.autograd.grad(each.float(), x, grad.float())
    torch.testing.assert_close(
        frozen.product_back(grad), expected, rtol=tolerance, atol=tolerance * 20
    )
    tiled = frozen.product(torch.cat([x.detach()] * 4), tile=rows)
    assert torch.equal(tiled[:rows], frozen.product(x.detach()))


@pytest.mark.parametrize("fan_out", [96, 100])
def test_packed_weights_equal_plain_weights(fan_out, route, monkeypatch):
    """The inputs cancel, so a different summation order changes the result, by at most the rounding
    of the largest terms.
    """
    x, weight = (tensor.to(torch.bfloat16) for tensor in cancelling(40, fan_out, 1152))
    linear = FrozenLinear([weight])
    kind = route
    if kind == "_BlockedWeight" and not onednn_multiplies_bfloat16():
        kind = "NoneType"
    assert type(linear._packed).__name__ == kind
    packed = linear.product(x)
    monkeypatch.setattr(module, "_packed", lambda *_, **__: None)
    torch.testing.assert_close(packed, FrozenLinear([weight]).product(x), rtol=0, atol=1e-4)


def test_weights_on_a_gpu_are_used_without_a_copy():
    """A copy would double the memory of a tied head. Adjacent weights are joined as a view."""
    whole = torch.empty(80, 64, device="meta")
    assert FrozenLinear([whole]).weight is whole
    linear = FrozenLinear(whole.split((64, 16)))
    assert linear._whole.shape == (80, 64)
    assert linear._whole.untyped_storage()._cdata == whole.untyped_storage()._cdata
