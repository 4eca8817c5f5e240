"""Start or resume an RL run. planish/training/rl_learner.py runs the training steps."""

# pyright: reportUnnecessaryIsInstance=false, reportUnknownMemberType=false

import asyncio
from collections.abc import Sequence
from pathlib import Path

import chz

from planish import ServiceClient
from planish.datasets.row_digests import recorded_rows
from planish.errors import UnsupportedError, UserError
from planish.reports.rollout_files import RolloutFiles, split_label
from planish.rl.environments.datasets import (
    ConcatenatedRLDataset,
    EpochCycledRLDataset,
    rebatch,
)
from planish.rl.environments.prompt_selection import require_prompt_fits
from planish.rl.kl import AdvantageShaping, KLPenalty
from planish.rl.rollout.evaluation import RLTestSetEvaluator
from planish.rl.types import RLDataset
from planish.runlog.evaluators import Evaluator
from planish.training.rl_config import Config, check
from planish.training.rl_learner import RLLearner
from planish.training.run_loop import RunLoop, open_client, run_training
from planish.training.run_options import resumable_options, run_in_place_of_training
from planish.training.scoring_models import pin_checkpoint, scoring_client, shared_context_window
from planish.training.script_errors import message_only


async def main(config: Config, service_client: ServiceClient | None = None) -> Path:
    """Train in this process, on a server (`base_url`), or with the given service client. Return the
    run directory.

    After Ctrl-C or SIGTERM the run is saved, so that it can be resumed. Then KeyboardInterrupt or
    planish.processes.interruption.Terminated (exit status 143) is raised.
    """
    with message_only():
        check(config)
        if (replacement := run_in_place_of_training.get()) is not None:
            return await asyncio.to_thread(replacement, config)
        with open_client(config, service_client) as client:
            return await train(config, client)


async def train(
    config: Config, service_client: ServiceClient, shaping: AdvantageShaping | None = None
) -> Path:
    """Train a run, and return its directory. `shaping` changes the advantages. If `shaping` is
    None, the KL penalty of `config` changes the advantages. Without a KL penalty, the advantages
    stay as they are. Raises UnsupportedError for `shaping` together with `stream_minibatch_config`.
    Raises UserError for options that cannot be used together, before anything is trained.
    """
    if shaping is not None and config.stream_minibatch_config is not None:
        raise UnsupportedError(
            "shaping and stream_minibatch_config exclude each other: shaping needs the advantages "
            "of the whole batch, but streaming trains before they are known; leave one of the two "
            "out"
        )
    if config.kl_reference_config is not None:
        reference = pin_checkpoint(config.kl_reference_config, "kl_reference_config")
        config = chz.replace(config, kl_reference_config=reference)
    with recorded_rows() as rows:
        train_set, test_set = checked_datasets(await config.dataset_builder())
    epoch = rebatch(train_set, config.groups_per_batch)
    dataset = with_epochs(epoch, config)
    dataset.require_full_batch()
    all_steps = len(epoch) * config.num_epochs
    num_steps = all_steps if config.max_steps is None else min(all_steps, config.max_steps)
    if num_steps == 0:
        raise UserError(
            "dataset_builder returned a dataset without batches; give a dataset with at least one"
        )
    evaluators = build_evaluators(config, test_set)
    for graded in (dataset, *(evaluator.dataset for evaluator in rl_test_sets(evaluators))):
        graded.require_answers_fit(config.max_tokens)

    async def make_learner(loop: RunLoop) -> RLLearner:
        files = RolloutFiles(
            loop.run_directory.path,
            config.rollout_layout,
            config.num_groups_to_log,
            config.rollout_json_export,
            await asyncio.to_thread(loop.training_client.get_tokenizer),
        )
        files.remove_from(loop.start.batch)
        context_window, smallest_model = await shared_context_window(
            service_client, config.model_name, config.scoring_models()
        )
        for prompts in (dataset, *(evaluator.dataset for evaluator in rl_test_sets(evaluators))):
            require_prompt_fits(prompts.longest_prompt, context_window, smallest_model)
        return RLLearner(
            loop,
            config,
            dataset,
            files,
            evaluators,
            shaping if shaping is not None else await kl_penalty(config, service_client),
            context_window,
        )

    ends_at_max_steps = config.max_steps is not None and config.max_steps < all_steps
    options_that_may_change = resumable_options(
        config, "num_groups_to_log", "rollout_error_tolerance", "eval_samples", "eval_temperature"
    )
    length_option = "max_steps" if ends_at_max_steps else "num_epochs"
    return await run_training(
        config,
        service_client,
        config=chz.asdict(config, shallow=True, include_type=True),
        may_change=options_that_may_change,
        num_steps=num_steps,
        rows=rows,
        data_size=train_set.data_size(),
        make_learner=make_learner,
        remedy=f"; give more {length_option} to continue"
        if length_option in options_that_may_change
        else "",
    )


def checked_datasets(
    result: tuple[RLDataset | None, ...],
) -> tuple[RLDataset, RLDataset | None]:
    """Return the result of a dataset builder: a training set, and a test set or None. Raises
    UserError if it is anything else.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise UserError(
            f"dataset_builder returned a {type(result).__name__}; return a tuple of two datasets, "
            "for training and for evaluation (or None)"
        )
    train_set, test_set = result
    if train_set is None:
        raise UserError(
            "dataset_builder returned None for training; return a dataset (only the second one, "
            "for evaluation, may be None)"
        )
    return train_set, test_set


def with_epochs(epoch: RLDataset, config: Config) -> RLDataset:
    """Return the batches of all epochs, with as many more as refills can use.

    The first epoch has the dataset's own order, and every later epoch is shuffled differently. The
    order of an epoch does not depend on `num_epochs`, so a run can be extended by further epochs.
    """
    num_epochs = config.num_epochs * (1 + config.max_refills)
    if num_epochs == 1:
        return epoch
    return ConcatenatedRLDataset([epoch, EpochCycledRLDataset(epoch, num_epochs - 1, config.seed)])


def build_evaluators(config: Config, test_set: RLDataset | None) -> list[Evaluator]:
    """Return the evaluators of a run: one for the test set, if there is a test set, and one for
    each of `config.evaluator_builders`. The list is empty if `eval_every` is 0. Raises UserError if
    two evaluators have the same name.
    """
    if config.eval_every == 0:
        return []
    evaluators: list[Evaluator] = [builder() for builder in config.evaluator_builders]
    if test_set is None and config.eval_samples > 1:
        raise UserError(
            f"eval_samples={config.eval_samples}: the dataset has no test problems; give it some, "
            "or leave eval_samples out"
        )
    if test_set is not None:
        evaluators = [test_evaluator(config, test_set), *evaluators]
    labels = [split_label(f"eval/{evaluator.name}") for evaluator in rl_test_sets(evaluators)]
    if len(set(labels)) < len(labels):
        raise UserError(
            "evaluator_builders: two or more evaluators have the same file name; the file names "
            f"are {labels}; give each evaluator another name"
        )
    return evaluators


def rl_test_sets(evaluators: Sequence[Evaluator]) -> list[RLTestSetEvaluator]:
    """Return the evaluators that roll out a test set."""
    return [evaluator for evaluator in evaluators if isinstance(evaluator, RLTestSetEvaluator)]


def test_evaluator(config: Config, test_set: RLDataset) -> RLTestSetEvaluator:
    """Return the evaluator that rolls out the test set, at `eval_temperature` if it is given."""
    temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
    return RLTestSetEvaluator(
        test_set,
        config.max_tokens,
        temperature=temperature,
        num_groups_to_log=config.num_groups_to_log,
        seed=config.seed,
        num_samples=config.eval_samples,
    )


async def kl_penalty(config: Config, service_client: ServiceClient) -> KLPenalty | None:
    """Return the KL penalty of the options; None without a reference policy."""
    if config.kl_reference_config is None:
        return None
    reference = await scoring_client(
        config.kl_reference_config,
        service_client,
        config.model_name,
        config.renderer_name,
        "kl_reference_config",
    )
    return KLPenalty(reference, config.kl_penalty_coef, config.kl_discount_factor)
