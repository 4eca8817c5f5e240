"""The randomness of samples: counted, not drawn from one stream, so it does not depend on what else
is drawn.
"""

import numpy as np
from numpy.random import Generator, Philox

_WORDS = 4
"""Numbers that Philox makes of one count."""


class UniformStream:
    """Uniform numbers in [0, 1) of one sample, by position: Philox (Salmon et al. 2011) keyed by
    the seed.
    """

    _BLOCK = 64

    def __init__(self, seed: int, index: int, purpose: int = 0) -> None:
        # The two high words of the counter name the stream; the two low ones count within it.
        counter = np.array([0, 0, index, purpose], dtype=np.uint64)
        self._generator = Generator(Philox(key=seed % (1 << 128), counter=counter))
        self._numbers: list[float] = []

    def at(self, position: int) -> float:
        while position >= len(self._numbers):
            self._numbers += self._generator.random(self._BLOCK).tolist()
        return self._numbers[position]


def uniforms(seed: int, purpose: int, positions: range, indices: range) -> np.ndarray:
    """float64 [positions, indices]: what the streams of these indices have `at` these positions,
    whatever came before.
    """
    numbers = np.empty((len(indices), len(positions)))
    source = Philox(key=seed % (1 << 128))
    generator = Generator(source)
    state = source.state
    first = positions.start // _WORDS
    for row, index in zip(numbers, indices, strict=True):
        # Set, as a generator of its own for each index takes four times as long.
        state["state"]["counter"][:] = (first, 0, index, purpose)
        source.state = state
        row[:] = generator.random(positions.stop - first * _WORDS)[
            positions.start - first * _WORDS :
        ]
    return np.ascontiguousarray(numbers.T)
