r"""Kimi K2 Thinking, K2.5 and K2.6: `<|im_user|>user<|im_middle|>text<|im_end|>`.

The rules follow the models' chat templates:

* A default system message is written if the conversation has none. Tools are declared before it, as
  JSON (K2) or as TypeScript (K2.5, K2.6).
* Every assistant message has a think block. In history the think blocks are empty, unless the
  format keeps all reasoning. To find the end of the history, ignore the last message of the
  conversation: history ends with the last assistant message that has no tool calls.
* A tool result names the id of its call. Ids have the form `functions.name:0`.
* Prompts of K2.5 and K2.6 end with `<think>`, or with `<think></think>` if thinking is disabled.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planish.renderers.chat_format import StopTokenFormat, Turn
from planish.renderers.chatml import REASONING_NOT_SAMPLED, read_call_section
from planish.renderers.codec import Control, Piece
from planish.renderers.forms import THINK, THINK_END, CallForm, Pattern, ThoughtForm
from planish.renderers.message_parts import MessageParser, ParseOptions
from planish.renderers.messages import Call, Capabilities, CheckedMessage
from planish.renderers.tagged_parser import CallTags, OpenCall, TaggedParser
from planish.renderers.tool_calls import (
    answered_call,
    last_answer_index,
    raw_call_pieces,
    read_named_call,
)
from planish.renderers.typescript import kimi_namespace

MIDDLE, END = Control("<|im_middle|>"), Control("<|im_end|>")
ROLES = {
    "system": Control("<|im_system|>"),
    "user": Control("<|im_user|>"),
    "assistant": Control("<|im_assistant|>"),
    "tool": Control("<|im_system|>"),
}
CALLS = Control("<|tool_calls_section_begin|>")
CALLS_END = Control("<|tool_calls_section_end|>")
CALL, CALL_END = Control("<|tool_call_begin|>"), Control("<|tool_call_end|>")
SECTION_TAGS = (CALLS, CALLS_END, CALL, CALL_END)
ARGUMENTS = Control("<|tool_call_argument_begin|>")
TAGS = tuple(tag.text for tag in (THINK, THINK_END, *SECTION_TAGS, ARGUMENTS))
KIMI_CALLS = CallForm(
    begin=(CALL, "functions."),
    before_arguments=(":", Pattern("[0-9]+"), ARGUMENTS),
    end=(CALL_END,),
    opening=(CALLS,),
    closing=(CALLS_END,),
)
DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


@dataclass(frozen=True)
class Kimi(StopTokenFormat):
    """The format of Kimi K2 Thinking, or with `opens_think_block` of Kimi K2.5 and K2.6."""

    stops = (END,)

    opens_think_block: bool = False
    """Whether prompts end with `<think>` and tools are declared in TypeScript (K2.5 and K2.6)."""
    thinks: bool = True
    """Whether the model samples reasoning. Otherwise prompts end with an empty think block."""
    preserves_thinking: bool = False
    """Whether all messages keep their reasoning."""

    @property
    def capabilities(self) -> Capabilities:
        """What the format can express, and the tokens that it requires."""
        return Capabilities(
            roles=tuple(ROLES),
            thinking=True,
            samples_thinking=self.thinks,
            thought=ThoughtForm(() if self.opens_think_block else (THINK,), (THINK_END,)),
            calls=KIMI_CALLS,
            required=(*(role.text for role in ROLES.values()), MIDDLE.text, END.text),
            extends=self.preserves_thinking or not self.thinks,
        )

    def turns(self, messages: Sequence[CheckedMessage]) -> list[Turn]:
        """Return the turns of the messages, after the tools and the default system message."""
        turns: list[Turn] = []
        tools = messages[0].tools
        if tools:
            header = (ROLES["system"], "tool_declare", MIDDLE)
            turns.append(Turn(header, (self._tools(tools), END), None))
        if messages[0].role != "system":
            turns.append(Turn(self._header("system"), (DEFAULT_SYSTEM, END), None))
        last_answer = last_answer_index(messages[:-1])
        for index, message in enumerate(messages):
            if message.role == "assistant":
                is_kept = self.preserves_thinking or index > last_answer
                turns.append(self._assistant_turn(message, index, is_kept))
            elif message.role == "tool":
                turns.append(self._tool_turn(messages, index))
            else:
                text = message.text if message.is_given else DEFAULT_SYSTEM
                turns.append(Turn(self._header(message.role), (text, END), index))
        return turns

    def suffix(self, messages: Sequence[CheckedMessage], role: str) -> tuple[Piece, ...]:
        """Return the header of the next message, with the think tags of K2.5 and K2.6."""
        header = self._header(role)
        if role != "assistant" or not self.opens_think_block:
            return header
        return (*header, THINK, *(() if self.thinks else (THINK_END,)))

    def tags(self) -> Sequence[str]:
        """Return the tags of reasoning and tool calls."""
        return TAGS

    def read_message(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the sampled message that `pieces` contain."""
        return read_call_section(
            pieces, self.opens_think_block and self.thinks, SECTION_TAGS, _read_call
        )

    def message_parser(self, options: ParseOptions) -> MessageParser:
        """Return a parser of one assistant message whose text arrives in pieces."""
        calls = CallTags(CALL, CALL_END, _read_call, _open_call, (ARGUMENTS,), (CALLS, CALLS_END))
        begins_in_reasoning = self.opens_think_block and self.thinks
        return TaggedParser(options, calls, begins_in_reasoning=begins_in_reasoning)

    def _header(self, role: str) -> tuple[Piece, ...]:
        return (ROLES[role], role, MIDDLE)

    def _assistant_turn(self, message: CheckedMessage, index: int, is_kept: bool) -> Turn:
        thought = (message.thinking or "") if is_kept else ""
        think_block: tuple[Piece, ...] = (THINK, thought, THINK_END)
        header = self._header("assistant")
        reason = None
        if self.opens_think_block:
            # The prompt ends with these pieces, so they are not a target.
            supplied = 1 if self.thinks or thought else 3
            header, think_block = (*header, *think_block[:supplied]), think_block[supplied:]
        if thought and not self.thinks:
            reason = REASONING_NOT_SAMPLED
        calls: list[Piece] = []
        for number, call in enumerate(message.calls):
            calls += [CALL, call_id(call, number), ARGUMENTS, call.arguments, CALL_END]
        for raw in message.unparsed_calls:
            calls += raw_call_pieces(raw, CALL, CALL_END, [ARGUMENTS.text])
        section = (CALLS, *calls, CALLS_END) if calls else ()
        output = (*think_block, message.text, *section, END)
        return Turn(header, output, index, sampled=True, untrainable_reason=reason)

    def _tool_turn(self, messages: Sequence[CheckedMessage], index: int) -> Turn:
        message = messages[index]
        id_ = message.call_id
        if not id_:
            call = answered_call(messages, index)
            if call is None:
                raise ValueError(
                    f"messages[{index}] is a tool result without 'tool_call_id', and every call "
                    "before it has a result already; give the id of the call that it answers"
                )
            first = index
            while messages[first - 1].role == "tool":
                first -= 1
            id_ = call_id(call, index - first)
        header = (ROLES["tool"], message.name or "tool", MIDDLE, f"## Return of {id_}\n")
        return Turn(header, (message.text, END), index)

    def _tools(self, tools: Sequence[str]) -> str:
        specs = [json.loads(tool) for tool in tools]
        if self.opens_think_block:
            return kimi_namespace([spec["function"] for spec in specs])
        return json.dumps(specs, separators=(",", ":"), sort_keys=True, ensure_ascii=False)


def call_id(call: Call, number: int) -> str:
    """Return the id of `call`, or an id in Kimi's form if the call has none.

    `number`: the position of the call in its message.
    """
    return call.id or f"functions.{call.name}:{number}"


def _read_call(inner: str) -> tuple[dict[str, Any] | None, str | None]:
    id_, separator, arguments = inner.partition(ARGUMENTS.text)
    id_ = id_.strip()
    name = _ID.fullmatch(id_)
    if not separator or name is None:
        return None, f"it has no id before {ARGUMENTS.text}"
    return read_named_call(name.group(1), arguments, id_)


def _open_call(inner: str) -> OpenCall | None:
    id_, _, arguments = inner.partition(ARGUMENTS.text)
    id_, arguments = id_.strip(), arguments.lstrip()
    name = _ID.fullmatch(id_)
    return None if name is None or not arguments else (name.group(1), arguments, id_)
