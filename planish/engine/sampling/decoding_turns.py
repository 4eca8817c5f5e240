"""Which samples take part in each decoding step, so that an owner with few samples does not wait
for the many samples of another.

A step with many samples takes long on a CPU, and each of its samples gets one token. In such steps,
an owner with one sample would wait for each of its tokens as long as for one token of all samples.
So after a step with all samples, the owners with few samples get steps of their own, for
at most as long as that step took. Which samples are in a step does not change their tokens, because
decoding is batch-invariant.

On a device where a small step takes nearly as long as a large one, such as a GPU, small steps would
gain nothing and cost much. So they are measured, and pause if they are not worthwhile.
"""

from collections import Counter
from collections.abc import Sequence

from planish.engine.sampling.requests import RunningSample

_FEW = 1 / 8
"""Owners with at most this share of the samples get small steps."""
_WORTHWHILE_STEPS = 4
"""Small steps pause if fewer of them fit into the time of a large step."""
_MAX_PAUSE = 64
"""The maximum number of large steps of a pause. The first pause is one step, and each pause is twice
as long as the previous one, so that a single slow step on a busy machine does not matter much.
"""


class DecodingTurns:
    """Chooses the samples of each decoding step of a sampler."""

    def __init__(self) -> None:
        """Begin with a step of all samples."""
        self._seconds_left = 0.0
        """How long small steps may still take before the next large step."""
        self._num_small_steps = 0
        """The number of small steps since the last large step."""
        self._pause = self._num_paused_steps = 0
        """The length of the last pause, and how many large steps of it are left."""

    def choose(self, samples: Sequence[RunningSample]) -> Sequence[RunningSample]:
        """Return the samples of the next step: those of the owners with few samples, or all."""
        if self._seconds_left <= 0 or self._num_paused_steps:
            return samples
        counts = Counter(sample.request.op.owner for sample in samples)
        few = {owner for owner, count in counts.items() if count <= _FEW * len(samples)}
        if not few:
            return samples
        chosen = [
            sample
            for sample in samples
            if sample.request.op.owner in few and not sample.awaits_mask
        ]
        return chosen or samples

    def charge(self, is_small: bool, seconds: float) -> None:
        """Record how long the chosen step took. `is_small`: it did not have all samples."""
        if not is_small:
            self._seconds_left, self._num_small_steps = seconds, 0
            self._num_paused_steps = max(0, self._num_paused_steps - 1)
            return
        self._seconds_left -= seconds
        self._num_small_steps += 1
        if self._num_small_steps >= _WORTHWHILE_STEPS:
            self._pause = 0
        elif self._seconds_left <= 0:
            self._pause = self._num_paused_steps = min(_MAX_PAUSE, max(1, 2 * self._pause))
