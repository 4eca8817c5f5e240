"""Ask a preference model about many comparisons concurrently, and validate its replies."""

import math
from collections.abc import Sequence
from typing import Any

from planish.datasets.messages import location_of
from planish.errors import NonFiniteError, UserError
from planish.preference.preference_models import (
    BoundedPreferenceModel,
    PreferenceModel,
    ScoringPreferenceModel,
    preference_of,
)
from planish.preference.types import Comparison, Messages
from planish.processes.interruption import gather_or_cancel

MAX_ROUNDING_ERROR = 1e-6
"""How far a preference may exceed 1 in absolute value by rounding."""


def require_judge_fits(
    preference_model: PreferenceModel, prompts: Sequence[Messages], max_tokens: int
) -> None:
    """Raise UserError for the first prompt to which the preference model cannot compare answers of
    `max_tokens` tokens. Models that are not a BoundedPreferenceModel are not checked.
    """
    if isinstance(preference_model, BoundedPreferenceModel):
        for number, prompt in enumerate(prompts, start=1):
            where = location_of(prompt) or f"prompt {number}"
            preference_model.require_fits(prompt, max_tokens, where)


async def judge_comparisons(
    preference_model: PreferenceModel, comparisons: Sequence[Comparison]
) -> list[float]:
    """Return the preference of each comparison, in order; the first error cancels the other
    requests.

    A model that scores answers reads each distinct answer to a prompt once, even if several
    comparisons contain it.
    """
    if isinstance(preference_model, ScoringPreferenceModel):
        preferences = await _preferences_from_scores(preference_model, comparisons)
    else:
        preferences = await gather_or_cancel(
            preference_of(preference_model, comparison) for comparison in comparisons
        )
    return [validate_preference(preference, preference_model) for preference in preferences]


async def _preferences_from_scores(
    model: ScoringPreferenceModel, comparisons: Sequence[Comparison]
) -> list[float]:
    answers = [
        answer
        for each in comparisons
        for answer in ((each, each.completion_A), (each, each.completion_B))
    ]
    distinct = {_key(each, answer): (each.prompt_conversation, answer) for each, answer in answers}
    score_list = await gather_or_cancel(
        model.score(prompt, answer) for prompt, answer in distinct.values()
    )
    scores = dict(zip(distinct, score_list, strict=True))
    return [
        model.preference_between(
            scores[_key(each, each.completion_A)], scores[_key(each, each.completion_B)]
        )
        for each in comparisons
    ]


def _key(comparison: Comparison, answer: Messages) -> str:
    return repr((comparison.prompt_conversation, answer))


def validate_preference(value: Any, preference_model: PreferenceModel) -> float:
    """Return `value` as a float from -1 to 1.

    Raise UserError, which names the model, for anything else.
    """
    name = getattr(preference_model, "__qualname__", type(preference_model).__qualname__)
    remedy = "return a number from -1 (A is better) to 1 (B is better)"
    try:
        preference = float(value)
    except (TypeError, ValueError):
        raise UserError(f"the preference model {name} returned {value!r:.200}; {remedy}") from None
    if not math.isfinite(preference):
        raise NonFiniteError(f"the preference model {name} returned {preference}; {remedy}")
    if abs(preference) > 1 + MAX_ROUNDING_ERROR:
        raise UserError(f"the preference model {name} returned {preference}; {remedy}")
    return max(-1.0, min(1.0, preference))
