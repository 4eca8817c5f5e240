"""Episodes with a policy that is no model: answers that are written down, or a person's. The way to
try an environment before anything is trained on it.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from planish.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from planish.errors import UserError
from planish.rl.rollout.rollouts import do_group_rollout
from planish.rl.types import Env, EnvGroupBuilder, Metrics, Trajectory, TrajectoryGroup
from planish.types import ModelInput


@dataclass(frozen=True)
class Answer:
    """What a policy writes in one turn."""

    text: str
    was_cut_off: bool = False
    """The answer has no end, as if its token limit had been reached."""


class AnswersAsTokens(TokenCompleter):
    """A policy that answers in text. Each token has the logprob -1."""

    def __init__(self, tokenizer: Any, max_tokens: int | None = None) -> None:
        """`tokenizer`: of `transformers`. `max_tokens`: longer answers are cut off; None: never."""
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens

    @abstractmethod
    def answer(self, model_input: ModelInput) -> Answer:
        """The answer to a prompt."""

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        answer = self.answer(model_input)
        tokens = list(self.tokenizer.encode(answer.text, add_special_tokens=False))
        if not answer.was_cut_off and stop:
            end = stop[0]
            tokens += (
                [end]
                if isinstance(end, int)
                else self.tokenizer.encode(end, add_special_tokens=False)
            )
        limits = [limit for limit in (self.max_tokens, max_tokens) if limit is not None]
        most = min(limits, default=len(tokens))
        was_cut_off = answer.was_cut_off or len(tokens) > most
        tokens = tokens[:most]
        return TokensWithLogprobs(tokens, [-1.0] * len(tokens), "length" if was_cut_off else "stop")


class ScriptedPolicy(AnswersAsTokens):
    """A policy that gives these answers, in the order in which it is asked."""

    def __init__(self, tokenizer: Any, answers: Iterable[str | Answer]) -> None:
        super().__init__(tokenizer)
        self._answers = list(answers)
        self._given = 0

    def answer(self, model_input: ModelInput) -> Answer:
        if self._given == len(self._answers):
            raise UserError(
                f"answers: all {self._given} were given and the episode goes on; give more"
            )
        answer = self._answers[self._given]
        self._given += 1
        return Answer(answer) if isinstance(answer, str) else answer


@dataclass(frozen=True)
class FirstEnv(EnvGroupBuilder):
    """The first environment of a group, graded alone."""

    builder: EnvGroupBuilder

    async def make_envs(self) -> Sequence[Env]:
        return list(await self.builder.make_envs())[:1]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        return await self.builder.compute_group_rewards(trajectory_group, env_group)

    async def cleanup(self) -> None:
        await self.builder.cleanup()

    def logging_tags(self) -> list[str]:
        return self.builder.logging_tags()


def play(builder: EnvGroupBuilder, *answers: str | Answer, tokenizer: Any) -> TrajectoryGroup:
    """Play one group with written answers and grade it, as in training.

    The environments take turns: with several in the group, the first answers go to their first
    turns. `tokenizer` is that of the renderer. Errors of the environment are raised as they are;
    UserError if the answers do not suffice. Not for code that runs in an event loop, which awaits
    `do_group_rollout(builder, ScriptedPolicy(tokenizer, answers))`.
    """
    group = asyncio.run(do_group_rollout(builder, ScriptedPolicy(tokenizer, answers)))
    assert group is not None, "without a strategy that drops groups there is one"
    return group
