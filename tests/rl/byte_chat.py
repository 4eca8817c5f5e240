"""Byte-token conversations: a policy with scripted answers, and a driver for one environment."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from planish.completers import TokenCompleter, TokensWithLogprobs
from planish.renderers import Renderer
from planish.rl.environments.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from planish.rl.types import InitialObservationOverflow, StepResult
from planish.types import ModelInput

END = "<|im_end|>"


def tokens_of(renderer: Renderer, text: str) -> list[int]:
    """Return the tokens of `text` as a model samples them: control tokens are parsed."""
    return renderer.tokenizer.encode(text, add_special_tokens=False)


@dataclass
class Episode:
    """The record of one episode."""

    prompts: list[list[int]]
    actions: list[list[int]]
    steps: list[StepResult]


def play(env: EnvFromMessageEnv, *answers: str | list[int]) -> Episode:
    """Step the environment with the answers in order. An answer that ends with "..." in place of
    `END` was truncated.
    """
    return asyncio.run(play_async(env, *answers))


async def play_async(env: EnvFromMessageEnv, *answers: str | list[int]) -> Episode:
    first = await env.initial_observation()
    assert not isinstance(first, InitialObservationOverflow)
    episode = Episode([first[0].to_ints()], [], [])
    for answer in answers:
        action = tokens_of(env.renderer, answer) if isinstance(answer, str) else answer
        is_cut = isinstance(answer, str) and answer.endswith("...")
        step = await env.step(action, extra={"stop_reason": "length" if is_cut else "stop"})
        episode.actions.append(action)
        episode.steps.append(step)
        if step.episode_done:
            break
        episode.prompts.append(step.next_observation.to_ints())
    return episode


@dataclass
class ScriptedPolicy(TokenCompleter):
    """Returns the answers in order, with a logprob of -1 per token."""

    renderer: Renderer
    answers: list[str]
    prompts: list[list[int]] = field(default_factory=list)

    async def __call__(
        self, model_input: ModelInput, stop: Any, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        self.prompts.append(model_input.to_ints())
        tokens = tokens_of(self.renderer, self.answers[len(self.prompts) - 1])
        await asyncio.sleep(0)
        return TokensWithLogprobs(tokens, [-1.0] * len(tokens))


@dataclass
class Counting(MessageEnv):
    """Answers each message with the number of messages so far; is done after `turns` messages."""

    turns: int = 100
    keeps_all: bool = False
    """Whether `seen` includes the messages that the adapter inserts."""
    last_reward: float = 0.0
    seen: list[Any] = field(default_factory=list)

    async def initial_observation(self):
        self.seen = [{"role": "user", "content": "Count."}]
        return self.seen

    async def step(self, message):
        self.seen.append(message)
        done = sum(one["role"] == "assistant" for one in self.seen) >= self.turns
        if not done:
            self.seen.append({"role": "user", "content": f"That is {len(self.seen)}."})
        return MessageStepResult(0.5, done, self.seen, {"length": len(self.seen)})

    async def observe_truncated_response(self, message):
        if not self.keeps_all:
            return None
        self.seen.append(message)
        return self.seen

    async def add_messages(self, messages):
        if not self.keeps_all:
            return None
        self.seen += messages
        return self.seen

    async def stopped_by_limit(self, reason):
        return self.last_reward, {"asked": 1.0}
