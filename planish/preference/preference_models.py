"""The interface of preference models: a function of a comparison, and the options that make one.

A trained model, a judge behind an API and a fixed rule all have this one signature. Names and sign
are those of the public cookbooks. The order of the answers can influence a model that reads both. A
caller that needs to be fair asks about both orders.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from planish import ServiceClient
from planish.preference.types import Comparison, Messages
from planish.processes.interruption import gather_or_cancel


class PreferenceModel(Protocol):
    """A coroutine function that judges a comparison. No base class is needed."""

    async def __call__(self, comparison: Comparison) -> float:
        """Return a preference from -1 to 1: 1 if completion B is better, -1 if A is, 0 if neither
        is.
        """
        ...


async def preference_of(preference_model: PreferenceModel, comparison: Comparison) -> float:
    """Return the model's preference. This turns any awaitable into a coroutine."""
    return await preference_model(comparison)


class LogOddsModel(PreferenceModel, Protocol):
    """A preference model that can be calibrated (planish/preference/calibration.py)."""

    async def log_odds(self, comparison: Comparison) -> float:
        """Return log(P(B is better) / P(A is better)) before any temperature."""
        ...


@dataclass(frozen=True)
class BothOrders:
    """A preference model that averages the preferences for both orders, which removes position
    bias.
    """

    model: PreferenceModel

    async def __call__(self, comparison: Comparison) -> float:
        given, swapped = await gather_or_cancel(
            preference_of(self.model, each) for each in (comparison, comparison.swap())
        )
        return (given - swapped) / 2

    def require_fits(self, prompt: Messages, max_tokens: int, where: str) -> None:
        """Raise UserError if the other model cannot compare answers of `max_tokens` tokens. `where`
        begins the message.
        """
        if isinstance(self.model, BoundedPreferenceModel):
            self.model.require_fits(prompt, max_tokens, where)


@runtime_checkable
class ScoringPreferenceModel(PreferenceModel, Protocol):
    """A preference model that scores each answer on its own.

    An answer that occurs in many comparisons is then read once (planish/preference/judging.py).
    """

    async def score(self, prompt: Messages, answer: Messages) -> float:
        """Return the score of an answer; only scores for the same prompt are comparable."""
        ...

    def preference_between(self, score_a: float, score_b: float) -> float:
        """Return the preference for a comparison of answers with these scores."""
        ...


@runtime_checkable
class BoundedPreferenceModel(PreferenceModel, Protocol):
    """A preference model that can read only so much. A run checks its prompts before it begins."""

    def require_fits(self, prompt: Messages, max_tokens: int, where: str) -> None:
        """Raise UserError, which begins with `where`, if the model cannot compare answers of
        `max_tokens` tokens to `prompt`. The tokens are those of the model's own tokenizer.
        """


class PreferenceModelBuilder(ABC):
    """The options of a preference model. They are plain data, so they can be logged and sent to
    other processes.
    """

    @abstractmethod
    def __call__(self, service_client: ServiceClient | None = None) -> PreferenceModel:
        """Make the model on `service_client`, so that the run needs only one engine.

        Without a service client, the model opens one of its own.
        """
