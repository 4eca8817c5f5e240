"""The Triton kernel that applies top_k, top_p and min_p to a batch of weights, without a sort.

A weight is a float32 number from 0 to 1, so its bits, read as an integer, are a key in the same
order. For each row, one program searches for the smallest key that stays, in ten passes over the
row for top_k and ten for top_p. A last pass zeroes the weights below the key. Of equal weights at
the key, the first ones stay.

The kept tokens are exactly those of the reference implementation. Masses are integers there too
(`mass_bits`), so no sum depends on the order of its terms.

Shapes: N rows, V vocabulary.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
# Static types do not describe Triton kernels: launches take additional options, and plain numbers
# for tl.constexpr parameters.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from planish.model.device import on_device
from planish.model.kernels.reference.token_sampling import is_filtered, mass_bits
from planish.model.kernels.triton.common import bound
from planish.types import SamplingParams

_KEY_BITS = 30
"""The bits of a key. The largest weight, 1.0, has the key 0x3F800000."""
_DIGIT_BITS = 3
"""The bits of a key that one pass finds. They divide _KEY_BITS."""
_BLOCK = 1024
"""The weights that a program reads at a time."""
_WARPS = 8


def filter_(weights: Tensor, params: Sequence[SamplingParams]) -> None:
    """Do the same as `Sampling.filter_`, with one copy to the device and one kernel.

    `weights`: float32 [N, V], contiguous.
    """
    rows, vocab = weights.shape
    assert weights.dtype == torch.float32
    assert weights.is_contiguous()
    bounds = [
        [p.top_k if 0 < p.top_k < vocab else 0, p.top_p, p.min_p]
        if is_filtered(p)
        else [0, 1.0, 0.0]
        for p in params
    ]
    filter_kernel[(rows,)](
        weights,
        on_device(bounds, torch.float64, weights.device),
        vocab,
        MASS_BITS=mass_bits(vocab),
        PASSES=_KEY_BITS // _DIGIT_BITS,
        DIGIT_BITS=_DIGIT_BITS,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


@triton.jit
def _keys(entries, column, vocab):
    """Return the keys of some entries of a row, and -1 after its end."""
    found = tl.load(entries + column, mask=column < vocab, other=0.0)
    return tl.where(column < vocab, found.to(tl.int32, bitcast=True), -1)


@triton.jit
def _masses(keys, MASS_BITS: tl.constexpr):
    """Return the weights of these keys times 2 ** MASS_BITS, rounded down: int64."""
    mantissa = ((keys & 0x7FFFFF) | 0x800000).to(tl.int64)
    shift = (keys >> 23) + (MASS_BITS - 150)
    left = mantissa << tl.maximum(shift, 0).to(tl.int64)
    right = mantissa >> tl.minimum(tl.maximum(-shift, 0), 63).to(tl.int64)
    # A weight of 0 and denormal weights have the exponent 0.
    return tl.where(keys < 0x800000, 0, tl.where(shift >= 0, left, right))


@triton.jit
def _measure_from(
    entries, vocab, first, COUNTS: tl.constexpr, MASS_BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the number or the mass of the weights whose key is at least `first`: int64."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, bound(vocab), BLOCK):
        keys = _keys(entries, start + tl.arange(0, BLOCK), vocab)
        measure = tl.full((BLOCK,), 1, tl.int64) if COUNTS else _masses(keys, MASS_BITS)
        total += tl.where(keys >= first, measure, 0)
    return tl.sum(total, 0)


@triton.jit
def _search(
    entries,
    vocab,
    goal,
    COUNTS: tl.constexpr,
    MASS_BITS: tl.constexpr,
    PASSES: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the smallest key such that the weights with larger keys measure less than `goal`.

    Also return their measure, which is their number (COUNTS) or their mass. `goal`: at least 1.
    """
    digit = tl.arange(0, 1 << DIGIT_BITS)
    key, above = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    for step in tl.static_range(PASSES):
        shift = DIGIT_BITS * (PASSES - 1 - step)
        limits = key + ((digit + 1) << shift)
        totals = tl.zeros((1 << DIGIT_BITS, BLOCK), tl.int64)
        for start in range(0, bound(vocab), BLOCK):
            keys = _keys(entries, start + tl.arange(0, BLOCK), vocab)
            measure = tl.full((BLOCK,), 1, tl.int64) if COUNTS else _masses(keys, MASS_BITS)
            totals += tl.where(keys[None, :] >= limits[:, None], measure[None, :], 0)
        # The weights above the last key of each digit. They measure less for larger digits.
        beyond = tl.sum(totals, 1)
        key += tl.sum((beyond >= goal).to(tl.int32), 0) << shift
        above = tl.max(tl.where(beyond < goal, beyond, 0), 0)
    return key, above


@triton.jit
def filter_kernel(
    weights,
    bounds,
    vocab,
    MASS_BITS: tl.constexpr,
    PASSES: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zero the weights of one row that the filters exclude.

    `bounds`: float64 [N, 3], with (top_k or 0, top_p, min_p) for each row.
    """
    row = tl.program_id(0).to(tl.int64)
    entries = weights + row * vocab
    top_k = tl.load(bounds + row * 3).to(tl.int64)
    top_p, min_p = tl.load(bounds + row * 3 + 1), tl.load(bounds + row * 3 + 2)
    if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
        # The weights with larger keys than `least` stay, and the first `ties` weights at it.
        least, ties = tl.full((), 0, tl.int32), tl.full((), 1, tl.int64) * vocab
        if top_k > 0:
            least, above = _search(
                entries, vocab, top_k, True, MASS_BITS, PASSES, DIGIT_BITS, BLOCK
            )
            ties = top_k - above
        if top_p < 1.0:
            above = _measure_from(entries, vocab, least + 1, False, MASS_BITS, BLOCK)
            total = above + ties * _masses(least, MASS_BITS)
            goal = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
            key, above_key = _search(
                entries, vocab, goal, False, MASS_BITS, PASSES, DIGIT_BITS, BLOCK
            )
            if key >= least:
                mass = tl.maximum(_masses(key, MASS_BITS), 1)
                kept = (goal - above_key + mass - 1) // mass
                ties = tl.where(key == least, tl.minimum(ties, kept), kept)
                least = key
        min_key = min_p.to(tl.float32).to(tl.int32, bitcast=True)
        seen = tl.full((), 0, tl.int64)
        for start in range(0, bound(vocab), BLOCK):
            column = start + tl.arange(0, BLOCK)
            keys = _keys(entries, column, vocab)
            is_tie = (keys == least).to(tl.int64)
            index = seen + tl.cumsum(is_tie, 0) - is_tie
            stays = (keys > least) | ((keys == least) & (index < ties))
            stays &= keys >= min_key
            tl.store(entries + column, tl.zeros((BLOCK,), tl.float32), (column < vocab) & ~stays)
            seen += tl.sum(is_tie, 0)
