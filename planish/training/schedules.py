"""Learning rate schedules: functions of the finished fraction of a run."""

import math
from collections.abc import Callable

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}
"""Factors of the learning rate, given the finished fraction of the run (0 at the first step).
"linear" and "cosine" reach 0 only after the last step.
"""


def learning_rate_at(
    step: int, num_steps: int, base_rate: float, schedule: str, warmup_steps: int = 0
) -> float:
    """Return the learning rate of `step` (counted from 0) of `num_steps`. It rises linearly to
    `base_rate` over the first `warmup_steps` steps.
    """
    if step < warmup_steps:
        return base_rate * (step + 1) / (warmup_steps + 1)
    return base_rate * SCHEDULES[schedule]((step - warmup_steps) / max(1, num_steps - warmup_steps))
