"""The mean of one value a question, prompt or pair, and how far it is to be trusted:

    stderr = sqrt( sum_i (x_i - mean)^2 / (N (N - 1)) )

Where a value is itself estimated from several answers, the error covers their luck too: questions
are drawn, and answers within them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mean:
    value: float
    stderr: float | None
    """None with fewer than two values, which say nothing of their spread."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """Of at least one."""
        count = len(values)
        mean = math.fsum(values) / count
        if count < 2:
            return cls(mean, None)
        return cls(
            mean,
            math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count * (count - 1))),
        )

    def named(self, name: str) -> dict[str, float]:
        """As metrics: NAME, and NAME_stderr where it is known."""
        return {name: self.value} | ({} if self.stderr is None else {f"{name}_stderr": self.stderr})
