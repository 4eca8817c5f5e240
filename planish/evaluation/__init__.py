"""Measure how good a model is at a task: questions, answers, and metrics with standard errors."""

from planish.evaluation.evaluate import Results, evaluate
from planish.evaluation.evaluator import TaskEvaluator
from planish.evaluation.models import OpenedModel, open_model
from planish.evaluation.tasks import TASKS, TaskKind, load_task
from planish.evaluation.types import ChoiceTask, Question, SampledTask, Sampling, Task, Verdict
from planish.runlog.statistics import Mean, pass_at_k

__all__ = [
    "TASKS",
    "ChoiceTask",
    "Mean",
    "OpenedModel",
    "Question",
    "Results",
    "SampledTask",
    "Sampling",
    "Task",
    "TaskEvaluator",
    "TaskKind",
    "Verdict",
    "evaluate",
    "load_task",
    "open_model",
    "pass_at_k",
]
