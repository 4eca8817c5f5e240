"""GSM8K by the RL library: environments, one training loop, tests, and all of a run's files.

    python -m planish.recipes.rl_basic                                      the embedded model,
        GSM8K from the hub
    python -m planish.recipes.rl_basic dataset=DIRECTORY eval_problems=64   train.jsonl and
        test.jsonl of your own
    python -m planish.recipes.rl_basic preset=seed                          sizes and model of the
        published recipe

The reward is correct + 0.1 * (format - 1): 1 for the right answer in a box, and a tenth less for an
answer without a box or without an end. Each step plays `batch_size` problems `group_size` times,
compares answers within their group, and makes one gradient step. The loop is planish/training/train_rl.py,
the environment planish/rl/environments/boxed_problems.py.
"""

import sys
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.recipes import training_run
from planish.recipes.rl_options import RLOptions, run
from planish.rl.environments.boxed_problems import BoxedProblemDatasetBuilder

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
class Options(RLOptions):
    log_path: str = chz.field(
        default="/tmp/planish-examples/rl_basic", doc="directory of the run's files"
    )
    dataset: str = chz.field(default="openai/gsm8k", doc="hub name, local directory or JSONL file")
    batch_size: int = chz.field(default=16, doc="problems a step")
    group_size: int = chz.field(default=8, doc="answers to each problem")
    eval_problems: int | None = chz.field(
        default=None, doc="problems a test; none = the whole test split, 0 = no tests"
    )


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train; returns the run directory."""
    training_run.require(
        options,
        batch_size=(options.batch_size >= 1, "a whole number of at least 1"),
        group_size=(options.group_size >= 2, "at least 2: answers are compared within their group"),
        eval_problems=(
            options.eval_problems is None or options.eval_problems >= 0,
            "a whole number, 0 for no tests",
        ),
    )
    builder = BoxedProblemDatasetBuilder(
        collection="gsm8k",
        dataset=options.dataset,
        model_name=options.model_name,
        renderer_name=options.renderer_name,
        batch_size=options.batch_size,
        group_size=options.group_size,
        eval_problems=options.eval_problems,
        seed=options.seed,
    )
    return run(options, builder, recipe_name="rl_basic", service_client=service_client)


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
