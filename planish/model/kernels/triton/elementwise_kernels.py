"""Triton kernels of the norms, RoPE and SwiGLU.

They correspond to the C++ functions in cpp/ops.py; `Backend` documents the operations.

The kernels can be captured in CUDA graphs: no call waits for the device, and the launches depend
only on shapes and dtypes. The kernels are batch-invariant: how a row is divided and summed depends
only on its length. Triton compiles a separate kernel with wide loads for row lengths that are a
multiple of 16, because every row then begins at an aligned address. Numbers of rows are not
specialized, so every batch size runs the same compiled kernel.

Some kernels overwrite their input. So a tile has at least as many entries as its program has
threads: each entry then belongs to one thread, and no thread reads what another has overwritten.

Shapes: T rows, D hidden, H heads, E head_dim.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Static types do not describe Triton kernels: launches take additional options, and plain numbers
# for tl.constexpr parameters.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from planish.model.kernels.triton.common import are_contiguous, power_of_two, quotient, rounded

_TILE = 1024
"""The entries per tile of elementwise kernels: 8 (16 bytes of bf16) for each of 128 threads."""


@triton.jit
def _sigmoid(x):
    # The bound keeps exp finite, as in cpp/src/vectors.h.
    return 1.0 / (1.0 + tl.exp(tl.minimum(-x, 88.37626)))


# ----------------------------------------------------------------------------
# norms


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same as `Norms.rms_norm`, with outputs in `dtype`."""
    assert x.dtype == torch.float32
    x = x.contiguous()
    assert are_contiguous(residual, weight)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(x.shape[:-1], device=x.device)
    total = x if residual is None or in_place else torch.empty_like(x)
    rows, block, warps = _norm_tile(x.shape[-1])
    grid = (quotient(scale.numel(), rows),)
    _rms_norm[grid](
        x,
        residual,
        weight,
        eps,
        total,
        out,
        scale,
        scale.numel(),
        x.shape[-1],
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
    return total, out, scale


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, grad_total: Tensor | None
) -> Tensor:
    """Do the same as `Norms.rms_norm_backward`. `x`: the sum that was normed."""
    grad, grad_total = grad.contiguous(), None if grad_total is None else grad_total.contiguous()
    assert are_contiguous(x, weight, scale)
    out = torch.empty_like(x)
    rows, block, warps = _norm_tile(x.shape[-1])
    grid = (quotient(scale.numel(), rows),)
    _rms_norm_backward[grid](
        grad,
        x,
        weight,
        scale,
        grad_total,
        out,
        scale.numel(),
        x.shape[-1],
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
    return out


def _norm_tile(width: int) -> tuple[int, int, int]:
    """Return the rows, the entries per row and the warps of a program.

    A thread has 8 entries of short rows and 16 entries of long rows.
    """
    block = power_of_two(width)
    return max(1, _TILE // block), block, min(32, max(4, block // 512))


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x,
    residual,
    weight,
    eps,
    total,
    out,
    scale,
    rows,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0)
    if residual is not None:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + at, value, mask=inside)
    mean = tl.div_rn(tl.sum(value * value, 1), width.to(tl.float32))
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(scale + row, factor, mask=row < rows)
    weights = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    normed = value * factor[:, None] * weights[None, :]
    tl.store(out + at, rounded(normed, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_backward(
    grad, x, weight, scale, grad_total, out, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write factor * (weighted - x * factor ** 2 * mean(weighted * x)) + grad_total to `out`.

    `weighted` is grad * weight, and `factor` is the norm's scale of the row.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0)
    weights = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    weighted = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * weights[None, :]
    factor = tl.load(scale + row, mask=row < rows, other=0.0)
    inner = tl.div_rn(tl.sum(weighted * value, 1), width.to(tl.float32)) * factor * factor
    found = (weighted - value * inner[:, None]) * factor[:, None]
    if grad_total is not None:
        found += tl.load(grad_total + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, found, mask=inside)


# ----------------------------------------------------------------------------
# RoPE


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Do the same as `Rope.rope`. The rows of `x` may have any stride."""
    rows, heads, e = x.shape
    assert x.stride(2) == 1
    assert heads == 1 or x.stride(1) == e
    assert are_contiguous(cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power_of_two(e // 2)
    group = max(1, _TILE // block)
    sign = -1.0 if inverse else 1.0
    grid = (quotient(rows * heads, group),)
    _rotate[grid](
        x, x.stride(0), cos, sin, sign, out, rows * heads, heads, e // 2, GROUP=group, BLOCK=block
    )
    return out


@triton.jit(do_not_specialize=["count", "heads"])
def _rotate(
    x, stride, cos, sin, sign, out, count, heads, half, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """Rotate GROUP heads per program. `count`: the number of rows times heads."""
    which = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    column = tl.arange(0, BLOCK)
    inside = (which < count)[:, None] & (column < half)[None, :]
    row, head = (which // heads).to(tl.int64), which % heads
    angle = row[:, None] * half + column[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0) * sign
    source = (row * stride + head * (2 * half))[:, None] + column[None, :]
    first = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + source + half, mask=inside, other=0.0).to(tl.float32)
    to = (which.to(tl.int64) * (2 * half))[:, None] + column[None, :]
    tl.store(out + to, rounded(first * c - second * s, out.dtype.element_ty), mask=inside)
    tl.store(out + to + half, rounded(second * c + first * s, out.dtype.element_ty), mask=inside)


def qk_norm_rope(
    qkv: Tensor,
    heads: tuple[int, int],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Do the same as `QkNormRope.qk_norm_rope`, in one kernel."""
    assert are_contiguous(qkv, cos, sin, *(norms or ()))
    rows, width = qkv.shape
    e = width // (heads[0] + 2 * heads[1])
    q, k = (torch.empty(rows, count, e, dtype=qkv.dtype, device=qkv.device) for count in heads)
    block = power_of_two(e // 2)
    group = max(1, _TILE // block)
    q_norm, k_norm = norms or (None, None)
    grid = (rows, quotient(sum(heads), group))
    _qk_norm_rope[grid](
        qkv,
        width,
        q_norm,
        k_norm,
        eps,
        cos,
        sin,
        q,
        k,
        *heads,
        e // 2,
        NORMED=norms is not None,
        GROUP=group,
        BLOCK=block,
    )
    return q, k


@triton.jit
def _norm_weights(q_norm, k_norm, column, inside, is_q):
    """Return the norm's weights at some columns for each head: the heads of q and k differ."""
    of_q = tl.load(q_norm + column, mask=inside, other=0.0)[None, :]
    of_k = tl.load(k_norm + column, mask=inside, other=0.0)[None, :]
    return tl.where(is_q[:, None], of_q, of_k)


@triton.jit
def _qk_norm_rope(
    qkv, width, q_norm, k_norm, eps, cos, sin, q, k, q_heads, k_heads, half,
    NORMED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm and rotate GROUP heads of one row. The heads of q come before the heads of k."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    column = tl.arange(0, BLOCK)
    of_row = column < half
    inside = (head < q_heads + k_heads)[:, None] & of_row[None, :]
    is_q = head < q_heads
    source = row * width + (head * (2 * half))[:, None] + column[None, :]
    first = tl.load(qkv + source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + source + half, mask=inside, other=0.0).to(tl.float32)
    if NORMED:  # Round between norm and RoPE, so that the bits equal those of separate kernels.
        mean = tl.div_rn(
            tl.sum(first * first, 1) + tl.sum(second * second, 1), (2 * half).to(tl.float32)
        )
        factor = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]
        weight = _norm_weights(q_norm, k_norm, column, of_row, is_q)
        first = rounded(first * factor * weight, q.dtype.element_ty).to(tl.float32)
        weight = _norm_weights(q_norm + half, k_norm + half, column, of_row, is_q)
        second = rounded(second * factor * weight, q.dtype.element_ty).to(tl.float32)
    c = tl.load(cos + row * half + column, mask=of_row, other=0.0)[None, :]
    s = tl.load(sin + row * half + column, mask=of_row, other=0.0)[None, :]
    one = rounded(first * c - second * s, q.dtype.element_ty)
    other = rounded(second * c + first * s, q.dtype.element_ty)
    to_q = ((row * q_heads + head) * (2 * half))[:, None] + column[None, :]
    to_k = ((row * k_heads + head - q_heads) * (2 * half))[:, None] + column[None, :]
    tl.store(q + to_q, one, mask=inside & is_q[:, None])
    tl.store(q + to_q + half, other, mask=inside & is_q[:, None])
    tl.store(k + to_k, one, mask=inside & ~is_q[:, None])
    tl.store(k + to_k + half, other, mask=inside & ~is_q[:, None])


# ----------------------------------------------------------------------------
# SwiGLU


def swiglu(gate_up: Tensor) -> Tensor:
    """Do the same as `Activations.swiglu`."""
    assert are_contiguous(gate_up)
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _swiglu[_tiles(out)](gate_up, out, out.shape[1], BLOCK=_TILE)
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Do the same as `Activations.swiglu_backward`."""
    grad = grad.contiguous()
    assert are_contiguous(gate_up)
    out = torch.empty_like(gate_up)
    _swiglu_backward[_tiles(grad)](grad, gate_up, out, grad.shape[1], BLOCK=_TILE)
    return out


def _tiles(x: Tensor) -> tuple[int, int]:
    return x.shape[0], quotient(x.shape[1], _TILE)


@triton.jit
def _swiglu(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = gate_up + row * (2 * width) + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    found = gate * _sigmoid(gate) * up
    tl.store(out + row * width + column, rounded(found, out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(grad, gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * (2 * width) + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share = _sigmoid(gate)
    slope = gate * share * (1.0 - share) + share
    tl.store(out + at, rounded(given * up * slope, out.dtype.element_ty), mask=inside)
    tl.store(out + at + width, rounded(given * (gate * share), out.dtype.element_ty), mask=inside)
