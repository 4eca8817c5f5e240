"""The units that group positions of a sequence, in attention, the prefix cache and KV cache slots.

All sizes in this module are numbers of positions.
"""

SPAN = 64
"""The positions whose values attention sums in one matmul (reference/ordered_attention.py)."""

CHUNK = 32
"""The positions of one prefix cache entry."""

STATE_CHUNK = 256
"""The positions of one prefix cache entry of a model with recurrent states.

Each entry contains the state after its last position. A state is as large as the keys and values of
hundreds to thousands of positions, so entries of CHUNK positions would waste memory.
"""

GPU_BLOCK = 1024
"""The positions by which the slot of a sample grows at least on a GPU. A move of a slot takes more
kernel launches than a decoding step, so moves must be rare.
"""

_MAX_DOUBLED = 256
"""The largest capacity to which slots grow by doubling."""


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


def grown_capacity(positions: int, limit: int, block: int) -> int:
    """Return the capacity of the slot that a growing sample moves to.

    The capacity is a power of two up to 256. Above that it is a multiple of an eighth of the next
    power of two, so that at most a fifth of a long slot is unused. The number of moves is
    logarithmic. In any case the capacity is a multiple of `block`, or `limit` (from
    `sample_capacity`) if that is less.
    """
    power = 1 << max(0, positions - 1).bit_length()
    step = max(block, power if power <= _MAX_DOUBLED else power // 8)
    return min(limit, max(1, -(-positions // step)) * step)
