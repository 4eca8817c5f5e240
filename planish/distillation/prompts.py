"""Prompts without rewards: the student answers them, and a teacher scores the answers.

A prompt is a conversation whose next message is the assistant's. A row has "prompt" (a text or
messages), "question", or a whole conversation ("messages", "conversations"). The last answer of a
whole conversation is removed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import chz

from planish import logtree
from planish.completers import StopCondition
from planish.datasets.rows import open_rows
from planish.errors import UserError
from planish.renderers import Renderer
from planish.renderers.messages import read_messages
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
from planish.supervised.conversations import Conversation, conversation_of


def read_prompt(row: Mapping[str, Any], where: str) -> Conversation:
    """Return the messages of a row up to the answer. Raise UserError, which names `where`, for a
    row of another form.
    """
    if "question" in row and "messages" not in row:
        row = {"prompt": row["question"]}
    if "prompt" in row:
        row = {"prompt": row["prompt"], "completion": ""}
    messages = conversation_of(row, where)
    if messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1].get("role") not in ("user", "tool"):
        raise UserError(
            f"{where}: there is no question; give a conversation with a user message before the "
            "answer"
        )
    return messages


def load_prompts(
    dataset: str, renderer: Renderer, prefix: Sequence[Mapping[str, Any]] = ()
) -> list[Conversation]:
    """Return the prompts of a hub name, a directory or a file. Raise UserError for a prompt that
    the chat format cannot express after `prefix`.
    """
    prompts = []
    for number, row in enumerate(open_rows(dataset, "train"), start=1):
        where = f"dataset={dataset}, train row {number}"
        prompts.append(read_prompt(row, where))
        check_prompt([*prefix, *prompts[-1]], renderer, where)
    return prompts


def check_prompt(messages: Sequence[Mapping[str, Any]], renderer: Renderer, where: str) -> None:
    """Raise UserError if the renderer's format cannot express the messages, without tokenising."""
    try:
        read_messages(messages, renderer.format.capabilities, renderer.name)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


@dataclass
class PromptOnlyEnv(Env):
    """An episode with one prompt, one answer and reward 0."""

    renderer: Renderer
    messages: Conversation

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        prompt = self.renderer.build_generation_prompt(self.messages)
        return prompt, self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        logtree.conversation([*self.messages, self.renderer.parse_response(action).message])
        return final_step(self.renderer, 0.0, extra)


@chz.chz
class PromptOnlyDatasetBuilder(ProblemDatasetBuilder):
    """Builds a training set of prompts. There is no test set, because prompts have no rewards."""

    dataset: str = chz.field(doc="hub name, local directory or file; its train split")
    group_size: int = chz.field(default=4, doc="answers per prompt")
    max_prompt_tokens: int | None = chz.field(
        default=1024, doc="maximum tokens in a prompt; longer ones are left out and counted"
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        prompts = load_prompts(self.dataset, self.renderer)
        places = [f"dataset={self.dataset}, train row {n + 1}" for n in range(len(prompts))]
        return self.shuffled(prompts, places=places), None

    def make_env(self, problem: Conversation) -> PromptOnlyEnv:
        """Return the environment of one answer."""
        return PromptOnlyEnv(self.renderer, problem)

    def tag(self) -> str:
        """Return "prompts"."""
        return "prompts"
