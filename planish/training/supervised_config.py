"""The options of supervised training, and the checks that reject wrong ones.

Options that the public cookbooks have too keep the cookbooks' names and defaults.
"""

import math
from collections.abc import Callable, Sequence

import chz

from planish.runlog.evaluators import Evaluator
from planish.supervised.types import SupervisedDatasetBuilder
from planish.training.run_options import RunOptions, check_run, require


@chz.chz
class Config(RunOptions):
    """The options of a supervised run."""

    dataset_builder: SupervisedDatasetBuilder
    learning_rate: float = chz.field(default=1e-4, doc="learning rate before the schedule")
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    submit_ahead: int = chz.field(
        default=1, doc="maximum number of unfinished steps while the next step is prepared"
    )
    eval_every: int = 10
    evaluator_builders: Sequence[Callable[[], Evaluator]] = chz.field(
        default=(), doc="evaluators in addition to that of the test set"
    )
    infrequent_eval_every: int = chz.field(
        default=100, doc="steps between runs of infrequent_evaluator_builders; 0 = never"
    )
    infrequent_evaluator_builders: Sequence[Callable[[], Evaluator]] = ()

    @property
    def eval_intervals(self) -> tuple[int, ...]:
        """The numbers of steps between evaluations, 0 for never."""
        return (self.eval_every, self.infrequent_eval_every)


def check(config: Config) -> None:
    """Raise UserError for an invalid option. It runs before anything is loaded."""
    check_run(config)
    require(
        config,
        adam_beta1=(0 <= config.adam_beta1 < 1, "a number from 0 to below 1"),
        adam_beta2=(0 <= config.adam_beta2 < 1, "a number from 0 to below 1"),
        adam_eps=(0 <= config.adam_eps < math.inf, "0 or more"),
        weight_decay=(0 <= config.weight_decay < math.inf, "0 or more"),
        submit_ahead=(config.submit_ahead >= 0, "a whole number, 0 to wait for each step"),
        infrequent_eval_every=(
            config.infrequent_eval_every >= 0,
            "a whole number, 0 for never",
        ),
    )
