"""SiLU of the causal convolutions of gated delta nets and Mamba-2 layers.

On a CPU, torch has two versions of `exp`, whose last bits differ: one for whole vector registers and
one for the remaining elements of a tensor. So on a CPU, operations that call `exp` run in float64
and are rounded to float32, which hides the difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from planish.model.kernels.reference.causal_conv import convolve, convolve_backward


def conv_silu(
    x: Tensor, preceding_rows: Tensor, tap_rows: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return SiLU of the causal convolution, float32 [T, C], with the gradient of `x`.

    `x`: [T, C]. `preceding_rows`: rows that precede `x`. `tap_rows`: indices into the rows of
    `preceding_rows` followed by those of `x`; -1 stands for a row of zeros. `weight`: float32
    [C, W]. `bias`: float32 [C]. Gradients need that `preceding_rows` is empty.
    """
    return _ConvSilu.apply(x, preceding_rows, tap_rows, weight, bias)  # type: ignore[no-any-return]


def sigmoid(x: Tensor) -> Tensor:
    """Return the float32 sigmoid with the same bits for every shape of `x`."""
    return promote_for_exp(x).sigmoid().float()


def promote_for_exp(x: Tensor) -> Tensor:
    """Return `x` in float64 on a CPU, and in float32 on a GPU."""
    return x.double() if x.device.type == "cpu" else x.float()


class _ConvSilu(torch.autograd.Function):
    """See `conv_silu`. Backward recomputes the convolution."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        preceding_rows: Tensor,
        tap_rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, tap_rows, weight, bias)
        conv_out = _convolve(torch.cat([preceding_rows, x]), tap_rows, weight, bias)
        return conv_out.mul_(sigmoid(conv_out))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, tap_rows, weight, bias = ctx.saved_tensors
        conv_out = _convolve(x, tap_rows, weight, bias)
        gate = sigmoid(conv_out)
        grad = grad * (gate * (1 + conv_out * (1 - gate)))
        return convolve_backward(grad, tap_rows, weight).to(x.dtype), None, None, None, None


def _convolve(x: Tensor, tap_rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    conv_out = convolve(x, tap_rows, weight)
    return conv_out if bias is None else conv_out.add_(bias)
