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
    """The smallest slot that holds `positions`: a power of two, at least one span."""
    return max(SPAN, 1 << max(0, positions - 1).bit_length())


def sample_capacity(prompt_tokens: int, max_tokens: int) -> int:
    """The slot that a sample may grow into: what follows the prompt's last whole span, without the
    last token drawn.
    """
    return capacity_for(prompt_tokens % SPAN + max_tokens - 1)
