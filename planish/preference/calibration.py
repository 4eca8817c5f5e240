"""Temperature scaling (Guo et al. 2017): one number that makes a preference model as sure as it is
right.

Log-odds are divided by the temperature that minimises the log loss on comparisons that were not
trained on. So that a few pairs which all are judged rightly do not ask for endless confidence, the
target is Platt's (1999): N pairs say (N + 1) / (N + 2), not 1.
"""

import math
from collections.abc import Sequence

HOTTEST = 1e3
"""Where log-odds say nothing, or the opposite of what is right: every preference is close to 0."""
COLDEST = 1e-3


def fit_temperature(chosen_log_odds: Sequence[float], pairs: int | None = None) -> float:
    """`chosen_log_odds`: of each preferred answer over the other one. `pairs`: how many comparisons
    they are, if some are in both orders; 1.0 without any.
    """
    count = len(chosen_log_odds) if pairs is None else pairs
    if not count:
        return 1.0
    target = (count + 1) / (count + 2)

    def slope(sharpness: float) -> float:
        """Of the log loss, which is convex in 1 / temperature."""
        return sum((_sigmoid(sharpness * x) - target) * x for x in chosen_log_odds)

    low, high = math.log(1 / HOTTEST), math.log(1 / COLDEST)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(math.exp(middle)) < 0 else (low, middle)
    return math.exp(-(low + high) / 2)


def _sigmoid(x: float) -> float:
    return (1 + math.tanh(x / 2)) / 2
