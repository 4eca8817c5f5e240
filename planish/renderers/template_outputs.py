"""The outputs of a chat template for the beginnings of one conversation."""

import json
from collections.abc import Container, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from planish.errors import UserError
from planish.renderers.messages import CheckedMessage
from planish.renderers.template_markup import ChatTemplate, Markers, Rendering
from planish.renderers.template_process import TemplateRefusedError
from planish.renderers.template_traits import TemplateTraits


class TemplateOutputs:
    """The outputs of a chat template for a conversation up to different messages."""

    def __init__(
        self, template: ChatTemplate, traits: TemplateTraits, messages: Sequence[CheckedMessage]
    ) -> None:
        """Raises ValueError if the template cannot write one of the messages."""
        self.template = template
        self.traits = traits
        self.messages = [self._writable(index, message) for index, message in enumerate(messages)]
        self.markers = Markers.absent_from([text for one in messages for text in _texts(one)])
        self._renderings: dict[tuple[int, bool], Rendering] = {}
        first = messages[0] if messages else None
        if first and first.tools and traits.tools_need_system and not first.text.strip():
            raise ValueError(
                "messages[0] offers tools, and the chat template writes tools only in a system "
                "message: give the message a content"
            )

    def _writable(self, index: int, message: CheckedMessage) -> CheckedMessage:
        """Return a message whose calls are a part of its text if the template would leave out the
        text, or all but one of the calls.
        """
        traits = self.traits
        if traits.can_write(len(message.calls), message.text):
            return message
        syntax = traits.syntax
        if syntax is None or not traits.writes_raw_calls or (syntax.form and syntax.form.xml):
            what = "text and tool calls" if message.text.strip() else "several tool calls"
            raise ValueError(
                f"messages[{index}] has {what}, and the chat template leaves out a part of them; "
                "remove the text, and give one call in a message"
            )
        raw = tuple(map(syntax.write, message.calls))
        return replace(message, calls=(), unparsed_calls=(*raw, *message.unparsed_calls))

    @cached_property
    def _tools(self) -> list[Any]:
        tools = self.messages[0].tools if self.messages else ()
        return self.template.guard_all([json.loads(tool) for tool in tools], self.markers)

    def up_to(self, count: int, prompt: bool) -> Rendering:
        """Return the output for the first `count` messages."""
        if (count, prompt) not in self._renderings:
            self._renderings[count, prompt] = self._render(count, prompt)
        return self._renderings[count, prompt]

    def _render(self, count: int, prompt: bool) -> Rendering:
        marked: Sequence[int] = range(count)
        plain, rendering = self._render_marked(count, prompt, (), marked)
        if rendering.code != plain.code:
            # The template compares texts with others, such as `/no_think` at the end of a text. So
            # these texts get no edges.
            ones = self._render_marked(count, prompt, *((index,) for index in marked))
            marked = [index for index, one in enumerate(ones) if one.code == plain.code]
            [rendering] = self._render_marked(count, prompt, marked)
        unmarked = set(range(count)) - set(marked)
        if rendering.code != plain.code or any(map(self._may_complete_mark, unmarked)):
            raise ValueError(
                "the chat template reads the texts of the messages, or gives two texts for one "
                "conversation; name the renderer of the model's family"
            )
        # What a template leaves out of the history of an answer is in the prompt of the answer.
        is_answered = not prompt and self.messages[count - 1].role == "assistant"
        for index in range(count - 1 if is_answered else 0, count):
            message = self.messages[index]
            text = message.text.strip()
            is_written = 2 * index in rendering.places if index in marked else text in plain.code
            if text and not is_written and message.is_given:
                raise ValueError(
                    f"messages[{index}]: the chat template leaves out the text of this message; "
                    "remove the message, or name the renderer of the model's family"
                )
        return rendering

    def _render_marked(self, count: int, prompt: bool, *marked: Container[int]) -> list[Rendering]:
        """Return the output for the first `count` messages, once for each set of messages whose
        texts have edges.
        """
        form, messages = self.traits.form, self.messages[:count]
        variants = [form.messages(messages, self.template, self.markers, one) for one in marked]
        try:
            return self.template.render_all(
                variants, self.markers, prompt=prompt, tools=self._tools
            )
        except TemplateRefusedError as error:
            raise RejectedError(
                f"the chat template rejects the conversation: {error.reason}"
            ) from None

    def _may_complete_mark(self, index: int) -> bool:
        """Return whether a text without edges could form a control token with the markup beside
        it.
        """
        message = self.messages[index]
        return any(
            text.startswith(mark[cut:]) or text.endswith(mark[:cut])
            for text in (message.text.strip(), (message.thinking or "").strip())
            for mark in self.template.marks
            for cut in range(1, len(mark))
        )


class RejectedError(UserError):
    """The template rejected a conversation."""


def _texts(message: CheckedMessage) -> list[str]:
    """Return all texts of a message."""
    calls = [part for call in message.calls for part in call]
    texts = [message.text, message.thinking or "", message.name, message.call_id]
    return [*texts, *calls, *message.unparsed_calls, *message.tools]
