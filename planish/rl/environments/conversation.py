"""The conversation of an episode, as messages and as the tokens of the policy's prompt.

The sampled tokens of an answer stay in later prompts unchanged. Rendering the parsed messages again
could give other tokens for the same text (a model may split a word into tokens that the tokenizer
would merge) or another text (spaces around a tool call). The policy would then be trained on
positions that it never saw, and an episode of T turns would become T training sequences instead of
one. So each prompt consists of the prompt before it, the sampled tokens, and the rendering of the
new messages (`Renderer.build_continuation`).

This works only while messages are appended. The whole conversation is rendered again in three
cases:

* The chat format rewrites history: some formats remove the thinking of earlier turns.
* The environment changes earlier messages.
* No message can be appended to the answer, because of its last tokens
  (`Renderer.build_continuation` returns None).
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, cast

from planish.renderers import Message, Renderer
from planish.types import EncodedTextChunk, ModelInput, ModelInputChunk


class Conversation:
    """The conversation of one episode; `messages` and `prompt` are the policy's next prompt."""

    def __init__(self, renderer: Renderer, messages: Sequence[Message]) -> None:
        self.messages = list(messages)
        self.prompt = renderer.build_generation_prompt(self.messages)
        """The tokens and images of the prompt."""
        self._renderer = renderer
        self._env_messages = deepcopy(self.messages)
        """The conversation that the environment returned last. It lacks the messages of `insert`.
        It is a copy, since an environment may edit its messages in place.
        """
        self._num_tool_calls = 0

    def with_call_ids(self, answer: Mapping[str, Any]) -> Message:
        """Return a parsed answer with an id in each tool call. Tool results refer to these ids."""
        calls = answer.get("tool_calls")
        if not calls:
            return cast(Message, answer)
        first = self._num_tool_calls
        self._num_tool_calls += len(calls)
        calls_with_ids = [
            {**call, "id": call.get("id") or f"call_{first + index}"}
            for index, call in enumerate(calls)
        ]
        return cast(Message, {**answer, "tool_calls": calls_with_ids})

    def replies(self, answer: Message, messages: Sequence[Message]) -> list[Message] | None:
        """Return the messages after the policy's answer. `messages` is the environment's whole
        conversation. None if earlier messages have changed.
        """
        expected = [*self._env_messages, answer]
        if list(messages[: len(expected)]) != expected:
            return None
        return list(messages[len(expected) :])

    def update(
        self, answer: Message, sampled_ids: Sequence[int], messages: Sequence[Message]
    ) -> None:
        """Set the conversation to `messages`, the environment's whole conversation. `sampled_ids`
        are the tokens of the policy's last answer.
        """
        replies = self.replies(answer, messages)
        if replies is None:
            self.messages = list(messages)
            self._render()
        else:
            self._append(answer, sampled_ids, replies)
        self._env_messages = deepcopy(list(messages))

    def insert(self, answer: Message, sampled_ids: Sequence[int], reply: Message) -> None:
        """Append an answer and a reply that the environment does not see."""
        self._append(answer, sampled_ids, [reply])

    def _append(
        self, answer: Message, sampled_ids: Sequence[int], replies: Sequence[Message]
    ) -> None:
        index = len(self.messages)
        self.messages = [*self.messages, answer, *replies]
        continuation = self._renderer.build_continuation(self.messages, index, sampled_ids)
        if continuation is None:
            self._render()
        else:
            sampled = EncodedTextChunk(list(sampled_ids))
            self.prompt = _joined([*self.prompt.chunks, sampled, *continuation.chunks])

    def _render(self) -> None:
        self.prompt = self._renderer.build_generation_prompt(self.messages)


def _joined(chunks: Sequence[ModelInputChunk]) -> ModelInput:
    """Return the input with these chunks, in which adjacent chunks of text are one chunk."""
    joined: list[ModelInputChunk] = []
    for chunk in chunks:
        last = joined[-1] if joined else None
        if isinstance(chunk, EncodedTextChunk) and isinstance(last, EncodedTextChunk):
            joined[-1] = EncodedTextChunk([*last.tokens, *chunk.tokens])
        else:
            joined.append(chunk)
    return ModelInput(joined)
