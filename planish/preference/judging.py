"""Asking a preference model about many comparisons at once, and not believing everything that it says."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from planish.errors import NonFiniteError, UserError
from planish.interruption import first_error
from planish.preference.preference_models import PreferenceModel
from planish.preference.types import Comparison

ROUNDING = 1e-6


async def judged(preference_model: PreferenceModel, comparisons: Sequence[Comparison]) -> list[float]:
    """The preference of each comparison, in order; all are asked at once, and the first error ends the others."""
    with first_error():
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(_judged(preference_model, comparison)) for comparison in comparisons]
    return [task.result() for task in asked]


async def _judged(preference_model: PreferenceModel, comparison: Comparison) -> float:
    return checked_preference(await preference_model(comparison), preference_model)


def checked_preference(given: Any, preference_model: PreferenceModel) -> float:
    """A preference as Python's own number from -1 to 1; UserError, which names the model, for anything else."""
    name = getattr(preference_model, "__qualname__", type(preference_model).__qualname__)
    wanted = "give a number from -1 (A is better) to 1 (B is better)"
    try:
        preference = float(given)
    except (TypeError, ValueError):
        raise UserError(f"the preference model {name} gave {given!r:.200}; {wanted}") from None
    if not math.isfinite(preference):
        raise NonFiniteError(f"the preference model {name} gave {preference}; {wanted}")
    if abs(preference) > 1 + ROUNDING:
        raise UserError(f"the preference model {name} gave {preference}; {wanted}")
    return max(-1.0, min(1.0, preference))
