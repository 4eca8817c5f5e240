"""Prompts without rewards: the student answers them, and a teacher scores the answers.

A prompt is a conversation whose next message is the assistant's. docs/reference/data.md lists the
layouts of rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import chz

from planish import logtree
from planish.completers import StopCondition
from planish.datasets.layouts import PROMPTS, prompt_of
from planish.datasets.messages import Conversation, Message, location_of
from planish.datasets.rows import open_rows
from planish.datasets.unused_columns import UnusedColumns
from planish.errors import UserError
from planish.renderers import Renderer
from planish.renderers.spelled_tokens import SpelledTokens
from planish.rl.environments.problem_datasets import ProblemDatasetBuilder
from planish.rl.environments.problem_env import final_step
from planish.rl.types import (
    Action,
    ActionExtra,
    Env,
    Observation,
    RLDataset,
    StepResult,
)


def load_prompts(
    dataset: str,
    renderer: Renderer,
    prefix: Sequence[Mapping[str, Any]] = (),
    split: str | None = None,
) -> list[Conversation]:
    """Return the prompts of a split (None = train) of a hub name, a directory or a file. Raise
    UserError for a prompt that the chat format cannot express after `prefix`.
    """
    prompts = []
    unused, spelled = UnusedColumns(dataset), SpelledTokens()
    for row in open_rows(dataset, split or "train"):
        prompts.append(prompt_of(row, row.location))
        unused.add_layout(row, PROMPTS, row.location)
        check_prompt([*prefix, *prompts[-1]], renderer, row.location)
        render = partial(renderer.build_generation_prompt, prompts[-1])
        spelled.add_rendered(prompts[-1], renderer, render, row.location)
    unused.warn()
    spelled.warn(f"of {len(prompts)} prompts of {dataset}")
    return prompts


def check_prompt(messages: Sequence[Mapping[str, Any]], renderer: Renderer, where: str) -> None:
    """Raise UserError if the renderer's format cannot express the messages, without tokenising.
    `where` begins the message.
    """
    try:
        renderer.check_prompt(messages)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


@dataclass
class PromptOnlyEnv(Env):
    """An episode with one prompt, one answer and reward 0."""

    renderer: Renderer
    messages: list[Message]

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """Return the tokens of the prompt, and what ends an answer."""
        prompt = self.renderer.build_generation_prompt(self.messages)
        return prompt, self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Return the end of the episode, with the reward 0: the teacher is the only signal."""
        logtree.conversation([*self.messages, self.renderer.parse_response(action).message])
        return final_step(self.renderer, 0.0, extra)


@chz.chz
class PromptOnlyDatasetBuilder(ProblemDatasetBuilder):
    """Builds a training set of prompts. There is no test set, because prompts have no rewards."""

    dataset: str = chz.field(doc="hub name, local directory or file; its train split")
    train_split: str | None = chz.field(
        default=None, doc="dataset: name of the split to train on; none = train"
    )
    group_size: int = chz.field(default=4, doc="answers per prompt")
    max_prompt_tokens: int | None = chz.field(
        default=1024, doc="maximum tokens in a prompt; longer ones are left out and counted"
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        prompts = load_prompts(self.dataset, self.renderer, split=self.train_split)
        return self.shuffled(prompts, places=list(map(location_of, prompts))), None

    def make_env(self, problem: list[Message]) -> PromptOnlyEnv:
        """Return the environment of one answer."""
        return PromptOnlyEnv(self.renderer, problem)

    def tag(self) -> str:
        """Return "prompts"."""
        return "prompts"
