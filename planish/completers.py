"""Policies as async functions: from tokens to tokens, or from messages to a message.

A rollout samples its policy through a TokenCompleter, which returns tokens with logprobs. A
MessageCompleter is for other models in an environment, such as an opponent or a judge, where tokens
do not matter. Calling a completer does not train anything.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from planish.errors import UserError
from planish.types import Constraint, ModelInput, SampleResponse, SamplingParams, StopReason

if TYPE_CHECKING:
    from planish.renderers import Message, Renderer

StopCondition = list[str] | list[int]


@dataclass(frozen=True)
class TokensWithLogprobs:
    """The tokens that a policy sampled in one turn."""

    tokens: list[int]
    maybe_logprobs: list[float] | None
    """The logprob of each token at the sampling temperature. None if the policy does not return
    logprobs; such tokens cannot be trained on.
    """
    stop_reason: StopReason = "stop"
    sequence_id: str | None = None
    prompt_cache_hit_tokens: int = 0

    @property
    def logprobs(self) -> list[float]:
        """The logprob of each token. Raises ValueError if the policy did not return logprobs."""
        if self.maybe_logprobs is None:
            raise ValueError(
                "these tokens have no logprobs, because their policy does not return any; use a "
                "policy that does"
            )
        return self.maybe_logprobs


@dataclass(frozen=True)
class PromptSize:
    """The size of a prompt, as far as its model tells it; None for a number that is not known."""

    num_tokens: int | None
    """The number of tokens of the prompt."""
    context_window: int | None
    """The maximum number of tokens of a prompt and its answer together."""


class TokenCompleter(ABC):
    """A policy that takes and returns tokens."""

    @abstractmethod
    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """Sample a continuation of `model_input`, up to a `stop` or `max_tokens` (None: the
        policy's own limit).
        """

    def seeded(self, seed: int) -> TokenCompleter:
        """Return this policy with sampling seeded by `seed` and the number of the call. A policy
        that does not sample returns itself.
        """
        return self


class MessageCompleter(ABC):
    """A policy that takes a conversation and returns the next message."""

    @abstractmethod
    async def __call__(self, messages: Sequence[Message]) -> Message:
        """Return the answer to `messages`."""


class SamplesTokens(Protocol):
    """A SamplingClient, or any object with this method."""

    def sample_async(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> Awaitable[SampleResponse]:
        """Return samples of a prompt."""
        ...


@dataclass(eq=False)
class TinkerTokenCompleter(TokenCompleter):
    """A TokenCompleter that samples from a SamplingClient. The tinker cookbook uses the same name.

    A `constraint` needs `allow_off_policy`, because RL rollouts sample from this class. The
    returned logprobs are those of the policy, but constrained tokens are sampled from another
    distribution. So training on them is biased; evaluations and judges are not affected.
    """

    sampling_client: SamplesTokens
    max_tokens: int
    """Maximum tokens per call."""
    temperature: float = 1.0
    context_window: int | None = None
    """Maximum tokens of prompt and answer together; None = no limit."""
    seed: int | None = None
    constraint: Constraint | None = None
    allow_off_policy: bool = False

    def __post_init__(self) -> None:
        if self.constraint is not None and not self.allow_off_policy:
            raise UserError(
                "constraint changes the distribution that tokens are sampled from, so training on "
                "them as samples of the policy is biased; leave it out, or give "
                "allow_off_policy=True"
            )
        self._num_calls = 0

    def seeded(self, seed: int) -> TinkerTokenCompleter:
        """Return a copy whose calls sample with seeds derived from `seed`."""
        return replace(self, seed=seed)

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        params = SamplingParams(
            max_tokens=self._max_tokens_for(model_input, max_tokens),
            temperature=self.temperature,
            stop=stop,
            seed=self._next_seed(),
            constraint=self.constraint,
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

    def _max_tokens_for(self, model_input: ModelInput, max_tokens: int | None) -> int:
        limit = self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens)
        if self.context_window is None:
            return limit
        remaining = self.context_window - model_input.length
        if remaining < 1:
            raise UserError(
                f"the prompt has {model_input.length} tokens, and "
                f"context_window={self.context_window} leaves no room for an "
                "answer; shorten it, or limit the episode with max_trajectory_tokens"
            )
        return min(limit, remaining)

    def _next_seed(self) -> int | None:
        if self.seed is None:
            return None
        self._num_calls += 1
        return derived_seed(self.seed, self._num_calls)


class TinkerMessageCompleter(MessageCompleter):
    """A MessageCompleter that samples from a SamplingClient and renders messages with
    `renderer`.
    """

    def __init__(
        self,
        sampling_client: SamplesTokens,
        renderer: Renderer,
        max_tokens: int,
        stop_condition: StopCondition | None = None,
        temperature: float = 1.0,
        context_window: int | None = None,
    ) -> None:
        """`context_window`: the maximum number of tokens of a prompt and its answer together. None:
        not known, so nothing can check in advance whether long conversations fit.
        """
        self.renderer = renderer
        self.max_tokens = max_tokens
        self.context_window = context_window
        self.stop_condition = (
            renderer.get_stop_sequences() if stop_condition is None else stop_condition
        )
        self._token_completer = TinkerTokenCompleter(sampling_client, max_tokens, temperature)

    async def __call__(self, messages: Sequence[Message]) -> Message:
        prompt = self.renderer.build_generation_prompt(messages)
        answer = await self._token_completer(prompt, self.stop_condition)
        return self.renderer.parse_response(answer.tokens).message  # type: ignore[return-value]


def derived_seed(seed: int, *position: int) -> int:
    """Return a seed derived from `seed` and a position in the run, such as (step, group,
    trajectory).

    It is the same in every run, and differs between positions (up to collisions of 31 bits).
    """
    return random.Random(":".join(map(str, (seed, *position)))).getrandbits(31)
