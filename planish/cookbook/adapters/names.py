"""Errors and type aliases of the cookbook."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from planish.errors import CheckpointError, PlanishError, UserError
from planish.training.schedules import learning_rate_at

logger = logging.getLogger("planish")

TinkerCookbookError = PlanishError
ConfigurationError = UserError
DataError = UserError
DataFormatError = UserError
DataValidationError = UserError
RendererError = UserError
TrainingError = PlanishError
WeightsError = UserError
EvalError = PlanishError

__all__ = ["CheckpointError"]

EvaluatorBuilder = Callable[[], Any]
LRSchedule = Literal["linear", "cosine", "constant"]


@dataclass(frozen=True)
class RolloutSummaryExportConfig:
    """The name of the rollout file that the cookbook passes to its evaluators.

    planish's loop writes these files itself, and does not pass this object to evaluators.
    """

    split: str
    iteration: int
    base_name: str
    sampling_client_step: int | None = None


def compute_schedule_lr_multiplier(lr_schedule: LRSchedule, step: int, total_steps: int) -> float:
    """Return the factor of the learning rate in step `step` (from 0) of `total_steps`."""
    return learning_rate_at(step, total_steps, 1.0, lr_schedule)
