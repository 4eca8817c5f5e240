"""Learning rates over the steps of a run: each is a function of the fraction of the run that is
done.
"""

import math
from collections.abc import Callable

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}
"""Factors for the fraction done, 0 at the first step. They reach 0 only after the last step."""


def learning_rate_at(
    step: int, steps: int, base: float, schedule: str, warmup_steps: int = 0
) -> float:
    """The rate of step `step` (from 0) of `steps`. It rises linearly to `base` over the first
    `warmup_steps`.
    """
    if step < warmup_steps:
        return base * (step + 1) / (warmup_steps + 1)
    return base * SCHEDULES[schedule]((step - warmup_steps) / max(1, steps - warmup_steps))
