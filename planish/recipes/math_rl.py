"""RL on questions whose answers a program checks, from sums to competition mathematics.

    python -m planish.recipes.math_rl                                      env=arithmetic: the
                                                                           embedded model learns to
                                                                           add
    python -m planish.recipes.math_rl env=math model_name=Qwen/Qwen3-8B    MATH, tested on MATH-500
    python -m planish.recipes.math_rl env=polaris dataset=rows.jsonl       a local file in the
                                                                           format of Polaris
    python -m planish.recipes.math_rl env=reasoning_gym:chain_sum task.max_digits=1

Each `env` has its own defaults (`ENV_DEFAULTS`), which options override. The envs are:

    arithmetic                   planish/recipes/sum_tasks.py
    gsm8k math polaris deepmath  planish/rl/environments/boxed_problems.py
    reasoning_gym:TASK           planish/recipes/reasoning_problems.py (pip install
                                 planish[reasoning-gym])
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.datasets.math_problems import COLLECTIONS
from planish.datasets.split_names import SplitNames
from planish.errors import UserError
from planish.recipes import training_run
from planish.recipes.reasoning_problems import TaskDatasetBuilder
from planish.recipes.reasoning_tasks import check_name
from planish.recipes.rl_options import RLOptions, run
from planish.recipes.sum_tasks import SumDatasetBuilder
from planish.rl.environments.boxed_problems import BoxedProblemDatasetBuilder
from planish.rl.environments.difficulty import DifficultyOptions
from planish.rl.types import RLDatasetBuilder
from planish.training.option_rules import GROUP_SIZE, at_least, check_fields, require, zero_for

ARITHMETIC = "arithmetic"
REASONING_GYM = "reasoning_gym"
DEFAULT_LOG_PATH = "/tmp/planish-examples/math_rl"
ENV_DEFAULTS: dict[str, dict[str, Any]] = {
    ARITHMETIC: {"learning_rate": 5e-4, "max_tokens": 16, "max_steps": 40, "eval_every": 10},
    "gsm8k": {"learning_rate": 4e-5, "max_tokens": 256},
    "math": {"learning_rate": 2e-5, "max_tokens": 512},
    "polaris": {"learning_rate": 2e-5, "max_tokens": 1024},
    "deepmath": {"learning_rate": 2e-5, "max_tokens": 1024},
    REASONING_GYM: {"learning_rate": 2e-4, "max_tokens": 48, "max_steps": 40, "eval_every": 10},
}
"""For each kind of env, the defaults that differ from those of `Options`."""


@chz.chz
class Options(DifficultyOptions, SplitNames, RLOptions):
    """Options of the recipe. `options_for` makes them with the defaults of an env."""

    env: str = chz.field(
        default=ARITHMETIC, doc=f"{', '.join([ARITHMETIC, *COLLECTIONS])} or {REASONING_GYM}:TASK"
    )
    log_path: str = chz.field(
        default=DEFAULT_LOG_PATH,
        doc=f"directory of the run's files; the default is {DEFAULT_LOG_PATH}-ENV",
    )
    batch_size: int = chz.field(default=16, doc="problems per step", metadata=at_least(1))
    group_size: int = chz.field(default=8, doc="answers per problem", metadata=GROUP_SIZE)
    eval_problems: int | None = chz.field(
        default=None,
        doc="number of test problems; none = the whole test split, or 100; 0 = no evaluation",
        metadata=zero_for("no evaluation"),
    )
    dataset: str | None = chz.field(
        default=None,
        doc="gsm8k, math, polaris, deepmath: hub name, local directory or file; none = the "
        "published one",
    )
    max_operand: int | None = chz.field(
        default=None, doc="arithmetic: largest operand; none = 20", metadata=at_least(1)
    )
    task: dict[str, Any] = chz.field(
        default_factory=dict, doc=f"{REASONING_GYM}: options of the task, such as task.max_terms=3"
    )
    shown_examples: int | None = chz.field(
        default=None,
        doc=f"{REASONING_GYM}: worked examples in the prompt; none = 2",
        metadata=zero_for("none"),
    )


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    check(options)
    return run(
        options, dataset_builder(options), recipe_name="math_rl", service_client=service_client
    )


def options_for(env: str, **changes: Any) -> Options:
    """Return the options of an env with its defaults, and with `changes`."""
    return Options(**{**defaults_for(env), "env": env, **changes})


def defaults_for(env: str) -> dict[str, Any]:
    """Return the defaults of an env."""
    return {"log_path": f"{DEFAULT_LOG_PATH}-{env.replace(':', '-')}", **ENV_DEFAULTS[kind_of(env)]}


def kind_of(env: str) -> str:
    """Return the key of an env in ENV_DEFAULTS. Names other than planish's own are tasks of
    reasoning-gym, with or without the prefix.
    """
    return env if env in ENV_DEFAULTS else REASONING_GYM


def task_name(env: str) -> str:
    """Return the name of a reasoning-gym task without the prefix."""
    return env.removeprefix(f"{REASONING_GYM}:")


def dataset_builder(options: Options) -> RLDatasetBuilder:
    """Return the dataset builder of the env."""
    match kind_of(options.env):
        case "arithmetic":
            return training_run.build_with_defaults(SumDatasetBuilder, options)
        case "reasoning_gym":
            return training_run.build_with_defaults(
                TaskDatasetBuilder, options, task_name=task_name(options.env)
            )
        case collection:
            return training_run.build(BoxedProblemDatasetBuilder, options, collection=collection)


def check(options: Options) -> None:
    """Raise UserError for an option that is invalid or would be ignored."""
    kind = kind_of(options.env)
    if kind == REASONING_GYM:
        check_task(options.env)
    for name, kinds in {
        "dataset": COLLECTIONS,
        "train_split": COLLECTIONS,
        "test_split": COLLECTIONS,
        "max_operand": [ARITHMETIC],
        "task": [REASONING_GYM],
        "shown_examples": [REASONING_GYM],
    }.items():
        if kind not in kinds:
            training_run.reject_unused(
                options, [name], f"is no option of env={options.env}; leave it out"
            )
    check_fields(options)
    require(
        options,
        max_steps=(
            kind in COLLECTIONS or options.max_steps is not None,
            f"a number, because the problems of env={options.env} are unlimited",
        ),
        num_epochs=(
            kind in COLLECTIONS or options.num_epochs == 1,
            f"1 and max_steps, because the problems of env={options.env} are unlimited",
        ),
    )


def check_task(env: str) -> None:
    """Raise UserError unless `env` is a task of reasoning-gym."""
    try:
        check_name(task_name(env))
    except UserError as error:
        if env.startswith(REASONING_GYM):
            raise
        raise UserError(
            f"{error}; the environments of planish itself are "
            f"{', '.join([ARITHMETIC, *COLLECTIONS])}"
        ) from error


def with_env_defaults(
    arguments: Sequence[str], env_defaults: Callable[[str], dict[str, Any]] = defaults_for
) -> tuple[training_run.Presets, list[str]]:
    """Treat `env=NAME` on the command line as a preset of the same name, which other arguments
    override. Return (presets, arguments). `env_defaults` returns the defaults of an env.
    """
    named = [argument.partition("=")[2] for argument in arguments if argument.startswith("env=")]
    env = named[-1] if named else ARITHMETIC
    return {env: env_defaults(env)}, [f"preset={env}", *arguments]


if __name__ == "__main__":
    training_run.run_command(main, Options, *with_env_defaults(sys.argv[1:]))
