"""A conversation that ends with one of a few fixed answers: what a model makes of it is the
logprobs of their first tokens.

An answer is told from the others by one token, the first in which they differ, so one request gives
the probability of every answer, and one position is learned. What a format puts in front of an
answer (an empty thinking block, for instance) belongs to the prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from planish import SamplingClient
from planish.errors import UserError
from planish.renderers import Renderer, TrainOnWhat
from planish.types import Datum, ModelInput, SamplingParams, TensorData

Conversation = Sequence[Mapping[str, Any]]
PROBE: Conversation = ({"role": "user", "content": "?"},)


@dataclass(frozen=True)
class Choice:
    renderer: Renderer
    answers: tuple[str, ...]
    tokens: tuple[int, ...]
    """By which each answer is told from the others."""
    lead: int
    """Tokens that the model writes before that one, whatever the answer."""

    @classmethod
    def between(cls, answers: Sequence[str], renderer: Renderer) -> Self:
        """UserError if two answers of this format differ only after their first tokens."""
        written = [_written(renderer, PROBE, answer) for answer in answers]
        columns = zip(*(each.output for each in written), strict=False)
        lead = next(place for place, column in enumerate(columns) if len(set(column)) > 1)
        tokens = tuple(each.output[lead] for each in written)
        if len(set(tokens)) < len(tokens):
            raise UserError(
                f"the answers {', '.join(answers)} are not told apart by one token of renderer {renderer.name}; "
                "give answers that begin differently"
            )
        return cls(renderer, tuple(answers), tokens, lead)

    def check(self, conversation: Conversation) -> None:
        """ValueError for a conversation that the format cannot write; no tokens are made."""
        answered = [*conversation, {"role": "assistant", "content": self.answers[0]}]
        self.renderer.check_supervised_examples(answered, TrainOnWhat.LAST_ASSISTANT_MESSAGE)

    def prompt(self, conversation: Conversation) -> list[int]:
        """All tokens before the one that decides."""
        written = _written(self.renderer, conversation, self.answers[0])
        assert written.output[self.lead] == self.tokens[0], (
            "an answer has the same tokens after every conversation"
        )
        return written.before + written.output[: self.lead]

    def datum(self, conversation: Conversation, weights: Sequence[float]) -> Datum:
        """The conversation with `weights` on the logprobs of the answers, at the one position where
        they are given.

        Its targets are (N, K): at each position but the last K times the token that follows, with
        weight 0.
        """
        prompt, count = self.prompt(conversation), len(self.tokens)
        targets = np.repeat(np.array([*prompt[1:], 0], dtype=np.int64)[:, None], count, axis=1)
        targets[-1] = self.tokens
        weighted = np.zeros((len(prompt), count), dtype=np.float32)
        weighted[-1] = weights
        inputs = {
            "target_tokens": TensorData.from_numpy(targets),
            "weights": TensorData.from_numpy(weighted),
        }
        return Datum(ModelInput.from_ints(prompt), inputs)

    async def logprobs(
        self, sampling_client: SamplingClient, conversation: Conversation
    ) -> list[float]:
        """Of each answer, at temperature 1, by one request. They are no distribution: a model may
        say something else.
        """
        prompt = self.prompt(conversation)
        asked = np.full((len(prompt), len(self.tokens)), -1, dtype=np.int64)
        asked[-1] = self.tokens
        response = await sampling_client.sample_async(
            prompt=ModelInput.from_ints([*prompt, self.tokens[0]]),
            num_samples=1,
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
            target_prompt_logprobs=TensorData.from_numpy(asked),
        )
        assert response.target_prompt_logprobs is not None
        return response.target_prompt_logprobs.to_numpy()[-1].tolist()


@dataclass(frozen=True)
class _Written:
    before: list[int]
    output: list[int]
    """What the model writes."""


def _written(renderer: Renderer, conversation: Conversation, answer: str) -> _Written:
    tokens, weights = renderer.build_supervised_example(
        [*conversation, {"role": "assistant", "content": answer}],
        TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    )
    begin = int(weights.argmax())
    ids = tokens.to_ints()
    return _Written(ids[:begin], ids[begin:])
