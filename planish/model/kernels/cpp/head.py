"""The output head with the C++ kernels (src/head.h, src/adapters.h).

The kernels apply head adapters, compute single logits in float32, and sample tokens. One call
serves all rows of a batch, with any number of adapters. It is batch-invariant: the result of a row
depends only on the row and its adapter.

Shapes: R rows, D hidden, V vocabulary, P (row, token) pairs, r rank, L columns of `lora_hidden`,
the LoRA hidden states.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from planish.model.kernels.cpp import ops
from planish.model.kernels.cpp.matmul import CppPackedModule
from planish.model.kernels.interface.parts import (
    MIN_WEIGHT,
    ExactLogits,
    Head,
    HeadAdapters,
    Sampling,
)
from planish.model.kernels.reference.head import TorchHeadAdapters
from planish.model.layers.linear import PackedLinear
from planish.model.layers.lora import HeadAdapterRange, padded_lora_columns
from planish.model.layers.row_tiling import RowTiling

_HeadRecord = np.dtype(
    [
        (name, np.int64)
        for name in ("b", "a_panels", "b_panels", "rank", "columns", "first", "count")
    ]
)
"""The adapter of rows first .. first + count - 1 of a batch.

`b`: the address of the unpacked B. `a_panels`, `b_panels`: the addresses of the packed matrices, or
0 if the kernel does not support them.
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
    """The head adapters of ranges of rows of a batch, as a table for the kernels."""

    def __init__(
        self, adapter_ranges: Sequence[tuple[int, int, Tensor, CppPackedModule | None]]
    ) -> None:
        """`adapter_ranges`: (start, stop, B [V, r], packed adapter or None) of each range of
        rows.
        """
        # The table contains addresses of the members' matrices, so it must keep them alive.
        self._adapter_ranges = adapter_ranges
        self.is_supported = all(packed is not None for *_, packed in adapter_ranges)
        """Whether the kernel supports all adapters of the table."""
        self.records = np.zeros(len(adapter_ranges), _HeadRecord)
        for index, (start, stop, b, packed) in enumerate(adapter_ranges):
            rank, matrices = (
                b.shape[1],
                packed.addresses if packed is not None and self.is_supported else (0, 0),
            )
            self.records[index] = (
                b.data_ptr(),
                *matrices,
                rank,
                rank + rank % 2,
                start,
                stop - start,
            )
        self.width = max(
            (padded_lora_columns(b.shape[1]) for _, _, b, _ in adapter_ranges), default=0
        )
        """The number of columns L of `lora_hidden`.

        A row uses only the first r columns, where r is the rank of its adapter.
        """

    @property
    def address(self) -> int:
        """The address of the table."""
        return self.records.ctypes.data

    def lora_hidden(self, hidden: Tensor) -> Tensor:
        """Return the LoRA hidden states [R, L]; undefined in rows without an adapter."""
        num_rows, d = hidden.shape
        lora_hidden = hidden.new_empty(num_rows, self.width)
        ops.call(
            "head_lora_hidden",
            hidden.dtype,
            self.address,
            len(self.records),
            hidden,
            d,
            lora_hidden,
            self.width,
            num_rows,
        )
        return lora_hidden

    def add_(self, lora_hidden: Tensor, logits: Tensor) -> None:
        """Add the LoRA outputs of `lora_hidden` [R, L] to `logits` [R, V], in place."""
        ops.call(
            "add_head_lora",
            lora_hidden.dtype,
            self.address,
            len(self.records),
            lora_hidden,
            lora_hidden.stride(0),
            logits,
            logits.shape[1],
        )


@dataclass(frozen=True, eq=False)
class Float32Logits:
    """Logits computed one at a time as float32 dot products.

    A logit is the dot product of a row of `hidden` [R, D] and a row of the head's weight [V, D].
    If the row has an adapter, the dot product of its row of `lora_hidden` [R, L] and a row of B is
    added.
    """

    hidden: Tensor
    weight: Tensor
    table: HeadTable
    lora_hidden: Tensor | None

    def top_k(self, logits: Tensor, k: int, float32_logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the k largest `logits`, bf16 [R, V], of each row, recomputed in float32.

        The result is tokens, int64 [R, k], and values, float32 [R, k]. Equal logits are in the
        order of their tokens. `float32_logits`: an optional float32 output [R, V]. It receives all
        logits, with the recomputed values at the returned tokens.
        """
        rows, vocab = logits.shape
        tokens, values = torch.empty(rows, k, dtype=torch.int64), torch.empty(rows, k)
        arguments = (ctypes.byref(self._arguments()), logits, k, tokens, values, float32_logits)
        ops.call("top_k_logits", logits.dtype, *arguments, rows, vocab)
        return tokens, values

    def pair_logits(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits of the pairs (rows[i], tokens[i]): float32 [P]."""
        out = torch.empty(rows.shape[0])
        arguments = (
            ctypes.byref(self._arguments()),
            rows.contiguous(),
            tokens.contiguous(),
            out,
            rows.shape[0],
        )
        ops.call("single_logits", self.hidden.dtype, *arguments)
        return out

    def _arguments(self) -> _ExactLogits:
        lora_hidden = (
            (None, 0)
            if self.lora_hidden is None
            else (self.lora_hidden.data_ptr(), self.lora_hidden.stride(0))
        )
        table = (self.table.address, len(self.table.records))
        return _ExactLogits(
            self.hidden.data_ptr(),
            self.weight.data_ptr(),
            self.hidden.shape[1],
            *table,
            *lora_hidden,
        )


def sample(
    logits: Tensor,
    rows: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token from each row in `rows` [N] of `logits`, float32 [R, V].

    `uniforms`: float64 [N]. `allowed`: the tokens that may be sampled, int32 [N, (V + 31) // 32]
    (see `Backend.sample`). Return the tokens, int64 [N], and the log-sum-exp of each row's scaled
    logits, float32 [N]. The scaled logits are the logits divided by the row's temperature.
    """
    tokens, normalizer = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows))
    if allowed is not None:
        allowed = allowed.contiguous()
    ops.call(
        "sample",
        logits.dtype,
        logits,
        rows,
        temperatures,
        uniforms,
        allowed,
        MIN_WEIGHT,
        tokens,
        normalizer,
        len(rows),
        logits.shape[1],
    )
    return tokens, normalizer


def sample_from_weights(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Sample K tokens from each row of `weights`: int64 [R, K] (see `Backend.sample_from_weights`).

    `weights`: float32 [R, V], as `log_sum_exp` writes them. `uniforms`: float64 [R, K].
    """
    tokens = torch.empty(uniforms.shape, dtype=torch.int64)
    sizes = (*weights.shape, uniforms.shape[1])
    ops.call(
        "sample_from_weights",
        weights.dtype,
        weights.contiguous(),
        uniforms.contiguous(),
        tokens,
        *sizes,
    )
    return tokens


class CppHeadAdapters:
    """The head adapters of ranges of rows (see `HeadAdapters`).

    One kernel applies all of them if all of them are packed.
    """

    def __init__(
        self,
        tiling: RowTiling,
        adapter_ranges: Sequence[HeadAdapterRange],
        x: Tensor,
        lora_hidden: Tensor | None,
    ) -> None:
        """`tiling`: the padding of torch's matmuls. `x`: [R, D]. `lora_hidden`: its LoRA hidden
        states, if they are known.
        """
        self.table = HeadTable(
            [
                (
                    start,
                    stop,
                    lora.b_matrices[0].detach(),
                    cast("CppPackedModule | None", lora.packed),
                )
                for start, stop, lora in adapter_ranges
            ]
        )
        if lora_hidden is None and self.table.is_supported:
            lora_hidden = self.table.lora_hidden(x.contiguous())
        fallback = TorchHeadAdapters(tiling, adapter_ranges, x, lora_hidden)
        self._fallback, self.hidden = fallback, fallback.hidden
        self.add_single_ = fallback.add_single_

    def add_(self, logits: Tensor) -> None:
        """Add the adapters' part to `logits` [R, V], in place."""
        if self.table.is_supported:
            self.table.add_(self.hidden, logits)
        else:
            self._fallback.add_(logits)


class CppHead:
    """The logits of the LM head (see `Head`)."""

    def __init__(self, fallback: Head, tiling: RowTiling, *, has_single_logits: bool) -> None:
        """`fallback`: computes what the kernels do not support. `tiling`: the padding of its
        matmuls. `has_single_logits`: whether the kernel for single logits in float32 may be used.
        """
        self._fallback, self._tiling, self._has_single_logits = fallback, tiling, has_single_logits
        self.logits_dtype, self.head_rows = fallback.logits_dtype, fallback.head_rows
        self.training_logits_dtype = fallback.training_logits_dtype
        self.base_logits = fallback.base_logits

    def head_adapters(
        self,
        adapter_ranges: Sequence[HeadAdapterRange],
        hidden: Tensor,
        lora_hidden: Tensor | None = None,
    ) -> HeadAdapters:
        """Return the head adapters of ranges of rows, applied by one kernel if possible."""
        return CppHeadAdapters(self._tiling, adapter_ranges, hidden, lora_hidden)

    def top_logits(
        self,
        hidden: Tensor,
        head: PackedLinear,
        adapters: HeadAdapters | None,
        logits: Tensor,
        k: int,
        float32_logits: Tensor | None = None,
    ) -> ExactLogits:
        """Return the k largest logits of each row, recomputed in float32."""
        single = self._float32_logits_of(hidden, head, adapters)
        if single is None:
            return self._fallback.top_logits(hidden, head, adapters, logits, k, float32_logits)
        return single.top_k(logits, k, float32_logits)

    def token_logits(
        self,
        hidden: Tensor,
        head: PackedLinear,
        adapters: HeadAdapters | None,
        rows: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        """Return single logits [P], computed as float32 dot products."""
        single = self._float32_logits_of(hidden, head, adapters)
        if single is None:
            return self._fallback.token_logits(hidden, head, adapters, rows, tokens)
        return single.pair_logits(rows, tokens)

    def _float32_logits_of(
        self, hidden: Tensor, head: PackedLinear, adapters: HeadAdapters | None
    ) -> Float32Logits | None:
        """Return single logits with the kernel, or None if it does not support the tensors."""
        if not (self._has_single_logits and hidden.is_contiguous() and head.weight.is_contiguous()):
            return None
        if not isinstance(adapters, CppHeadAdapters):
            return Float32Logits(hidden, head.weight, HeadTable(()), None)
        return Float32Logits(hidden, head.weight, adapters.table, adapters.hidden)


class CppSampling:
    """The choice of tokens from logits (see `Sampling`)."""

    def __init__(self, fallback: Sampling) -> None:
        """`fallback`: filters weights, and samples from rows that are not contiguous."""
        self._fallback, self.filter_ = fallback, fallback.filter_

    def sample(
        self,
        logits: Tensor,
        rows: Tensor | None,
        temperatures: Tensor,
        uniforms: Tensor,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sample one token from each row: tokens, int64 [N], and log-sum-exp [N]."""
        if not logits.is_contiguous():
            return self._fallback.sample(logits, rows, temperatures, uniforms, allowed)
        rows = torch.arange(len(logits)) if rows is None else rows
        return sample(logits, rows, temperatures, uniforms, allowed)

    def sample_from_weights(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Sample tokens [N, K] (see `Backend.sample_from_weights`). Every token is within the
        vocabulary.
        """
        if not weights.is_contiguous():
            return self._fallback.sample_from_weights(weights, uniforms)
        return sample_from_weights(weights, uniforms).clamp_(max=weights.shape[1] - 1)
