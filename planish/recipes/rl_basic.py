"""RL on GSM8K with the library's environments, training loop, evaluation and run files.

    python -m planish.recipes.rl_basic                                      the embedded model,
                                                                            GSM8K from the hub
    python -m planish.recipes.rl_basic dataset=DIRECTORY eval_problems=64   your own train.jsonl
                                                                            and test.jsonl
    python -m planish.recipes.rl_basic preset=seed                          sizes and model of the
                                                                            published recipe

The reward is correct + 0.1 * (format - 1): 1 for the right answer in a box, and 0.1 less for an
answer without a box or without a stop sequence. Each step samples `group_size` answers to each of
`batch_size` problems, compares them within their group, and makes one gradient step. The loop is in
planish/training/train_rl.py, the environment in planish/rl/environments/boxed_problems.py.
"""

import sys
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.datasets.split_names import SplitNames
from planish.recipes import training_run
from planish.recipes.rl_options import RLOptions, run
from planish.rl.environments.boxed_problems import BoxedProblemDatasetBuilder
from planish.rl.environments.difficulty import DifficultyOptions
from planish.training.option_rules import GROUP_SIZE, at_least, check_fields, zero_for

PRESETS: dict[str, dict[str, Any]] = {
    "seed": {
        "model_name": "Qwen/Qwen3-8B",
        "batch_size": 128,
        "group_size": 16,
        "learning_rate": 4e-5,
        "max_tokens": 256,
        "eval_temperature": None,
    },
}


@chz.chz
class Options(DifficultyOptions, SplitNames, RLOptions):
    """Options of the recipe."""

    log_path: str = "/tmp/planish-examples/rl_basic"
    dataset: str = chz.field(default="openai/gsm8k", doc="hub name, local directory or file")
    batch_size: int = chz.field(default=16, doc="problems per step", metadata=at_least(1))
    group_size: int = chz.field(default=8, doc="answers per problem", metadata=GROUP_SIZE)
    eval_problems: int | None = chz.field(
        default=None,
        doc="number of test problems; none = the whole test split, 0 = no evaluation",
        metadata=zero_for("no evaluation"),
    )


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    check_fields(options)
    builder = training_run.build(BoxedProblemDatasetBuilder, options, collection="gsm8k")
    return run(options, builder, recipe_name="rl_basic", service_client=service_client)


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
