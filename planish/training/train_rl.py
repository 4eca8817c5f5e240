"""A training run: from its options to its directory. The loop itself is planish/training/rl_loop.py."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.errors import UserError
from planish.files import write_whole
from planish.reports.rollout_files import RolloutFiles, split_label
from planish.rl.environments.datasets import (
    ConcatenatedRLDataset,
    EpochCycledRLDataset,
    RebatchedRLDataset,
)
from planish.rl.kl import KLPenalty, Pull
from planish.rl.rollout.evaluation import RLTestSetEvaluator
from planish.rl.types import RLDataset
from planish.runlog.checkpoints import RunCheckpoints, Start, origin_metadata, start_training
from planish.runlog.evaluators import Evaluator
from planish.runlog.metrics_log import open_metric_logs
from planish.runlog.provenance import code_diff
from planish.runlog.run_directory import CODE_DIFF, RunDirectory, checkpoint_of
from planish.runlog.spans import TraceFile
from planish.training.rl_config import Config, KLReferenceConfig, check, may_change
from planish.training.rl_loop import Loop
from planish.training.rl_progress import TrainingProgress


async def main(config: Config, service_client: Any = None) -> Path:
    """Train, in this process, on a server (`base_url`) or with a given service client; returns the
    run directory.

    After Ctrl-C or SIGTERM the run is saved where it can be resumed, and KeyboardInterrupt or
    planish.processes.interruption.Terminated (exit status 143) is raised.
    """
    check(config)
    if service_client is not None:
        return await train(config, service_client)
    with ServiceClient(base_url=config.base_url, deterministic=config.deterministic) as own_client:
        return await train(config, own_client)


async def train(config: Config, service_client: Any, pull: Pull | None = None) -> Path:
    """A run whose advantages `pull` changes; the KL penalty of the options if there is none."""
    built: Any = await config.dataset_builder()
    if not isinstance(built, tuple) or len(built) != 2:
        raise UserError(
            f"dataset_builder gave a {type(built).__name__}; give two data sets, to train on and to test on (or None)"
        )
    train_set, test_set = built
    if train_set is None:
        raise UserError(
            "dataset_builder gave None to train on; give a data set (the second one, for tests, may be None)"
        )
    batches = planned(train_set, config)
    steps = len(batches) if config.max_steps is None else min(len(batches), config.max_steps)
    if steps == 0:
        raise UserError("dataset_builder gives no batches; give a data set with at least one")
    evaluators = built_evaluators(config, test_set)
    options = chz.asdict(config, shallow=True, include_type=True)
    with RunDirectory(config.log_path, options, may_change=may_change(config)) as run:
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
            more = (
                "max_steps"
                if config.max_steps is not None and config.max_steps < len(batches)
                else "num_epochs"
            )
            remedy = f"; give more {more} to go on" if more in may_change(config) else ""
            print(f"{run.path}: all {start.batch} steps are done{remedy}")
            return run.path
        await _train(config, service_client, batches, steps, evaluators, run, start, pull)
    return run.path


async def _train(
    config: Config,
    service_client: Any,
    batches: RLDataset,
    steps: int,
    evaluators: list[Evaluator],
    run: RunDirectory,
    start: Start,
    pull: Pull | None,
) -> None:
    """Do the steps that are left."""
    files = RolloutFiles(
        run.path,
        config.rollout_layout,
        config.num_groups_to_log,
        config.rollout_json_export,
        await asyncio.to_thread(start.training_client.get_tokenizer),
    )
    run.resume_at(start.batch)
    files.remove_from(start.batch)
    write_whole(
        run.path / CODE_DIFF, await asyncio.to_thread(code_diff, [Path(__file__), Path.cwd()])
    )
    checkpoints = RunCheckpoints.after(
        start, run, config.ttl_seconds, config.rolling_ttl_seconds, service_client
    )
    with (
        TrainingProgress(steps, start.batch) as progress,
        open_metric_logs(
            config.loggers,
            run,
            steps=steps,
            console=progress.console,
            project=config.wandb_project,
            name=config.wandb_name,
        ) as log,
        TraceFile(run.path, start.batch) if config.enable_trace else nullcontext() as trace,
    ):
        loop = Loop(
            config,
            batches,
            steps,
            start,
            run,
            files,
            checkpoints,
            evaluators,
            pull=pull if pull is not None else await kl_penalty(config, service_client),
            context_window=(await service_client.get_server_capabilities_async()).context_of(
                config.model_name
            ),
            progress=progress,
            log=log,
            trace=trace,
        )
        with loop.interruption.heed_signals(progress.say):
            is_finished = await loop.run_to_end()
    if not is_finished:
        raise loop.interruption.ending


def planned(train_set: RLDataset, config: Config) -> RLDataset:
    """The batches of all epochs, with as many groups as the options ask for.

    The first epoch has the data set's own order and each further one an order of its own, however
    many there are, so that a run can go on with more.
    """
    dataset = (
        train_set
        if config.groups_per_batch is None
        else RebatchedRLDataset(train_set, config.groups_per_batch)
    )
    if config.num_epochs == 1:
        return dataset
    return ConcatenatedRLDataset(
        [dataset, EpochCycledRLDataset(dataset, config.num_epochs - 1, config.seed)]
    )


def built_evaluators(config: Config, test_set: RLDataset | None) -> list[Evaluator]:
    """The test of the data set, if it has one, and those of the options; none if they are never
    due.
    """
    if config.eval_every == 0:
        return []
    evaluators = [builder() for builder in config.evaluator_builders]
    if test_set is not None:
        evaluators = [test_evaluator(config, test_set), *evaluators]
    labels = [
        split_label(f"eval/{e.name}") for e in evaluators if isinstance(e, RLTestSetEvaluator)
    ]
    if len(set(labels)) < len(labels):
        raise UserError(
            f"evaluator_builders: several tests write files as {labels}; give each a name of its own"
        )
    return evaluators


def test_evaluator(config: Config, test_set: RLDataset) -> RLTestSetEvaluator:
    temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
    return RLTestSetEvaluator(
        test_set,
        config.max_tokens,
        temperature=temperature,
        num_groups_to_log=config.num_groups_to_log,
        seed=config.seed,
    )


async def kl_penalty(config: Config, service_client: Any) -> KLPenalty | None:
    """The pull that the options ask for."""
    if config.kl_reference_config is None:
        return None
    reference = await policy_client(config.kl_reference_config, service_client, "kl_reference")
    return KLPenalty(reference, config.kl_penalty_coef, config.kl_discount_factor)


async def policy_client(policy: KLReferenceConfig, service_client: Any, option: str) -> Any:
    """A sampling client of the policy that `option` names."""
    if policy.load_checkpoint_path is None:
        return await service_client.create_sampling_client_async(base_model=policy.base_model)
    try:
        path = checkpoint_of(policy.load_checkpoint_path)
    except UserError as error:
        raise UserError(f"{option}: {error}") from error
    client = await service_client.create_sampling_client_async(model_path=path)
    if client.get_base_model() != policy.base_model:
        raise UserError(
            f"{option}: {policy.load_checkpoint_path} is of the base model {client.get_base_model()}, and {policy.base_model} "
            "was asked for; give the checkpoint's own"
        )
    return client
