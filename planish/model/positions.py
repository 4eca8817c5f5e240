"""The units that group positions of a sequence, in attention, the prefix cache and KV cache slots.

All sizes in this module are numbers of positions.
"""

SPAN = 64
"""The positions whose values attention sums in one matmul (see ordered_attention.py)."""

CHUNK = 32
"""The positions of one prefix cache entry."""

STATE_CHUNK = 256
"""The positions of one prefix cache entry of a model with recurrent states.

Each entry contains the state after its last position. A state is as large as the keys and values of
hundreds to thousands of positions, so entries of CHUNK positions would waste memory.
"""


def round_up_to_spans(positions: int) -> int:
    """Return `positions` rounded up to a multiple of SPAN."""
    return -(-positions // SPAN) * SPAN


def capacity_for(positions: int) -> int:
    """Return the capacity of the smallest slot for `positions`: a positive multiple of SPAN."""
    return max(SPAN, round_up_to_spans(positions))


def sample_capacity(prompt_tokens: int, max_tokens: int) -> int:
    """Return the slot capacity that a sample needs at its maximum length.

    The slot covers the prompt's positions after its last whole span and the sampled tokens. The
    last sampled token needs no position, because it never goes through the decoder.
    """
    return capacity_for(prompt_tokens % SPAN + max_tokens - 1)


def grown_capacity(positions: int, limit: int) -> int:
    """Return the capacity of the slot that a growing sample moves to.

    The capacity is a power of two, or `limit` (from `sample_capacity`) if that is less. Doubling
    keeps the number of moves logarithmic.
    """
    return min(limit, max(SPAN, 1 << max(0, positions - 1).bit_length()))
