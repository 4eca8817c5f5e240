"""What an attention mask of transformers hides, read from its mask function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planish.errors import UnsupportedError

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""(batch, head, query position, key position) -> whether the query attends to the key."""


@dataclass(frozen=True)
class CausalMask:
    """Causal attention, at most to the last `window` positions including the query's own."""

    window: int | None


def read_mask(mask_function: MaskFunction, max_context: int) -> CausalMask:
    """Return the causal mask that `mask_function` computes.

    The function is evaluated for the last two queries of the longest sequence. Raises
    UnsupportedError if these do not attend to a window that ends at their own position.
    """
    # The first key of a window moves with the query. The first key of a chunk does not.
    queries = [max(0, max_context - 2), max_context - 1]
    sizes = [_num_visible(mask_function, query) for query in queries]
    windows = {size for query, size in zip(queries, sizes, strict=True) if size <= query}
    if len(windows) > 1:
        raise UnsupportedError(
            "its attention is in chunks, and planish has only causal attention with or without a "
            "sliding window"
        )
    return CausalMask(windows.pop() if windows else None)


def _num_visible(mask_function: MaskFunction, query: int) -> int:
    """Return the number of keys that a query attends to. The last one is at its position."""
    import torch  # Commands that list models do not need torch, which takes seconds to import.

    zero = torch.zeros((), dtype=torch.int64)
    keys = torch.arange(query + 2)
    queries = torch.full_like(keys, query)
    visible = mask_function(zero, zero, queries, keys).expand(keys.shape)
    count = int(visible.sum())
    if bool(visible[query + 1]) or not bool(visible[query + 1 - count : query + 1].all()):
        raise UnsupportedError(
            "its attention is not causal, or hides positions between visible ones, and planish has "
            "only causal attention with or without a sliding window"
        )
    return count
