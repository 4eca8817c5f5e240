"""The mean of N values, one per question, prompt or pair, and its standard error:

    stderr = sqrt( sum_i (x_i - mean)^2 / (N (N - 1)) )

A value may itself be the mean over several sampled answers. The standard error then covers both
sources of variance: which questions were chosen, and which answers were sampled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mean:
    """A mean and its standard error."""

    value: float
    stderr: float | None
    """None with fewer than two values, because they have no spread."""

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "Mean":
        """Return the mean of at least one value."""
        count = len(values)
        mean = math.fsum(values) / count
        if count < 2:
            return cls(mean, None)
        return cls(
            mean,
            math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count * (count - 1))),
        )

    def as_metrics(self, name: str) -> dict[str, float]:
        """Return the metrics NAME and, if the standard error is known, NAME_stderr."""
        return {name: self.value} | ({} if self.stderr is None else {f"{name}_stderr": self.stderr})
