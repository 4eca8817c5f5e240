"""Conversations whose last message is one of a few fixed answers. A model's choice is read off as
the logprobs of the answers.

The answers share their leading tokens and differ in one deciding token. So one request gives the
probability of every answer, and training needs one position only. Tokens that a chat format puts in
front of an answer (an empty thinking block, for instance) belong to the prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from planish import SamplingClient
from planish.errors import UserError
from planish.renderers import Renderer, TrainOnWhat
from planish.renderers.codec import token_bounds
from planish.types import Datum, ModelInput, SamplingParams, TensorData

Conversation = Sequence[Mapping[str, Any]]
EXTRA_REQUEST_TOKENS = 2
"""A request has the tokens of its prompt, a deciding token, and one sampled token."""
PROBE_CONVERSATION: Conversation = ({"role": "user", "content": "?"},)
"""A conversation used to find the deciding tokens of a format."""


@dataclass(frozen=True)
class Choice:
    """A set of fixed answers in one chat format, with the token that identifies each answer."""

    renderer: Renderer
    answers: tuple[str, ...]
    deciding_tokens: tuple[int, ...]
    """The deciding token of each answer."""
    num_shared_tokens: int
    """The number of leading tokens that all answers share."""

    @classmethod
    def between(cls, answers: Sequence[str], renderer: Renderer) -> Self:
        """Return the choice between `answers` in the format of `renderer`.

        Raise UserError if two answers share the token at the first position where any answers
        differ.
        """
        outputs = [
            _prompt_and_output(renderer, PROBE_CONVERSATION, answer)[1] for answer in answers
        ]
        columns = zip(*outputs, strict=False)
        num_shared_tokens = next(
            position for position, column in enumerate(columns) if len(set(column)) > 1
        )
        deciding_tokens = tuple(output[num_shared_tokens] for output in outputs)
        if len(set(deciding_tokens)) < len(deciding_tokens):
            raise UserError(
                f"the answers {', '.join(answers)} do not differ in their first token with "
                f"renderer {renderer.name}; give answers that begin differently"
            )
        return cls(renderer, tuple(answers), deciding_tokens, num_shared_tokens)

    def check(self, conversation: Conversation) -> None:
        """Raise ValueError for a conversation that the format cannot express. Nothing is
        tokenized.
        """
        answered = [*conversation, {"role": "assistant", "content": self.answers[0]}]
        self.renderer.check_supervised_examples(answered, TrainOnWhat.LAST_ASSISTANT_MESSAGE)

    def prompt(self, conversation: Conversation) -> list[int]:
        """Return all tokens before the deciding one."""
        prompt_tokens, output = _prompt_and_output(self.renderer, conversation, self.answers[0])
        assert output[self.num_shared_tokens] == self.deciding_tokens[0], (
            "an answer has the same tokens after every conversation"
        )
        return prompt_tokens + output[: self.num_shared_tokens]

    def require_fits(
        self,
        conversation: Conversation,
        other_tokens: int,
        context_window: int | None,
        where: str,
    ) -> None:
        """Raise UserError, which begins with `where`, if a request about the conversation with
        `other_tokens` further tokens exceeds the context window (None = not known).
        """
        if context_window is None:
            return
        needed = other_tokens + EXTRA_REQUEST_TOKENS
        with token_bounds():
            if self._prompt_length(conversation) + needed <= context_window:
                return
        needed += self._prompt_length(conversation)
        if needed > context_window:
            raise UserError(
                f"{where} needs {needed} tokens, and its context window has {context_window}; give "
                "a smaller max_tokens, a max_prompt_tokens, or a preference model with a longer "
                "context"
            )

    def _prompt_length(self, conversation: Conversation) -> int:
        prompt_tokens, _ = _prompt_and_output(self.renderer, conversation, self.answers[0])
        return len(prompt_tokens) + self.num_shared_tokens

    def datum(self, conversation: Conversation, weights: Sequence[float]) -> Datum:
        """Return a datum whose loss weights the logprobs of the K answers at the deciding position.

        `target_tokens` and `weights` have the shape (N, K) for N tokens of the prompt. Row N - 1
        holds the deciding tokens and `weights`. Every other row repeats the next token with weight
        0.
        """
        prompt, count = self.prompt(conversation), len(self.deciding_tokens)
        targets_NK = np.repeat(np.array([*prompt[1:], 0], dtype=np.int64)[:, None], count, axis=1)
        targets_NK[-1] = self.deciding_tokens
        weights_NK = np.zeros((len(prompt), count), dtype=np.float32)
        weights_NK[-1] = weights
        inputs = {
            "target_tokens": TensorData.from_numpy(targets_NK),
            "weights": TensorData.from_numpy(weights_NK),
        }
        return Datum(ModelInput.from_ints(prompt), inputs)

    async def logprobs(
        self, sampling_client: SamplingClient, conversation: Conversation
    ) -> list[float]:
        """Return the logprob of each answer's deciding token at temperature 1, with one request.

        Their probabilities need not sum to 1, because the model may say something else.
        """
        prompt = self.prompt(conversation)
        target_tokens = np.full((len(prompt), len(self.deciding_tokens)), -1, dtype=np.int64)
        target_tokens[-1] = self.deciding_tokens
        response = await sampling_client.sample_async(
            prompt=ModelInput.from_ints([*prompt, self.deciding_tokens[0]]),
            num_samples=1,
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
            target_prompt_logprobs=TensorData.from_numpy(target_tokens),
        )
        assert response.target_prompt_logprobs is not None
        return response.target_prompt_logprobs.to_numpy()[-1].tolist()


def _prompt_and_output(
    renderer: Renderer, conversation: Conversation, answer: str
) -> tuple[list[int], list[int]]:
    """Return (the tokens before the assistant's output, the tokens that the model writes)."""
    tokens, weights = renderer.build_supervised_example(
        [*conversation, {"role": "assistant", "content": answer}],
        TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    )
    start = int(weights.argmax())
    ids = tokens.to_ints()
    return ids[:start], ids[start:]
