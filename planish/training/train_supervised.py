"""Start or resume a supervised run. planish/training/supervised_learner.py runs its steps."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import chz

from planish import ServiceClient
from planish.datasets.row_digests import recorded_rows
from planish.errors import UserError
from planish.runlog.checkpoints import RunStart
from planish.supervised.objective import CrossEntropy, Objective
from planish.supervised.types import SupervisedDataset
from planish.training.run_loop import RunLoop, open_client, run_training
from planish.training.run_options import resumable_options
from planish.training.script_errors import message_only
from planish.training.supervised_config import Config, check
from planish.training.supervised_context import limit_to_context
from planish.training.supervised_learner import EvalSchedule, SupervisedLearner

CONSOLE_METRICS = {
    "train_mean_nll": "nll {:.4f}",
    "train_mean_bpb": "bpb {:.4f}",
    "test/nll": "test nll {:.4f}",
    "test/bpb": "test bpb {:.4f}",
    "learning_rate": "lr {:.1e}",
    "time/total": "{:.1f} s",
}


async def main(config: Config, service_client: ServiceClient | None = None) -> Path:
    """Train in this process, on a server (`base_url`), or with the given service client. Return the
    run directory.

    After Ctrl-C or SIGTERM the run is saved, so that it can be resumed. Then KeyboardInterrupt or
    planish.processes.interruption.Terminated (exit status 143) is raised.
    """
    with message_only():
        check(config)
        with open_client(config, service_client) as client:
            return await train(
                await limit_to_context(config, client), client, cross_entropy, CONSOLE_METRICS
            )


def cross_entropy(start: RunStart) -> Objective:
    """Return the objective of plain supervised training."""
    return CrossEntropy(start.training_client.get_tokenizer())


async def train(
    config: Config,
    service_client: ServiceClient,
    make_objective: Callable[[RunStart], Objective],
    console_metrics: dict[str, str],
) -> Path:
    """Train a run with the objective that `make_objective` returns. Return the run directory.

    `console_metrics` maps the metrics on a step's console line to their format.
    """
    with recorded_rows() as rows:
        train_set, test_set = await asyncio.to_thread(config.dataset_builder)

    async def make_learner(loop: RunLoop) -> SupervisedLearner:
        objective = await asyncio.to_thread(make_objective, loop.start)
        schedules = await asyncio.to_thread(eval_schedules, config, objective, test_set)
        return SupervisedLearner(loop, config, train_set, objective, schedules)

    return await run_training(
        config,
        service_client,
        config=chz.asdict(config),
        may_change=resumable_options(
            config, "submit_ahead", "infrequent_eval_every", "infrequent_evaluator_builders"
        ),
        num_steps=num_planned_steps(train_set, config),
        rows=rows,
        data_size=train_set.data_size(),
        make_learner=make_learner,
        console_metrics=console_metrics,
    )


def num_planned_steps(train_set: SupervisedDataset, config: Config) -> int:
    """Return the number of steps of the run. Raises UserError if the dataset has no batches."""
    if len(train_set) == 0:
        raise UserError(
            "dataset_builder returned a dataset without batches; give a dataset with at least "
            "one, or a smaller batch_size"
        )
    num_steps = config.num_epochs * len(train_set)
    return num_steps if config.max_steps is None else min(num_steps, config.max_steps)


def eval_schedules(
    config: Config, objective: Objective, test_set: SupervisedDataset | None
) -> list[EvalSchedule]:
    """Return the evaluators of the test set and of the options, with how often they run."""
    test_evaluators = (
        [objective.evaluator(test_set)] if test_set is not None and config.eval_every else []
    )
    return [
        EvalSchedule(
            config.eval_every, [*test_evaluators, *(build() for build in config.evaluator_builders)]
        ),
        EvalSchedule(
            config.infrequent_eval_every,
            [build() for build in config.infrequent_evaluator_builders],
        ),
    ]
