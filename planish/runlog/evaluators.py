"""Measurements of a policy between training steps. Each answers metrics by name; the loop puts the
names into the step's row.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from planish import SamplingClient, TrainingClient
from planish.errors import UserError
from planish.processes.interruption import only_errors


class SamplingClientEvaluator(ABC):
    """Measures what a sampling client answers."""

    @abstractmethod
    async def __call__(self, sampling_client: SamplingClient) -> Mapping[str, float]: ...


class TrainingClientEvaluator(ABC):
    """Measures with a training client, such as its loss on held-out data. It must not train."""

    @abstractmethod
    async def __call__(self, training_client: TrainingClient) -> Mapping[str, float]: ...


Evaluator = SamplingClientEvaluator | TrainingClientEvaluator


def evaluator_name(evaluator: Evaluator) -> str:
    """Its attribute `name`, if it has one; otherwise that of its class."""
    return getattr(evaluator, "name", type(evaluator).__name__)


@contextmanager
def asking(evaluator: Evaluator, step: int) -> Iterator[None]:
    """Errors that leave the block say which evaluator was asked, and when; so does a cancellation
    that nobody asked for.
    """
    try:
        with only_errors():
            yield
    except Exception as error:
        error.add_note(f"in the evaluator {evaluator_name(evaluator)}, before step {step}")
        raise


def add_metrics(
    metrics: dict[str, float], found: Mapping[str, float], evaluator: Evaluator
) -> None:
    """Put what `evaluator` gave beside what others did; UserError for a name that is taken."""
    if (twice := next((name for name in ["step", *metrics] if name in found), None)) is not None:
        owner = "the row's own" if twice == "step" else "that of another evaluator"
        raise UserError(
            f"the evaluator {evaluator_name(evaluator)} gave the metric {twice!r}, which is {owner}; give it another name, such as "
            "one with the evaluator's in front"
        )
    metrics |= found


def checked_metrics(given: Any, source: str) -> dict[str, int | float]:
    """What `source` gave, as Python's own numbers. UserError unless it is numbers by name; NaN and
    infinity are numbers too.
    """
    if not isinstance(given, Mapping):
        raise UserError(f"{source} gave {given!r} as metrics; give a mapping of names to numbers")
    return {name: _number(name, value, source) for name, value in given.items()}


def _number(name: Any, value: Any, source: str) -> int | float:
    if not isinstance(name, str):
        raise UserError(f"{source} gave a metric with the name {name!r}; give a text")
    if type(value) in (int, float):
        return value
    if isinstance(value, str | bytes):  # float() would read them
        raise UserError(
            f"{source} gave the metric {name}={value!r}; give a number, and text as a log"
        )
    try:
        return float(value)  # of another library, such as NumPy
    except (TypeError, ValueError):
        raise UserError(f"{source} gave the metric {name}={value!r}; give a number") from None
