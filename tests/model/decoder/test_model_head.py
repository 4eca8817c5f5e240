"""The head equals float64: values, gradients, several targets per row, large bfloat16 logits and
recomputation.
"""

from dataclasses import replace

import pytest
import torch
from backends import backend_of
from variants import slow_after

from planish.model.decoder.head import exact_logits, head_logits, scored_logprobs
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.reference.head import top_tokens
from planish.model.kernels.reference.probe import cancelling_inputs
from planish.model.layers.linear import PackedLinear
from planish.model.layers.lora import LoraMatrices


def head(
    rows: int,
    hidden: int,
    vocab: int,
    rank: int | None,
    dtype: torch.dtype,
    magnitude: float = 3.0,
    seed: int = 0,
):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    states, weight = (
        normal(rows, hidden, scale=1.0),
        normal(vocab, hidden, scale=magnitude / 4 * hidden**-0.5),
    )
    lora = (
        None
        if rank is None
        else (normal(rank, hidden, scale=hidden**-0.5), normal(vocab, rank, scale=0.3))
    )
    return states, weight, lora


def site(lora) -> LoraMatrices | None:
    """Return the adapter of the head, with packed weights if a CPU kernel takes them."""
    if lora is None:
        return None
    a, b = lora
    matrices = LoraMatrices(a, (b,))
    packed = backend_of(a.dtype).pack_adapter([matrices], is_head=True)
    return replace(matrices, packed=packed.target(0) if packed else None)


def on(states: torch.Tensor, weight: torch.Tensor) -> tuple[Backend, torch.Tensor, PackedLinear]:
    """Return the first arguments of the functions under test."""
    backend = backend_of(weight.dtype)
    return backend, states, backend.pack([weight])


def plain_logprobs(states, weight, lora, rows, targets, temperature):
    """Return log softmax((h W^T + h A^T B^T) / temperature) at the targets, in float64."""
    logits = states.double() @ weight.double().T
    if lora is not None:
        logits = logits + states.double() @ lora[0].double().T @ lora[1].double().T
    return torch.log_softmax(logits / temperature, -1)[rows, targets]


@pytest.mark.parametrize("vocab", slow_after(2, [2501, 5024, 2500, 2560]))
@pytest.mark.parametrize("rank", slow_after(2, [None, 8, 1]))
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_logprobs_and_gradients_equal_the_float64_formula(
    vocab, rank, recompute: bool, dtype, tolerance: float
):
    """planish's kernels take a vocabulary of 2560, a multiple of 16; torch takes 2500."""
    states, weight, lora = head(300, 32, vocab, rank, dtype)
    generator = torch.Generator().manual_seed(9)
    rows, targets = (
        torch.randint(0, 300, (900,), generator=generator),
        torch.randint(0, vocab, (900,), generator=generator),
    )
    upstream = torch.randn(900, generator=generator)
    upstream[rows % 3 == 0] = 0  # rows without gradient take another path
    leaves = [x.clone().requires_grad_() for x in (states, *(lora or ()))]
    pair = (leaves[1], leaves[2]) if lora else None
    (
        scored_logprobs(*on(leaves[0], weight), site(pair), rows, targets, 0.7, recompute=recompute)
        * upstream
    ).sum().backward()
    references = [x.double().requires_grad_() for x in (states, *(lora or ()))]
    pair = (references[1], references[2]) if lora else None
    (plain_logprobs(references[0], weight, pair, rows, targets, 0.7) * upstream).sum().backward()
    for leaf, reference in zip(leaves, references, strict=True):
        assert leaf.grad is not None
        assert reference.grad is not None
        assert (
            float((leaf.grad.double() - reference.grad).norm() / reference.grad.norm()) < tolerance
        )
    assert leaves[0].grad is not None
    assert float(leaves[0].grad[::3].abs().max()) == 0.0


@pytest.mark.slow
def test_large_bfloat16_logits_keep_their_precision():
    states, weight, lora = head(200, 576, 8000, 8, torch.bfloat16, magnitude=4.0)
    # bfloat16 rounds logits of magnitude 30 by up to 0.06
    weight = (weight.float() * 8).bfloat16()
    rows = torch.arange(200)
    best = plain_best(states, weight, lora)
    got = scored_logprobs(*on(states, weight), site(lora), rows, best, 1.0)
    want = plain_logprobs(states, weight, lora, rows, best, 1.0)
    logits = states.double() @ weight.double().T
    assert float(logits.max()) > 30
    rounded = torch.log_softmax((states @ weight.T).float(), -1)[rows, best]
    assert float((rounded.double() - torch.log_softmax(logits, -1)[rows, best]).abs().max()) > 2e-2
    assert float((got.double() - want).abs().max()) < 5e-3


def plain_best(states, weight, lora):
    logits = (
        states.double() @ weight.double().T
        + states.double() @ lora[0].double().T @ lora[1].double().T
    )
    return logits.argmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_logits_agree_with_scored_logprobs(dtype):
    states, weight, lora = head(70, 64, 3008, 4, dtype)
    own = site(lora)
    assert own is not None
    rows, adapters = torch.arange(70), [(0, 70, own)]
    targets = head_logits(*on(states, weight), adapters).argmax(-1)
    from_logits = torch.log_softmax(head_logits(*on(states, weight), adapters) / 0.5, -1)[
        rows, targets
    ]
    torch.testing.assert_close(
        scored_logprobs(*on(states, weight), own, rows, targets, 0.5),
        from_logits,
        rtol=0,
        atol=1e-5,
    )
    single = exact_logits(*on(states, weight), rows, targets, adapters)
    torch.testing.assert_close(
        single, head_logits(*on(states, weight), adapters)[rows, targets], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("vocab", [5, 272, 3000, 4096, 8191])
def test_the_search_for_the_largest_logits_is_exact(vocab: int):
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(3))
    found = top_tokens(logits, min(16, vocab))
    assert torch.equal(found.sort(1).values, logits.topk(min(16, vocab), 1).indices.sort(1).values)


def test_the_last_row_does_not_depend_on_the_size_of_its_chunk():
    """Some machines use another kernel for one row of more than 1024 columns. The inputs of
    `cancelling_inputs` make its summation order visible.
    """
    states, weight = (x.mul(2**7).to(torch.bfloat16) for x in cancelling_inputs(400, 300, 2048))
    if not torch.equal(states[:32] @ weight.T, (states @ weight.T)[:32]):
        pytest.skip(
            "this machine's bf16 products depend on the number of rows; see "
            "model/kernels/reference/probe.py"
        )
    row, target = torch.tensor([256]), torch.tensor([5])
    expected = scored_logprobs(*on(states, weight), None, row, target)
    for rows in (257, 258, 287, 288):
        assert torch.equal(scored_logprobs(*on(states[:rows], weight), None, row, target), expected)


def test_scoring_no_targets_gives_empty_logprobs():
    states, weight, lora = head(0, 16, 300, 2, torch.float32)
    empty = torch.empty(0, dtype=torch.int64)
    assert scored_logprobs(*on(states, weight), site(lora), empty, empty).shape == (0,)
