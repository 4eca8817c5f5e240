"""RL on an environment of the verifiers library, from its hub or your own.

    pip install 'planish[verifiers]'
    python -m planish.recipes.verifiers_rl env_id=reverse-text
    python -m planish.recipes.verifiers_rl env_id=my_module 'env_args={"difficulty": 2}'

`env_id` is an installed environment or any importable module with a function `load_environment`.
The environment defines prompts, turns, tools, rewards and metrics. The loop is in
planish/training/train_rl.py. planish/integrations/verifiers/environments.py connects the two.
"""

import sys
from pathlib import Path

import chz

from planish import ServiceClient
from planish.errors import UserError
from planish.integrations.verifiers.datasets import VerifiersDatasetBuilder, canonical_env_args
from planish.integrations.verifiers.library import load_environment
from planish.recipes import training_run
from planish.recipes.rl_options import RLOptions, run
from planish.training.option_rules import GROUP_SIZE, at_least, check_fields, zero_for


@chz.chz
class Options(RLOptions):
    """Options of the recipe."""

    env_id: str = chz.field(
        doc="environment of verifiers: an installed package, or a module on Python's path"
    )
    log_path: str = "/tmp/planish-examples/verifiers_rl"
    env_args: str = chz.field(default="{}", doc="arguments of load_environment as a JSON object")
    batch_size: int = chz.field(default=8, doc="rows per step", metadata=at_least(1))
    group_size: int = chz.field(default=8, doc="rollouts per row", metadata=GROUP_SIZE)
    eval_problems: int | None = chz.field(
        default=None,
        doc="number of test rows; none = the environment's eval data, or rows held out of "
        "training if it has none",
        metadata=zero_for("no evaluation"),
    )
    max_prompt_tokens: int | None = chz.field(
        default=None,
        doc="maximum tokens in the prompt of a turn; a longer prompt ends the rollout; none = what "
        "max_trajectory_tokens leaves beside max_tokens",
        metadata=at_least(1),
    )
    max_trajectory_tokens: int = chz.field(
        default=4096,
        doc="maximum tokens in a prompt with its answer; a longer prompt ends the rollout",
    )
    learning_rate: float = 2e-4
    eval_every: int = 10


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    check(options)
    env_args = canonical_env_args(options.env_args)
    load_environment(options.env_id, env_args)  # an error should come before a model is loaded
    builder = training_run.build(
        VerifiersDatasetBuilder,
        options,
        env_args=env_args,
        max_prompt_tokens=min(
            options.max_trajectory_tokens - options.max_tokens,
            options.max_prompt_tokens or options.max_trajectory_tokens,
        ),
    )
    return run(options, builder, recipe_name="verifiers_rl", service_client=service_client)


def check(options: Options) -> None:
    """Raise UserError for an invalid option."""
    check_fields(options)
    if options.max_trajectory_tokens <= options.max_tokens:
        raise UserError(
            f"max_trajectory_tokens={options.max_trajectory_tokens}: give more than "
            f"max_tokens={options.max_tokens}, or no prompt fits"
        )


if __name__ == "__main__":
    training_run.run_command(main, Options, {}, sys.argv[1:])
