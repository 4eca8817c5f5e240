"""The conversation of an episode, as messages and as the tokens of the policy's prompt.

Tokens are the truth: what the policy wrote stays in later prompts as it was written. Rendering the
parsed messages again could give other tokens for the same text (a model may spell a word in pieces
that the tokenizer would join) or another text (blanks around a tool call), and then the policy
would be trained on positions that it never saw, and an episode of T turns would be T training
sequences instead of one. So a prompt is the prompt before it, the sampled tokens, and the rendering
of what is new (`Renderer.build_continuation`).

That holds only while history is append-only. It is rendered anew where the format rewrites history
(thinking that is left out of earlier turns), where the environment gives back other messages than
it had, and where the answer ended so that nothing can follow it.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, cast

from planish.renderers import Message, Renderer


class Conversation:
    """One episode's; `messages` and `tokens` are what the policy sees next."""

    def __init__(self, renderer: Renderer, messages: Sequence[Message]) -> None:
        self.messages = list(messages)
        self.tokens = renderer.build_generation_prompt(self.messages).to_ints()
        self._renderer = renderer
        self._known = deepcopy(self.messages)
        """The messages as the environment gave them last; without those that were put in by
        `insert`. A copy, since an environment may edit its history in place.
        """
        self._tool_calls = 0

    def numbered(self, answer: Mapping[str, Any]) -> Message:
        """A parsed answer with an id for each tool call that has none, by which its result is
        known.
        """
        calls = answer.get("tool_calls")
        if not calls:
            return cast(Message, answer)
        first = self._tool_calls
        self._tool_calls += len(calls)
        numbered = [
            {**call, "id": call.get("id") or f"call_{first + number}"}
            for number, call in enumerate(calls)
        ]
        return cast(Message, {**answer, "tool_calls": numbered})

    def replies(self, answer: Message, messages: Sequence[Message]) -> list[Message] | None:
        """What follows the policy's answer in the environment's whole conversation; None if history
        is another now.
        """
        expected = [*self._known, answer]
        return (
            list(messages[len(expected) :]) if list(messages[: len(expected)]) == expected else None
        )

    def update(self, answer: Message, sampled: Sequence[int], messages: Sequence[Message]) -> None:
        """Take the environment's whole conversation after the policy's answer."""
        replies = self.replies(answer, messages)
        if replies is None:
            self.messages = list(messages)
            self._render()
        else:
            self._append(answer, sampled, replies)
        self._known = deepcopy(list(messages))

    def insert(self, answer: Message, sampled: Sequence[int], reply: Message) -> None:
        """Put in a turn of which the environment knows nothing."""
        self._append(answer, sampled, [reply])

    def _append(self, answer: Message, sampled: Sequence[int], new: Sequence[Message]) -> None:
        number = len(self.messages)
        self.messages = [*self.messages, answer, *new]
        continuation = self._renderer.build_continuation(self.messages, number, sampled)
        if continuation is None:
            self._render()
        else:
            self.tokens = [*self.tokens, *sampled, *continuation]

    def _render(self) -> None:
        self.tokens = self._renderer.build_generation_prompt(self.messages).to_ints()
