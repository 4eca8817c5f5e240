"""Each Triton kernel for single rows and for logits equals its torch reference, in all dtypes and
odd sizes, is batch-invariant, and compiles for Hopper.
"""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from backends import CONFIG, torch_backend
from hopper import Case, resources
from torch import Tensor

from planish.engine.sampling import token_sampling
from planish.model.architecture.config import ModelConfig
from planish.model.decoder.decoder import Decoder
from planish.model.decoder.head import scored_logprobs
from planish.model.decoder.operations import add_rms_norm, gated_activation, rope
from planish.model.kernels.choose import reference_backend, triton_backend
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.reference.log_sum_exp import TorchLogSumExp
from planish.model.kernels.reference.token_sampling import sample_from_weights
from planish.model.kernels.triton.families import FAMILIES
from planish.model.kernels.triton.parts import TritonLogSumExp
from planish.model.layers.lora import AdapterRange, LoraLayout, LoraMatrices, LoraWeights
from planish.model.sources.weights import load_weights
from planish.testing import tiny_model
from planish.types import LoraConfig, SamplingParams

own = pytest.importorskip("planish.model.kernels.triton.elementwise_kernels")
head = pytest.importorskip("planish.model.kernels.triton.head_kernels")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Tolerances for results that are rounded once; in bf16, the rounding may go either way."""


@pytest.fixture
def normal(device):
    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(
            device, dtype
        )

    return make


@pytest.fixture
def both(device):
    """Return a function that calls another with the Triton backend and then with torch."""

    def call(function, dtype: torch.dtype = torch.float32):
        triton = triton_backend(CONFIG, dtype, device, FAMILIES)
        return [function(backend) for backend in (triton, torch_backend(dtype, device))]

    return call


def close(ours: Tensor, theirs: Tensor) -> None:
    tolerance = TOLERANCES[theirs.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


# Norms


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("more_dtype", [None, *DTYPES])
@pytest.mark.parametrize("shape", [(1, 16), (5, 67), (7, 3, 64), (2, 576), (3, 2100)])
def test_the_norm_equals_torch(shape, more_dtype, dtype, normal):
    x, weight = normal(*shape), normal(shape[-1])
    more = None if more_dtype is None else normal(*shape, dtype=more_dtype) * 2
    total = x if more is None else x + more
    expected = rms_norm(total, weight)
    for in_place in (False, True):
        given = x.clone()
        found, out, scale = own.rms_norm(given, more, weight, 1e-5, dtype, in_place=in_place)
        assert torch.equal(found, total)
        assert (found is given) == (in_place or more is None)
        assert torch.equal(given, total if in_place else x)
        assert out.dtype == dtype
        close(out, expected.to(dtype))
        close(scale, (total.square().mean(-1) + 1e-5).rsqrt())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (5, 67), (7, 3, 64), (2, 576), (3, 2100)])
def test_the_gradient_of_a_norm_equals_torch(shape, dtype, normal):
    x, weight, grad, more = (
        normal(*shape),
        normal(shape[-1]),
        normal(*shape).to(dtype) * 3,
        normal(*shape) * 2,
    )
    scale = (x.square().mean(-1) + 1e-5).rsqrt()
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(rms_norm(leaf, weight), leaf, grad.float())
    close(own.rms_norm_backward(grad, x, weight, scale, None), expected)
    close(own.rms_norm_backward(grad, x, weight, scale, more), expected + more)


# Rotations


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "size"), [(1, 3, 64), (7, 1, 20), (70, 2, 16), (9, 3, 128), (3, 2, 256)]
)
def test_the_rotation_equals_torch(rows, heads, size, back, dtype, normal):
    x = normal(rows, heads + 2, size, dtype=dtype)[
        :, 1 : 1 + heads
    ]  # strided rows, as in the fused output of q, k and v
    angles = normal(rows, 1, size // 2)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.complex(*x.float().chunk(2, -1)) * torch.polar(
        torch.ones_like(angles), -angles if back else angles
    )
    out = own.rope(x, cos, sin, inverse=back)
    assert out.is_contiguous()
    close(out, torch.cat([turned.real, turned.imag], -1).to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "size"), [((4, 2), 16), ((9, 3), 64), ((16, 8), 96)])
def test_the_fused_head_kernel_equals_separate_kernels(heads, size, normed, dtype, normal):
    qkv = normal(5, (heads[0] + 2 * heads[1]) * size, dtype=dtype)
    norms = (normal(size), normal(size)) if normed else None
    angles = normal(5, 1, size // 2)
    cos, sin = angles.cos(), angles.sin()
    parts = qkv.unflatten(1, (-1, size)).split([*heads, heads[1]], 1)
    for found, part, which in zip(
        own.qk_norm_rope(qkv, heads, norms, 1e-5, cos, sin), parts, (0, 1), strict=False
    ):
        if norms is not None:
            part = own.rms_norm(part.float().contiguous(), None, norms[which], 1e-5, dtype)[1]
        assert found.is_contiguous()
        close(found, own.rope(part, cos, sin))


# SwiGLU


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (6, 33), (3, 1536)])
def test_swiglu_and_its_gradient_equal_torch(rows, width, dtype, normal):
    gate_up, grad = normal(rows, 2 * width, dtype=dtype) * 4, normal(rows, width, dtype=dtype)
    gate_up[0, 0], gate_up[0, 1] = 200, -200
    leaf = gate_up.float().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    expected = F.silu(gate) * up
    close(own.swiglu(gate_up), expected.detach().to(dtype))
    close(
        own.swiglu_backward(grad, gate_up),
        torch.autograd.grad(expected, leaf, grad.float())[0].to(dtype),
    )


def test_bf16_is_rounded_to_nearest_even_and_non_finite_values_stay(normal):
    wide = torch.cat(
        [normal(1000), normal(6).new_tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3e36])]
    )[None]
    # silu(100) is 100
    out = own.swiglu(torch.cat([torch.full_like(wide, 100), wide], 1).to(torch.bfloat16))
    expected = (100 * wide.to(torch.bfloat16).float()).to(torch.bfloat16)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


# The head


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [7, 272, 4097, 12_400])
def test_normalizers_equal_torch(vocab, dtype, normal, device):
    logits, temperature = (
        normal(5, vocab, dtype=dtype) * 8,
        torch.linspace(0.5, 2, 5, device=device),
    )
    logits[1, vocab // 2 :] = -torch.inf  # impossible tokens, in whole splits
    scaled = logits.float() / temperature[:, None]
    expected_weights = (scaled - scaled.amax(1, keepdim=True)).exp()
    weights = torch.empty_like(scaled)
    found = head.log_sum_exp(logits, temperature, weights=weights)
    close(found, scaled.logsumexp(1))
    close(weights, expected_weights)
    assert torch.equal(found, head.log_sum_exp(logits, temperature))
    if dtype == torch.float32:
        assert torch.equal(found, head.log_sum_exp(logits, temperature, weights=logits))
        assert torch.equal(logits, weights)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_row_has_a_non_finite_normalizer(bad, normal):
    logits, temperature = normal(4, 9000) * 200, normal(4).square() + 0.5
    expected = head.log_sum_exp(logits, temperature)
    logits[1, 5], logits[3, 8999] = bad, bad
    logits[2] = -torch.inf
    found = head.log_sum_exp(logits, temperature, weights=logits.clone())
    assert found.isfinite().tolist() == [True, False, False, False]
    assert found[0] == expected[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [7, 272, 4097, 9000])
def test_the_gradient_of_logprobs_equals_torch(vocab, dtype, normal):
    """Rows have no pair, one pair, or several pairs, of which two have one target."""
    logits, temperature = (normal(5, vocab) * 5).to(dtype), 0.7
    rows = torch.tensor([0, 2, 2, 2, 4], device=logits.device)
    targets = torch.tensor([0, 3, vocab - 1, 3, vocab // 2], device=logits.device)
    first = torch.searchsorted(rows, torch.arange(6, device=logits.device))
    grads = normal(5) * 2
    scaled = (logits.float() / temperature).requires_grad_()
    (expected,) = torch.autograd.grad(scaled.log_softmax(1)[rows, targets], scaled, grads)
    head.log_sum_exp_backward_(
        logits, temperature, scaled.detach().logsumexp(1), first, targets, grads
    )
    close(logits, expected.to(dtype))
    assert not logits[[1, 3]].any()


@pytest.mark.parametrize("vocab", [16, 9000])
def test_exact_values_replace_rounded_logits(vocab, normal, device):
    """The exact tokens include both ends of a row, and neighbours on both sides of a split."""
    logits, temperature = (normal(4, vocab) * 5).bfloat16(), normal(4).square() + 0.5
    tokens = torch.tensor([0, vocab - 1, 4095 % vocab, 4096 % vocab], device=device).repeat(4, 1)
    values = normal(4, 4) * 3 + 9
    if vocab == 16:
        tokens, values = tokens[:, :2].contiguous(), values[:, :2].contiguous()
    replaced = logits.float().scatter_(1, tokens, values)
    weights, expected_weights = torch.empty_like(replaced), replaced.clone()
    parts = TritonLogSumExp(), TorchLogSumExp(device)
    found = parts[0].log_sum_exp(logits, temperature, (tokens, values), weights)
    close(found, parts[1].log_sum_exp(replaced, temperature, weights=expected_weights))
    close(weights, expected_weights)
    rows = torch.tensor([0, 1, 3], device=device)
    first, targets = torch.tensor([0, 2, 2, 4], device=device), tokens.flatten()[:4].contiguous()
    total = torch.logsumexp(replaced[rows] / 0.7, 1)
    given = (rows, 0.7, total, first, targets, normal(4), (tokens, values))
    gradients = [part.log_sum_exp_backward(logits, *given) for part in parts]
    close(*gradients)
    assert gradients[0][0].any()
    assert not gradients[0][1].any()


# All kernels


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_inputs_are_accepted(dtype, normal):
    x, angles, none = normal(0, 64), normal(0, 1, 32), normal(0)
    total, out, scale = own.rms_norm(x, x.to(dtype), normal(64), 1e-5, dtype)
    assert own.rms_norm_backward(out, total, normal(64), scale, None).shape == (0, 64)
    assert own.rope(normal(0, 3, 64, dtype=dtype), angles, angles).shape == (0, 3, 64)
    assert own.swiglu_backward(own.swiglu(out), out).shape == (0, 64)
    assert head.log_sum_exp(out, none).shape == (0,)
    whole = torch.zeros(1, dtype=torch.int64, device=x.device)
    head.log_sum_exp_backward_(out, 1.0, none, whole, whole[:0], none)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "vocab"), [(96, 4112), (67, 4098)])
def test_kernel_rows_are_batch_invariant(width, vocab, dtype, normal, device):
    rows = 300 if device.type == "cuda" else 6
    x, grad, weight, angles = (
        normal(rows, width),
        normal(rows, width, dtype=dtype),
        normal(width),
        normal(rows, 1, 32),
    )
    heads, gate_up, logits = (
        normal(rows, *shape, dtype=dtype) for shape in ((3, 64), (2 * width,), (vocab,))
    )
    targets = torch.arange(rows, device=x.device)

    def results(part: slice) -> list[Tensor]:
        total, out, scale = own.rms_norm(x[part], grad[part], weight, 1e-5, dtype)
        temperature = angles[part, 0, 0].abs() + 0.5
        gradient, weights = (
            logits[part].clone(),
            torch.empty_like(logits[part], dtype=torch.float32),
        )
        log_total = head.log_sum_exp(logits[part], temperature, weights=weights)
        first = torch.arange(len(total) + 1, device=x.device)
        head.log_sum_exp_backward_(
            gradient, 0.7, log_total, first, targets[part], angles[part, 0, 1].contiguous()
        )
        return [
            *(total, out, scale, log_total, weights, gradient),
            own.rms_norm_backward(grad[part], x[part], weight, scale, None),
            own.rope(heads[part], angles[part].cos(), angles[part].sin()),
            own.swiglu(gate_up[part]),
            own.swiglu_backward(grad[part], gate_up[part]),
        ]

    whole = results(slice(None))
    for part in (slice(3, 4), slice(1, rows - 1)):
        for found, expected in zip(results(part), whole, strict=True):
            assert torch.equal(found, expected[part])


def outcome(function, leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Return the last output and the gradients of the leaves."""
    fresh = [leaf.clone().requires_grad_() for leaf in leaves]
    out = function(*fresh)
    out = out[-1] if isinstance(out, tuple) else out
    return [out.detach(), *torch.autograd.grad(out, fresh, upstream)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_through_the_model_functions_equal_torch(dtype, normal, both):
    weight, angles = normal(67), (normal(5, 1, 10).cos(), normal(5, 1, 10).sin())
    cases = [
        (
            lambda backend, x, more: add_rms_norm(backend, x, more, weight, 1e-5),
            [normal(5, 67), normal(5, 67, dtype=dtype)],
            (5, 67),
        ),
        (
            lambda backend, x: add_rms_norm(backend, x, None, weight, 1e-5),
            [normal(5, 67)],
            (5, 67),
        ),
        (
            lambda backend, x: rope(backend, x[:, :3], *angles),
            [normal(5, 4, 20, dtype=dtype)],
            (5, 3, 20),
        ),
        (gated_activation, [normal(5, 66, dtype=dtype)], (5, 33)),
    ]
    for function, leaves, shape in cases:
        ours, theirs = both(
            lambda backend, f=function, ls=leaves, s=shape: outcome(
                partial(f, backend), ls, normal(*s, dtype=dtype)
            ),
            dtype,
        )
        for found, expected in zip(ours, theirs, strict=True):
            assert found.dtype == expected.dtype
            torch.testing.assert_close(
                found, expected, rtol=2 * TOLERANCES[dtype], atol=2 * TOLERANCES[dtype]
            )


@pytest.mark.parametrize("recompute", [False, True])
def test_model_logprobs_and_gradients_equal_torch(recompute, normal, both, device):
    weight = normal(301, 32)
    rows = torch.arange(0, 12, 2, device=device).repeat_interleave(2)
    targets, upstream = (torch.arange(12, device=device) * 5) % 301, normal(12)
    upstream[4:6] = 0  # a row that needs no gradient

    def logprobs(backend, hidden, a, b):
        given = (backend, hidden, backend.pack([weight]), LoraMatrices(a, (b,)), rows, targets, 0.7)
        return scored_logprobs(*given, recompute=recompute)

    leaves = [normal(12, 32), normal(4, 32), normal(301, 4)]
    ours, theirs = both(lambda backend: outcome(partial(logprobs, backend), leaves, upstream))
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_sampling_weights_equal_torch(normal, both):
    logits, temperature = normal(3, 500) * 5, normal(3).square() + 0.5

    def call(backend):
        weights = logits.clone()
        return backend.log_sum_exp(weights, temperature, weights=weights), weights

    ours, theirs = both(call)
    close(ours[0], theirs[0])
    close(ours[1], theirs[1])


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 5, 1023, 4096, 9001])
def test_sampled_tokens_equal_torch(vocab, normal, device):
    """This includes uniform numbers at both ends, and rows with large parts of zero weight."""
    weights = (normal(6, vocab) * 3).exp()
    weights[3, vocab // 2 :] = 0
    weights[3, 0] = 1
    weights[4, : vocab // 2] = 0
    weights[5] = 0
    weights[5, vocab // 3] = 1e-30
    for uniform in (0.0, 1e-12, 0.3, 0.77, 1 - 2**-53):
        uniforms = torch.full((6,), uniform, dtype=torch.float64, device=device)
        found = head.sample(weights, uniforms)
        assert torch.equal(found, sample_from_weights(weights, uniforms.unsqueeze(1)).squeeze(1))
        assert (weights.gather(1, found.unsqueeze(1)) > 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_row_gets_a_valid_token(bad, normal, device):
    weights = normal(2, 5000).exp()
    weights[0, 4500] = bad
    uniforms = torch.full((2,), 0.5, dtype=torch.float64, device=device)
    assert 0 <= int(head.sample(weights, uniforms)[0]) < 5000


def test_a_gpu_samples_with_the_triton_kernel(monkeypatch, both, device):
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).to(device)
    params = [SamplingParams(), SamplingParams(top_k=5), SamplingParams()]

    def sampled(backend):
        return token_sampling.sample_tokens(
            backend, logits, params, [0.2, 0.9, 0.5], [2, 1, 0]
        ).tokens

    monkeypatch.setattr(head, "sample", Mock(side_effect=head.sample))
    ours, theirs = both(sampled)
    head.sample.assert_called_once()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("grad", [False, True])
def test_a_whole_decoder_equals_torch(grad, tmp_path, device):
    """The model has query and key norms. Sampling and an adapter's gradient are compared."""
    tiny_model(tmp_path, family="qwen3", layers=1)
    config = ModelConfig.from_directory(tmp_path)
    layout = LoraLayout(config, LoraConfig(rank=2, train_unembed=False))
    tokens, positions = torch.arange(6, device=device) * 40, torch.arange(6, device=device)

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        assert sinks is None
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(
            0, 1
        )

    def outcome(backend: Backend) -> Tensor:
        decoder = Decoder(load_weights(tmp_path, config), backend)
        weights = LoraWeights(layout, layout.init(0) + 0.05, backend, requires_grad=grad)
        batch = weights if grad else backend.adapter_batch([AdapterRange(0, 6, weights)])
        with torch.set_grad_enabled(grad):
            hidden = decoder.forward(tokens, positions, attend, batch)
        if not grad:
            return hidden
        hidden.logsumexp(-1).sum().backward()
        return weights.collect_grad()

    triton = triton_backend(config, torch.float32, device, FAMILIES)
    ours, theirs = outcome(triton), outcome(reference_backend(config, torch.float32, device))
    assert theirs.norm() > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# On GPUs


@pytest.mark.gpu
def test_all_kernels_can_be_captured_in_a_graph(normal, device):
    x, heads, gate_up, logits = normal(5, 96), normal(5, 3, 64), normal(5, 96), normal(5, 9000)
    weight, angles, temperature = normal(96), normal(5, 1, 32), normal(5).square() + 0.5
    first, targets = torch.arange(6, device=device), torch.arange(5, device=device)
    inputs = [x, heads, gate_up, logits]

    def results() -> list[Tensor]:
        weights, gradient = torch.empty_like(logits), logits.clone()
        log_total = head.log_sum_exp(logits, temperature, weights=weights)
        head.log_sum_exp_backward_(gradient, 0.7, log_total, first, targets, temperature)
        total, out, scale = own.rms_norm(x, x, weight, 1e-5, torch.bfloat16)
        return [
            *(log_total, weights, gradient, total, out, scale),
            own.rms_norm_backward(out, x, weight, scale, total),
            own.rope(heads, angles.cos(), angles.sin()),
            own.swiglu(gate_up),
            own.swiglu_backward(gate_up[:, :48].contiguous(), gate_up),
        ]

    results()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results()
    for given in inputs:
        given.mul_(0.5)
    graph.replay()
    for found, expected in zip(captured, results(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.gpu
def test_tensors_with_more_than_2_31_entries_are_indexed_correctly(device):
    rows, vocab = 8200, 1 << 18
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=device)
    logits[-1] = torch.randn(vocab, generator=torch.Generator().manual_seed(0)).to(logits)
    temperature = torch.ones(rows, device=device)
    found = head.log_sum_exp(logits, temperature)
    assert torch.equal(found[-1:], head.log_sum_exp(logits[-1:].clone(), temperature[-1:]))
    close(found[-1], logits[-1].float().logsumexp(0))
    first, targets = (
        torch.arange(rows + 1, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
    )
    expected = F.one_hot(targets[0], vocab) - logits[-1].float().softmax(0)
    head.log_sum_exp_backward_(logits, 1.0, found, first, targets, temperature)
    close(logits[-1], expected.to(logits.dtype))


# For Hopper


def launched(width: int, head_dim: int, vocab: int) -> list[Case]:
    """Return the kernel launches for a bf16 model of these sizes."""
    norm = {"x": "*fp32", "weight": "*fp32", "scale": "*fp32", "rows": "i32", "width": "i32"}
    forth = norm | {"residual": "*bf16", "eps": "fp32", "total": "*fp32", "out": "*bf16"}
    back = norm | {"grad": "*bf16", "grad_total": "*fp32", "out": "*fp32"}
    turn = {
        "x": "*bf16",
        "stride": "i32",
        "cos": "*fp32",
        "sin": "*fp32",
        "sign": "fp32",
        "out": "*bf16",
    }
    heads = dict.fromkeys(("qkv", "q", "k"), "*bf16") | dict.fromkeys(
        ("q_norm", "k_norm", "cos", "sin"), "*fp32"
    )
    heads |= dict.fromkeys(("width", "q_heads", "k_heads", "half"), "i32") | {"eps": "fp32"}
    gated = {"gate_up": "*bf16", "out": "*bf16", "width": "i32"}
    row = {"logits": "*bf16", "vocab": "i32", "tokens": "*i64", "values": "*fp32"}
    sums = row | {"temperature": "*fp32", "split_maxima": "*fp32", "sums": "*fp32"}
    pairs = {"log_total": "*fp32", "first": "*i64", "targets": "*i64", "grads": "*fp32"}
    operands = dict.fromkeys(("hidden", "weight", "lora_hidden", "b"), "*bf16")
    operands |= dict.fromkeys(("hidden_stride", "weight_stride", "lora_stride", "b_stride"), "i32")
    operands |= {"rows": "*i64", "tokens": "*i64", "out": "*fp32", "width": "i32", "rank": "i32"}
    group, block, warps = own._norm_tile(width)
    tile = {"ROWS": group, "BLOCK": block}
    half = head_dim // 2
    split = head._split(torch.empty(0, vocab))
    splits = -(-vocab // split)
    rows = {"SPLITS": splits, "SPLIT_BLOCK": own.power_of_two(splits), "BLOCK": split, "EXACT": 16}
    sizes = {"width": width, "vocab": vocab, "half": half, "stride": 3 * head_dim}

    def case(kernel: str, types: dict, constants: dict, warps: int = 4) -> Case:
        # Triton compiles another kernel for integers that are multiples of 16.
        multiples = tuple(name for name in types if sizes.get(name, 1) % 16 == 0)
        return Case(kernel, types, constants, warps, multiples=multiples)

    return [
        case("_rms_norm", forth, tile, warps),
        case("_rms_norm_backward", back, tile, warps),
        case(
            "_rotate",
            turn | {"count": "i32", "heads": "i32", "half": "i32"},
            {"GROUP": own._TILE // half, "BLOCK": half},
        ),
        case("_qk_norm_rope", heads, {"NORMED": True, "GROUP": own._TILE // half, "BLOCK": half}),
        case("_swiglu", gated, {"BLOCK": own._TILE}),
        case("_swiglu_backward", gated | {"grad": "*bf16"}, {"BLOCK": own._TILE}),
        case("_split_sums", sums, {"BLOCK": split, "EXACT": 16}, split // 512),
        case("_row_sums", sums | {"out": "*fp32", "weights": "*fp32"}, rows, split // 512),
        case("_row_sums", sums | {"out": "*fp32"}, rows | {"weights": None}, 1),
        case(
            "_sample",
            {"weights": "*fp32", "uniforms": "*fp64", "out": "*i64", "vocab": "i32"},
            {"SPLITS": rows["SPLITS"], "BLOCK": split},
            split // 512,
        ),
        case(
            "_normalizers_backward",
            row | pairs | {"temperature": "fp32"},
            {"BLOCK": split, "EXACT": 16},
            split // 512,
        ),
        case("token_logits_kernel", operands, {"BLOCK": own._TILE, "RANK_BLOCK": 32}),
    ]


@pytest.mark.slow
def test_elementwise_kernels_compile_for_hopper_without_spills():
    """The sizes are those of Qwen3-8B."""
    cases = launched(4096, 128, 151_936)
    compiled = [
        found
        for module in (own, head)
        for found in resources(
            module.__name__, [case for case in cases if hasattr(module, case.kernel)]
        )
    ]
    for case, found in zip(cases, compiled, strict=True):
        assert case.kernel == found.kernel
        assert found.spilled <= 8, found  # registers that the compiler reserves
        assert found.registers * 32 * case.warps <= 65_536, found
