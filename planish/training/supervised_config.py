"""The options of supervised training, and the checks that reject wrong ones.

Options that the public cookbooks have too keep the cookbooks' names and defaults.
"""

from collections.abc import Callable, Sequence

import chz

from planish.errors import suggest_arguments
from planish.runlog.evaluators import Evaluator
from planish.supervised.types import SupervisedDatasetBuilder
from planish.training.option_rules import NOT_NEGATIVE, USUAL_NAMES, rule, zero_for
from planish.training.run_options import RunOptions, check_run

ADAM_BETA = rule(lambda value: 0 <= value < 1, "a number from 0 to below 1")


@suggest_arguments(**USUAL_NAMES)
@chz.chz
class Config(RunOptions):
    """The options of a supervised run."""

    dataset_builder: SupervisedDatasetBuilder
    learning_rate: float = 1e-4
    adam_beta1: float = chz.field(default=0.9, metadata=ADAM_BETA)
    adam_beta2: float = chz.field(default=0.95, metadata=ADAM_BETA)
    adam_eps: float = chz.field(default=1e-8, metadata=NOT_NEGATIVE)
    weight_decay: float = chz.field(default=0.0, metadata=NOT_NEGATIVE)
    submit_ahead: int = chz.field(
        default=1,
        doc="maximum number of unfinished steps while the next step is prepared",
        metadata=zero_for("waiting for each step"),
    )
    eval_every: int = 10
    evaluator_builders: Sequence[Callable[[], Evaluator]] = chz.field(
        default=(), doc="evaluators in addition to that of the test set"
    )
    infrequent_eval_every: int = chz.field(
        default=100,
        doc="steps between runs of infrequent_evaluator_builders; 0 = never",
        metadata=zero_for("never"),
    )
    infrequent_evaluator_builders: Sequence[Callable[[], Evaluator]] = ()

    @property
    def eval_intervals(self) -> tuple[int, ...]:
        """The numbers of steps between evaluations, 0 for never."""
        return (self.eval_every, self.infrequent_eval_every)


def check(config: Config) -> None:
    """Raise UserError for an invalid option. It runs before anything is loaded."""
    check_run(config)
