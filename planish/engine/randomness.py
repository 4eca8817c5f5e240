"""The randomness of samples: counted, not drawn from one stream, so it does not depend on what else is drawn."""

import numpy as np


class UniformStream:
    """Uniform numbers in [0, 1) of one sample, by position: Philox (Salmon et al. 2011) keyed by the seed."""

    _BLOCK = 64

    def __init__(self, seed: int, index: int, purpose: int = 0) -> None:
        # The two high words of the counter name the stream; the two low ones count within it.
        counter = np.array([0, 0, index, purpose], dtype=np.uint64)
        self._generator = np.random.Generator(np.random.Philox(key=seed % (1 << 128), counter=counter))
        self._numbers: list[float] = []

    def at(self, position: int) -> float:
        while position >= len(self._numbers):
            self._numbers += self._generator.random(self._BLOCK).tolist()
        return self._numbers[position]
