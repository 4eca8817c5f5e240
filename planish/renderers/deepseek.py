r"""DeepSeek V3.1: `<｜User｜>text<｜Assistant｜></think>text<｜end▁of▁sentence｜>`.

The rules follow the model's chat template:

* The system message comes first and has no mark.
* A prompt ends with `<think>`, or with `</think>` if thinking is disabled. In history, `</think>`
  takes the place of the reasoning.
* Tool results have no role. The assistant continues right after them, without a mark of its own.
  Only the mode without thinking has tools, as the model card says.

The template does not say how tools are declared, so the declaration is worded as in the model card.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planish.renderers.chat_format import StopTokenFormat, Turn
from planish.renderers.chatml import read_call_section
from planish.renderers.codec import Control, Piece
from planish.renderers.forms import THINK, THINK_END, CallForm, ThoughtForm
from planish.renderers.message_parts import MessageParser, ParseOptions
from planish.renderers.messages import Capabilities, CheckedMessage
from planish.renderers.tagged_parser import CallTags, OpenCall, TaggedParser
from planish.renderers.tool_calls import raw_call_pieces, read_named_call

BOS, EOS = Control("<｜begin▁of▁sentence｜>"), Control("<｜end▁of▁sentence｜>")
USER, ASSISTANT = Control("<｜User｜>"), Control("<｜Assistant｜>")
CALLS, CALLS_END = Control("<｜tool▁calls▁begin｜>"), Control("<｜tool▁calls▁end｜>")
CALL, CALL_END = Control("<｜tool▁call▁begin｜>"), Control("<｜tool▁call▁end｜>")
SECTION_TAGS = (CALLS, CALLS_END, CALL, CALL_END)
SEPARATOR = Control("<｜tool▁sep｜>")
OUTPUT, OUTPUT_END = Control("<｜tool▁output▁begin｜>"), Control("<｜tool▁output▁end｜>")
TAGS = tuple(tag.text for tag in (THINK, THINK_END, *SECTION_TAGS, SEPARATOR))
DEEPSEEK_CALLS = CallForm((CALL,), (SEPARATOR,), (CALL_END,), (CALLS,), (), (CALLS_END,))

TOOLS_INTRODUCTION = "\n\n## Tools\nYou have access to the following tools:\n\n"
TOOLS_CONCLUSION: tuple[Piece, ...] = (
    "\n\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n",
    CALLS,
    CALL,
    "tool_call_name",
    SEPARATOR,
    "tool_call_arguments",
    CALL_END,
    CALLS_END,
    "\n\nWhere:\n- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters "
    "Schema\n- For multiple tool calls, chain them directly without separators or spaces",
)


@dataclass(frozen=True)
class DeepSeekV3(StopTokenFormat):
    """The format of DeepSeek V3.1."""

    begin = (BOS,)
    stops = (EOS,)

    thinks: bool = False

    @property
    def capabilities(self) -> Capabilities:
        """What the format can express, and the tokens that it requires."""
        return Capabilities(
            roles=("system", "user", "assistant", *(() if self.thinks else ("tool",))),
            thinking=True,
            samples_thinking=self.thinks,
            thought=ThoughtForm((), (THINK_END,)),
            calls=None if self.thinks else DEEPSEEK_CALLS,
            required=(BOS.text, EOS.text, USER.text, ASSISTANT.text, THINK.text, THINK_END.text),
            extends=not self.thinks,
            extends_in_turn=not self.thinks,
        )

    def turns(self, messages: Sequence[CheckedMessage]) -> list[Turn]:
        """Return one turn per message. Raises ValueError for a system message that is not first."""
        turns: list[Turn] = []
        for index, message in enumerate(messages):
            follows_tool = index > 0 and messages[index - 1].role == "tool"
            if message.role == "system":
                if index:
                    raise ValueError(
                        f"messages[{index}] is a system message; DeepSeek V3 supports one only at "
                        "the start of a conversation: move its text into a user message"
                    )
                turns.append(Turn((), _system(message), index))
            elif message.role == "user":
                turns.append(Turn((USER,), (message.text,), index))
            elif message.role == "tool":
                turns.append(Turn((OUTPUT,), (message.text, OUTPUT_END), index))
            else:
                is_last = index == len(messages) - 1
                turns.append(self._assistant_turn(message, index, is_last, follows_tool))
        return turns

    def suffix(self, messages: Sequence[CheckedMessage], role: str) -> tuple[Piece, ...]:
        """Return the header of the next message. An assistant's header ends with `<think>`, or with
        `</think>` if thinking is disabled. After a tool result it is empty.
        """
        if role == "user":
            return (USER,)
        if role == "system" or messages[-1].role == "tool":
            return ()
        return (ASSISTANT, THINK if self.thinks else THINK_END)

    def tags(self) -> Sequence[str]:
        """Return the tags of reasoning and tool calls."""
        return TAGS

    def read_message(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the sampled message that `pieces` contain."""
        return read_call_section(pieces, self.thinks, SECTION_TAGS, _read_call)

    def message_parser(self, options: ParseOptions) -> MessageParser:
        """Return a parser of one assistant message whose text arrives in pieces."""
        calls = CallTags(CALL, CALL_END, _read_call, _open_call, (SEPARATOR,), (CALLS, CALLS_END))
        return TaggedParser(options, calls, begins_in_reasoning=self.thinks)

    def _assistant_turn(
        self, message: CheckedMessage, index: int, is_last: bool, follows_tool: bool
    ) -> Turn:
        header: tuple[Piece, ...] = () if follows_tool else (ASSISTANT, THINK_END)
        think_block: tuple[Piece, ...] = ()
        reason = None
        if self.thinks and is_last:
            header, think_block = (ASSISTANT, THINK), (message.thinking or "", THINK_END)
        elif message.thinking:
            reason = (
                "it has reasoning, which this renderer leaves out here; use deepseekv3_thinking "
                "for the last message of a conversation, or remove the thinking part"
            )
        output = (*think_block, message.text, *_call_pieces(message), EOS)
        return Turn(header, output, index, sampled=True, untrainable_reason=reason)


def _read_call(inner: str) -> tuple[dict[str, Any] | None, str | None]:
    name, separator, arguments = inner.partition(SEPARATOR.text)
    if not separator:
        return None, f"it has no {SEPARATOR.text}"
    return read_named_call(name.strip(), arguments)


def _open_call(inner: str) -> OpenCall | None:
    name, _, arguments = inner.partition(SEPARATOR.text)
    arguments = arguments.lstrip()
    return (name.strip(), arguments, None) if arguments else None


def _call_pieces(message: CheckedMessage) -> list[Piece]:
    pieces: list[Piece] = []
    for call in message.calls:
        pieces += [CALL, call.name, SEPARATOR, call.arguments, CALL_END]
    for raw in message.unparsed_calls:
        pieces += raw_call_pieces(raw, CALL, CALL_END, [SEPARATOR.text])
    return [CALLS, *pieces, CALLS_END] if pieces else []


def _system(message: CheckedMessage) -> tuple[Piece, ...]:
    if not message.tools:
        return (message.text,)
    tools = [json.loads(tool)["function"] for tool in message.tools]
    texts = [
        f"### {tool['name']}\nDescription: {tool.get('description', '')}\n\n"
        f"Parameters: {json.dumps(tool.get('parameters', {}), ensure_ascii=False)}"
        for tool in tools
    ]
    return (message.text + TOOLS_INTRODUCTION + "\n".join(texts), *TOOLS_CONCLUSION)
