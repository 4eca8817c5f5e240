"""The pairs of a row and an expert in a mixture of experts, sorted so that experts are matmuls.

Shapes: T rows of a batch, N experts, k experts per token, P = T * k pairs of a row and an expert.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from planish.model.layers.quantized_experts import QuantizedExperts


class ExpertKernels(Protocol):
    """Operations that one kernel computes for all experts of a layer (kernels/triton).

    `ranges`: int32 [2, N], the first of each expert's sorted pairs, and the last one plus 1.
    """

    def choose(self, logits: Tensor, k: int, *, normalizes: bool) -> tuple[Tensor, Tensor]:
        """Return the k largest probabilities of each row, float32 [T, k], and their experts.

        `normalizes`: divide the probabilities by their sum.
        """
        ...

    def sort(self, chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return `order`, `row_indices`, `places` and the ranges of the pairs (see below)."""
        ...

    def matmul(
        self,
        x: Tensor,
        weights: Tensor | QuantizedExperts,
        ranges: Tensor,
        columns: int,
        *,
        bias: Tensor | None = None,
        transposed: bool = False,
    ) -> Tensor:
        """Return x @ W.T + bias with the W [columns, in] of each pair's expert: [P, columns].

        `weights`: the addresses of the Ws, int64 [N], or quantized experts. `bias`: [N, columns].
        `transposed`: each W is stored as [in, columns].
        """
        ...

    def add_lora_(self, x: Tensor, out: Tensor, a: Tensor, b: Tensor, ranges: Tensor) -> Tensor:
        """Add x @ A.T @ B.T, with A and B of each pair's expert, to `out`. Return x @ A.T [P, r].

        Pairs outside of the ranges do not change. `a`: [N, r, in]. `b`: [N, out, r].
        """
        ...

    def lora_backward_(
        self,
        grad: Tensor,
        x: Tensor,
        hidden: Tensor,
        grad_x: Tensor,
        a: Tensor,
        b: Tensor,
        ranges: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of A and B, and add the gradient of the input to `grad_x`.

        `x`, `hidden`: input and result of `add_lora_`.
        """
        ...

    def weighted_sum(
        self, values: Tensor, places: Tensor, k: int, weights: Tensor | None = None
    ) -> Tensor:
        """Return the weighted sum over each row's pairs, [T, D]. `values`: [P, D]."""
        ...


class TokenExpertPairs:
    """The pairs of a row and one of its experts, sorted by expert, then by row."""

    def __init__(
        self, selected_experts: Tensor, num_experts: int, kernels: ExpertKernels | None = None
    ) -> None:
        """`selected_experts`: int64 [T, k], the distinct experts of each row. `kernels`: compute
        the operations on the pairs; None: torch computes one expert after another.
        """
        self.num_rows, self.experts_per_row = selected_experts.shape
        self._flat_experts = selected_experts.flatten()
        self._num_experts, self.kernels = num_experts, kernels
        self._ranges_of_rows: dict[tuple[int, int], Tensor] = {}
        self.order: Tensor
        """int64 [P]. Sorted pair i is entry order[i] of the flattened `selected_experts`."""
        self.row_indices: Tensor
        """int64 [P]: the row of each sorted pair."""
        if kernels is None:
            self.order = self._flat_experts.sort(stable=True).indices
            self.row_indices = self.order // self.experts_per_row
        else:
            sorted_pairs = kernels.sort(selected_experts, num_experts)
            self.order, self.row_indices, self.places, self.ranges = sorted_pairs
            """`places`: int64 [P], the sorted pair of each entry. `ranges`: see `ExpertKernels`.
            Both exist only with kernels.
            """

    @cached_property
    def sorted_experts(self) -> Tensor:
        """int64 [P]: the expert of each sorted pair."""
        return self._flat_experts[self.order]

    @cached_property
    def _sort_keys(self) -> np.ndarray:
        """For each sorted pair, expert * T + row: int64 [P], ascending."""
        keys: np.ndarray = (self.sorted_experts * self.num_rows + self.row_indices).cpu().numpy()
        return keys

    def device_ranges(self, start: int, stop: int) -> Tensor:
        """Return the ranges of the pairs in rows start .. stop - 1, on the device (with kernels)."""
        if (start, stop) == (0, self.num_rows):
            return self.ranges
        if (start, stop) not in self._ranges_of_rows:
            keys = self.sorted_experts * self.num_rows + self.row_indices
            experts = torch.arange(self._num_experts, device=keys.device) * self.num_rows
            edges = torch.stack([experts + start, experts + stop])
            self._ranges_of_rows[start, stop] = torch.searchsorted(keys, edges, out_int32=True)
        return self._ranges_of_rows[start, stop]

    @cached_property
    def expert_slices(self) -> list[tuple[int, slice]]:
        """The experts that at least one row uses, each with the slice of its sorted pairs."""
        return self.expert_slices_of(0, self.num_rows)

    def expert_ranges(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the range of sorted pairs of each expert, for the rows start .. stop - 1.

        The pairs of one expert in these rows are consecutive. The result is the index of each
        expert's first pair, int64 [N], and the number of its pairs, int64 [N].
        """
        expert_keys = np.arange(self._num_experts) * self.num_rows
        starts = np.searchsorted(self._sort_keys, expert_keys + start)
        return starts, np.searchsorted(self._sort_keys, expert_keys + stop) - starts

    def expert_slices_of(self, start: int, stop: int) -> list[tuple[int, slice]]:
        """Return the experts that rows start .. stop - 1 use, each with the slice of its pairs."""
        firsts, counts = (array.tolist() for array in self.expert_ranges(start, stop))
        return [
            (expert, slice(first, first + count))
            for expert, (first, count) in enumerate(zip(firsts, counts, strict=True))
            if count
        ]

    def unsort(self, values: Tensor) -> Tensor:
        """Return values [P, ...] of the sorted pairs as [T, k, ...], in the order of
        `selected_experts`.
        """
        out = torch.empty_like(values)
        out[self.order] = values
        return out.unflatten(0, (self.num_rows, self.experts_per_row))
