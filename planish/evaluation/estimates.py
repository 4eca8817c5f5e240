"""The unbiased estimate of pass@k (Chen et al. 2021, arXiv:2107.03374).

pass@k is the probability that at least one of k independent answers to a problem is correct. For c
correct answers among n samples the estimate is

    pass@k = 1 - C(n - c, k) / C(n, k)

This is the probability that k of the n samples, chosen without replacement, include a correct one.
The simpler 1 - (1 - c/n)^k is biased. pass@1 is c/n.
"""

import math

from planish.errors import UserError


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
