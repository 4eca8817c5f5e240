"""Adapters of one shape in one batched product, where a batch has many of them.

A product of few rows costs a matrix library more to set up than to compute, and a decoder layer has
eleven for each adapter. So rows of adapters are padded to a few numbers, and neighbours with
equally many share a product. Stacking copies the weights, which takes about as long as one step
with separate products; a stack is kept while its adapters stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from planish.model.lora import AdapterRows, LoraStack, LoraWeights, StackRows

ROWS = 4
"""Rows of an adapter are padded to a multiple of this, so that more adapters have equally many."""

Shape = tuple[int, bool, bool]


def shape_of(weights: LoraWeights | None) -> Shape:
    """What adapters must have in common to share a product."""
    if weights is None:
        return (0, False, False)
    lora = weights.layout.lora
    return (lora.rank, lora.train_attn, lora.train_mlp)


class AdapterStacks:
    """Keeps the stacks of the last batch."""

    def __init__(self) -> None:
        self._stacks: dict[tuple[LoraWeights, ...], LoraStack] = {}

    def forget(self) -> None:
        """Free the memory of all stacks, and let go of their adapters."""
        self._stacks = {}

    def of(
        self, adapters: Sequence[AdapterRows], stacks: Callable[[int], bool]
    ) -> list[AdapterRows | StackRows]:
        """The same rows, with one entry for neighbours that can share products. `stacks`: whether
        adapters of a rank may.
        """
        known, self._stacks = self._stacks, {}
        merged: list[AdapterRows | StackRows] = []
        for _, group in groupby(
            adapters, key=lambda rows: (shape_of(rows.weights), rows.stop - rows.start)
        ):
            rows = list(group)
            members = tuple(one.weights for one in rows if one.weights is not None)
            if len(members) < 2 or not stacks(members[0].layout.lora.rank):
                merged += rows
                continue
            stack = known.get(members) or LoraStack(members)
            self._stacks[members] = stack
            merged.append(StackRows(rows[0].start, rows[-1].stop, stack))
        return merged
