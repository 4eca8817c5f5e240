"""Errors and type aliases of the cookbook."""

import logging
from collections.abc import Callable
from typing import Any, Literal

from planish.errors import CheckpointError, PlanishError, UserError
from planish.tinker.refused import refused_type
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
RolloutSummaryExportConfig = refused_type(
    "RolloutSummaryExportConfig", "the loop writes rollouts itself; see rollout_json_export"
)


def compute_schedule_lr_multiplier(lr_schedule: LRSchedule, step: int, total_steps: int) -> float:
    """The factor of the learning rate in step `step` (from 0) of `total_steps`."""
    return learning_rate_at(step, total_steps, 1.0, lr_schedule)
