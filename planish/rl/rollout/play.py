"""Episodes in which a list or a person answers in place of a model. Use them to try an environment
before training on it.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planish.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from planish.errors import UserError
from planish.rl.rollout.rollouts import do_group_rollout
from planish.rl.types import Env, EnvGroupBuilder, TrajectoryGroup, WrappedGroup
from planish.tokenizer import ModelTokenizer
from planish.types import ModelInput


@dataclass(frozen=True)
class Answer:
    """The text of one turn of a policy."""

    text: str
    was_cut_off: bool = False
    """Whether the answer ends without a stop sequence, as if a token limit had cut it off."""


@dataclass(eq=False)
class TextPolicy(TokenCompleter):
    """A policy whose answers are texts. They are tokenised, and each token has the logprob -1."""

    tokenizer: ModelTokenizer
    """A tokenizer of `transformers`."""
    max_tokens: int | None = None
    """The length at which answers are cut off; None = no limit."""

    @abstractmethod
    def answer(self, model_input: ModelInput) -> Answer:
        """Return the answer to a prompt."""

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """Return the tokens of the answer. Unless the answer was cut off, the first stop sequence
        follows.
        """
        answer = self.answer(model_input)
        tokens = list(self.tokenizer.encode(answer.text, add_special_tokens=False))
        if not answer.was_cut_off and stop:
            end = stop[0]
            if isinstance(end, int):
                tokens.append(end)
            else:
                tokens += self.tokenizer.encode(end, add_special_tokens=False)
        limits = [limit for limit in (self.max_tokens, max_tokens) if limit is not None]
        limit = min(limits, default=len(tokens))
        was_cut_off = answer.was_cut_off or len(tokens) > limit
        tokens = tokens[:limit]
        return TokensWithLogprobs(tokens, [-1.0] * len(tokens), "length" if was_cut_off else "stop")


class ScriptedPolicy(TextPolicy):
    """A policy that returns given answers in order. A call after the last answer raises
    UserError.
    """

    def __init__(self, tokenizer: ModelTokenizer, answers: Iterable[str | Answer]) -> None:
        super().__init__(tokenizer)
        self._answers = list(answers)
        self._next = 0

    def answer(self, model_input: ModelInput) -> Answer:
        """Return the next answer of the list. Raises UserError after the last one."""
        if self._next == len(self._answers):
            raise UserError(
                f"answers: all {self._next} answers were used and the episode has not ended; give "
                "more"
            )
        answer = self._answers[self._next]
        self._next += 1
        return Answer(answer) if isinstance(answer, str) else answer


@dataclass(frozen=True)
class FirstEnvOnly(WrappedGroup):
    """A group with only the first environment of another group."""

    async def make_envs(self) -> Sequence[Env]:
        """Return the first of the other group's new environments."""
        return list(await self.inner.make_envs())[:1]


def play(
    builder: EnvGroupBuilder, *answers: str | Answer, tokenizer: ModelTokenizer
) -> TrajectoryGroup:
    """Roll out one group with given answers and grade it as in training.

    The environments of a group run concurrently, and each answer goes to the environment that asks
    next. `FirstEnvOnly(builder)` has the first environment only. `tokenizer` is that of the
    renderer. Errors of the environment are raised unchanged; too few answers raise UserError. In a
    running event loop, await `do_group_rollout(builder, ScriptedPolicy(tokenizer, answers))`
    instead.
    """
    group = asyncio.run(do_group_rollout(builder, ScriptedPolicy(tokenizer, answers)))
    assert group is not None, "FailFast, the default strategy, drops no group"
    return group
