"""The options of supervised training. Names and defaults are those of the public cookbooks; what is
added is marked by its doc.
"""

import math
from collections.abc import Callable, Sequence

import chz

from planish.errors import UserError
from planish.runlog.evaluators import Evaluator
from planish.runlog.metrics_log import require_loggers
from planish.supervised.types import SupervisedDatasetBuilder
from planish.training.schedules import SCHEDULES
from planish.types import TTL_REMEDY, is_ttl


@chz.chz
class Config:
    log_path: str
    model_name: str
    dataset_builder: SupervisedDatasetBuilder
    recipe_name: str | None = None

    # where it begins
    base_url: str | None = chz.field(default=None, doc="a server; none = train in this process")
    load_checkpoint_path: str | None = chz.field(
        default=None, doc="weights to begin with: a checkpoint or a run directory"
    )
    renderer_name: str | None = chz.field(default=None, doc="recorded with the checkpoints")
    lora_rank: int = 32
    seed: int = chz.field(default=0, doc="of initial weights; the data's order is the builder's")

    # one step
    learning_rate: float = 1e-4
    lr_schedule: str = chz.field(default="linear", doc=f"one of {', '.join(SCHEDULES)}")
    warmup_steps: int = chz.field(
        default=0, doc="steps in which the learning rate rises to its value"
    )
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = chz.field(default=0.0, doc="0 = off")

    # the whole run
    num_epochs: int = 1
    max_steps: int | None = chz.field(default=None, doc="none = num_epochs times through the data")
    submit_ahead: int = chz.field(
        default=1, doc="steps submitted before the results of one are waited for"
    )

    # tests
    eval_every: int = chz.field(default=10, doc="steps between tests; 0 = never")
    evaluator_builders: Sequence[Callable[[], Evaluator]] = chz.field(
        default=(), doc="besides the test set's"
    )
    infrequent_eval_every: int = chz.field(
        default=100, doc="the same for infrequent_evaluator_builders"
    )
    infrequent_evaluator_builders: Sequence[Callable[[], Evaluator]] = ()

    # files
    save_every: int = chz.field(default=20, doc="steps between checkpoints; 0 = only the last")
    ttl_seconds: int | None = chz.field(
        default=604800, doc="life of the checkpoints before the last"
    )
    rolling_save_every: int = chz.field(
        default=0, doc="steps between short-lived checkpoints; 0 = none"
    )
    rolling_ttl_seconds: int = 7200
    enable_trace: bool = chz.field(default=False, doc="write trace_events.jsonl")
    loggers: Sequence[str] = chz.field(
        default=(), doc="besides files and console: wandb, trackio, tensorboard"
    )
    wandb_project: str | None = None
    wandb_name: str | None = None


MAY_CHANGE = (
    "base_url",
    "submit_ahead",
    "save_every",
    "ttl_seconds",
    "rolling_save_every",
    "rolling_ttl_seconds",
    "loggers",
    "wandb_project",
    "wandb_name",
    "enable_trace",
)


def may_change(config: Config) -> tuple[str, ...]:
    """Options that may differ when a run is resumed. A rate that falls until the last step fixes
    that step.
    """
    return (
        (*MAY_CHANGE, "max_steps", "num_epochs") if config.lr_schedule == "constant" else MAY_CHANGE
    )


def check(config: Config) -> None:
    """UserError for an option that cannot be right, before anything is loaded."""
    rules: dict[str, tuple[bool, str]] = {
        "learning_rate": (0 < config.learning_rate < math.inf, "a number above 0"),
        "lr_schedule": (config.lr_schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
        "warmup_steps": (config.warmup_steps >= 0, "0 or more"),
        "adam_beta1": (0 <= config.adam_beta1 < 1, "a number from 0 to below 1"),
        "adam_beta2": (0 <= config.adam_beta2 < 1, "a number from 0 to below 1"),
        "adam_eps": (0 <= config.adam_eps < math.inf, "0 or more"),
        "weight_decay": (0 <= config.weight_decay < math.inf, "0 or more"),
        "grad_clip_norm": (0 <= config.grad_clip_norm < math.inf, "0 or more"),
        "lora_rank": (config.lora_rank >= 1, "a whole number of at least 1"),
        "num_epochs": (config.num_epochs >= 1, "a whole number of at least 1"),
        "max_steps": (
            config.max_steps is None or config.max_steps >= 1,
            "a whole number of at least 1",
        ),
        "submit_ahead": (config.submit_ahead >= 0, "a whole number, 0 to wait for each step"),
        "eval_every": (config.eval_every >= 0, "a whole number, 0 for never"),
        "infrequent_eval_every": (config.infrequent_eval_every >= 0, "a whole number, 0 for never"),
        "save_every": (config.save_every >= 0, "a whole number, 0 for only the last"),
        "rolling_save_every": (config.rolling_save_every >= 0, "a whole number, 0 for none"),
        "ttl_seconds": (is_ttl(config.ttl_seconds), TTL_REMEDY),
        "rolling_ttl_seconds": (is_ttl(config.rolling_ttl_seconds), TTL_REMEDY),
    }
    for name, (holds, remedy) in rules.items():
        if not holds:
            raise UserError(f"{name}={getattr(config, name)}: give {remedy}")
    require_loggers(config.loggers)
