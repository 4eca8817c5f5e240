"""A supervised run: from its options to its directory. The loop itself is
planish/training/supervised_loop.py.
"""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.errors import UserError
from planish.files import write_whole
from planish.runlog.checkpoints import RunCheckpoints, Start, origin_metadata, start_training
from planish.runlog.console import StepDisplay
from planish.runlog.metrics_log import open_metric_logs
from planish.runlog.provenance import code_diff
from planish.runlog.run_directory import CODE_DIFF, RunDirectory
from planish.runlog.spans import TraceFile
from planish.supervised.objective import CrossEntropy, Objective
from planish.supervised.types import SupervisedDataset
from planish.training.supervised_config import Config, check, may_change
from planish.training.supervised_context import within_context
from planish.training.supervised_loop import Loop, Measured

SHOWN = {
    "train_mean_nll": "nll {:.4f}",
    "train_mean_bpb": "bpb {:.4f}",
    "test/nll": "test nll {:.4f}",
    "test/bpb": "test bpb {:.4f}",
    "learning_rate": "lr {:.1e}",
    "time/total": "{:.1f} s",
}


async def main(config: Config, service_client: Any = None) -> Path:
    """Train, in this process, on a server (`base_url`) or with a given service client; returns the
    run directory.

    After Ctrl-C or SIGTERM the run is saved where it can be resumed, and KeyboardInterrupt or
    planish.processes.interruption.Terminated (exit status 143) is raised.
    """
    check(config)
    if service_client is not None:
        return await _run(config, service_client)
    with ServiceClient(base_url=config.base_url) as own_client:
        return await _run(config, own_client)


async def _run(config: Config, service_client: Any) -> Path:
    return await train(
        await within_context(config, service_client), service_client, cross_entropy, SHOWN
    )


def cross_entropy(start: Start) -> Objective:
    return CrossEntropy(start.training_client.get_tokenizer())


async def train(
    config: Config,
    service_client: Any,
    objective_of: Callable[[Start], Objective],
    shown: dict[str, str],
) -> Path:
    """A run with the objective that `objective_of` makes at its start; `shown` is a step's line on
    the console.
    """
    train_set, test_set = await asyncio.to_thread(config.dataset_builder)
    steps = planned_steps(train_set, config)
    with RunDirectory(config.log_path, chz.asdict(config), may_change=may_change(config)) as run:
        start = await asyncio.to_thread(
            start_training,
            service_client,
            run,
            model_name=config.model_name,
            lora_rank=config.lora_rank,
            seed=config.seed,
            load_checkpoint_path=config.load_checkpoint_path,
            data_size=train_set.data_size(),
            user_metadata=origin_metadata(config.recipe_name, config.renderer_name),
        )
        if start.batch > steps or (start.batch == steps and start.was_finished):
            print(f"{run.path}: all {start.batch} steps are done")
            return run.path
        run.resume_at(start.batch)
        write_whole(
            run.path / CODE_DIFF, await asyncio.to_thread(code_diff, [Path(__file__), Path.cwd()])
        )
        objective = await asyncio.to_thread(objective_of, start)
        with (
            StepDisplay(steps, start.batch) as display,
            open_metric_logs(
                config.loggers,
                run,
                steps=steps,
                console=display.console,
                shown=shown,
                project=config.wandb_project,
                name=config.wandb_name,
            ) as log,
            TraceFile(run.path, start.batch) if config.enable_trace else nullcontext() as trace,
        ):
            display.say(
                f"{config.model_name}: steps {start.batch} to {steps}, written to {run.path}"
            )
            loop = Loop(
                config,
                train_set,
                objective,
                steps,
                start,
                run,
                RunCheckpoints.after(
                    start, run, config.ttl_seconds, config.rolling_ttl_seconds, service_client
                ),
                await asyncio.to_thread(measured_in, config, objective, test_set),
                display,
                log,
                trace,
            )
            with loop.interruption.heed_signals(display.say):
                is_finished = await loop.run_to_end()
        if not is_finished:
            raise loop.interruption.ending
        return run.path


def planned_steps(train_set: SupervisedDataset, config: Config) -> int:
    if len(train_set) == 0:
        raise UserError(
            "dataset_builder gives no batches; give a data set with at least one, or a smaller batch_size"
        )
    steps = config.num_epochs * len(train_set)
    return steps if config.max_steps is None else min(steps, config.max_steps)


def measured_in(
    config: Config, objective: Objective, test_set: SupervisedDataset | None
) -> list[Measured]:
    """The test of the data set, if it has one, and those of the options."""
    own = [objective.test(test_set)] if test_set is not None and config.eval_every else []
    return [
        Measured(config.eval_every, [*own, *(build() for build in config.evaluator_builders)]),
        Measured(
            config.infrequent_eval_every,
            [build() for build in config.infrequent_evaluator_builders],
        ),
    ]
