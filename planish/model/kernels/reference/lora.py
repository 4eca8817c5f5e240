"""LoRA matmuls in torch, for one adapter and for stacks of adapters.

Shapes: T rows, n linears that read one input, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planish.model.lora import LoraMatrices


def add_lora_(x: Tensor, out: Tensor, sizes: Sequence[int], lora: LoraMatrices) -> Tensor:
    """Add the LoRA outputs of n linears to `out` [T, sum(sizes)]; return x @ A.T [T, n * r].

    `x`: [T, in]. Each B multiplies its share of the LoRA hidden states x @ A.T.
    """
    hidden = x @ lora.a.t()
    add_outputs_(hidden, out, sizes, lora.b_matrices)
    return hidden


def add_outputs_(
    hidden: Tensor, out: Tensor, sizes: Sequence[int], b_matrices: Sequence[Tensor]
) -> None:
    """Add the products of LoRA hidden states [T, n * r] and the Bs to `out` [T, sum(sizes)]."""
    parts = zip(out.split(list(sizes), 1), hidden.chunk(len(sizes), 1), b_matrices, strict=True)
    for part, share, b in parts:
        part.addmm_(share, b.t())


def add_lora_stack_(x: Tensor, out: Tensor, sizes: Sequence[int], stack: LoraMatrices) -> None:
    """Add the LoRA outputs of k stacked adapters to `out`; each adapter has 1 / k of the rows."""
    k = stack.a.shape[0]
    shares = torch.bmm(x.unflatten(0, (k, -1)), stack.a.transpose(1, 2)).chunk(len(sizes), dim=-1)
    for part, share, b in zip(out.split(list(sizes), 1), shares, stack.b_matrices, strict=True):
        part.unflatten(0, (k, -1)).baddbmm_(share, b.transpose(1, 2))


def lora_backward_(
    grad: Tensor,
    x: Tensor,
    lora_hidden: Tensor,
    grad_x: Tensor | None,
    sizes: Sequence[int],
    lora: LoraMatrices,
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of A and of the Bs; add the gradient of the input to `grad_x`.

    See `Backend.lora_backward_` for the arguments.
    """
    parts = grad.split(list(sizes), 1)
    grad_hidden = torch.cat([part @ b for part, b in zip(parts, lora.b_matrices, strict=True)], 1)
    if grad_x is not None:
        grad_x.addmm_(grad_hidden, lora.a)
    shares = lora_hidden.chunk(len(lora.b_matrices), 1)
    b_grads = [part.t() @ share for part, share in zip(parts, shares, strict=True)]
    return grad_hidden.t() @ x, b_grads
