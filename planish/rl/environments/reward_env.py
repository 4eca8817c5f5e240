"""Questions whose answers your own function rewards. It is called once per answer.

    def reward(answer: str, row: dict) -> float: ...

    builder = RewardDatasetBuilder(dataset="questions.jsonl", reward=reward, model_name=MODEL)

The function takes the text of the answer and a copy of the row of the question. It returns a finite
number, or a dict of named numbers, whose sum is the reward. Each named number is also a metric. A
pair of a number and a dict of metrics is possible too. If the function raises AbstainError, the
answer is left out of its group.

The function may be async. A plain function runs in a thread of its own, so that it may block. It
must be thread-safe, because several answers are graded at the same time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import chz

from planish import logtree
from planish.completers import StopCondition
from planish.datasets.rows import has_split, rows_with_locations
from planish.errors import UserError
from planish.processes.blocking import call_function
from planish.renderers import Message, Renderer, get_text_content
from planish.rl.environments.problem_datasets import ProblemDatasetBuilder
from planish.rl.environments.problem_env import final_step
from planish.rl.rewards import Reward, function_name, read_graded
from planish.rl.types import (
    Action,
    ActionExtra,
    Env,
    Observation,
    RLDataset,
    StepResult,
)

Row: TypeAlias = Mapping[str, Any]
Question: TypeAlias = tuple[list[Message], Row]
"""The conversation up to the answer, and the row that it is from."""
RewardFunction: TypeAlias = Callable[[str, Row], Reward | Awaitable[Reward]]


@dataclass(eq=False)
class RewardEnv(Env):
    """One question, whose answer a function rewards."""

    renderer: Renderer
    messages: Sequence[Message]
    """The conversation up to the answer."""
    row: Row
    reward: RewardFunction
    """Called with the text of the answer and a copy of `row`."""

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """Return the prompt with the messages, and the renderer's stop sequences."""
        prompt = self.renderer.build_generation_prompt(self.messages)
        return prompt, self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Call the reward function on the answer and end the episode. Raises UserError for a reward
        that is not a number, and NonFiniteError for one that is not finite.
        """
        message, termination = self.renderer.parse_response(action)
        with logtree.scope_header("Conversation"):
            logtree.conversation([*self.messages, message])
        # All answers to a question share its row, and a function may change what it gets.
        call = partial(self.reward, get_text_content(message), deepcopy(self.row))
        name = function_name(self.reward)
        reward, metrics = read_graded(await call_function(call), name)
        if "ended" in metrics:
            raise UserError(
                f"{name} returned a part 'ended', which is already the name of a metric; rename it"
            )
        metrics = {"ended": float(termination.is_clean), **metrics}
        with logtree.scope_header("Reward"):
            logtree.table_from_dict({**metrics, "reward": reward})
        return final_step(self.renderer, reward, extra, metrics)


@chz.chz
class RewardDatasetBuilder(ProblemDatasetBuilder):
    """Groups of `RewardEnv`, one for each row with "prompt" or "messages"."""

    dataset: str = chz.field(
        doc="JSONL file, directory with train.jsonl and test.jsonl, or hub name"
    )
    reward: RewardFunction
    test_size: int = chz.field(
        default=0, doc="single file: number of rows at its end that are held out for evaluation"
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return (training dataset, test dataset). The test dataset is None without test rows.
        Raises UserError if there are no rows to train on.
        """
        train = await asyncio.to_thread(self._questions, "train")
        test: list[tuple[str, Question]] = []
        if not train:
            raise UserError(f"dataset={self.dataset} has no rows to train on; give at least one")
        if not 0 <= self.test_size < len(train):
            raise UserError(
                f"test_size={self.test_size}: there are {len(train)} rows; give fewer, 0 for no "
                "tests"
            )
        if self.test_size:
            train, test = train[: -self.test_size], train[-self.test_size :]
        elif await asyncio.to_thread(has_split, self.dataset, "test"):
            test = await asyncio.to_thread(self._questions, "test")
        train_set = self.shuffled(
            [question for _, question in train], places=[place for place, _ in train]
        )
        test_set = self.evaluation(
            [question for _, question in test], places=[place for place, _ in test]
        )
        return train_set, test_set

    def make_env(self, problem: Question) -> RewardEnv:
        """Return the environment of one answer."""
        return RewardEnv(self.renderer, *problem, self.reward)

    def tag(self) -> str:
        """Return "rewards"."""
        return "rewards"

    def _questions(self, split: str) -> list[tuple[str, Question]]:
        """Return the questions of a split, each with its place for messages."""
        rows = rows_with_locations(self.dataset, split)
        return [(where, (_messages(row, where), row)) for where, row in rows]


def _messages(row: Row, where: str) -> list[Message]:
    """Return the question of a row as messages. Raises UserError if it has none. `where` names the
    row.
    """
    prompt = row.get("messages", row.get("prompt", row.get("question")))
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt:
        return prompt
    raise UserError(
        f'{where} has no question: give "prompt", a text, or "messages", a list of messages'
    )
