"""Messages as the variables of a chat template.

Templates of different families want the same message in different forms: reasoning under the key
`reasoning_content` or `thinking`, the arguments of a call as an object or as JSON text, and so on.
A `MessageForm` says which form a template wants. template_traits.py finds it.
"""

import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from planish.renderers.codec import Control, split_text
from planish.renderers.messages import Call, CheckedMessage
from planish.renderers.template_markup import ChatTemplate, Markers
from planish.renderers.tool_calls import answered_call

ThinkingKey = Literal["reasoning_content", "thinking", "reasoning", "parts", "inline"]
"""Where a template reads reasoning: a key of the message, a part of the content, or a block with
tags at the start of the content.
"""
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


@dataclass(frozen=True)
class MessageForm:
    """The form of messages that a template wants."""

    has_parts: bool = False
    """Whether the content is a list of parts."""
    thinking: ThinkingKey | None = None
    """None if the template writes no reasoning."""
    think_tags: tuple[str, str] = ("<think>", "</think>")
    call_text: str | None = ""
    """The content of a message with calls and without text."""
    arguments_are_text: bool = False
    """Whether the arguments of a call are JSON text. Otherwise they are an object."""
    names_results: bool = False
    """Whether each tool result has the name of its function and the id of its call."""
    has_short_ids: bool = False
    """Whether the ids of calls are nine digits. Mistral's templates reject other ids."""
    call_tags: tuple[str, ...] = ()
    """The tags of calls. They stay control tokens in a call that could not be parsed."""

    def messages(
        self,
        checked: Sequence[CheckedMessage],
        template: ChatTemplate,
        markers: Markers,
        marked: Container[int] = (),
    ) -> list[dict[str, Any]]:
        """Return messages for the template, with guarded texts. The texts of the messages `marked`
        have edges: number 2 i for the text of message i, and 2 i + 1 for its reasoning. Raises
        ValueError if a call does not fit the form.
        """
        ids = self._call_ids(checked)
        made: list[dict[str, Any]] = []
        for index, message in enumerate(checked):
            if not message.is_given:
                continue
            text, thinking = template.guard(message.text, markers), message.thinking or ""
            thinking = template.guard(thinking, markers)
            if index in marked:
                text = markers.with_edges(text, 2 * index)
                thinking = markers.with_edges(thinking, 2 * index + 1)
            for raw in message.unparsed_calls:
                text += ("\n" if text else "") + self._guard_raw(raw, template, markers)
            one = self._message(message.role, text, thinking)
            if message.calls:
                one["content"] = one["content"] or self.call_text
                one["tool_calls"] = [
                    self._call(call, ids[index][number], index, template, markers)
                    for number, call in enumerate(message.calls)
                ]
            if message.role == "tool":
                one |= template.guard_all(self._result_keys(checked, index, ids), markers)
            made.append(one)
        return made

    def _message(self, role: str, text: str, thinking: str) -> dict[str, Any]:
        if thinking and self.thinking == "inline":
            begin, end = self.think_tags
            text = f"{begin}\n{thinking}\n{end}\n\n{text}"
        if thinking and self.thinking == "parts":
            parts = [{"type": "thinking", "thinking": thinking}]
            return {"role": role, "content": [*parts, {"type": "text", "text": text}]}
        content: Any = [{"type": "text", "text": text}] if self.has_parts else text
        if thinking and self.thinking not in (None, "inline"):
            return {"role": role, "content": content, self.thinking: thinking}
        return {"role": role, "content": content}

    def _guard_raw(self, raw: str, template: ChatTemplate, markers: Markers) -> str:
        return "".join(
            piece.text if isinstance(piece, Control) else template.guard(piece, markers)
            for piece in split_text(raw, self.call_tags)
        )

    def _call(
        self, call: Call, id_: str, index: int, template: ChatTemplate, markers: Markers
    ) -> dict[str, Any]:
        arguments: Any = template.guard(call.arguments, markers)
        if not self.arguments_are_text:
            try:
                value = json.loads(call.arguments)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, Mapping):
                raise ValueError(
                    f"messages[{index}]: arguments={call.arguments!r} is not a JSON object, and "
                    "the chat template writes each argument itself; give an object as text, such "
                    "as '{\"x\": 1}', or remove a call that max_tokens cut off"
                )
            arguments = template.guard_all(value, markers)
        function = {"name": template.guard(call.name, markers), "arguments": arguments}
        made = {"type": "function", "function": function}
        return {**made, "id": template.guard(id_, markers)} if id_ else made

    def _call_ids(self, checked: Sequence[CheckedMessage]) -> dict[int, list[str]]:
        """Return the ids of the calls of each message."""
        ids: dict[int, list[str]] = {}
        num_calls = 0
        for index, message in enumerate(checked):
            ids[index] = [
                call.id
                if call.id and (not self.has_short_ids or _SHORT_ID.fullmatch(call.id))
                else self._new_id(num_calls + number)
                for number, call in enumerate(message.calls)
            ]
            num_calls += len(message.calls)
        return ids

    def _new_id(self, number: int) -> str:
        return f"{number:09d}" if self.has_short_ids or self.names_results else ""

    def _result_keys(
        self, checked: Sequence[CheckedMessage], index: int, ids: Mapping[int, list[str]]
    ) -> dict[str, str]:
        message = checked[index]
        name, call_id = message.name, message.call_id
        call = answered_call(checked, index)
        if call is not None and (self.names_results or self.has_short_ids):
            caller = index
            while checked[caller].role == "tool":
                caller -= 1
            name = name or call.name
            call_id = ids[caller][checked[caller].calls.index(call)]
        elif self.names_results and not (name and call_id):
            raise ValueError(
                f"messages[{index}] is a tool result, and no call before it is without a result; "
                "the chat template writes the name of the function: give 'name' and 'tool_call_id'"
            )
        return {key: value for key, value in (("name", name), ("tool_call_id", call_id)) if value}
