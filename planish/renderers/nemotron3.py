r"""Nemotron 3 and 3.5: ChatML with open think blocks, XML tool calls and XML tool declarations.

The rules follow the models' chat templates, which differ from Qwen3.5's in these points:

* A conversation without a system message gets an empty one. The tools follow the system text.
* Every assistant message has a think block. Without reasoning, the block is `<think></think>`.
  Messages before the last user message lose their reasoning, unless history is preserved.
* The text of messages is not trimmed, except for the end of assistant messages.
* Ultra and 3.5 write no line breaks around `</think>`; Nano and Super write one on each side.
* The reasoning effort, if there is one, is appended to the last user message.

A prompt ends with `<think>\n`, but the template writes an answer without reasoning as
`<think></think>`. No sample can have that form, so such an answer cannot be trained with a renderer
that thinks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planish.renderers.chat_format import StopTokenFormat, Turn
from planish.renderers.chatml import END, REASONING_NOT_SAMPLED, START, tool_turn
from planish.renderers.codec import Piece
from planish.renderers.forms import THINK, THINK_END, ThoughtForm
from planish.renderers.message_parts import MessageParser, ParseOptions
from planish.renderers.messages import Capabilities, CheckedMessage, last_user_index
from planish.renderers.qwen3_5 import TAGS, read_thinking_message, xml_parser
from planish.renderers.xml_calls import (
    TOOLS_CONCLUSION,
    TOOLS_INTRODUCTION,
    XML_CALLS,
    python_text,
    xml_call_pieces,
)

EMPTY: tuple[Piece, ...] = (THINK, THINK_END)


@dataclass(frozen=True)
class Nemotron3(StopTokenFormat):
    """The format of Nemotron 3 Nano and Super, or of Nemotron 3 Ultra and 3.5."""

    stops = (END,)

    is_ultra: bool = False
    thinks: bool = True
    """Whether prompts open a think block. Otherwise they end with an empty one."""
    preserves_thinking: bool = False
    """Whether all messages keep their reasoning."""
    effort: str = ""
    """The effort in the remark at the end of the last user message; "" for no remark."""

    @property
    def capabilities(self) -> Capabilities:
        """What the format can express, and the tokens that it requires."""
        is_stable = not self.thinks or self.preserves_thinking
        return Capabilities(
            roles=("system", "user", "assistant", "tool"),
            thinking=True,
            samples_thinking=self.thinks,
            thought=ThoughtForm((), (THINK_END, *self._line_break)),
            calls=replace(
                XML_CALLS,
                end=(*XML_CALLS.end, "\n"),
                between=(),
                lead=() if self.thinks and not self.is_ultra else ("\n",),
            ),
            required=(START.text, END.text, THINK.text, THINK_END.text),
            extends=is_stable and not self.effort,
        )

    def turns(self, messages: Sequence[CheckedMessage]) -> list[Turn]:
        """Return the turns of the messages, after a system message, which may be empty."""
        has_system = messages[0].role == "system"
        turns = [Turn((START, "system\n"), (*_system(messages[0]), END), 0 if has_system else None)]
        last_query = last_user_index(messages)
        for index, message in enumerate(messages[has_system:], has_system):
            if message.role == "tool":
                turns.append(tool_turn(("\n",), messages, index, message.text, "\n"))
            elif message.role == "assistant":
                is_kept = self.preserves_thinking or index > last_query
                turns.append(self._assistant_turn(message, index, is_kept))
            else:
                text = message.text
                if index == last_query and self.effort:
                    text += f"\n\n{{reasoning effort: {self.effort}}}"
                turns.append(Turn(("\n", START, f"{message.role}\n"), (text, END), index))
        return turns

    def suffix(self, messages: Sequence[CheckedMessage], role: str) -> tuple[Piece, ...]:
        """Return the header of the next message, with an open or an empty think block."""
        if role != "assistant":
            return ("\n", START, f"{role}\n")
        return ("\n", START, "assistant\n", *((THINK, "\n") if self.thinks else EMPTY))

    def tags(self) -> Sequence[str]:
        """Return the tags of reasoning and tool calls."""
        return TAGS

    def read_message(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the sampled message that `pieces` contain."""
        return read_thinking_message(pieces, self.thinks)

    def message_parser(self, options: ParseOptions) -> MessageParser:
        """Return a parser of one assistant message whose text arrives in pieces."""
        return xml_parser(options, self.thinks)

    @property
    def _line_break(self) -> tuple[str, ...]:
        return () if self.is_ultra else ("\n",)

    def _assistant_turn(self, message: CheckedMessage, index: int, is_kept: bool) -> Turn:
        header: tuple[Piece, ...] = ("\n", START, "assistant\n")
        thought, text = message.thinking or "", message.text
        calls = [piece for call in xml_call_pieces(message, python_text) for piece in (*call, "\n")]
        reason = None
        if is_kept and thought.strip():
            header = (*header, THINK, "\n")
            think_block: tuple[Piece, ...] = (thought, *self._line_break, THINK_END)
            if self.is_ultra or text.strip() or calls:
                think_block = (*think_block, *(self._line_break if text.strip() else ()))
            if not self.thinks:
                reason = REASONING_NOT_SAMPLED
        else:
            header, think_block = (*header, *EMPTY), ()
            if thought.strip() and not calls and text.strip():
                # The template removes everything up to `</think>`, but not the line break after
                # this tag.
                think_block = self._line_break
            elif (thought.strip() or (calls and not is_kept)) and not self.is_ultra:
                text = text.lstrip()
            if self.thinks:
                reason = (
                    "it has no reasoning, and prompts of this renderer end inside a think block; "
                    "give it a thinking part, or use the renderer that disables thinking"
                )
        if (calls and (is_kept or not self.is_ultra)) or not calls:
            text = text.rstrip()
        output = (*think_block, text, *(("\n", *calls) if calls else ()), END)
        return Turn(header, output, index, sampled=True, untrainable_reason=reason)


def _system(message: CheckedMessage) -> tuple[Piece, ...]:
    """Return the pieces of the system message, () if `message` is of another role."""
    if message.role != "system":
        return ()
    if not message.tools:
        return (message.text,)
    lead = f"{message.text}\n\n" if message.text else ""
    tools = "\n".join(_tool_text(json.loads(tool)["function"]) for tool in message.tools)
    return (f"{lead}{TOOLS_INTRODUCTION}{tools}", *TOOLS_CONCLUSION)


def _tool_text(tool: Mapping[str, Any]) -> str:
    """Return the XML declaration of a tool."""
    lines = ["<function>", f"<name>{tool['name']}</name>"]
    if "description" in tool:
        lines.append(f"<description>{tool['description'].strip()}</description>")
    lines.append("<parameters>")
    parameters = tool.get("parameters") or {}
    for name, fields in (parameters.get("properties") or {}).items():
        lines += ["<parameter>", f"<name>{name}</name>"]
        if "type" in fields:
            lines.append(f"<type>{fields['type']}</type>")
        if "description" in fields:
            lines.append(f"<description>{fields['description'].strip()}</description>")
        if "enum" in fields:
            lines.append(f"<enum>{_json(fields['enum'])}</enum>")
        lines += _other_fields(fields, ("name", "type", "description", "enum"))
        lines.append("</parameter>")
    lines += _other_fields(parameters, ("type", "properties", "required"))
    if "required" in parameters:
        lines.append(f"<required>{_json(parameters['required'])}</required>")
    lines.append("</parameters>")
    lines += _other_fields(tool, ("type", "name", "description", "parameters"))
    return "\n".join([*lines, "</function>"])


def _other_fields(fields: Mapping[str, Any], excluded: Sequence[str]) -> list[str]:
    return [
        f"<{key}>{python_text(value)}</{key}>"
        for key, value in fields.items()
        if key not in excluded
    ]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
