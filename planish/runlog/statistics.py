"""The mean of N values, one per question, prompt or pair, and its standard error:

    stderr = sqrt( sum_i (x_i - mean)^2 / (N (N - 1)) )

A value may itself be the mean over several sampled answers. The standard error then covers both
sources of variance: which questions were chosen, and which answers were sampled.

pass@k is the probability that at least one of k independent answers to a problem is correct. For c
correct answers among n samples the unbiased estimate (Chen et al. 2021, arXiv:2107.03374) is

    pass@k = 1 - C(n - c, k) / C(n, k)

This is the probability that k of the n samples, chosen without replacement, include a correct one.
The simpler 1 - (1 - c/n)^k is biased. pass@1 is c/n.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planish.errors import UserError


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


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate for one problem, with `num_correct` correct answers among
    `num_samples`.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise UserError(
            f"pass@k with k={k}, {num_correct} of {num_samples} right: k is from 1 to the number "
            f"of answers"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
