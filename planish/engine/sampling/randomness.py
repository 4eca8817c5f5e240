"""Counter-based random numbers for sampling (Philox, Salmon et al. 2011).

Each number is a function of seed, purpose, sample index and position. So it does not depend on
what else is sampled.
"""

import numpy as np
from numpy.random import Generator, Philox

_NUMBERS_PER_COUNTER = 4
"""The number of random numbers that Philox generates per counter value."""


class UniformStream:
    """The uniform random numbers in [0, 1) of one sample, by position.

    The seed is the Philox key.
    """

    _BLOCK_SIZE = 64
    """How many numbers are generated at a time."""

    def __init__(self, seed: int, index: int, purpose: int = 0) -> None:
        """Create the stream of sample `index`. Different purposes have independent streams."""
        # The two high words of the counter name the stream; the two low ones count within it.
        counter = np.array([0, 0, index, purpose], dtype=np.uint64)
        self._generator = Generator(Philox(key=seed % (1 << 128), counter=counter))
        self._numbers: list[float] = []

    def at(self, position: int) -> float:
        """Return the random number at `position`, which does not depend on earlier calls."""
        while position >= len(self._numbers):
            self._numbers += self._generator.random(self._BLOCK_SIZE).tolist()
        return self._numbers[position]


def uniforms(seed: int, purpose: int, positions: range, indices: range) -> np.ndarray:
    """Return random numbers of several streams at several positions: float64 [positions, indices].

    The numbers equal those of `UniformStream(seed, index, purpose).at(position)`.
    """
    numbers = np.empty((len(indices), len(positions)))
    philox = Philox(key=seed % (1 << 128))
    generator = Generator(philox)
    state = philox.state
    first = positions.start // _NUMBERS_PER_COUNTER
    for row, index in zip(numbers, indices, strict=True):
        # A new generator for each index would take four times as long as setting the state.
        state["state"]["counter"][:] = (first, 0, index, purpose)
        philox.state = state
        row[:] = generator.random(positions.stop - first * _NUMBERS_PER_COUNTER)[
            positions.start - first * _NUMBERS_PER_COUNTER :
        ]
    return np.ascontiguousarray(numbers.T)
