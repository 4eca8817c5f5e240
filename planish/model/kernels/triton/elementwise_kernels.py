"""Triton kernels of the norms, RoPE, SwiGLU, log-sum-exp and sampling.

They correspond to the C++ functions in cpp/ops.py; `Backend` documents the operations.

The kernels can be captured in CUDA graphs: no call waits for the device, and the launches depend
only on shapes and dtypes. The kernels are batch-invariant: how a row is divided and summed depends
only on its length. Triton compiles a separate kernel with wide loads for row lengths that are a
multiple of 16, because every row then begins at an aligned address. Numbers of rows are not
specialized, so every batch size runs the same compiled kernel.

Some kernels overwrite their input. So a tile has at least as many entries as its program has
threads: each entry then belongs to one thread, and no thread reads what another has overwritten.

Shapes: T rows, D hidden, H heads, E head_dim, R rows and V vocabulary of the head, S splits of a
vocabulary.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Static types do not describe Triton kernels: launches take additional options, and plain numbers
# for tl.constexpr parameters.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from planish.model.kernels.interface import ExactLogits
from planish.model.kernels.triton.common import power_of_two, rounded

_TILE = 1024
"""The entries per tile of elementwise kernels: 8 (16 bytes of bf16) for each of 128 threads."""
_SPLIT = 4096
"""The maximum number of vocabulary entries per program: 16 for each of 256 threads.

A single row of 150,000 entries then still occupies 37 programs.
"""


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
    assert _are_contiguous(residual, weight)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(x.shape[:-1], device=x.device)
    total = x if residual is None or in_place else torch.empty_like(x)
    rows, block, warps = _norm_tile(x.shape[-1])
    grid = (_quotient(scale.numel(), rows),)
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
    assert _are_contiguous(x, weight, scale)
    out = torch.empty_like(x)
    rows, block, warps = _norm_tile(x.shape[-1])
    grid = (_quotient(scale.numel(), rows),)
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
    assert _are_contiguous(cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power_of_two(e // 2)
    group = max(1, _TILE // block)
    sign = -1.0 if inverse else 1.0
    grid = (_quotient(rows * heads, group),)
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
    assert _are_contiguous(qkv, cos, sin, *(norms or ()))
    rows, width = qkv.shape
    e = width // (heads[0] + 2 * heads[1])
    q, k = (torch.empty(rows, count, e, dtype=qkv.dtype, device=qkv.device) for count in heads)
    block = power_of_two(e // 2)
    group = max(1, _TILE // block)
    q_norm, k_norm = norms or (None, None)
    grid = (rows, _quotient(sum(heads), group))
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
    assert _are_contiguous(gate_up)
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _swiglu[_tiles(out)](gate_up, out, out.shape[1], BLOCK=_TILE)
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Do the same as `Activations.swiglu_backward`."""
    grad = grad.contiguous()
    assert _are_contiguous(gate_up)
    out = torch.empty_like(gate_up)
    _swiglu_backward[_tiles(grad)](grad, gate_up, out, grad.shape[1], BLOCK=_TILE)
    return out


def _tiles(x: Tensor) -> tuple[int, int]:
    return x.shape[0], _quotient(x.shape[1], _TILE)


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


# ----------------------------------------------------------------------------
# the head


def log_sum_exp(
    logits: Tensor,
    temperature: Tensor,
    exact: ExactLogits | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Do the same as `LogSumExp.log_sum_exp`, for logits that need no correction by `exact`.

    A first kernel computes the max and the sum of each split of a row, and a second kernel combines
    them. One program per row would leave most of a GPU idle if there are few rows.
    """
    assert exact is None, "exact must be None: logits are already computed in float32 on a GPU"
    assert _are_contiguous(logits, temperature, weights)
    assert weights is None or weights.dtype == torch.float32
    (rows, vocab), block = logits.shape, _split(logits)
    splits = _quotient(vocab, block)
    out = torch.empty(rows, device=logits.device)
    split_maxima, sums = (torch.empty(rows, splits, device=logits.device) for _ in range(2))
    warps = block // 512
    _split_sums[rows, splits](
        logits, temperature, split_maxima, sums, vocab, BLOCK=block, num_warps=warps
    )
    _row_sums[rows, splits if weights is not None else 1](
        logits,
        temperature,
        split_maxima,
        sums,
        weights,
        out,
        vocab,
        SPLITS=splits,
        SPLIT_BLOCK=power_of_two(splits),
        BLOCK=block,
        num_warps=warps if weights is not None else 1,
    )
    return out


def log_sum_exp_backward_(
    logits: Tensor,
    temperature: float,
    log_total: Tensor,
    first: Tensor,
    targets: Tensor,
    grads: Tensor,
    exact: ExactLogits | None = None,
) -> None:
    """Do the same as `LogSumExp.log_sum_exp_backward_`, without a correction by `exact`."""
    assert exact is None, "exact must be None: logits are already computed in float32 on a GPU"
    assert _are_contiguous(logits, log_total, first, targets, grads)
    (rows, vocab), block = logits.shape, _split(logits)
    grid = (rows, _quotient(vocab, block))
    _normalizers_backward[grid](
        logits,
        temperature,
        log_total,
        first,
        targets,
        grads,
        vocab,
        BLOCK=block,
        num_warps=block // 512,
    )


def _split(logits: Tensor) -> int:
    """Return the number of entries of a row per program."""
    return min(_SPLIT, max(_TILE, power_of_two(logits.shape[1])))


@triton.jit
def _exp_below(x, row_max):
    """Return exp(x - row_max), where `row_max` is at least the max of x.

    The result is 0 if the row_max is -inf, and NaN if the row_max is +inf.
    """
    below = x - tl.where(tl.abs(row_max) < float("inf"), row_max, 0.0)
    return tl.exp(tl.where(below > 0.0, float("nan"), below))


@triton.jit
def _scaled(logits, temperature, column, vocab):
    """Return entries of a row divided by the temperature, and -inf after the end of the row."""
    entries = tl.load(logits + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
    return tl.div_rn(entries, temperature)


@triton.jit
def _split_sums(logits, temperature, split_maxima, sums, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entries = _scaled(logits + row * vocab, tl.load(temperature + row), column, vocab)
    row_max = tl.max(entries, 0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(split_maxima + at, row_max)
    tl.store(sums + at, tl.sum(_exp_below(entries, row_max), 0))


@triton.jit
def _row_sums(
    logits,
    temperature,
    split_maxima,
    sums,
    weights,
    out,
    vocab,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Combine the maxima and sums of a row's splits to the log-sum-exp of the row.

    If `weights` is given, each program also writes the weights of one split.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLIT_BLOCK)
    at = row * SPLITS + split
    maxima = tl.load(split_maxima + at, mask=split < SPLITS, other=-float("inf"))
    row_max = tl.max(maxima, 0)
    if tl.program_id(1) == 0:
        parts = tl.load(sums + at, mask=split < SPLITS, other=0.0) * _exp_below(maxima, row_max)
        total = tl.sum(parts.to(tl.float64), 0)
        total = tl.where(total > 0.0, total, float("nan"))
        tl.store(out + row, (row_max.to(tl.float64) + tl.log(total)).to(tl.float32))
    if weights is not None:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        entries = _scaled(logits + row * vocab, tl.load(temperature + row), column, vocab)
        tl.store(weights + row * vocab + column, _exp_below(entries, row_max), mask=column < vocab)


def sample(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Sample one token from each row of `weights`: int64 [R].

    `weights`: float32 [R, V], not negative. `uniforms`: float64 [R], below 1. A token is the first
    entry at which the cumulative sum exceeds uniform * total. The token of a row that is not finite
    or has only zeros is undefined.
    """
    assert _are_contiguous(weights, uniforms)
    assert weights.dtype == torch.float32
    assert uniforms.dtype == torch.float64
    (rows, vocab), block = weights.shape, _split(weights)
    out = torch.empty(rows, dtype=torch.int64, device=weights.device)
    splits = _quotient(vocab, block)
    _sample[(rows,)](
        weights, uniforms, out, vocab, SPLITS=splits, BLOCK=block, num_warps=block // 512
    )
    return out


@triton.jit
def _sample(weights, uniforms, out, vocab, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Sample one row in three steps.

    Find the total, then the split in which the cumulative sum exceeds the goal, and then the entry
    within that split. Sums over splits are float64.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    entries = weights + row * vocab
    total = tl.full((), 0.0, tl.float64)
    for split in range(SPLITS):
        at = split * BLOCK + column
        found = tl.load(entries + at, mask=at < vocab, other=0.0)
        total += tl.sum(found.to(tl.float64), 0)
    goal = tl.load(uniforms + row) * total
    # Rounding may make the goal equal to the total. Then the last split with any weight is chosen.
    before = tl.full((), 0.0, tl.float64)
    chosen, start = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float64)
    is_found = tl.full((), 0, tl.int32)
    for split in range(SPLITS):
        at = split * BLOCK + column
        found = tl.load(entries + at, mask=at < vocab, other=0.0)
        mass = tl.sum(found.to(tl.float64), 0)
        takes = (is_found == 0) & (mass > 0.0)
        chosen, start = tl.where(takes, split, chosen), tl.where(takes, before, start)
        before += mass
        is_found = tl.where(takes & (before > goal), 1, is_found)
    at = chosen * BLOCK + column
    found = tl.load(entries + at, mask=at < vocab, other=0.0).to(tl.float64)
    passed = (start + tl.cumsum(found, 0) > goal) & (found > 0.0)
    first = tl.min(tl.where(passed, column, BLOCK), 0)
    last = tl.max(tl.where(found > 0.0, column, 0), 0)
    tl.store(out + row, (chosen * BLOCK + tl.minimum(first, last)).to(tl.int64))


@triton.jit
def _normalizers_backward(
    logits, temperature, log_total, first, targets, grads, vocab, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = 0.0
    at_targets = tl.zeros([BLOCK], tl.float32)
    pair, last = tl.load(first + row), tl.load(first + row + 1)
    while pair < last:
        grad = tl.load(grads + pair)
        total += grad
        at_targets += tl.where(column == tl.load(targets + pair), grad, 0.0)
        pair += 1
    entries = _scaled(logits + row * vocab, temperature, column, vocab)
    found = at_targets - tl.exp(entries - tl.load(log_total + row)) * total
    tl.store(
        logits + row * vocab + column, rounded(found, logits.dtype.element_ty), mask=column < vocab
    )


def _quotient(n: int, size: int) -> int:
    """Return n / size, rounded up."""
    return -(-n // size)


def _are_contiguous(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)
