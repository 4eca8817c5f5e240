"""Supervised training on chat data in many formats, with a learning rate that fits the model.

    python -m planish.recipes.chat_sl                                      no_robots, the embedded
                                                                           model
    python -m planish.recipes.chat_sl dataset=tulu3 model_name=Qwen/Qwen3-8B test_size=512 preset=seed
    python -m planish.recipes.chat_sl dataset=chats.jsonl test_size=100    your own file

`dataset` is one of the names below, any other hub name, a directory with train and test files, or
one file. docs/reference/data.md lists the layouts of rows.
"""

import sys
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.recipes import training_run
from planish.recipes.sl_options import SLOptions, run

HUB_NAMES = {
    "no_robots": "HuggingFaceH4/no_robots",
    "tulu3": "allenai/tulu-3-sft-mixture",
    "smoltalk": "HuggingFaceTB/smoltalk:all",
    "gsm8k": "openai/gsm8k",
}
PRESETS: dict[str, dict[str, Any]] = {
    "seed": {"batch_size": 128, "lora_rank": 64, "learning_rate": 5e-4, "max_length": 16384},
}


@chz.chz
class Options(SLOptions):
    """Options of the recipe."""

    log_path: str = "/tmp/planish-examples/chat_sl"
    dataset: str = chz.field(
        default="no_robots",
        doc=f"{', '.join(HUB_NAMES)}, a hub name, a local directory or a file",
    )
    batch_size: int = 16
    max_length: int = 1024


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    dataset = HUB_NAMES.get(options.dataset, options.dataset)
    return run(options, recipe_name="chat_sl", dataset=dataset, service_client=service_client)


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
