"""Options of the recipes of `planish.supervised`, and how a run is started from them.

The options of a recipe are a subclass of `SLOptions` with further options and other defaults; `run`
does the rest.
"""

from pathlib import Path
from typing import Literal

import chz

from planish import ServiceClient
from planish.datasets.split_names import SplitNames
from planish.recipes.training_run import build, chat_config, run_main
from planish.renderers import TrainOnWhat
from planish.supervised.datasets import FromRowsBuilder
from planish.supervised.types import SupervisedDatasetBuilder
from planish.training import train_supervised
from planish.training.learning_rates import get_lr
from planish.training.option_rules import NOT_NEGATIVE, at_least, check_fields, zero_for
from planish.training.run_options import RecipeOptions
from planish.training.supervised_config import Config, check


@chz.chz
class SLOptions(SplitNames, RecipeOptions):
    """Options of every supervised recipe. An option with the name of a field of
    `planish.training.supervised_config.Config` sets that field.
    """

    dataset: str = chz.field(
        default="HuggingFaceH4/no_robots",
        doc="conversations: hub name, local directory or file",
    )
    test_size: int | None = chz.field(
        default=None,
        doc="number of test conversations; none = the whole test split, if any; 0 = no evaluation",
        metadata=zero_for("no evaluation"),
    )
    log_path: str = "/tmp/planish-examples/sl"
    batch_size: int = chz.field(default=128, doc="conversations per step", metadata=at_least(1))
    max_length: int = chz.field(
        default=16384,
        doc="maximum tokens in a conversation; longer ones are truncated and counted",
        metadata=at_least(2),
    )
    train_on_what: TrainOnWhat = chz.field(
        default=TrainOnWhat.ALL_ASSISTANT_MESSAGES,
        doc=f"messages to train on: one of {', '.join(TrainOnWhat)}",
    )
    reduction: Literal["mean", "none"] = chz.field(
        default="mean", doc="weights in the loss: mean = 1 per example, none = 1 per token"
    )
    learning_rate: float | None = chz.field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=None, doc="learning rate before the schedule; none = get_lr(model_name)"
    )
    weight_decay: float = chz.field(default=0.0, doc="weight decay of AdamW", metadata=NOT_NEGATIVE)
    submit_ahead: int = chz.field(
        default=1,
        doc="maximum number of unfinished steps while the next step is prepared",
        metadata=zero_for("waiting for each step"),
    )


def run(
    options: SLOptions,
    *,
    recipe_name: str,
    dataset: str | None = None,
    service_client: ServiceClient | None = None,
) -> Path:
    """Train on `dataset` (None = options.dataset), with the given service client or a new one, and
    return the run directory. Options are checked before anything is loaded.
    """
    config = sl_config(
        options, chat_builder(options, dataset or options.dataset), recipe_name=recipe_name
    )
    check(config)
    return run_main(train_supervised.main, config, service_client)


def sl_config(
    options: SLOptions, dataset_builder: SupervisedDatasetBuilder, *, recipe_name: str
) -> Config:
    """Return the config of `planish.training.train_supervised`."""
    return build(
        Config,
        options,
        learning_rate=learning_rate(options),
        dataset_builder=dataset_builder,
        recipe_name=recipe_name,
    )


def learning_rate(options: SLOptions) -> float:
    """Return the learning rate of the options, or the default rate of the model."""
    return get_lr(options.model_name) if options.learning_rate is None else options.learning_rate


def chat_builder(options: SLOptions, dataset: str) -> FromRowsBuilder:
    """Return the builder of the conversations in `dataset`."""
    check_fields(options)
    return build(
        FromRowsBuilder,
        options,
        common_config=chat_config(options),
        dataset=dataset,
        shuffle_seed=options.seed,
    )
