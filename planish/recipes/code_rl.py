"""RL on programming problems: programs run in a sandbox, and tests grade them.

    python -m planish.recipes.code_rl                                    the embedded model writes
                                                                         small functions
    python -m planish.recipes.code_rl env=repair                         three attempts, with a
                                                                         report of each failure
    python -m planish.recipes.code_rl steps=2                            longer functions
    python -m planish.recipes.code_rl dataset=problems.jsonl             your own problems
    python -m planish.recipes.code_rl preset=deepcoder model_name=...    DeepCoder from the hub

planish/recipes/code_env.py defines the episode and the reward, planish/recipes/code_problems.py the
formats of problems; docs/reference/sandbox.md describes the sandbox. If the sandbox fails its
self-test, the recipe does not start.
"""

import sys
from pathlib import Path
from typing import Any, Literal

import chz

from planish import ServiceClient
from planish.recipes import training_run
from planish.recipes.code_datasets import (
    NUM_TEST_FUNCTIONS,
    CodeDatasetBuilder,
    FunctionDatasetBuilder,
)
from planish.recipes.code_env import Rules, process_sandbox
from planish.recipes.rl_options import RLOptions, run
from planish.rl.environments.difficulty import DifficultyOptions
from planish.rl.types import RLDatasetBuilder
from planish.sandbox import Limits
from planish.sandbox.limits import MIB
from planish.training.option_rules import (
    GROUP_SIZE,
    NOT_NEGATIVE,
    at_least,
    between,
    check_fields,
    require,
    zero_for,
)

REPAIR_TURNS = 3
DATASET_OPTIONS = ("train_split", "test_split", "shown_tests", "max_tests")
PRESETS: dict[str, dict[str, Any]] = {
    "deepcoder": {
        "dataset": "agentica-org/DeepCoder-Preview-Dataset:primeintellect",
        "batch_size": 128,
        "max_tokens": 8192,
        "learning_rate": 4e-5,
        "max_tests": 15,
        "cpu_seconds": 6,
        "max_steps": None,
        "eval_problems": 256,
        "eval_every": 20,
        "eval_temperature": 0.6,
    },
}


@chz.chz
class ProblemOptions:
    """Where the problems come from, and how many a step has."""

    dataset: str | None = chz.field(
        default=None, doc="hub name, local directory or file; none = generated functions"
    )
    train_split: str | None = chz.field(
        default=None, doc="training split of the dataset; none = train"
    )
    test_split: str | None = chz.field(
        default=None,
        doc="test split of the dataset; none = a directory's test file, else eval_problems "
        "problems held out of training",
    )
    shown_tests: int | None = chz.field(
        default=None,
        doc="dataset: number of tests that env=repair shows, for rows that do not name public "
        "tests; none = 2",
        metadata=at_least(1, "at least {}"),
    )
    max_tests: int | None = chz.field(
        default=None,
        doc="dataset: maximum number of tests per problem, the first ones; none = all",
        metadata=at_least(1, "at least {}"),
    )
    steps: int | None = chz.field(
        default=None,
        doc="generated functions: operations per function; none = 1",
        metadata=between(1, 8),
    )
    batch_size: int = chz.field(default=8, doc="problems per step", metadata=at_least(1))
    group_size: int = chz.field(default=8, doc="attempts per problem", metadata=GROUP_SIZE)
    eval_problems: int | None = chz.field(
        default=None,
        doc=f"number of test problems; none = {NUM_TEST_FUNCTIONS} functions, or the test split; "
        "0 = no evaluation",
        metadata=zero_for("no evaluation"),
    )


@chz.chz
class ProgramLimits:
    """The limits of a program in the sandbox."""

    cpu_seconds: int = chz.field(default=4, doc="CPU seconds of a program per test, a whole number")
    wall_seconds: float = chz.field(default=12.0, doc="wall-clock seconds of a program per test")
    memory_mb: int = chz.field(default=512, doc="memory limit of a program in MiB")


@chz.chz
class Options(ProgramLimits, ProblemOptions, DifficultyOptions, RLOptions):
    """Options of the recipe."""

    log_path: str = "/tmp/planish-examples/code_rl"
    env: Literal["solve", "repair"] = chz.field(
        default="solve",
        doc="solve = one answer, repair = several answers with test reports between them",
    )
    reward: Literal["all", "fraction"] = chz.field(
        default="all",
        doc="all = 1 if every test passes, fraction = the fraction of tests that pass",
    )
    format_coef: float = chz.field(
        default=0.1,
        doc="penalty of an answer that has no code block or is truncated",
        metadata=NOT_NEGATIVE,
    )
    max_turns: int | None = chz.field(
        default=None,
        doc=f"env=repair: maximum number of programs in an episode; none = {REPAIR_TURNS}",
        metadata=at_least(2, "at least {}, or env=solve"),
    )
    learning_rate: float = 2e-4
    max_tokens: int = 64
    max_steps: int | None = 20
    eval_every: int = 10


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    check(options)
    training_run.run_coroutine(process_sandbox(rules(options).limits).check())
    return run(
        options, dataset_builder(options), recipe_name="code_rl", service_client=service_client
    )


def check(options: Options) -> None:
    """Raise UserError for an option that is invalid or would be ignored."""
    has_data = options.dataset is not None
    for names, is_used, when in (
        (("max_turns",), options.env == "repair", "env=repair"),
        (DATASET_OPTIONS, has_data, "dataset=..."),
        (("steps",), not has_data, "generated functions, without dataset"),
    ):
        if not is_used:
            training_run.reject_unused(options, names, f"is an option for {when}; leave it out")
    check_fields(options)
    require(
        options,
        max_steps=(
            has_data or options.max_steps is not None,
            "a number, because generated functions are unlimited",
        ),
        num_epochs=(
            has_data or options.num_epochs == 1,
            "1 and max_steps, because generated functions are unlimited",
        ),
    )


def rules(options: Options) -> Rules:
    """Return the rules of episodes."""
    turns = 1 if options.env == "solve" else options.max_turns or REPAIR_TURNS
    limits = Limits(
        cpu_seconds=options.cpu_seconds,
        wall_seconds=options.wall_seconds,
        memory_bytes=options.memory_mb * MIB,
    )
    return training_run.build(Rules, options, max_turns=turns, limits=limits)


def dataset_builder(options: Options) -> RLDatasetBuilder:
    """Return the builder of generated functions, or of the problems of `dataset`."""
    builder = FunctionDatasetBuilder if options.dataset is None else CodeDatasetBuilder
    return training_run.build_with_defaults(builder, options, rules=rules(options))


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
