"""The options that training runs share, in groups. Names and defaults are those of the public
cookbooks.

The Config classes of RL and supervised runs inherit these groups. So option names stay flat in
programs (`Config(save_every=10)`) and on the command line (`save_every=10`). Help texts list the
last base class first.
"""

from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import chz

from planish.errors import UserError
from planish.model.sources.resolve import DEFAULT_MODEL
from planish.runlog.metrics_log import require_loggers
from planish.runlog.retention import Retention
from planish.training.option_rules import (
    NOT_NEGATIVE,
    POSITIVE,
    at_least,
    check_fields,
    one_of,
    require,
    rule,
    zero_for,
)
from planish.training.schedules import SCHEDULES
from planish.types import TTL_REMEDY, is_ttl

run_in_place_of_training: ContextVar[Callable[[Any], Path] | None] = ContextVar(
    "run_in_place_of_training", default=None
)
"""A function that is called with the config of a run in place of training, as `planish play` does.
None: the run is trained.
"""


@chz.chz
class EngineOptions:
    """Where the engine of a run is: in this process, in several processes, or on a server."""

    base_url: str | None = chz.field(
        default=None, doc="URL of a server; none = train in this process"
    )
    replicas: int | None = chz.field(
        default=None,
        doc="number of engines, each on a device of its own; none = one",
        metadata=at_least(1),
    )
    ray: str | None = chz.field(
        default=None, doc="address of a Ray cluster: auto or HOST:PORT; none = this machine"
    )
    tensor_parallel: int | None = chz.field(
        default=None,
        doc="number of devices of this machine that share each base model; none = one",
        metadata=at_least(1),
    )
    sampler: str = chz.field(
        default="engine", doc="what samples: engine, vllm, or the URLs of vLLM servers"
    )

    @property
    def client_options(self) -> dict[str, Any]:
        """The arguments of ServiceClient for these options, without those at their default."""
        defaults = {"sampler": "engine"}
        values = {name: getattr(self, name) for name in ENGINE_OPTIONS}
        return {k: v for k, v in values.items() if v is not None and v != defaults.get(k)}


@chz.chz
class ModelOptions(EngineOptions):
    """The model that a run starts from."""

    model_name: str = chz.field(doc="base model: a name or a local directory")
    load_checkpoint_path: str | None = chz.field(
        default=None,
        doc="weights to start from: a checkpoint or a run directory; none = a new adapter",
    )
    renderer_name: str | None = chz.field(default=None, doc="chat format; none = the model's own")
    seed: int = chz.field(default=0, doc="seed of the initial weights and of the order of the data")


@chz.chz
class LoraOptions:
    """The adapter that a run trains: its rank, and the parts of the model that it changes.

    None means the default in a new adapter: a switch is True, and the rank is 32. In a run that
    starts from a checkpoint it means whatever the checkpoint has.
    """

    lora_rank: int | None = chz.field(
        default=None,
        doc="rank of the LoRA matrices; none = as in the loaded checkpoint, else 32",
        metadata=at_least(1),
    )
    train_mlp: bool | None = chz.field(
        default=None, doc="adapt the MLPs; none = as in the loaded checkpoint, else yes"
    )
    train_attn: bool | None = chz.field(
        default=None, doc="adapt the attention; none = as in the loaded checkpoint, else yes"
    )
    train_unembed: bool | None = chz.field(
        default=None, doc="adapt the output head; none = as in the loaded checkpoint, else yes"
    )

    @chz.validate
    def _trains_something(self) -> None:
        if self.train_mlp is self.train_attn is self.train_unembed is False:
            raise UserError(
                "train_mlp, train_attn and train_unembed are all False: nothing would be trained; "
                "leave one of them out"
            )

    @property
    def lora_switches(self) -> dict[str, bool]:
        """The switches that are not None, by name."""
        values = {
            name: getattr(self, name) for name in ("train_mlp", "train_attn", "train_unembed")
        }
        return {name: value for name, value in values.items() if value is not None}


@chz.chz
class StartOptions(LoraOptions, ModelOptions):
    """Where a run begins."""


@chz.chz
class ScheduleOptions:
    """How long a run is, and how large its updates are."""

    learning_rate: float = chz.field(doc="learning rate before the schedule", metadata=POSITIVE)
    lr_schedule: str = chz.field(
        default="linear",
        doc=f"learning rate schedule: one of {', '.join(SCHEDULES)}",
        metadata=one_of(SCHEDULES),
    )
    warmup_steps: int = chz.field(
        default=0,
        doc="number of steps in which the learning rate rises to learning_rate",
        metadata=NOT_NEGATIVE,
    )
    grad_clip_norm: float = chz.field(
        default=0.0, doc="maximum norm of the gradient; 0 = no clipping", metadata=NOT_NEGATIVE
    )
    num_epochs: int = chz.field(
        default=1, doc="number of passes through the data", metadata=at_least(1)
    )
    max_steps: int | None = chz.field(
        default=None,
        doc="maximum number of steps; none = num_epochs passes",
        metadata=at_least(1),
    )


@chz.chz
class CheckpointOptions:
    """What a run saves."""

    save_every: int = chz.field(
        default=20,
        doc="steps between checkpoints; 0 = only a last one",
        metadata=zero_for("only the last"),
    )
    ttl_seconds: int | None = chz.field(
        default=604800,
        doc="seconds until a checkpoint expires, except the last; none = never",
        metadata=rule(is_ttl, TTL_REMEDY),
    )


@chz.chz
class RetainedCheckpointOptions(CheckpointOptions):
    """What a run saves and keeps."""

    keep_last: int | None = chz.field(
        default=None,
        doc="number of most recent checkpoints that are kept; none = all",
        metadata=at_least(1),
    )
    keep_best: int = chz.field(
        default=0,
        doc="number of checkpoints with the best best_metric that are kept besides keep_last",
        metadata=zero_for("none"),
    )
    best_metric: str | None = chz.field(
        default=None, doc="metric of evaluations for keep_best, such as test/env/all/correct"
    )
    best_metric_mode: Literal["max", "min"] = chz.field(
        default="max", doc="max = higher values are better, min = lower values are better"
    )

    @property
    def retention(self) -> Retention | None:
        """Which checkpoints are kept; None = all."""
        if self.keep_last is None:
            return None
        is_highest_best = self.best_metric_mode == "max"
        return Retention(self.keep_last, self.keep_best, self.best_metric, is_highest_best)


@chz.chz
class RollingCheckpointOptions(RetainedCheckpointOptions):
    """What a run saves and keeps, short-lived checkpoints included."""

    rolling_save_every: int = chz.field(
        default=0,
        doc="steps between rolling checkpoints, each of which replaces the one before; 0 = none",
        metadata=zero_for("none"),
    )


@chz.chz
class EvaluationOptions:
    """When a run is evaluated. The final weights are always evaluated, unless eval_every is 0."""

    eval_every: int = chz.field(
        default=20, doc="steps between evaluations; 0 = never", metadata=zero_for("never")
    )
    eval_on_start: bool = chz.field(
        default=True, doc="evaluate the initial weights too, before the first step"
    )

    @property
    def eval_intervals(self) -> tuple[int, ...]:
        """The numbers of steps between evaluations, 0 for never."""
        return (self.eval_every,)


@chz.chz
class LogOptions:
    """Where a run writes."""

    log_path: str = chz.field(doc="directory of the run's files")
    enable_trace: bool = chz.field(default=False, doc="write trace_events.jsonl, for planish trace")
    loggers: tuple[str, ...] = chz.field(
        default=(), doc="loggers in addition to files and console: wandb, trackio, tensorboard"
    )
    wandb_project: str | None = chz.field(default=None, doc="project in W&B or Trackio")
    wandb_name: str | None = chz.field(default=None, doc="name of the run in W&B or Trackio")


@chz.chz
class RecipeOptions(
    LogOptions, EvaluationOptions, RollingCheckpointOptions, ScheduleOptions, StartOptions
):
    """The options of all recipes with checkpoints, evaluations, a schedule and logs."""

    model_name: str = DEFAULT_MODEL


@chz.chz
class RunOptions(RecipeOptions):
    """The options that every training run has: those of recipes, and those that a recipe sets."""

    model_name: str = chz.field(doc="base model: a name or a local directory")
    recipe_name: str | None = chz.field(default=None, doc="name that the checkpoints record")
    rolling_ttl_seconds: int = chz.field(
        default=7200,
        doc="seconds until a rolling checkpoint expires",
        metadata=rule(is_ttl, TTL_REMEDY),
    )


RESUMABLE_CHECKPOINT_OPTIONS = (
    "save_every",
    "ttl_seconds",
    "keep_last",
    "keep_best",
    "best_metric",
    "best_metric_mode",
    "eval_every",
    "eval_on_start",
)
ENGINE_OPTIONS = ("base_url", "replicas", "ray", "tensor_parallel", "sampler")
"""The fields of `EngineOptions`."""
RESUMABLE_OPTIONS = (
    *RESUMABLE_CHECKPOINT_OPTIONS,
    *ENGINE_OPTIONS,
    "rolling_save_every",
    "rolling_ttl_seconds",
    "loggers",
    "wandb_project",
    "wandb_name",
    "enable_trace",
    "evaluator_builders",
)
"""Options that may differ when a run is resumed."""


def resumable_options(options: RunOptions, *other_options: str) -> tuple[str, ...]:
    """Return the options that may differ when a run is resumed; `other_options` are added.

    The number of steps may change only with a constant learning rate. Other schedules depend on it,
    so a change would alter the rates of steps already taken.
    """
    length_options = ("max_steps", "num_epochs") if options.lr_schedule == "constant" else ()
    return (*RESUMABLE_OPTIONS, *other_options, *length_options)


def check_run(options: RunOptions) -> None:
    """Raise UserError for an invalid value of an option that all runs have."""
    check_fields(options)
    check_kept_checkpoints(options)
    require_loggers(options.loggers)


def check_kept_checkpoints(options: Any) -> None:
    """Raise UserError unless the options of `RetainedCheckpointOptions` and `EvaluationOptions` fit
    together.
    """
    if options.keep_best == 0:
        require(
            options, best_metric=(options.best_metric is None, "keep_best too, or leave it out")
        )
        return
    require(
        options,
        keep_last=(options.keep_last is not None, "a number; with None, every checkpoint is kept"),
        best_metric=(
            options.best_metric is not None,
            "the metric of evaluations that keep_best uses",
        ),
        save_every=(
            options.save_every > 0
            and any(every and options.save_every % every == 0 for every in options.eval_intervals),
            "a multiple of eval_every: keep_best compares checkpoints by their evaluations",
        ),
    )
