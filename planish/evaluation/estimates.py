"""pass@k of a problem with c right answers of n is the chance that k of the n, drawn without
putting back, hold a right one (Chen et al. 2021, arXiv:2107.03374):

    pass@k = 1 - C(n - c, k) / C(n, k)

It is unbiased for the chance that k independent answers hold a right one; 1 - (1 - c/n)^k is not.
pass@1 is c/n.
"""

import math

from planish.errors import UserError


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Of one problem: the unbiased estimate from `samples` answers of which `correct` are right."""
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise UserError(
            f"pass@k with k={k}, {correct} of {samples} right: k is from 1 to the number of answers"
        )
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
