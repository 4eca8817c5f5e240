"""The head kernels equal float64 and sorting, and are batch-invariant."""

from typing import Any

import pytest
import torch
from backends import backend_of
from torch import Tensor
from variants import slow_after

from planish.model.decoder.head import exact_logits, head_logits
from planish.model.kernels.cpp.head import Float32Logits, HeadTable
from planish.model.kernels.cpp.matmul import CppPackedAdapter, supports_lora_forward
from planish.model.layers.lora import HeadAdapterRange, LoraMatrices

WIDTH = 100


pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.fixture
def normal():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(torch.bfloat16)


def adapter(normal, vocab: int, rank: int) -> LoraMatrices:
    a, b = normal(rank, WIDTH), normal(vocab, rank)
    return LoraMatrices(a, (b,), CppPackedAdapter([(a, (b,))]).target(0))


def single(hidden: Tensor, weight: Tensor, lora: Any = None) -> Float32Logits:
    return Float32Logits(
        hidden,
        weight,
        HeadTable(()) if lora is None else lora.table,
        None if lora is None else lora.hidden,
    )


def sorted_first(logits: Tensor, k: int) -> Tensor:
    return logits.float().sort(dim=1, descending=True, stable=True).indices[:, :k]


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 5, 16, 31, 129, 272, 3001, 49152])
@pytest.mark.parametrize("kind", ["different", "tied", "rising", "equal", "infinite"])
def test_the_largest_entries_equal_those_of_a_stable_sort(vocab, kind, normal):
    logits = {
        "different": lambda: normal(9, vocab) * 10,
        "tied": lambda: normal(9, vocab).float().round().to(torch.bfloat16) + 3,
        "rising": lambda: torch.arange(vocab).expand(9, -1).to(torch.bfloat16).contiguous() - 20,
        "equal": lambda: torch.full((9, vocab), -2.0, dtype=torch.bfloat16),
        "infinite": lambda: torch.where(normal(9, vocab) > 0, float("-inf"), normal(9, vocab)),
    }[kind]()
    k = min(16, vocab)
    hidden, weight = normal(9, WIDTH), normal(vocab, WIDTH)
    float32_logits = torch.empty(9, vocab)
    tokens, values = single(hidden, weight).top_k(logits, k, float32_logits)
    assert torch.equal(tokens, sorted_first(logits, k))
    expected = (hidden.double() @ weight.double().t()).gather(1, tokens)
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(float32_logits, logits.float().scatter_(1, tokens, values))


def test_the_largest_entries_are_found_at_any_position(normal):
    """Sixteen large entries are in one of the kernel's classes, followed by entries that are larger
    by one bit.
    """
    logits = torch.full((1, 128 * 20), -5.0, dtype=torch.bfloat16)
    logits[0, ::128] = 1.0
    logits[0, 128 * 16 :: 128] = 1.0 + 2**-7
    tokens, _ = single(normal(1, WIDTH), normal(128 * 20, WIDTH)).top_k(logits, 16, None)
    assert tokens[0].tolist() == [128 * i for i in (*range(16, 20), *range(12))]


def test_non_finite_logits_stay_in_their_row(normal):
    logits, hidden, weight = normal(4, 300), normal(4, WIDTH), normal(300, WIDTH)
    expected, _ = single(hidden, weight).top_k(logits, 16, None)
    logits[1, ::2], logits[2, 7] = torch.nan, torch.inf
    logits.view(torch.int16)[3] = -1  # a NaN whose bits compare below all numbers
    tokens, _ = single(hidden, weight).top_k(logits, 16, None)
    assert torch.equal(tokens[0], expected[0])
    assert tokens[2, 0] == 7
    assert ((tokens >= 0) & (tokens < 300)).all()


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rank", slow_after(3, [1, 8, 64, 3, 32]))
@pytest.mark.parametrize("vocab", [200, 2080])
def test_adapters_of_the_head_equal_the_formula(rank, vocab, dtype, normal):
    """The kernel takes a vocabulary of 2080, a multiple of 16; torch takes 200."""

    def drawn(*shape: int) -> Tensor:
        return normal(*shape).to(dtype)

    hidden, weight, site = drawn(7, WIDTH), drawn(vocab, WIDTH), adapter(drawn, vocab, rank)
    assert (site.packed is not None) == supports_lora_forward([(vocab, WIDTH)], dtype)
    adapter_ranges = [(1, 6, site)]
    low = (hidden.double() @ site.a.double().t()).to(dtype).double()
    low[0], low[6] = 0, 0
    expected = hidden.double() @ weight.double().t() + low @ site.b_matrices[0].double().t()
    backend = backend_of(dtype)
    head = backend.pack([weight])
    logits = head_logits(backend, hidden, head, adapter_ranges)
    assert (logits - expected).abs().max() < (
        0.01 if dtype == torch.bfloat16 else 1e-6
    ) * expected.abs().max()
    rows, tokens = torch.arange(7).repeat_interleave(40), torch.arange(280) * 7 % vocab
    exact = exact_logits(backend, hidden, head, rows, tokens, adapter_ranges)
    # Summation in float32 may change how the result of A is rounded.
    error = (exact - expected[rows, tokens]).abs()
    assert error.median() < 1e-5
    assert error.max() < (0.5 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_kernel_rows_are_batch_invariant(threads, dtype, normal):
    """A batch with adapters of several ranks and rows of the base model equals each row alone."""

    def drawn(*shape: int) -> Tensor:
        return normal(*shape).to(dtype)

    vocab, rows = 2080, 60
    backend, hidden = backend_of(dtype), drawn(rows, WIDTH)
    head = backend.pack([drawn(vocab, WIDTH)])
    spans = [(0, 1), (3, 31), (31, 50)]
    adapter_ranges: list[HeadAdapterRange] = [
        (*span, adapter(drawn, vocab, rank)) for span, rank in zip(spans, (8, 40, 3), strict=True)
    ]
    pairs, tokens = torch.arange(rows).repeat_interleave(5), torch.arange(5 * rows) * 331 % vocab
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = head_logits(backend, hidden, head, adapter_ranges)
        exact = exact_logits(backend, hidden, head, pairs, tokens, adapter_ranges)
        torch.set_num_threads(1)
        for row in range(rows):
            own = [(0, 1, site) for start, stop, site in adapter_ranges if start <= row < stop]
            alone = hidden[row : row + 1]
            assert torch.equal(head_logits(backend, alone, head, own)[0], together[row])
            mine = pairs == row
            zeros = torch.zeros(5, dtype=torch.int64)
            assert torch.equal(
                exact_logits(backend, alone, head, zeros, tokens[mine], own), exact[mine]
            )
    finally:
        torch.set_num_threads(before)


def test_a_selected_logit_equals_the_one_computed_alone(normal):
    backend = backend_of(torch.bfloat16)
    hidden, head = normal(5, WIDTH), backend.pack([normal(320, WIDTH)])
    site = adapter(normal, 320, 8)
    logits = head_logits(backend, hidden, head, [(0, 5, site)])
    best = logits.argmax(1)
    found = exact_logits(backend, hidden, head, torch.arange(5), best, [(0, 5, site)])
    assert torch.equal(found, logits.gather(1, best[:, None])[:, 0])
