"""Options of the recipes of `planish.training.train_rl`, and how a run is started from them.

The options of a recipe are a subclass of `RLOptions` with further options and other defaults. The
recipe makes a dataset builder, and `run` does the rest:

    @chz.chz
    class Options(RLOptions):
        log_path: str = "/tmp/planish-examples/mine"

    def main(options: Options) -> Path:
        return run(options, MyDatasetBuilder(...), recipe_name="mine")

    if __name__ == "__main__":
        training_run.run_command(main, Options, {}, sys.argv[1:])
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.recipes.training_run import build, reject_unused, run_main
from planish.rl.types import RLDatasetBuilder
from planish.runlog.evaluators import Evaluator
from planish.training import train_rl
from planish.training.option_rules import at_least, zero_for
from planish.training.rl_config import (
    AsyncConfig,
    Config,
    KLReferenceConfig,
    LossOptions,
    RolloutOptions,
    StreamMinibatchConfig,
    check,
)
from planish.training.run_options import RecipeOptions, run_in_place_of_training


@chz.chz
class RLOptions(RolloutOptions, LossOptions, RecipeOptions):
    """Options of every RL recipe. An option with the name of a field of
    `planish.training.rl_config.Config` sets that field.
    """

    log_path: str = "/tmp/planish-examples/rl"
    seed: int = chz.field(default=0, doc="seed of initial weights, data order and sampling")
    learning_rate: float = 4e-5
    lr_schedule: str = "constant"
    max_tokens: int = 256
    max_prompt_tokens: int | None = chz.field(
        default=None,
        doc="maximum tokens in a prompt; problems with longer prompts are left out and counted; "
        "none = no limit",
        metadata=at_least(1),
    )
    remove_constant_reward_groups: bool = True
    kl_reference_model: str | None = chz.field(
        default=None, doc="base model of the KL reference; none = model_name"
    )
    kl_reference_checkpoint: str | None = chz.field(
        default=None,
        doc="checkpoint or run directory of the KL reference; none = load_checkpoint_path, or the "
        "base model",
    )
    max_steps_off_policy: int = chz.field(
        default=0,
        doc="maximum number of steps that sampling runs ahead of training; 0 = synchronous",
        metadata=zero_for("synchronous"),
    )
    num_minibatches: int = chz.field(
        default=1,
        doc="minibatches per substep; with more than 1, training begins before sampling ends",
        metadata=at_least(1),
    )
    rollout_error_tolerance: bool = chz.field(
        default=False, doc="retry rollouts that fail instead of ending the run"
    )
    eval_temperature: float | None = 0.0


def run(
    options: RLOptions,
    dataset_builder: RLDatasetBuilder,
    *,
    recipe_name: str,
    service_client: ServiceClient | None = None,
    evaluator_builders: Sequence[Callable[[], Evaluator]] = (),
) -> Path:
    """Train, with the given service client or a new one, and return the run directory.

    Options are checked before anything is loaded. Async code calls `await
    train_rl.main(train_config(...))` instead.
    """
    config = train_config(
        options, dataset_builder, recipe_name=recipe_name, evaluator_builders=evaluator_builders
    )
    check(config)
    if (replacement := run_in_place_of_training.get()) is not None:
        return replacement(config)
    return run_main(train_rl.main, config, service_client)


@contextmanager
def instead_of_training(work: Callable[[Any], Path]) -> Iterator[None]:
    """In the block, make the `main` of recipes call `work` with their config instead of training.
    Options of RL recipes are checked first. The recipes rl_loop, sl_loop, demo and rlhf, which have
    loops of their own, train nevertheless.
    """
    token = run_in_place_of_training.set(work)
    try:
        yield
    finally:
        run_in_place_of_training.reset(token)


def train_config(
    options: RLOptions,
    dataset_builder: RLDatasetBuilder,
    *,
    recipe_name: str,
    evaluator_builders: Sequence[Callable[[], Evaluator]] = (),
) -> Config:
    """Return the config of `planish.training.train_rl`. Raises UserError for an option of the
    dataset that `dataset_builder` would ignore.
    """
    if getattr(dataset_builder, "max_prompt_tokens", None) is None:
        reject_unused(
            options,
            ("max_prompt_tokens",),
            f"is not used by {type(dataset_builder).__name__}; leave it out",
        )
    return build(
        Config,
        options,
        **sampling_ahead(options),
        dataset_builder=dataset_builder,
        recipe_name=recipe_name,
        evaluator_builders=evaluator_builders if options.eval_every else (),
        kl_reference_config=kl_reference(options),
    )


def sampling_ahead(options: RLOptions) -> dict[str, Any]:
    """Return the fields `async_config` and `stream_minibatch_config` of `Config`."""
    lag, minibatches = options.max_steps_off_policy, options.num_minibatches
    return {
        "async_config": AsyncConfig(max_steps_off_policy=lag) if lag != 0 else None,
        "stream_minibatch_config": StreamMinibatchConfig(num_minibatches=minibatches)
        if minibatches != 1
        else None,
    }


def kl_reference(options: RLOptions) -> KLReferenceConfig | None:
    """Return the reference of the KL penalty: by default the policy that the run begins with; None
    without a penalty. Raises UserError if a reference is given without a penalty.
    """
    if options.kl_penalty_coef == 0:
        reject_unused(
            options,
            ("kl_reference_model", "kl_reference_checkpoint"),
            "is given, but kl_penalty_coef is 0; give a coefficient such as 0.01",
        )
        return None
    return KLReferenceConfig(
        base_model=options.kl_reference_model or options.model_name,
        load_checkpoint_path=options.kl_reference_checkpoint or options.load_checkpoint_path,
    )
