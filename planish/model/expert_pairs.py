"""The pairs of a row and an expert in a mixture of experts, sorted so that experts are matmuls.

Shapes: T rows of a batch, N experts, k experts per token, P = T * k pairs of a row and an expert.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor


class TokenExpertPairs:
    """The pairs of a row and one of its experts, sorted by expert, then by row."""

    def __init__(self, selected_experts: Tensor, num_experts: int) -> None:
        """`selected_experts`: int64 [T, k], the distinct experts of each row."""
        self.num_rows, self.experts_per_row = selected_experts.shape
        flat_experts = selected_experts.flatten()
        sorted_experts, self.order = flat_experts.sort(stable=True)
        """`order`: int64 [P]. Sorted pair i is entry order[i] of the flattened
        `selected_experts`.
        """
        self.row_indices = self.order // self.experts_per_row
        """int64 [P]: the row of each sorted pair."""
        self._sorted_experts = sorted_experts
        self._num_experts = num_experts

    @cached_property
    def _sort_keys(self) -> np.ndarray:
        """For each sorted pair, expert * T + row: int64 [P], ascending."""
        keys: np.ndarray = (self._sorted_experts * self.num_rows + self.row_indices).cpu().numpy()
        return keys

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
