"""Evaluators measure a policy between training steps. Each returns metrics by name, and the loop
adds them to the step's row.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from planish import SamplingClient, TrainingClient
from planish.errors import UserError
from planish.processes.interruption import exits_as_errors


class SamplingClientEvaluator(ABC):
    """Measures a policy through a sampling client."""

    @abstractmethod
    async def __call__(self, sampling_client: SamplingClient) -> Mapping[str, float]:
        """Return metrics by name."""
        ...


class TrainingClientEvaluator(ABC):
    """Measures through a training client, for example the loss on held-out data. It must not
    train.
    """

    @abstractmethod
    async def __call__(self, training_client: TrainingClient) -> Mapping[str, float]:
        """Return metrics by name."""
        ...


Evaluator = SamplingClientEvaluator | TrainingClientEvaluator


def evaluator_name(evaluator: Evaluator) -> str:
    """Return the evaluator's attribute `name`, or the name of its class if it has none."""
    return getattr(evaluator, "name", type(evaluator).__name__)


@contextmanager
def evaluator_errors(evaluator: Evaluator, step: int) -> Iterator[None]:
    """Add a note with the evaluator and the step to any error raised in the block.

    SystemExit, and a CancelledError without a cancellation of this task, become RuntimeError.
    """
    try:
        with exits_as_errors():
            yield
    except Exception as error:
        error.add_note(f"in the evaluator {evaluator_name(evaluator)}, before step {step}")
        raise


def add_metrics(
    metrics: dict[str, float], new_metrics: Mapping[str, float], evaluator: Evaluator
) -> None:
    """Add `new_metrics`, which `evaluator` returned, to `metrics`. Raises UserError for a name
    already in use.
    """
    if (
        duplicate := next((name for name in ["step", *metrics] if name in new_metrics), None)
    ) is not None:
        owner = "the row's own" if duplicate == "step" else "that of another evaluator"
        raise UserError(
            f"the evaluator {evaluator_name(evaluator)} returned the metric {duplicate!r}, which "
            f"is {owner}; give it another name, such as {evaluator_name(evaluator)}/{duplicate}"
        )
    metrics |= new_metrics


def validate_metrics(metrics: Any, source: str) -> dict[str, int | float]:
    """Return the metrics as a dict of Python numbers. NaN and infinity count as numbers.

    Raise UserError, which names `source`, unless `metrics` maps names to numbers.
    """
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"{source} returned {metrics!r} as metrics; return a mapping of names to numbers"
        )
    return {name: _number(name, value, source) for name, value in metrics.items()}


def _number(name: Any, value: Any, source: str) -> int | float:
    if not isinstance(name, str):
        raise UserError(f"{source} returned a metric with the name {name!r}; give a text")
    if type(value) in (int, float):
        return value
    if isinstance(value, str | bytes):  # float() would parse a text such as "1.5"
        raise UserError(
            f"{source} returned the metric {name}={value!r}; return a number, and text as a log"
        )
    try:
        return float(value)  # a scalar of another library, such as NumPy
    except (TypeError, ValueError):
        raise UserError(f"{source} returned the metric {name}={value!r}; return a number") from None
