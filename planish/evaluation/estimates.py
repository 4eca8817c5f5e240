"""From answers to numbers with errors: pass@k and its mean over problems.

pass@k of a problem with c right answers of n is the chance that k of the n, drawn without putting back, hold a right one
(Chen et al. 2021, arXiv:2107.03374):

    pass@k = 1 - C(n - c, k) / C(n, k)

It is unbiased for the chance that k independent answers hold a right one; 1 - (1 - c/n)^k is not. pass@1 is c/n.

Problems are drawn, and answers within them: so the problem is the unit (the cluster), and the error of a mean over N problems is

    stderr = sqrt( sum_i (x_i - mean)^2 / (N (N - 1)) )

with x_i the problem's own estimate. It covers both the choice of problems and the luck of the answers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planish.errors import UserError


@dataclass(frozen=True)
class Mean:
    value: float
    stderr: float | None
    """None with fewer than two values, which say nothing of their spread."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """Of one value a problem, at least one."""
        count = len(values)
        mean = math.fsum(values) / count
        if count < 2:
            return cls(mean, None)
        return cls(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count * (count - 1))))


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Of one problem: the unbiased estimate from `samples` answers of which `correct` are right."""
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise UserError(f"pass@k with k={k}, {correct} of {samples} right: k is from 1 to the number of answers")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
