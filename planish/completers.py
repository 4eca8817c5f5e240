"""Policies as functions: tokens in and tokens out, or messages in and a message out.

An environment is played by a TokenCompleter. A MessageCompleter is for parts of an environment that
talk (an opponent, a judge) and do not care for tokens. Neither is trained by being called: what was
sampled, with its logprobs, comes back.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planish.errors import UserError
from planish.types import ModelInput, SamplingParams, StopReason

if TYPE_CHECKING:
    from planish.renderers import Message, Renderer

StopCondition = list[str] | list[int]


@dataclass(frozen=True)
class TokensWithLogprobs:
    """What a policy wrote in one turn."""

    tokens: list[int]
    maybe_logprobs: list[float] | None
    """Of each token at the sampler's temperature; None if the policy has none, and then it cannot
    be trained on.
    """
    stop_reason: StopReason = "stop"
    sequence_id: str | None = None
    prompt_cache_hit_tokens: int = 0

    @property
    def logprobs(self) -> list[float]:
        if self.maybe_logprobs is None:
            raise ValueError(
                "these tokens have no logprobs: they come from a policy that gives none"
            )
        return self.maybe_logprobs


class TokenCompleter(ABC):
    """A policy over tokens."""

    @abstractmethod
    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """Go on from `model_input` until a stop, or at most `max_tokens` (None: the policy's own
        limit).
        """

    def seeded(self, seed: int) -> TokenCompleter:
        """This policy with draws that are a function of `seed` and the number of the call; itself
        if it draws nothing.
        """
        return self


class MessageCompleter(ABC):
    """A policy over messages."""

    @abstractmethod
    async def __call__(self, messages: Sequence[Message]) -> Message: ...


class TinkerTokenCompleter(TokenCompleter):
    """The policy that a sampling client holds. The name is the one that programs of this field
    know.
    """

    def __init__(
        self,
        sampling_client: Any,
        max_tokens: int,
        temperature: float = 1.0,
        context_window: int | None = None,
        seed: int | None = None,
    ) -> None:
        """`context_window`: with it, an answer gets no more tokens than the prompt leaves room for."""
        self.sampling_client = sampling_client
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.context_window = context_window
        self.seed = seed
        self._calls = 0

    def seeded(self, seed: int) -> TinkerTokenCompleter:
        return TinkerTokenCompleter(
            self.sampling_client, self.max_tokens, self.temperature, self.context_window, seed=seed
        )

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        params = SamplingParams(
            max_tokens=self._room(model_input, max_tokens),
            temperature=self.temperature,
            stop=stop,
            seed=self._next_seed(),
        )
        response = await self.sampling_client.sample_async(
            prompt=model_input, num_samples=1, sampling_params=params
        )
        [sequence] = response.sequences
        return TokensWithLogprobs(
            sequence.tokens,
            sequence.logprobs,
            sequence.stop_reason,
            sequence.sequence_id,
            response.prompt_cache_hit_tokens,
        )

    def _room(self, model_input: ModelInput, max_tokens: int | None) -> int:
        most = self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens)
        if self.context_window is None:
            return most
        room = self.context_window - model_input.length
        if room < 1:
            raise UserError(
                f"the prompt has {model_input.length} tokens, and context_window={self.context_window} leaves no room for an "
                "answer; shorten it, or bound the episode with max_trajectory_tokens"
            )
        return min(most, room)

    def _next_seed(self) -> int | None:
        if self.seed is None:
            return None
        self._calls += 1
        return derived_seed(self.seed, self._calls)


class TinkerMessageCompleter(MessageCompleter):
    """The policy that a sampling client holds, for messages."""

    def __init__(
        self,
        sampling_client: Any,
        renderer: Renderer,
        max_tokens: int,
        stop_condition: StopCondition | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.renderer = renderer
        self.stop_condition = (
            renderer.get_stop_sequences() if stop_condition is None else stop_condition
        )
        self._complete = TinkerTokenCompleter(sampling_client, max_tokens, temperature)

    async def __call__(self, messages: Sequence[Message]) -> Message:
        prompt = self.renderer.build_generation_prompt(messages)
        answer = await self._complete(prompt, self.stop_condition)
        return self.renderer.parse_response(answer.tokens).message  # type: ignore[return-value]


def derived_seed(seed: int, *place: int) -> int:
    """A seed for one place of a run, such as (step, group, trajectory): the same in every run,
    unlike at every other place.
    """
    return random.Random(":".join(map(str, (seed, *place)))).getrandbits(31)
