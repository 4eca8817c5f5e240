"""Stacks of adapters of one shape, so that one batched matmul serves several adapters of a batch.

For a matmul of few rows, the library's setup takes longer than the computation. A decoder layer has
eleven LoRA matmuls per adapter. So the rows of each adapter are padded to a multiple of `ROWS`, and
adjacent adapters with equal numbers of rows share a batched matmul. Stacking copies the weights,
which takes about as long as one step with separate matmuls. So a stack is reused as long as
consecutive batches contain the same adapters in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from planish.model.layers.lora import AdapterRange, AdapterStackRange, LoraStack, LoraWeights

ROWS = 4
"""The multiple to which an adapter's rows are padded, so that more adapters can share a stack."""

Shape = tuple[int, bool, bool]


def shape_of(weights: LoraWeights | None) -> Shape:
    """Return (rank, train_attn, train_mlp), which must be equal for adapters of one stack.

    Return (0, False, False) for the base model alone.
    """
    if weights is None:
        return (0, False, False)
    lora = weights.layout.lora_config
    return (lora.rank, lora.train_attn, lora.train_mlp)


class AdapterStacks:
    """A cache of the stacks that the last batch used."""

    def __init__(self) -> None:
        self._stacks: dict[tuple[LoraWeights, ...], LoraStack] = {}

    def forget(self) -> None:
        """Drop all stacks and their references to adapters."""
        self._stacks = {}

    def of(
        self, adapters: Sequence[AdapterRange], stacks: Callable[[int], bool]
    ) -> list[AdapterRange | AdapterStackRange]:
        """Return `adapters` with adjacent entries merged if they can share batched matmuls.

        `stacks`: a function that returns whether adapters of a rank may be stacked.
        """
        previous, self._stacks = self._stacks, {}
        merged: list[AdapterRange | AdapterStackRange] = []
        for _, group in groupby(
            adapters, key=lambda entry: (shape_of(entry.weights), entry.stop - entry.start)
        ):
            row_ranges = list(group)
            stacked = tuple(entry.weights for entry in row_ranges if entry.weights is not None)
            if len(stacked) < 2 or not stacks(stacked[0].layout.lora_config.rank):
                merged += row_ranges
                continue
            stack = previous.get(stacked) or LoraStack(stacked)
            self._stacks[stacked] = stack
            merged.append(AdapterStackRange(row_ranges[0].start, row_ranges[-1].stop, stack))
        return merged
