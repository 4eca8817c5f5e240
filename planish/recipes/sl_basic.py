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

    log_path: str = "/tmp/planish-examples/sl_basic"
    batch_size: int = 16
    learning_rate: float | None = 2e-4
    max_length: int = 1024
    eval_every: int = 8


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    return run(options, recipe_name="sl_basic", service_client=service_client)


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
