"""Train a tiny model until the run is asked to stop: python stoppable_run.py MODEL RUN."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "rl"))

from digit_env import DigitsBuilder

from planish import ServiceClient
from planish.processes.interruption import run_coroutine
from planish.training.rl_config import Config
from planish.training.train_rl import main

if __name__ == "__main__":
    config = Config(
        learning_rate=1e-3,
        dataset_builder=DigitsBuilder(batches=3000),
        model_name=sys.argv[1],
        lora_rank=4,
        max_tokens=6,
        log_path=sys.argv[2],
        eval_every=0,
        save_every=0,
    )
    with ServiceClient(data_dir=Path(sys.argv[2]).parent / "data") as client:
        run_coroutine(main(config, client))
