"""Environments of one or two turns whose reward is a sampled digit, and their datasets."""

from collections.abc import Sequence
from dataclasses import dataclass

import chz

from planish.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from planish.types import ModelInput


@dataclass
class DigitEnv(Env):
    number: int
    turns: int = 1
    is_constant: bool = False
    turns_taken: int = 0
    prompt: ModelInput | None = None

    async def initial_observation(self):
        self.prompt = ModelInput.from_ints([65, 66 + self.number % 150])
        return self.prompt, [10]

    async def step(self, action, *, extra=None):
        self.turns_taken += 1
        assert self.prompt is not None
        reward = 1.0 if self.is_constant else float(action[-1] % 2)
        next_prompt = ModelInput.from_ints([*self.prompt.to_ints(), *action, 10])
        self.prompt = next_prompt
        return StepResult(
            reward,
            self.turns_taken == self.turns,
            next_prompt,
            [10],
            metrics={"digit": action[-1] - 48},
        )


@dataclass(frozen=True)
class DigitGroup(EnvGroupBuilder):
    number: int
    size: int = 4
    turns: int = 1
    tag: str = "digits"

    async def make_envs(self) -> Sequence[Env]:
        return [
            DigitEnv(self.number, self.turns, is_constant=self.tag == "constant")
            for _ in range(self.size)
        ]

    def logging_tags(self):
        return [self.tag]


@dataclass(frozen=True)
class Digits(RLDataset):
    batches: int = 6
    groups: int = 4
    turns: int = 1
    constant_every: int = 0

    def get_batch(self, index):
        first = index * self.groups
        return [self._group(number) for number in range(first, first + self.groups)]

    def _group(self, number: int) -> DigitGroup:
        is_constant = self.constant_every > 0 and number % self.constant_every == 0
        return DigitGroup(number, turns=self.turns, tag="constant" if is_constant else "digits")

    def __len__(self):
        return self.batches


@chz.chz
class DigitsBuilder(RLDatasetBuilder):
    batches: int = 6
    groups: int = 4
    turns: int = 1
    constant_every: int = 0
    tests: int = 0

    async def __call__(self):
        test = Digits(1, self.tests) if self.tests else None
        return Digits(self.batches, self.groups, self.turns, self.constant_every), test
