"""The LoRA matmuls of the torch backend."""

import torch

from planish.model.kernels.reference.lora import add_lora_, lora_backward_
from planish.model.layers.lora import LoraMatrices


def test_outputs_and_gradients_equal_autograd():
    sizes, rank = (6, 4), 3
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    a = torch.randn(2 * rank, 8, dtype=torch.float64, requires_grad=True)
    b_matrices = tuple(torch.randn(n, rank, dtype=torch.float64, requires_grad=True) for n in sizes)
    expected = torch.cat(
        [(x @ a[:rank].t()) @ b_matrices[0].t(), (x @ a[rank:].t()) @ b_matrices[1].t()], 1
    )
    upstream = torch.randn(5, sum(sizes), dtype=torch.float64)
    gradients = torch.autograd.grad(expected, (x, a, *b_matrices), upstream)

    with torch.no_grad():
        out, grad_x, lora = (
            torch.ones_like(expected),
            torch.ones_like(x),
            LoraMatrices(a, b_matrices),
        )
        hidden = add_lora_(x, out, sizes, lora)
        grad_a, b_grads = lora_backward_(upstream, x, hidden, grad_x, sizes, lora)
    torch.testing.assert_close(out, expected + 1)
    torch.testing.assert_close((grad_x - 1, grad_a, *b_grads), gradients)
