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
from typing import Any, TypeAlias, cast

import chz

from planish import logtree
from planish.completers import StopCondition
from planish.datasets.layouts import prompt_of
from planish.datasets.messages import Conversation
from planish.datasets.row_files import Row
from planish.datasets.rows import has_split, load_rows
from planish.datasets.split_names import SplitNames
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

Question: TypeAlias = tuple[Conversation, Row]
"""The conversation up to the answer, and the row that it is from."""
RewardFunction: TypeAlias = Callable[[str, Mapping[str, Any]], Reward | Awaitable[Reward]]


@dataclass(eq=False)
class RewardEnv(Env):
    """One question, whose answer a function rewards."""

    renderer: Renderer
    messages: Sequence[Message]
    """The conversation up to the answer."""
    row: Mapping[str, Any]
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
class RewardDatasetBuilder(SplitNames, ProblemDatasetBuilder):
    """Groups of `RewardEnv`, one for each row with a prompt (docs/reference/data.md). An answer at
    the end of the row's conversation is not part of the prompt. The reward function gets the whole
    row.
    """

    dataset: str = chz.field(doc="file, directory with train and test files, or hub name")
    reward: RewardFunction
    test_size: int = chz.field(
        default=0, doc="single file: number of rows at its end that are held out for evaluation"
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return (training dataset, test dataset). The test dataset is None without test rows.
        Raises UserError if there are no rows to train on.
        """
        train = await asyncio.to_thread(self._questions, self.train_split or "train")
        test: list[Question] = []
        if not 0 <= self.test_size < len(train):
            raise UserError(
                f"test_size={self.test_size}: there are {len(train)} rows; give fewer, 0 for no "
                "tests"
            )
        if self.test_size and self.test_split:
            raise UserError(
                f"test_size={self.test_size}: rows are held out of training, and "
                f"test_split={self.test_split} names test rows too; leave one of the two out"
            )
        if self.test_size:
            train, test = train[: -self.test_size], train[-self.test_size :]
        elif self.test_split or await asyncio.to_thread(has_split, self.dataset, "test"):
            test = await asyncio.to_thread(self._questions, self.test_split or "test")
        train_set = self.shuffled(train, places=[row.location for _, row in train])
        return train_set, self.evaluation(test, places=[row.location for _, row in test])

    def make_env(self, problem: Question) -> RewardEnv:
        """Return the environment of one answer."""
        messages, row = problem
        return RewardEnv(self.renderer, cast(Sequence[Message], messages), row, self.reward)

    def tag(self) -> str:
        """Return "rewards"."""
        return "rewards"

    def _questions(self, split: str) -> list[Question]:
        return [(prompt_of(row, row.location), row) for row in load_rows(self.dataset, split)]
