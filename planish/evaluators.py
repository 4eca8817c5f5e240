"""Measurements of a policy between training steps. Each answers metrics by name; the loop puts the names into the step's row."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class SamplingClientEvaluator(ABC):
    """Measures what a sampling client answers."""

    @abstractmethod
    async def __call__(self, sampling_client: Any) -> Mapping[str, float]: ...


class TrainingClientEvaluator(ABC):
    """Measures with a training client, such as its loss on held-out data. It must not train."""

    @abstractmethod
    async def __call__(self, training_client: Any) -> Mapping[str, float]: ...


Evaluator = SamplingClientEvaluator | TrainingClientEvaluator
