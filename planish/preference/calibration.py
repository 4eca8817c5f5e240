"""Temperature scaling (Guo et al. 2017): fit the one number that calibrates a preference model's
confidence.

Log-odds are divided by the temperature that minimises the log loss on held-out comparisons. If the
model judges all of a few pairs correctly, the best fit would be infinite confidence. Platt's (1999)
target prevents this: N pairs aim at a probability of (N + 1) / (N + 2) instead of 1.
"""

import math
from collections.abc import Sequence

MAX_TEMPERATURE = 1e3
"""The largest temperature, which brings every preference close to 0. It is fitted if log-odds are
uninformative or mostly wrong.
"""
MIN_TEMPERATURE = 1e-3
"""The smallest temperature."""


def fit_temperature(chosen_log_odds: Sequence[float], num_pairs: int | None = None) -> float:
    """Return the temperature that minimises the log loss; 1.0 if there are no comparisons.

    `chosen_log_odds` are the log-odds of the preferred answer over the other one. If they contain
    both orders of some comparisons, `num_pairs` is the number of distinct comparisons.
    """
    count = len(chosen_log_odds) if num_pairs is None else num_pairs
    if not count:
        return 1.0
    target = (count + 1) / (count + 2)

    def loss_derivative(inverse_temperature: float) -> float:
        """Return the derivative of the log loss, which is convex in sharpness = 1 / temperature."""
        return sum((_sigmoid(inverse_temperature * x) - target) * x for x in chosen_log_odds)

    low, high = math.log(1 / MAX_TEMPERATURE), math.log(1 / MIN_TEMPERATURE)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if loss_derivative(math.exp(middle)) < 0 else (low, middle)
    return math.exp(-(low + high) / 2)


def _sigmoid(x: float) -> float:
    return (1 + math.tanh(x / 2)) / 2
