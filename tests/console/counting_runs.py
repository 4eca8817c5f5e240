"""Two real runs on a tiny model that differ in max_tokens: the answers of the first are cut off, so
its reward stops rising.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import chz

from planish import ServiceClient
from planish.processes.interruption import run_coroutine
from planish.rl.types import (
    Env,
    EnvGroupBuilder,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
    StopReason,
)
from planish.testing import tiny_model
from planish.training.rl_config import Config
from planish.training.train_rl import main
from planish.types import ModelInput

WANTED = 12
STOP = ord("\n")


@dataclass
class OddLettersEnv(Env):
    """The reward is the share of WANTED odd characters that an answer has."""

    number: int

    async def initial_observation(self):
        question = f"Question {self.number}: write {WANTED} odd characters and a newline.\n"
        self.prompt = ModelInput.from_ints(list(question.encode()))
        return self.prompt, [STOP]

    async def step(self, action, *, extra=None):
        odd = sum(token % 2 for token in action)
        return StepResult(
            min(odd, WANTED) / WANTED,
            True,
            ModelInput.empty(),
            [STOP],
            metrics={"correct": float(odd >= WANTED)},
            logs={"verdict": f"{odd} of {WANTED} odd characters"},
            stop_reason=StopReason.COMPLETED if action[-1] == STOP else StopReason.MAX_TOKENS,
        )


@dataclass(frozen=True)
class OddLetters(EnvGroupBuilder):
    number: int

    async def make_envs(self) -> Sequence[Env]:
        return [OddLettersEnv(self.number) for _ in range(4)]

    def logging_tags(self):
        return ["odd"]


@dataclass(frozen=True)
class Questions(RLDataset):
    batches: int
    groups: int

    def get_batch(self, index):
        return [OddLetters(number) for number in range(self.groups)]

    def __len__(self):
        return self.batches


@chz.chz
class QuestionsBuilder(RLDatasetBuilder):
    steps: int
    groups: int = 4

    async def __call__(self):
        return Questions(self.steps, self.groups), Questions(1, self.groups)


def train_two_runs(directory: Path, steps: int) -> None:
    """Train `directory`/short with max_tokens=8, and `directory`/long with max_tokens=16."""
    model = str(tiny_model(directory.parent / "tiny-model"))
    with ServiceClient(data_dir=directory.parent / "data", dtype="float32") as client:
        for name, max_tokens in (("short", 8), ("long", 16)):
            config = Config(
                recipe_name="odd_letters",
                learning_rate=1.5e-3,
                dataset_builder=QuestionsBuilder(steps=steps),
                model_name=model,
                lora_rank=4,
                max_tokens=max_tokens,
                log_path=str(directory / name),
                eval_every=steps // 2,
                save_every=0,
            )
            run_coroutine(main(config, client))
