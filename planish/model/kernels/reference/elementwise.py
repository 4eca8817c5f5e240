"""Norms, RoPE and gated activations in torch.

Shapes: see kernels/interface/parts.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class TorchNorms:
    """RMSNorm and its gradient (see `Norms`)."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: the dtype of the model."""
        self._dtype = dtype

    def rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        *,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return x + residual, its RMSNorm in `dtype`, and the norm's scale per row."""
        total = x
        if residual is not None:
            total = x.add_(residual) if in_place else x + residual
        scale = (
            torch.linalg.vector_norm(total, dim=-1, keepdim=True)
            .square_()
            .div_(total.shape[-1])
            .add_(eps)
            .rsqrt_()
        )
        return total, (total * scale).mul_(weight).to(self._dtype), scale

    def rms_norm_backward(
        self, grad: Tensor, total: Tensor, weight: Tensor, scale: Tensor, grad_total: Tensor | None
    ) -> Tensor:
        """Return the float32 gradient of `total`, the sum that `rms_norm` normed."""
        weighted_grad = grad.to(total.dtype) * weight
        mean_product = (
            torch.linalg.vecdot(weighted_grad, total)
            .unsqueeze(-1)
            .div_(total.shape[-1])
            .mul_(scale)
            .mul_(scale)
        )
        grad_x = weighted_grad.sub_(total * mean_product).mul_(scale)
        return grad_x if grad_total is None else grad_x.add_(grad_total)


class TorchRope:
    """The rotary position embedding (see `Rope`)."""

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        """Return x [T, H, E] rotated by the angles of `cos` and `sin` [T, 1, E/2]."""
        sin = -sin if inverse else sin
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(
            x.dtype
        )


class TorchActivations:
    """The gated activations of MLPs and their gradients (see `Activations`)."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up: [T, I]. `gate_up`: [T, 2 * I]."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def swiglu_backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """Return the gradient of `gate_up`: [T, 2 * I]."""
        gate, up = gate_up.chunk(2, -1)
        return torch.cat(
            [torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)], -1
        )

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up: [T, I]. `gate_up`: [T, 2 * I]."""
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def geglu_backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """Return the gradient of `gate_up`: [T, 2 * I]."""
        gate, up = gate_up.chunk(2, -1)
        grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        return torch.cat([grad_gate, F.gelu(gate, approximate="tanh").mul_(grad)], -1)

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """Return (up + 1) * gate * sigmoid(alpha * gate): [T, I]."""
        gate, up = _clamped(gate_up, limit)
        return (gate * torch.sigmoid(gate * alpha)).mul_(up + 1).to(gate_up.dtype)

    def clamped_swiglu_backward(
        self, grad: Tensor, gate_up: Tensor, alpha: float, limit: float
    ) -> Tensor:
        """Return the gradient of `gate_up`: [T, 2 * I], given that of the result: [T, I]."""
        gate, up = _clamped(gate_up, limit)
        gate_sigmoid, grad = torch.sigmoid(gate * alpha), grad.to(gate.dtype)
        # Operations are in place, because each of these tensors has a row for each pair of a token
        # and an expert.
        activation_grad = (alpha * gate).mul_(1 - gate_sigmoid).add_(1).mul_(gate_sigmoid)
        unclamped, grad_gate_up = gate_up.unflatten(-1, (-1, 2)), torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.unflatten(-1, (-1, 2)).unbind(-1)
        grad_up.copy_(gate.mul_(grad).mul_(gate_sigmoid))
        grad_up.masked_fill_(unclamped[..., 1].abs() > limit, 0.0)
        grad_gate.copy_(up.add_(1).mul_(grad).mul_(activation_grad))
        grad_gate.masked_fill_(unclamped[..., 0] > limit, 0.0)
        return grad_gate_up


def accum_dtype(x: Tensor) -> torch.dtype:
    """Return float32, or the dtype of `x` if that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def _clamped(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return gate and up [T, I] of a clamped SwiGLU, clamped, in float32 or wider."""
    gate, up = gate_up.to(accum_dtype(gate_up)).unflatten(-1, (-1, 2)).unbind(-1)
    return gate.clamp(max=limit), up.clamp(-limit, limit)
