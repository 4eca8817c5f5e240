"""Supervised training on conversations with the library's training loop, evaluation and run files.

    python -m planish.recipes.sl_basic                                     the embedded model,
                                                                           no_robots from the hub
    python -m planish.recipes.sl_basic dataset=chats.jsonl test_size=50    your own file
    python -m planish.recipes.sl_basic preset=seed                         sizes and model of the
                                                                           published recipe

All messages of the assistant are trained on. planish/training/supervised_learner.py runs the
steps. The recipe chat_sl reads more datasets.
"""

import sys
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.recipes import training_run
from planish.recipes.sl_options import SLOptions, run

PRESETS: dict[str, dict[str, Any]] = {
    "seed": {
        "model_name": "Qwen/Qwen3-8B",
        "batch_size": 128,
        "learning_rate": 2e-4,
        "max_length": 32768,
    },
}


@chz.chz
class Options(SLOptions):
    """Options of the recipe."""

    log_path: str = chz.field(
        default="/tmp/planish-examples/sl_basic", doc="directory of the run's files"
    )
    batch_size: int = chz.field(default=16, doc="conversations per step")
    learning_rate: float | None = chz.field(
        default=2e-4, doc="learning rate before the schedule; none = get_lr(model_name)"
    )
    max_length: int = chz.field(
        default=1024, doc="maximum tokens in a conversation; longer ones are truncated and counted"
    )
    eval_every: int = chz.field(default=8, doc="steps between evaluations; 0 = never")


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    return run(options, recipe_name="sl_basic", service_client=service_client)


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
