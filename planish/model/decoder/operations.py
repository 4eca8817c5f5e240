"""The differentiable operations of the decoder, computed by a backend.

Each operation is an autograd function of its own. It stores fewer tensors for the backward pass
than plain torch operations would, and calls one kernel instead of several.

Shapes: T rows, H heads, E head_dim, I intermediate size of the MLP.
"""

from __future__ import annotations

import torch
from torch import Tensor

from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.reference.conv_silu import sigmoid
from planish.model.layers.linear import PackedLinear
from planish.model.layers.lora import LoraMatrices


def adapted_linear(
    backend: Backend, x: Tensor, linear: PackedLinear, lora: LoraMatrices | None
) -> Tensor:
    """Return the output [T, out] of frozen linears with one adapter (or none) for all rows.

    The result is differentiable with respect to `x` [T, in] and the LoRA matrices.
    """
    matrices = () if lora is None else (lora.a, *lora.b_matrices)
    return _AdaptedLinear.apply(backend, x, linear, lora, *matrices)  # type: ignore[no-any-return]


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        backend: Backend,
        x: Tensor,
        linear: PackedLinear,
        lora: LoraMatrices | None,
        *matrices: Tensor,
    ) -> Tensor:
        out = backend.matmul(x, linear, training=True)
        ctx.backend, ctx.linear, ctx.packed = backend, linear, None
        if lora is not None:
            lora_hidden = backend.add_lora_(x, out, linear.sizes, lora)
            ctx.packed = lora.packed
            ctx.save_for_backward(x, lora_hidden, *matrices)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # The first layer reads the frozen embedding, which needs no gradient.
        needs_grad_x = ctx.needs_input_grad[1]
        grad_x = ctx.backend.matmul_backward(grad, ctx.linear) if needs_grad_x else None
        saved_tensors = ctx.saved_tensors
        if not saved_tensors:
            return None, grad_x, None, None
        x, lora_hidden, a, *b_matrices = saved_tensors
        lora = LoraMatrices(a, tuple(b_matrices), ctx.packed)
        grad_a, b_grads = ctx.backend.lora_backward_(
            grad, x, lora_hidden, grad_x, ctx.linear.sizes, lora
        )
        return None, grad_x, None, None, grad_a, *b_grads


def add_rms_norm(
    backend: Backend, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + residual (float32) and its RMSNorm (Zhang & Sennrich 2019) in the model's dtype.

    The norm is x / sqrt(mean(x ** 2) + eps) * weight over the last dimension, in float32. If
    gradients are disabled, `x` may be overwritten with the sum.
    """
    if torch.is_grad_enabled():
        return _AddRMSNorm.apply(backend, x, residual, weight, eps)  # type: ignore[no-any-return]
    return backend.rms_norm(x, residual, weight, eps, in_place=True)[:2]


class _AddRMSNorm(torch.autograd.Function):
    """The sum of two tensors, and the RMSNorm of the sum.

    The norm's weight is frozen, so only the two summands get gradients. The backward pass needs
    only their sum and the norm's scale of each row.
    """

    @staticmethod
    def forward(
        ctx, backend: Backend, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ):
        total, out, scale = backend.rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, scale)
        ctx.backend = backend
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return total.view_as(total) if total is x else total, out

    @staticmethod
    def backward(ctx, grad_total: Tensor | None, grad: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        total, weight, scale = ctx.saved_tensors
        if grad is not None:
            grad_total = ctx.backend.rms_norm_backward(grad, total, weight, scale, grad_total)
        assert grad_total is not None
        dtype = ctx.residual_dtype
        grad_residual = None if dtype is None else grad_total.to(dtype)
        return None, grad_total, grad_residual, None, None


def rope(backend: Backend, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[e], x[e + E/2]) of x [T, H, E] by the angles of its row.

    `cos`, `sin`: float32 [T, 1, E/2].
    """
    return _Rope.apply(backend, x, cos, sin)  # type: ignore[no-any-return]


class _Rope(torch.autograd.Function):
    """RoPE. Its backward pass rotates the gradient by the negative angles."""

    @staticmethod
    def forward(ctx, backend: Backend, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.backend = backend
        return backend.rope(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return None, ctx.backend.rope(grad.contiguous(), cos, sin, inverse=True), None, None


def permute_last_dim(x: Tensor, order: Tensor) -> Tensor:
    """Return x [..., E] with its last dimension permuted by `order`, int64 [E]."""
    return _PermuteLastDim.apply(x, order)  # type: ignore[no-any-return]


class _PermuteLastDim(torch.autograd.Function):
    """A permutation, whose backward pass applies the inverse permutation to the gradient.

    The backward pass of torch's `index_select` is slower: it adds the gradient to a tensor of
    zeros, entry by entry.
    """

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(-1, order)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (order,) = ctx.saved_tensors
        return grad.index_select(-1, order.argsort()), None


def gated_activation(backend: Backend, gate_up: Tensor) -> Tensor:
    """Return activation(gate) * up (Shazeer 2020): [T, I].

    `gate_up`: [T, 2 * I], where the columns of the gate come first. The activation is SiLU or GELU
    (see `ModelConfig.activation`). The clamped SwiGLU of gpt-oss has another formula, and the
    columns of gate and up alternate (see `Backend.clamped_swiglu`).
    """
    if torch.is_grad_enabled():
        return _GatedActivation.apply(backend, gate_up)  # type: ignore[no-any-return]
    return gated_activation_forward(backend, gate_up)


def gated_activation_forward(backend: Backend, gate_up: Tensor) -> Tensor:
    """Return activation(gate) * up: [T, I], without gradients. `gate_up`: [T, 2 * I].

    The clamped SwiGLU has another formula and order of columns (see `Backend.clamped_swiglu`).
    """
    config = backend.config
    if config.activation == "clamped_swiglu":
        return backend.clamped_swiglu(gate_up, config.swiglu_alpha, config.swiglu_limit)
    return backend.geglu(gate_up) if config.activation == "gelu_tanh" else backend.swiglu(gate_up)


def gated_activation_backward(backend: Backend, grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient with respect to `gate_up`: [T, 2 * I].

    `grad` [T, I] is the gradient with respect to the result of `gated_activation_forward`.
    """
    config = backend.config
    if config.activation == "clamped_swiglu":
        alpha, limit = config.swiglu_alpha, config.swiglu_limit
        return backend.clamped_swiglu_backward(grad, gate_up, alpha, limit)
    if config.activation == "gelu_tanh":
        return backend.geglu_backward(grad, gate_up)
    return backend.swiglu_backward(grad, gate_up)


class _GatedActivation(torch.autograd.Function):
    """A gated activation, whose backward pass recomputes the activation instead of storing it."""

    @staticmethod
    def forward(ctx, backend: Backend, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.backend = backend
        return gated_activation_forward(backend, gate_up)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gate_up,) = ctx.saved_tensors
        return None, gated_activation_backward(ctx.backend, grad, gate_up)


def apply_output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate) in the dtype of `x`.

    `x`: [T, H * E]. `gate`: [T, H * E], or [T, 1] for one gate per row.
    """
    return _OutputGate.apply(x, gate)  # type: ignore[no-any-return]


class _OutputGate(torch.autograd.Function):
    """The product with a sigmoid gate, in float32. The backward pass recomputes the sigmoid."""

    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return (x.float() * sigmoid(gate)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gate = ctx.saved_tensors
        factor, grad = sigmoid(gate), grad.float()
        grad_gate = (grad * x.float() * factor * (1 - factor)).sum_to_size(gate.shape)
        return (grad * factor).to(x.dtype), grad_gate.to(gate.dtype)
