"""PackedLinear equals separate linears in one matmul, in values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from backends import CONFIG, backend_of, torch_backend

from planish.model.decoder.operations import adapted_linear
from planish.model.kernels.choose import reference_backend
from planish.model.kernels.reference import matmuls
from planish.model.kernels.reference.probe import cancelling_inputs
from planish.model.layers.linear import onednn_packs_bfloat16
from planish.model.layers.lora import LoraMatrices

SIZES = (64, 16, 16)


def linears(
    dtype: torch.dtype, biased: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    weights = [torch.randn(size, 64).to(dtype) for size in SIZES]
    return weights, [torch.randn(size).to(dtype) if biased else None for size in SIZES]


@pytest.fixture(params=["own", "onednn", "plain"])
def route(request, monkeypatch):
    """Each implementation of the matmul that this machine has: backends and the class of packed
    bf16 weights.
    """
    if request.param == "own":
        if not backend_of(torch.bfloat16).can_pack(64, 64):
            pytest.skip("this machine has no kernels of our own")
        return backend_of, "CppPackedWeight"
    if request.param == "onednn":
        return torch_backend, "OneDnnWeight" if onednn_packs_bfloat16() else "NoneType"

    monkeypatch.setattr(matmuls, "onednn_packs_bfloat16", lambda: False)
    return torch_backend, "NoneType"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("keep_unpacked", [False, True])
def test_joined_linears_equal_separate_linears(dtype, biased, rows, keep_unpacked, route):
    weights, biases = linears(dtype, biased)
    backend = route[0](dtype)
    linear = backend.pack(weights, biases, keep_unpacked=keep_unpacked)
    x, grad = (
        torch.randn(rows, 64).to(dtype).requires_grad_(),
        torch.randn(rows, sum(SIZES)).to(dtype),
    )
    each = torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], 1)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(
        backend.matmul(x.detach(), linear), each.detach(), rtol=tolerance, atol=tolerance
    )
    (expected,) = torch.autograd.grad(each.float(), x, grad.float())
    torch.testing.assert_close(
        backend.matmul_backward(grad, linear), expected, rtol=tolerance, atol=tolerance * 20
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_input_costs_no_backward_matmul(dtype, route, monkeypatch):
    """The first layer reads the frozen embedding. The adapter's gradients keep their bits."""
    torch.manual_seed(0)
    backend = route[0](dtype)
    weights, biases = linears(dtype, False)
    linear = backend.pack(weights, biases)
    x, grad = torch.randn(20, 64).to(dtype), torch.randn(20, sum(SIZES)).to(dtype)
    a, b_matrices = (
        torch.randn(3 * 4, 64).to(dtype),
        [torch.randn(size, 4).to(dtype) for size in SIZES],
    )
    packed = backend.pack_adapter([LoraMatrices(a, tuple(b_matrices))])
    matrices = [matrix.requires_grad_() for matrix in (a, *b_matrices)]
    lora = LoraMatrices(a, tuple(b_matrices), None if packed is None else packed.target(0))
    backward, calls = backend.matmul_backward, []

    def counted(*given):
        calls.append(given)
        return backward(*given)

    monkeypatch.setattr(backend, "matmul_backward", counted)
    trained = adapted_linear(backend, x.clone().requires_grad_(), linear, lora)
    expected = torch.autograd.grad(trained, matrices, grad)
    assert len(calls) == 1
    found = torch.autograd.grad(adapted_linear(backend, x, linear, lora), matrices, grad)
    assert len(calls) == 1
    for own, wanted in zip(found, expected, strict=True):
        assert torch.equal(own, wanted)


@pytest.mark.parametrize("fan_out", [96, 100])
def test_packed_weights_equal_plain_weights(fan_out, route):
    """The inputs cancel, so a different summation order changes the result, by at most the rounding
    of the largest terms.
    """
    x, weight = (tensor.to(torch.bfloat16) for tensor in cancelling_inputs(40, fan_out, 1152))
    backend, kind = route[0](torch.bfloat16), route[1]
    linear = backend.pack([weight])
    assert type(linear.packed).__name__ == kind
    torch.testing.assert_close(backend.matmul(x, linear), x @ weight.t(), rtol=0, atol=1e-4)


def test_weights_on_a_gpu_are_used_without_a_copy():
    """A copy would double the memory of a tied head. Adjacent weights are joined as a view."""
    whole = torch.empty(80, 64, device="meta")
    backend = reference_backend(CONFIG, torch.float32, torch.device("meta"))
    assert backend.pack([whole]).weight is whole
    linear = backend.pack(whole.split((64, 16)))
    assert linear._fused_weight.shape == (80, 64)
    assert linear._fused_weight.untyped_storage()._cdata == whole.untyped_storage()._cdata
