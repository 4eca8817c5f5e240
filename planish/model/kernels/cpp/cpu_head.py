"""The output head in the CPU's own kernels (cpp/head.h, adapters.h): its adapters, single logits in
float32, and the drawing of tokens.

Everything is of a batch's rows with their adapters, however many: one call. A row's bits depend on
that row and its adapter alone.

Shapes: R rows, D hidden, V vocabulary, P pairs of a row and a token, r rank, L columns of `low`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planish.model.kernels.backend import padded_lora_columns
from planish.model.kernels.cpp import cpu
from planish.model.kernels.cpp.cpu_products import PanelSite

_HeadRows = np.dtype(
    [
        (name, np.int64)
        for name in ("b", "a_panels", "b_panels", "rank", "columns", "first", "count")
    ]
)
"""Rows first .. first + count - 1 of a batch, and their adapter: B as it is, both as panels where
the kernel multiplies by them.
"""


class _ExactLogits(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight")),
        ("d", ctypes.c_int64),
        ("adapters", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("low", ctypes.c_void_p),
        ("low_stride", ctypes.c_int64),
    )


class HeadTable:
    """Adapters of the head, and which rows of a batch have them."""

    def __init__(self, members: Sequence[tuple[int, int, Tensor, PanelSite | None]]) -> None:
        """(start, stop, B [V, r], the adapter as panels) each."""
        self._members = members  # what the table names must stay
        self.is_served = all(panels is not None for *_, panels in members)
        """Whether the kernel multiplies by all of them."""
        self.rows = np.zeros(len(members), _HeadRows)
        for index, (start, stop, b, panels) in enumerate(members):
            rank, matrices = (
                b.shape[1],
                panels.addresses if panels is not None and self.is_served else (0, 0),
            )
            self.rows[index] = (b.data_ptr(), *matrices, rank, rank + rank % 2, start, stop - start)
        self.width = max((padded_lora_columns(b.shape[1]) for _, _, b, _ in members), default=0)
        """Columns of `low`, of which each row uses as many as its adapter has."""

    @property
    def address(self) -> int:
        return self.rows.ctypes.data

    def low(self, hidden: Tensor) -> Tensor:
        """What lies between A and B: [R, L]; not set where a row has no adapter."""
        rows, d = hidden.shape
        low = hidden.new_empty(rows, self.width)
        cpu.call(
            "head_low", hidden.dtype, self.address, len(self.rows), hidden, d, low, self.width, rows
        )
        return low

    def add_(self, low: Tensor, logits: Tensor) -> None:
        """Adds to logits [R, V] what comes of `low`."""
        cpu.call(
            "add_head",
            low.dtype,
            self.address,
            len(self.rows),
            low,
            low.stride(0),
            logits,
            logits.shape[1],
        )


@dataclass(frozen=True, eq=False)
class SingleLogits:
    """Single logits as float32 sums of hidden [R, D] times rows of the head's weight [V, D], plus
    those of `low` times rows of B.
    """

    hidden: Tensor
    weight: Tensor
    table: HeadTable
    low: Tensor | None

    def likeliest(self, logits: Tensor, k: int, wide: Tensor | None) -> tuple[Tensor, Tensor]:
        """The k largest entries of each row of logits, bf16 [R, V], the first of equal ones first:
        tokens [R, k] and values [R, k].

        `wide` [R, V] takes the logits in float32, with these values in their places.
        """
        rows, vocab = logits.shape
        tokens, values = torch.empty(rows, k, dtype=torch.int64), torch.empty(rows, k)
        given = (ctypes.byref(self._arguments()), logits, k, tokens, values, wide)
        cpu.call("likeliest", logits.dtype, *given, rows, vocab)
        return tokens, values

    def at(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Of the pairs (rows[i], tokens[i]): [P]."""
        out = torch.empty(rows.shape[0])
        given = (
            ctypes.byref(self._arguments()),
            rows.contiguous(),
            tokens.contiguous(),
            out,
            rows.shape[0],
        )
        cpu.call("single_logits", self.hidden.dtype, *given)
        return out

    def _arguments(self) -> _ExactLogits:
        low = (None, 0) if self.low is None else (self.low.data_ptr(), self.low.stride(0))
        table = (self.table.address, len(self.table.rows))
        return _ExactLogits(
            self.hidden.data_ptr(), self.weight.data_ptr(), self.hidden.shape[1], *table, *low
        )


def draw(
    logits: Tensor, rows: Tensor, temperatures: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """A token for each of rows [N] of logits, float32 [R, V], by uniform numbers, float64 [N]; and
    log-sum-exp of the row / temperature [N].
    """
    tokens, normalizer = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows))
    given = (rows, temperatures, uniforms, tokens, normalizer)
    cpu.call("draw", logits.dtype, logits, *given, len(rows), logits.shape[1])
    return tokens, normalizer


def invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The same of weights, float32 [R, V], as `normalizers` leaves them: tokens for uniforms,
    float64 [R, K], of each row.
    """
    tokens = torch.empty(uniforms.shape, dtype=torch.int64)
    sizes = (*weights.shape, uniforms.shape[1])
    cpu.call("invert", weights.dtype, weights.contiguous(), uniforms.contiguous(), tokens, *sizes)
    return tokens
