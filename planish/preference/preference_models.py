"""What says which of two answers is better: a function of a comparison, and the options that make
one.

Whatever judges (a model that was trained on comparisons, a judge behind an API, a rule) is behind
this one signature. Names and sign are those of the public cookbooks. A model that knows the order
of the answers may say one thing of a comparison and another thing of its swap; whoever needs to be
fair asks both.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from planish import ServiceClient
from planish.preference.types import Comparison, Messages
from planish.processes.interruption import at_once


class PreferenceModel(Protocol):
    """Any coroutine function of a comparison is one."""

    async def __call__(self, comparison: Comparison) -> float:
        """From -1 to 1: +1 = completion B is better, -1 = completion A is, 0 = neither."""
        ...


async def asked(preference_model: PreferenceModel, comparison: Comparison) -> float:
    return await preference_model(comparison)


class LogOddsModel(PreferenceModel, Protocol):
    """A preference model that can be calibrated (planish/preference/calibration.py)."""

    async def log_odds(self, comparison: Comparison) -> float:
        """Of B over A, before any temperature."""
        ...


@dataclass(frozen=True)
class BothOrders:
    """The mean of what a model says of a comparison and of its swap, so that the places of the
    answers have no say.
    """

    model: PreferenceModel

    async def __call__(self, comparison: Comparison) -> float:
        given, swapped = await at_once(
            asked(self.model, each) for each in (comparison, comparison.swap())
        )
        return (given - swapped) / 2


@runtime_checkable
class ScoringPreferenceModel(PreferenceModel, Protocol):
    """A preference model that gives each answer a number of its own, so that of many comparisons
    each answer is read once (planish/preference/judging.py).
    """

    async def score(self, prompt: Messages, answer: Messages) -> float: ...

    def preference_between(self, score_a: float, score_b: float) -> float:
        """What it says of a comparison of answers with these scores."""
        ...


class PreferenceModelBuilder(ABC):
    """The options of a preference model, which are plain data: they are written down and sent to
    other processes.
    """

    @abstractmethod
    def __call__(self, service_client: ServiceClient | None = None) -> PreferenceModel:
        """With the weights on `service_client`, so that a run holds one engine; without one, the
        model opens its own.
        """
