"""Triton kernels of the logits: log-sum-exp, sampling, and single logits of the LM head.

They can be captured in CUDA graphs and are batch-invariant, as those of elementwise_kernels.py.

Single logits are dot products in float32. torch would first copy the hidden state and the weight of
each logit, in both dtypes. That is ten times the memory traffic of the kernel, which reads each
operand once.

Shapes: R rows, D hidden, V vocabulary, S splits of a vocabulary, P (row, token) pairs, r rank.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Static types do not describe Triton kernels: launches take additional options, and plain numbers
# for tl.constexpr parameters.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from planish.model.kernels.interface.parts import ExactLogits
from planish.model.kernels.triton.common import (
    are_contiguous,
    bound,
    power_of_two,
    quotient,
    rounded,
)

_TILE = 1024
"""The least entries per program: 8 (16 bytes of bf16) for each of 128 threads."""
_SPLIT = 4096
"""The maximum number of vocabulary entries per program: 16 for each of 256 threads.

A single row of 150,000 entries then still occupies 37 programs.
"""


def log_sum_exp(
    logits: Tensor,
    temperature: Tensor,
    exact: ExactLogits | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Do the same as `LogSumExp.log_sum_exp`.

    A first kernel computes the max and the sum of each split of a row, and a second kernel combines
    them. One program per row would leave most of a GPU idle if there are few rows.
    """
    tokens, values, num_exact = _exact_arguments(exact)
    assert are_contiguous(logits, temperature, weights)
    assert weights is None or weights.dtype == torch.float32
    (rows, vocab), block = logits.shape, _split(logits)
    splits = quotient(vocab, block)
    out = torch.empty(rows, device=logits.device)
    split_maxima, sums = (torch.empty(rows, splits, device=logits.device) for _ in range(2))
    warps = block // 512
    _split_sums[rows, splits](
        logits,
        temperature,
        tokens,
        values,
        split_maxima,
        sums,
        vocab,
        EXACT=num_exact,
        BLOCK=block,
        num_warps=warps,
    )
    _row_sums[rows, splits if weights is not None else 1](
        logits,
        temperature,
        tokens,
        values,
        split_maxima,
        sums,
        weights,
        out,
        vocab,
        SPLITS=splits,
        SPLIT_BLOCK=power_of_two(splits),
        EXACT=num_exact,
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
    """Do the same as `LogSumExp.log_sum_exp_backward_`."""
    tokens, values, num_exact = _exact_arguments(exact)
    assert are_contiguous(logits, log_total, first, targets, grads)
    (rows, vocab), block = logits.shape, _split(logits)
    grid = (rows, quotient(vocab, block))
    _normalizers_backward[grid](
        logits,
        temperature,
        tokens,
        values,
        log_total,
        first,
        targets,
        grads,
        vocab,
        EXACT=num_exact,
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


def _exact_arguments(exact: ExactLogits | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Return the tokens, the values, and the number of exact logits of a row, for the kernels."""
    if exact is None:
        return None, None, 0
    tokens, values = exact
    assert are_contiguous(tokens, values)
    assert values.dtype == torch.float32
    return tokens, values, tokens.shape[1]


@triton.jit
def _scaled(
    logits, row, temperature, tokens, values, vocab, EXACT: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the logits of split `program_id(1)` of a row, divided by the temperature: [BLOCK].

    The EXACT `values` of the row replace the logits of their `tokens`. The result is -inf after the
    end of the row.
    """
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    entries = tl.load(logits + row * vocab + column, mask=inside, other=-float("inf"))
    entries = entries.to(tl.float32)
    if tokens is not None:
        for number in range(EXACT):
            token = tl.load(tokens + row * EXACT + number)
            # Most splits have none of the exact logits, and skip the comparison with each entry.
            if token // BLOCK == tl.program_id(1):
                value = tl.load(values + row * EXACT + number)
                entries = tl.where(column == token, value, entries)
    return tl.div_rn(entries, temperature)


@triton.jit
def _split_sums(
    logits,
    temperature,
    tokens,
    values,
    split_maxima,
    sums,
    vocab,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(temperature + row)
    entries = _scaled(logits, row, scale, tokens, values, vocab, EXACT, BLOCK)
    row_max = tl.max(entries, 0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(split_maxima + at, row_max)
    tl.store(sums + at, tl.sum(_exp_below(entries, row_max), 0))


@triton.jit
def _row_sums(
    logits,
    temperature,
    tokens,
    values,
    split_maxima,
    sums,
    weights,
    out,
    vocab,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
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
        scale = tl.load(temperature + row)
        entries = _scaled(logits, row, scale, tokens, values, vocab, EXACT, BLOCK)
        tl.store(weights + row * vocab + column, _exp_below(entries, row_max), mask=column < vocab)


def sample(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Sample one token from each row of `weights`: int64 [R].

    `weights`: float32 [R, V], not negative. `uniforms`: float64 [R], below 1. A token is the first
    entry at which the cumulative sum exceeds uniform * total. The token of a row that is not finite
    or has only zeros is undefined.
    """
    assert are_contiguous(weights, uniforms)
    assert weights.dtype == torch.float32
    assert uniforms.dtype == torch.float64
    (rows, vocab), block = weights.shape, _split(weights)
    out = torch.empty(rows, dtype=torch.int64, device=weights.device)
    splits = quotient(vocab, block)
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
    logits,
    temperature,
    tokens,
    values,
    log_total,
    first,
    targets,
    grads,
    vocab,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
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
    entries = _scaled(logits, row, temperature, tokens, values, vocab, EXACT, BLOCK)
    found = at_targets - tl.exp(entries - tl.load(log_total + row)) * total
    tl.store(
        logits + row * vocab + column, rounded(found, logits.dtype.element_ty), mask=column < vocab
    )


def token_logits(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor,
    tokens: Tensor,
    lora: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return hidden[rows] . weight[tokens], plus the part of a head adapter: float32 [P].

    `hidden`: [R, D]. `weight`: [V, D]. `rows`, `tokens`: int64 [P]. `lora`: the LoRA hidden states
    [R, r or more] and B [V, r] of the adapter of all rows. The bits of a logit do not depend on the
    other pairs.
    """
    lora_hidden, b = (None, None) if lora is None else lora
    matrices = [x for x in (hidden, weight, lora_hidden, b) if x is not None]
    assert all(matrix.stride(1) == 1 for matrix in matrices)
    out = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
    rank = 0 if b is None else b.shape[1]
    if len(rows):
        token_logits_kernel[(len(rows),)](
            hidden,
            hidden.stride(0),
            weight,
            weight.stride(0),
            lora_hidden,
            0 if lora_hidden is None else lora_hidden.stride(0),
            b,
            0 if b is None else b.stride(0),
            rows.contiguous(),
            tokens.contiguous(),
            out,
            hidden.shape[1],
            rank,
            BLOCK=min(_TILE, max(128, power_of_two(hidden.shape[1]))),
            RANK_BLOCK=power_of_two(max(rank, 1)),
            num_warps=4,
        )
    return out


@triton.jit
def token_logits_kernel(
    hidden,
    hidden_stride,
    weight,
    weight_stride,
    lora_hidden,
    lora_stride,
    b,
    b_stride,
    rows,
    tokens,
    out,
    width,
    rank,
    BLOCK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """Write the logit of one pair."""
    pair = tl.program_id(0).to(tl.int64)
    row, token = tl.load(rows + pair), tl.load(tokens + pair)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, bound(width), BLOCK):
        k = begin + tl.arange(0, BLOCK)
        x = tl.load(hidden + row * hidden_stride + k, mask=k < width, other=0.0)
        w = tl.load(weight + token * weight_stride + k, mask=k < width, other=0.0)
        total += x.to(tl.float32) * w.to(tl.float32)
    logit = tl.sum(total, 0)
    if b is not None:
        r = tl.arange(0, RANK_BLOCK)
        low = tl.load(lora_hidden + row * lora_stride + r, mask=r < rank, other=0.0)
        column = tl.load(b + token * b_stride + r, mask=r < rank, other=0.0)
        logit += tl.sum(low.to(tl.float32) * column.to(tl.float32), 0)
    tl.store(out + pair, logit)
