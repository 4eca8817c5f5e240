"""Units in which positions of a sequence are counted: spans of the attention, chunks of the prefix
cache, sizes of slots.
"""

SPAN = 64
"""Positions whose values attention sums in one product (see ordered_attention.py)."""

CHUNK = 32
"""Positions of one entry of the prefix cache."""


def whole_spans(positions: int) -> int:
    """`positions` rounded up to whole spans."""
    return -(-positions // SPAN) * SPAN


def capacity_for(positions: int) -> int:
    """Return the size of the smallest slot that holds `positions`: whole spans, at least one."""
    return max(SPAN, whole_spans(positions))


def sample_capacity(prompt_tokens: int, max_tokens: int) -> int:
    """Return the size of the slot that a sample may grow into.

    The slot holds what follows the prompt's last whole span, without the last sampled token.
    """
    return capacity_for(prompt_tokens % SPAN + max_tokens - 1)


def grown_capacity(positions: int, limit: int) -> int:
    """Return the size of the slot that a growing sample moves to: a power of two, or `limit` (from
    `sample_capacity`) if that is less. Doubling keeps the number of moves logarithmic.
    """
    return min(limit, max(SPAN, 1 << max(0, positions - 1).bit_length()))
