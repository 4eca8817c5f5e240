r"""Qwen3.5, Qwen3.6 and Qwen3.8: ChatML with open think blocks and XML tool calls.

The rules follow the models' chat templates:

* The text of every message is trimmed. In Qwen3.5 and Qwen3.6, the text after a think block that is
  part of a string keeps the spaces at its start.
* A prompt ends with `<think>\n`, or with an empty think block if thinking is disabled.
* An assistant message after the last user message has a think block, which is empty without
  reasoning. Earlier messages have one only if history is preserved (the default of Qwen3.8).
* Qwen3.8 states a reasoning effort at the start of the system message, and adds a system message
  for it if there is none. It leaves out an empty system message.

With thinking, some prompts do not begin with the tokens of the prompt before them. A sampled answer
without reasoning begins with a line break, directly after the line break that ends the prompt's
`<think>\n`. When a later prompt contains this answer as history, the tokenizer merges the two line
breaks into one token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planish.renderers.chat_format import StopTokenFormat, Turn
from planish.renderers.chatml import (
    EMPTY_THOUGHT,
    END,
    REASONING_NOT_SAMPLED,
    START,
    begun_in_thought,
    split_thought,
    tool_turn,
    with_thought,
)
from planish.renderers.codec import Piece
from planish.renderers.forms import THINK, THINK_END, ThoughtForm
from planish.renderers.message_parts import MessageParser, ParseOptions
from planish.renderers.messages import Capabilities, CheckedMessage, last_user_index
from planish.renderers.tagged_parser import CallTags, TaggedParser, TextRules
from planish.renderers.tool_calls import CALL_TAGS, read_calls
from planish.renderers.xml_calls import (
    TOOLS_CONCLUSION,
    TOOLS_INTRODUCTION,
    XML_CALLS,
    json_text,
    python_text,
    read_xml_call,
    xml_call_pieces,
)

EFFORTS = {
    "xhigh": "Reasoning effort is set to xhigh. Please think carefully through the task, validate "
    "key assumptions, consider plausible alternatives, and prioritize correctness, consistency, "
    "and clarity in the final answer.",
    "medium": "",
    "low": "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly "
    "to the conclusion without unnecessary elaboration.",
}
TAGS = (THINK.text, THINK_END.text, *CALL_TAGS)


@dataclass(frozen=True)
class Qwen35(StopTokenFormat):
    """The format of Qwen3.5 to Qwen3.8."""

    stops = (END,)

    thinks: bool = True
    """Whether prompts open a think block. Otherwise they end with an empty one."""
    preserves_thinking: bool = False
    """Whether all messages keep their think blocks."""
    effort: str | None = None
    """A key of EFFORTS for Qwen3.8; None for earlier models."""

    @property
    def capabilities(self) -> Capabilities:
        """What the format can express, and the tokens that it requires."""
        return Capabilities(
            roles=("system", "user", "assistant", "tool"),
            thinking=True,
            samples_thinking=self.thinks,
            thought=ThoughtForm((), (THINK_END, "\n\n")),
            calls=XML_CALLS,
            required=(START.text, END.text, THINK.text, THINK_END.text),
            extends=self.preserves_thinking and not self.thinks,
            extends_in_turn=not self.thinks,
        )

    def turns(self, messages: Sequence[CheckedMessage]) -> list[Turn]:
        """Return the turns of the messages, with Qwen3.8's reasoning effort in a system message."""
        turns: list[Turn] = []
        system = self._system(messages)
        is_first = messages[0].role == "system"
        if system:
            index = 0 if is_first else None
            turns.append(Turn((START, "system\n"), (*system, END), index))
        elif is_first:
            reason = "the format leaves out an empty system message"
            turns.append(Turn((), (), 0, untrainable_reason=reason))
        last_query = last_user_index(messages)
        for index, message in enumerate(messages):
            separator = ("\n",) if system or index > is_first else ()
            if message.role == "tool":
                turns.append(tool_turn(separator, messages, index, message.text.strip()))
            elif message.role == "assistant":
                is_last = index == len(messages) - 1
                has_think_block = self.preserves_thinking or index > last_query
                turns.append(
                    self._assistant_turn(separator, message, index, has_think_block, is_last)
                )
            elif index or not is_first:
                header = (*separator, START, f"{message.role}\n")
                turns.append(Turn(header, (message.text.strip(), END), index))
        return turns

    def suffix(self, messages: Sequence[CheckedMessage], role: str) -> tuple[Piece, ...]:
        """Return the header of the next message, with an open or an empty think block."""
        is_written = self._system(messages) or len(messages) > (messages[0].role == "system")
        separator = ("\n",) if is_written else ()
        if role != "assistant":
            return (*separator, START, f"{role}\n")
        return (
            *separator,
            START,
            "assistant\n",
            *((THINK, "\n") if self.thinks else EMPTY_THOUGHT),
        )

    def tags(self) -> Sequence[str]:
        """Return the tags of reasoning and tool calls."""
        return TAGS

    def read_message(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the sampled message that `pieces` contain."""
        return read_thinking_message(pieces, self.thinks)

    def message_parser(self, options: ParseOptions) -> MessageParser:
        """Return a parser of one assistant message whose text arrives in pieces."""
        return xml_parser(options, self.thinks)

    def _system(self, messages: Sequence[CheckedMessage]) -> tuple[Piece, ...]:
        """Return the pieces of the system message, () if it is left out."""
        first = messages[0]
        effort = EFFORTS[self.effort] if self.effort and self.thinks else ""
        text = first.text.strip() if first.role == "system" else ""
        sections: list[tuple[Piece, ...]] = [(effort,)] if effort else []
        if first.tools:
            tools = "\n".join(first.tools)
            sections.append((f"{TOOLS_INTRODUCTION}{tools}", *TOOLS_CONCLUSION))
        if text or (first.role == "system" and not sections and self.effort is None):
            sections.append((text,))
        pieces: list[Piece] = []
        for number, section in enumerate(sections):
            pieces += ["\n\n" if number else "", *section]
        return tuple(pieces)

    def _assistant_turn(
        self,
        separator: tuple[Piece, ...],
        message: CheckedMessage,
        index: int,
        has_think_block: bool,
        is_last: bool,
    ) -> Turn:
        header: tuple[Piece, ...] = (*separator, START, "assistant\n")
        think_block: tuple[Piece, ...] = ()
        thought = (message.thinking or "").strip()
        reason = None
        if has_think_block and thought:
            think_block = (THINK, f"\n{thought}\n", THINK_END, "\n\n")
            if self.thinks:
                # The prompt ends with these pieces, so they are not a target.
                header, think_block = (*header, THINK, "\n"), (f"{thought}\n", *think_block[2:])
            else:
                reason = REASONING_NOT_SAMPLED
        elif has_think_block and is_last and self.thinks:
            header, think_block = (*header, THINK, "\n"), ("\n", THINK_END, "\n\n")
        elif has_think_block:
            header = (*header, *EMPTY_THOUGHT)
        text = message.text.strip()
        if text and message.has_inline_thinking and self.effort is None:
            text = message.text.rstrip()
        calls: list[Piece] = []
        has_json_values = self.preserves_thinking or self.effort is not None
        value_text = json_text if has_json_values else python_text
        for number, call in enumerate(xml_call_pieces(message, value_text)):
            calls += ["\n" if number else "\n\n" if text else "", *call]
        output = (*think_block, text, *calls, END)
        return Turn(header, output, index, sampled=True, untrainable_reason=reason)


def read_thinking_message(pieces: Sequence[Piece], begins_in_thought: bool) -> dict[str, Any]:
    """Parse a sampled message with XML tool calls. `begins_in_thought` says whether its prompt
    opened the think block.
    """
    thought, rest = split_thought(begun_in_thought(pieces) if begins_in_thought else pieces)
    message: dict[str, Any] = {"role": "assistant", **read_calls(rest, read_xml_call)}
    message["content"] = message["content"].strip()
    return with_thought(message, (thought or "").strip())


def xml_parser(options: ParseOptions, begins_in_reasoning: bool) -> MessageParser:
    """Return a parser of messages with XML tool calls. `begins_in_reasoning` says whether the
    prompt opened the think block.
    """
    return TaggedParser(
        options,
        CallTags(read=read_xml_call, open=None),
        TextRules(around_reasoning=None, after_reasoning=None, around_text=None),
        begins_in_reasoning=begins_in_reasoning,
    )
