"""Each CPU kernel equals torch, in all dtypes and odd sizes, and is batch-invariant."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from backends import backend_of, torch_backend
from torch import Tensor
from variants import slow_after

from planish.model.decoder.head import scored_logprobs
from planish.model.decoder.operations import add_rms_norm, gated_activation, rope
from planish.model.kernels.cpp import ops
from planish.model.kernels.cpp.matmul import CppPackedWeight, WeightArena, supports_matmul
from planish.model.kernels.reference.probe import cancelling_inputs

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


pytestmark = pytest.mark.usefixtures("cpu_kernels")


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def outcome(function, leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Return the last output and the gradients of the leaves."""
    fresh = [leaf.clone().requires_grad_() for leaf in leaves]
    out = function(*fresh)
    out = out[-1] if isinstance(out, tuple) else out
    return [out.detach(), *torch.autograd.grad(out, fresh, upstream)]


def both(
    function, leaves: list[Tensor], upstream: Tensor, dtype: torch.dtype, atol: float = 0.0
) -> None:
    """`function`: its first argument is the backend."""
    native = outcome(partial(function, backend_of(dtype)), leaves, upstream)
    plain = outcome(partial(function, torch_backend(dtype)), leaves, upstream)
    for ours, theirs in zip(native, plain, strict=True):
        assert ours.dtype == theirs.dtype
        tolerance = TOLERANCES[upstream.dtype]
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=max(tolerance, atol))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 67), (300, 576)])
def test_the_norm_equals_torch(rows, width, dtype):
    weight = normal(width)

    def summed(backend, x, more):
        return add_rms_norm(backend, x, more, weight, 1e-5)

    def alone(backend, x):
        return add_rms_norm(backend, x, None, weight, 1e-5)

    x, more, upstream = (normal(rows, width, dtype=kind) for kind in (torch.float32, dtype, dtype))
    both(summed, [x, more], upstream, dtype)
    both(alone, [x], upstream, dtype)


def test_the_residual_of_a_norm_has_its_own_gradient():
    x, more, weight = normal(9, 64), normal(9, 64).neg(), normal(64)
    for use in (lambda total, _: total, lambda total, out: total + out):
        leaves = [x.clone().requires_grad_(), more.clone().requires_grad_()]
        plain = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        use(
            *add_rms_norm(backend_of(), leaves[0], leaves[1], weight, 1e-5)
        ).square().sum().backward()
        total = plain[0] + plain[1]
        use(total, F.rms_norm(total, (64,), weight, 1e-5)).square().sum().backward()
        for ours, theirs in zip(leaves, plain, strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "size"), [(1, 3, 64), (7, 2, 20), (200, 9, 128)])
def test_the_rotation_equals_torch(rows, heads, size, dtype):
    angles = normal(rows, 1, size // 2)

    def turn(backend, x):
        # strided rows, as in the fused output of q, k and v
        return rope(backend, x[:, :heads], angles.cos(), angles.sin())

    both(
        turn,
        [normal(rows, heads + 2, size, dtype=dtype)],
        normal(rows, heads, size, dtype=dtype),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (6, 33), (250, 1536)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activations_equal_torch(rows, width, dtype, activation):
    def function(backend, gate_up):
        backend.config = replace(backend.config, activation=activation)
        return gated_activation(backend, gate_up)

    both(
        function,
        [normal(rows, 2 * width, dtype=dtype) * 4],
        normal(rows, width, dtype=dtype),
        dtype,
        # torch computes 1 + tanh, which cancels where the gate is far below 0.
        atol=5e-5 if activation == "gelu_tanh" else 0.0,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [7, 128, 3001])
def test_logprobs_and_their_gradients_equal_torch(dtype, vocab):
    weight, rows = normal(vocab, 32, dtype=dtype), torch.arange(0, 70, 2).repeat_interleave(2)
    targets = (torch.arange(len(rows)) * 5) % vocab

    def logprobs(backend, hidden):
        head = backend.pack([weight])
        return scored_logprobs(backend, hidden, head, None, rows, targets, 0.7)

    upstream = normal(len(rows)) * (torch.arange(len(rows)) % 3 > 0)
    both(logprobs, [normal(70, 32, dtype=dtype)], upstream, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("corrected", [False, True])
def test_the_gradient_of_some_rows_has_the_bits_of_selected_rows(dtype, corrected):
    logits, rows = normal(9, 300, dtype=dtype) * 5, torch.tensor([0, 3, 4, 8])
    exact = (torch.arange(18).view(9, 2) * 7, normal(9, 2)) if corrected else None
    first, targets, grads = torch.tensor([0, 1, 3, 3, 4]), torch.tensor([5, 0, 299, 7]), normal(4)
    before = logits.clone()
    given = (0.7, normal(4).abs() + 20, first, targets, grads)
    found = ops.log_sum_exp_backward(logits, rows, *given, exact)
    assert torch.equal(logits, before)
    expected = logits[rows]
    of_rows = None if exact is None else (exact[0][rows], exact[1][rows])
    ops.log_sum_exp_backward_(expected, *given, of_rows)
    assert torch.equal(found, expected)
    assert not found[2].any()


def test_the_normalizer_kernel_leaves_the_sampling_weights():
    logits, temperature = normal(9, 300) * 5, torch.linspace(0.5, 2, 9)
    weights = logits.clone()
    found = ops.log_sum_exp(weights, temperature, weights=weights)
    scaled = logits / temperature[:, None]
    torch.testing.assert_close(found, scaled.logsumexp(1))
    torch.testing.assert_close(weights, (scaled - scaled.amax(1, keepdim=True)).exp())
    assert torch.equal(found, ops.log_sum_exp(logits, temperature))
    logits[3, 5], logits[4, 200] = torch.nan, torch.inf
    bad = ops.log_sum_exp(logits, temperature)
    assert bad.isfinite().tolist() == [row not in (3, 4) for row in range(9)]
    others = bad.isfinite()
    assert torch.equal(bad[others], found[others])


def test_bf16_is_rounded_to_nearest_even_and_non_finite_values_stay():
    wide = torch.cat(
        [normal(1000), torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 3e38])]
    )[None]
    ones = torch.ones_like(wide)
    # silu(100) is 100, so the result is the product with `up`, rounded once.
    out = ops.swiglu(torch.cat([100 * ones, wide], 1).to(torch.bfloat16))
    expected = (100 * wide.to(torch.bfloat16).float()).to(torch.bfloat16)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_rows_do_not_depend_on_batch_or_threads(dtype):
    x, weight, angles = normal(500, 576), normal(576), normal(500, 1, 32)
    heads = normal(500, 9, 64, dtype=dtype)

    def rows(part: slice) -> list[Tensor]:
        return [
            ops.rms_norm(x[part].contiguous(), None, weight, 1e-5, dtype)[1],
            ops.swiglu(x[part].to(dtype).contiguous()),
            ops.geglu(x[part].to(dtype).contiguous()),
            ops.clamped_swiglu(x[part].to(dtype).contiguous(), 1.702, 1.0),
            ops.rope(heads[part], angles[part].cos(), angles[part].sin()),
        ]

    whole = rows(slice(None))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for part in (slice(None), slice(3, 4), slice(100, 433)):
                for found, expected in zip(rows(part), whole, strict=True):
                    assert torch.equal(found, expected[part])
    finally:
        torch.set_num_threads(threads)


def panels(weight: Tensor) -> CppPackedWeight:
    fan_out, fan_in = weight.shape
    if not supports_matmul(fan_out, fan_in, weight.dtype):
        pytest.skip("this machine has no kernels of our own")
    return CppPackedWeight(weight, WeightArena())


@pytest.mark.parametrize(
    ("rows", "fan_out", "fan_in"),
    [
        (1, 32, 2),
        (2, 48, 34),
        (3, 64, 30),
        (7, 96, 512),
        (13, 176, 514),
        (70, 16, 1538),
        (700, 96, 1100),
        (3, 96, 4098),
        (300, 160, 6200),
        (9, 1, 64),
        (40, 101, 2050),
    ],
)
@pytest.mark.parametrize("biased", slow_after(1, [True, False]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_matmuls_equal_float64(rows, fan_out, fan_in, biased, dtype):
    """The terms cancel, so a missing or repeated term changes the result."""
    x, weight = (tensor.to(dtype) for tensor in cancelling_inputs(rows, fan_out, fan_in))
    bias = normal(fan_out, dtype=dtype) if biased else None
    found = panels(weight).matmul(x, bias)
    expected = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    assert found.dtype == dtype
    # With more than 1538 columns, the terms are larger, and so are the errors.
    rtol, atol = (
        4e-3 if dtype == torch.bfloat16 else 1e-6,
        1e-4 if fan_in <= 1538 else 1e-7 * fan_in + 1e-4,
    )
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)


def test_weights_in_one_arena_do_not_overlap():
    weights = [normal(fan_out, 64, dtype=dtype) for dtype in DTYPES for fan_out in (16, 64, 112)]
    if not all(supports_matmul(16, 64, dtype) for dtype in DTYPES):
        pytest.skip("this machine has no kernels of our own")
    arena, x = WeightArena(), normal(5, 64)
    together = [CppPackedWeight(weight, arena) for weight in weights]
    for weight, packed in zip(weights, together, strict=True):
        given = x.to(weight.dtype)
        assert torch.equal(packed.matmul(given, None), panels(weight).matmul(given, None))


@pytest.mark.parametrize(("fan_out", "fan_in"), [(32, 2), (101, 50), (176, 576)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_transposed_matrix_can_be_packed(fan_out, fan_in, dtype):
    weight, x = normal(fan_out, fan_in, dtype=dtype), normal(7, fan_in, dtype=dtype)
    expected = panels(weight).matmul(x, None)
    assert torch.equal(
        CppPackedWeight(weight.t(), WeightArena(), transposed=True).matmul(x, None), expected
    )


@pytest.mark.parametrize(("fan_out", "fan_in"), [(16, 2), (101, 50), (176, 576)])
def test_unpacking_returns_the_packed_matrix(fan_out, fan_in):
    weight = normal(fan_out, fan_in)
    unpack = panels(weight).unpack
    assert unpack is not None
    assert torch.equal(unpack(), weight)
    assert panels(weight.bfloat16()).unpack is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_rows_do_not_depend_on_batch_or_threads(dtype):
    x, weight = (tensor.to(dtype) for tensor in cancelling_inputs(1500, 224, 576))
    packed = panels(weight)
    whole = packed.matmul(x, None)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 17):
            torch.set_num_threads(count)
            for rows in (*range(1, 40), 456, 1500):
                for part in (slice(rows), slice(1500 - rows, 1500)):
                    assert torch.equal(packed.matmul(x[part], None), whole[part])
    finally:
        torch.set_num_threads(threads)
