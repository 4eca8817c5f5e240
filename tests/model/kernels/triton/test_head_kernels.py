"""Single logits of a Triton kernel, and logprobs from rounded logits, equal float64."""

import pytest
import torch
from backends import CONFIG
from pretended_gpu import GPU, pretended_gpu

from planish.model.decoder.head import head_logits, scored_logprobs
from planish.model.kernels.choose import triton_backend
from planish.model.kernels.triton.families import FAMILIES
from planish.model.layers.lora import LoraMatrices

own = pytest.importorskip("planish.model.kernels.triton.head_kernels")


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).bfloat16()


@pytest.mark.parametrize(("width", "rank"), [(64, None), (1500, 3), (67, 1), (1024, 16)])
def test_single_logits_equal_float64_for_any_other_pairs(width, rank, device):
    hidden, weight = normal(5, 2 * width)[:, width:].to(device), normal(70, width).to(device)
    rows = torch.tensor([0, 4, 4, 2], device=device)
    tokens = torch.tensor([69, 0, 69, 31], device=device)
    lora, expected = None, (hidden[rows].double() * weight[tokens].double()).sum(1)
    if rank is not None:
        low, b = normal(5, rank + 2).to(device), normal(70, rank).to(device)
        lora = low, b
        expected += (low[rows, :rank].double() * b[tokens].double()).sum(1)
    found = own.token_logits(hidden, weight, rows, tokens, lora)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for pair in range(4):
        alone = own.token_logits(hidden, weight, rows[pair, None], tokens[pair, None], lora)
        assert torch.equal(alone[0], found[pair])
    assert own.token_logits(hidden, weight, rows[:0], tokens[:0], lora).shape == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_logprobs_on_a_gpu_from_rounded_logits_equal_the_sampler(monkeypatch, recompute):
    """The trainer's logits are bf16, the sampler's float32. bf16 rounds a logit of 30 by 0.06."""
    states, weight = normal(7, 64), normal(3000, 64, scale=1.1)
    lora = normal(4, 64, scale=0.125), normal(3000, 4, scale=0.3)
    rows, upstream = torch.arange(7).repeat(2), torch.linspace(0.5, 1.5, 14)
    leaves = [x.double().requires_grad_() for x in (states, *lora)]
    logits = leaves[0] @ weight.double().T + leaves[0] @ leaves[1].T @ leaves[2].T
    assert logits.max() > 30
    targets = torch.cat([logits.argmax(1), logits.topk(20).indices[:, -1]])
    expected = logits.log_softmax(1)[rows, targets]
    (expected * upstream).sum().backward()
    with pretended_gpu(monkeypatch):
        backend = triton_backend(CONFIG, torch.bfloat16, GPU, FAMILIES)
        assert backend.logits_dtype == torch.float32
        assert backend.training_logits_dtype == torch.bfloat16
        hidden, a, b = (x.to(GPU).requires_grad_() for x in (states, *lora))
        adapter, head = LoraMatrices(a, (b,)), backend.pack([weight.to(GPU)])
        pairs = rows.to(GPU), targets.to(GPU)
        found = scored_logprobs(backend, hidden, head, adapter, *pairs, recompute=recompute)
        (found * upstream.to(GPU)).sum().backward()
        sampled = head_logits(backend, hidden, head, [(0, 7, adapter)]).log_softmax(1)[pairs]
        results = [x.detach().cpu() for x in (found, sampled)]
        gradients = [x.grad.cpu() for x in (hidden, a, b) if x.grad is not None]
    for result in results:
        torch.testing.assert_close(result.double(), expected.detach(), rtol=0, atol=5e-3)
    torch.testing.assert_close(*results, rtol=0, atol=5e-3)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        assert leaf.grad is not None
        assert (gradient.double() - leaf.grad).norm() < 0.02 * leaf.grad.norm()
