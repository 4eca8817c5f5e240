"""The CPU kernel for matmuls with adapters equals float64 and is batch-invariant."""

import pytest
import torch
from backends import CPU, load_on
from torch import Tensor
from variants import slow_after

from planish.model.kernels.choose import reference_backend
from planish.model.kernels.cpp.matmul import (
    CppAdapterBatch,
    CppPackedAdapter,
    CppPackedModule,
    CppPackedWeight,
    WeightArena,
)
from planish.model.kernels.interface.backend import Backend
from planish.model.layers.lora import FUSED_MODULE_NAMES, AdapterRange, LoraLayout, LoraWeights
from planish.testing import tiny_model
from planish.types import LoraConfig

SIZES = (96, 48, 80)


pytestmark = pytest.mark.usefixtures("products")


@pytest.fixture(params=[torch.bfloat16, torch.float32])
def normal(request):
    """Return a function for random tensors, in each dtype with matmul kernels."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(request.param)


def matrices(normal, rank: int, sizes=SIZES, fan_in: int = 64) -> tuple[Tensor, list[Tensor]]:
    return normal(len(sizes) * rank, fan_in), [normal(size, rank) for size in sizes]


def site_of(a: Tensor, b_matrices: list[Tensor]) -> CppPackedModule:
    found = CppPackedAdapter([(a, b_matrices)]).target(0)
    assert found is not None
    return found


def adapted(x: Tensor, a: Tensor, b_matrices: list[Tensor]) -> Tensor:
    """Return the result in float64, but with the result of A rounded to its dtype."""
    low = (x.double() @ a.double().t()).to(x.dtype).double()
    return torch.cat(
        [
            part @ b.double().t()
            for part, b in zip(low.chunk(len(b_matrices), 1), b_matrices, strict=True)
        ],
        1,
    )


def close(found: Tensor, expected: Tensor) -> None:
    """Assert equality up to one rounding; float32 sums may also change the rounding after A."""
    size = expected.abs().max()
    # In float32, errors are relative to the terms, which may be far larger than the sum.
    allowed = 0.01 * size if found.dtype == torch.bfloat16 else 2e-6 * size.clamp(min=1)
    assert (found.double() - expected).abs().max() <= allowed


def test_matmul_results_are_rounded_as_in_torch(normal):
    """Rounding is to nearest even; infinities and NaN stay unchanged."""
    dtype = normal(1).dtype
    x = torch.cat(
        [normal(50, 2) * 3, torch.tensor([[torch.inf, 0], [torch.nan, 0], [1e38, 0]], dtype=dtype)]
    )
    weight, bias = torch.tensor([[1.0, 0.0]], dtype=dtype).expand(96, 2), normal(96)
    bias[0] = 3.38e38
    found = CppPackedWeight(weight, WeightArena(0)).matmul(x, bias)
    expected = (x[:, :1].float() + bias.float()).to(dtype)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert found[-1, 0].isinf()


@pytest.mark.parametrize("sizes", [SIZES, (128,)])
@pytest.mark.parametrize("rank", slow_after(3, [1, 8, 40, 5, 16, 32]))
@pytest.mark.parametrize("rows", slow_after(2, [1, 130, 7]))
def test_forward_and_backward_matmuls_with_adapters_equal_float64(rows, rank, sizes, normal):
    a, b_matrices = matrices(normal, rank, sizes)
    x, out, grad, grad_x = (
        normal(rows, 64),
        normal(rows, sum(sizes)),
        normal(rows, sum(sizes)),
        normal(rows, 64),
    )
    site = site_of(a, b_matrices)
    expected = out.double() + adapted(x, a, b_matrices)
    low = site.add_(x, out, sizes)
    close(out, expected)
    close(low, x.double() @ a.double().t())
    parts = zip(grad.double().split(sizes, 1), b_matrices, strict=True)
    expected_low = torch.cat([part @ b.double() for part, b in parts], 1)
    expected_x = grad_x.double() + expected_low @ a.double()
    without_x = site.backward_(grad, None, sizes)
    low_grad = site.backward_(grad, grad_x, sizes)
    assert torch.equal(without_x, low_grad)
    close(low_grad, expected_low)
    close(grad_x, expected_x)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SIZES, (320,)])
@pytest.mark.parametrize("rank", [1, 3, 8, 32, 64])
@pytest.mark.parametrize("rows", [0, 1, 7, 512, 1101])
def test_gradients_of_adapter_matrices_equal_float64(rows, rank, sizes, normal):
    """The gradients agree up to float32 rounding, also for ranks and row counts that do not fill
    the kernel's tiles.
    """
    site = site_of(*matrices(normal, rank, sizes, 288))
    x, grad, out, grad_x = (
        normal(rows, 288),
        normal(rows, sum(sizes)),
        normal(rows, sum(sizes)),
        normal(rows, 288),
    )
    low, low_grad = site.add_(x, out, sizes), site.backward_(grad, grad_x, sizes)
    grad_a, b_grads = site.gradients(x, low, grad, low_grad, sizes)
    parts = zip(grad.double().split(sizes, 1), low.double().chunk(len(sizes), 1), strict=True)
    expected = [low_grad.double().t() @ x.double(), *(part.t() @ own for part, own in parts)]
    for found, wanted in zip([grad_a, *b_grads], expected, strict=True):
        assert found.dtype == torch.float32
        assert (
            (found - wanted).abs().max() <= 3e-6 * wanted.abs().max() if rows else not found.any()
        )


def test_gradients_do_not_depend_on_the_number_of_threads(normal):
    site = site_of(*matrices(normal, 5))
    rows = [normal(700, width) for width in (64, sum(SIZES), sum(SIZES), 64)]
    low, low_grad = site.add_(rows[0], rows[1], SIZES), site.backward_(rows[2], rows[3], SIZES)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            grad_a, b_grads = site.gradients(rows[0], low, rows[2], low_grad, SIZES)
            found.append(torch.cat([grad_a.flatten(), *(grad.flatten() for grad in b_grads)]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_kernel_rows_are_batch_invariant(threads, normal):
    """The batch has adapters of several ranks, one without this target module, and rows of the base
    model, as in the sampler and in the trainer.
    """
    adapters = [CppPackedAdapter([None, matrices(normal, rank)]) for rank in (8, 32, 3)]
    x, base = normal(60, 64), normal(60, sum(SIZES))
    spans = [(0, 1), (3, 31), (31, 50)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = base.clone()
        members = [(*span, panels) for span, panels in zip(spans, adapters, strict=True)]
        members.append((50, 60, CppPackedAdapter([matrices(normal, 8), None])))
        CppAdapterBatch(members, ("first", "second")).add_(x, together, SIZES, 0, "second")
        for (start, stop), panels in zip(spans, adapters, strict=True):
            site = panels.target(1)
            assert site is not None
            for row in (start, stop - 1):
                alone = base[row : row + 1].clone()
                site.add_(x[row : row + 1], alone, SIZES)
                assert torch.equal(together[row : row + 1], alone)
        for untouched in (slice(1, 3), slice(50, 60)):
            assert torch.equal(together[untouched], base[untouched])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_decoder_with_native_adapters_equals_torch(dtype, tmp_path):
    decoder = load_on(tiny_model(tmp_path), dtype, CPU)
    if not decoder.backend.packs_layer_adapters:
        pytest.fail("the tiny model is no multiple of 16 wide any more: this test compares nothing")
    rows, adapters = 0, []
    for seed, rank in enumerate((4, 16)):
        layout = LoraLayout(decoder.config, LoraConfig(rank=rank, train_mlp=rank == 16))
        noise = 0.05 * torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))
        adapters.append(
            AdapterRange(
                rows, rows + 5, LoraWeights(layout, layout.init(seed) + noise, decoder.backend)
            )
        )
        rows += 5

    def queries(layer, q, k, v, sinks=None):
        return q

    def hidden(backend: Backend) -> Tensor:
        tokens, positions = torch.arange(12), torch.zeros(12, dtype=torch.int64)
        batch = backend.adapter_batch(adapters)
        with torch.inference_mode():
            return decoder.forward(tokens, positions, queries, batch).float()

    own, plain = hidden(decoder.backend), hidden(reference_backend(decoder.config, dtype, CPU))
    assert (own - plain).abs().max() < (0.05 if dtype == torch.bfloat16 else 1e-5) * own.abs().max()
    assert FUSED_MODULE_NAMES == ("attn_in", "attn_out", "mlp_in", "mlp_out")
