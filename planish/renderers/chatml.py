r"""ChatML, `<|im_start|>role\n...<|im_end|>`, with the `<think>` blocks of the Qwen3 models.

One class implements four renderers. Their models differ in only three ways: the default system
message, whether answers begin with a `<think>` block, and whether a prompt ends with an empty
`<think>` block. The rules follow the models' chat templates:

* A default system message is put first when the conversation begins with another role (Qwen2.5,
  SmolLM2).
* With thinking, an assistant message after the last user message keeps its reasoning. Earlier
  messages lose their reasoning, so a later prompt does not extend an earlier prompt. An assistant
  message at the end of the conversation has a think block even without reasoning.
* Consecutive tool results form one user turn. Text after a think block loses its leading line
  breaks.

Two differences from the templates are intended. A template ends with a line break after the last
`<|im_end|>`; here that line break belongs to the header of the next message. And user text that
looks like a tool result stays text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from planish.renderers.chat_format import StopTokenFormat, Turn
from planish.renderers.codec import Control, Piece
from planish.renderers.forms import THINK, THINK_END
from planish.renderers.message_parts import MessageParser, ParseOptions
from planish.renderers.messages import Capabilities, CheckedMessage
from planish.renderers.tagged_parser import CallTags, TaggedParser, TextRules
from planish.renderers.tool_calls import (
    CALL,
    CALL_TAGS,
    QWEN_CALLS,
    ReadCall,
    as_text,
    call_pieces,
    find_piece,
    read_calls,
    response_pieces,
    tools_pieces,
)

START, END = Control("<|im_start|>"), Control("<|im_end|>")
EMPTY_THOUGHT: tuple[Piece, ...] = (THINK, "\n\n", THINK_END, "\n\n")
THOUGHT_RULES = TextRules(around_reasoning="\n", after_reasoning="\n")
REASONING_NOT_SAMPLED = (
    "it has reasoning, which this renderer never samples; use the renderer that thinks, or remove "
    "the thinking part"
)
"""Error text: a renderer that disables thinking cannot train on a message with reasoning."""


class Thinking(StrEnum):
    """How a renderer writes reasoning."""

    NONE = "none"
    """The model has no think blocks; the tags are text."""
    STRIP_HISTORY = "strip_history"
    """As in Qwen3's template: reasoning before the last user message is left out."""
    KEEP_HISTORY = "keep_history"
    """Every assistant message has its think block, so prompts extend each other."""
    DISABLED = "disabled"
    """Prompts end with an empty think block: the model answers at once."""


@dataclass(frozen=True)
class ChatML(StopTokenFormat):
    """The ChatML format, with an optional default system message and one kind of `Thinking`."""

    stops = (END,)
    default_system: str | None = None
    thinking: Thinking = Thinking.NONE

    @property
    def capabilities(self) -> Capabilities:
        """What the format can express, and the tokens that it requires."""
        return Capabilities(
            roles=("system", "user", "assistant", "tool"),
            thinking=self.thinking is not Thinking.NONE,
            samples_thinking=self.thinking in (Thinking.STRIP_HISTORY, Thinking.KEEP_HISTORY),
            calls=QWEN_CALLS,
            required=(START.text, END.text),
            extends=self.thinking in (Thinking.NONE, Thinking.KEEP_HISTORY),
            # With DISABLED, a prompt ends with an empty think block, which the template omits from
            # the history. So the next prompt does not begin with that prompt.
            extends_in_turn=self.thinking is not Thinking.DISABLED,
        )

    def turns(self, messages: Sequence[CheckedMessage]) -> list[Turn]:
        """Return the turns of the messages, with the default system message first if needed."""
        turns: list[Turn] = []
        if self.default_system is not None and messages[0].role != "system":
            turns.append(Turn((START, "system\n"), (self.default_system, END), message=None))
        users = [index for index, message in enumerate(messages) if message.role == "user"]
        last_query = users[-1] if users else len(messages) - 1
        for index, message in enumerate(messages):
            separator = ("\n",) if turns else ()
            if message.role == "tool":
                turns.append(tool_turn(separator, messages, index, message.text))
            elif message.role == "assistant":
                is_current, is_last = index > last_query, index == len(messages) - 1
                turns.append(self._assistant_turn(separator, message, index, is_current, is_last))
            else:
                turns.append(self._plain_turn(separator, message, index))
        return turns

    def suffix(self, messages: Sequence[CheckedMessage], role: str) -> tuple[Piece, ...]:
        """Return the header of the next message. With thinking disabled, an assistant's header
        includes an empty think block.
        """
        separator = ("\n",) if messages else ()
        is_closed = self.thinking is Thinking.DISABLED and role == "assistant"
        return (*separator, START, f"{role}\n", *(EMPTY_THOUGHT if is_closed else ()))

    def tags(self) -> Sequence[str]:
        """Return the tags of tool calls and, for models that think, of reasoning."""
        if self.thinking is Thinking.NONE:
            return CALL_TAGS
        return (THINK.text, THINK_END.text, *CALL_TAGS)

    def read_message(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the sampled message that `pieces` contain."""
        if self.thinking is Thinking.NONE:
            return {"role": "assistant", **read_calls(pieces)}
        return read_thought_message(pieces)

    def message_parser(self, options: ParseOptions) -> MessageParser:
        """Return a parser of one assistant message whose text arrives in pieces."""
        return TaggedParser(
            options,
            CallTags(),
            THOUGHT_RULES,
            reads_reasoning=self.thinking is not Thinking.NONE,
        )

    def _plain_turn(
        self, separator: tuple[Piece, ...], message: CheckedMessage, index: int
    ) -> Turn:
        text: tuple[Piece, ...] = (message.text,)
        if message.tools:
            system = message.text if message.is_given else self.default_system or None
            text = tools_pieces(system, message.tools)
        return Turn(
            header=(*separator, START, f"{message.role}\n"), output=(*text, END), message=index
        )

    def _assistant_turn(
        self,
        separator: tuple[Piece, ...],
        message: CheckedMessage,
        index: int,
        is_current: bool,
        is_last: bool,
    ) -> Turn:
        header: tuple[Piece, ...] = (*separator, START, "assistant\n")
        thought, text = message.thinking, message.text
        if self.thinking is Thinking.KEEP_HISTORY:
            has_think_block = True
        else:
            has_think_block = (
                self.thinking is not Thinking.NONE and is_current and (is_last or bool(thought))
            )
        think_block: tuple[Piece, ...] = ()
        if has_think_block:
            text = text.lstrip("\n")
            reasoning = thought.strip("\n") if thought else ""
            think_block = (
                (THINK, f"\n{reasoning}\n", THINK_END, "\n\n") if reasoning else EMPTY_THOUGHT
            )
        reason = None
        if self.thinking is Thinking.DISABLED:
            # The prompt already contains the empty think block, so the block is not a target.
            header, think_block = (*header, *think_block), ()
            if thought:
                reason = (
                    "it has reasoning, which qwen3_disable_thinking never samples; use qwen3, or "
                    "remove the thinking part"
                )
        output = (*think_block, text, *call_pieces(message), END)
        return Turn(header, output, index, sampled=True, untrainable_reason=reason)


def tool_turn(
    separator: tuple[Piece, ...],
    messages: Sequence[CheckedMessage],
    index: int,
    text: str,
    trailing: str = "",
) -> Turn:
    """Return the turn of the tool result messages[index], which is written as `text`.

    Consecutive results share one user turn. `trailing` follows each result; if it is empty, a line
    break separates the results.
    """
    is_first = index == 0 or messages[index - 1].role != "tool"
    is_last = index == len(messages) - 1 or messages[index + 1].role != "tool"
    header = (*separator, START, "user\n") if is_first else () if trailing else ("\n",)
    return Turn(header, (*response_pieces(text), trailing, *((END,) if is_last else ())), index)


def split_thought(
    pieces: Sequence[Piece],
    calls: Control = CALL,
    tags: tuple[Control, Control] = (THINK, THINK_END),
) -> tuple[str | None, list[Piece]]:
    """Split a sampled message into (reasoning, rest); reasoning is None without a think block.
    `calls` is the tag that begins the tool calls, and `tags` are those of the think block.
    """
    end = find_piece(pieces, tags[1])
    before = pieces[:end]
    start = find_piece(before, tags[0])
    has_start_tag = start < len(before)
    if not has_start_tag and (end == len(pieces) or calls in before):
        return None, list(pieces)
    if has_start_tag and as_text(before[:start]).strip():
        return None, list(pieces)
    # A prompt may end with `<think>`; then the sample begins inside the block.
    return as_text(before[start + 1 :] if has_start_tag else before), list(pieces[end + 1 :])


def begun_in_thought(pieces: Sequence[Piece], begin: Control = THINK) -> Sequence[Piece]:
    """Return a message that was sampled inside a think block, with the opening tag put first."""
    return pieces if pieces and pieces[0] == begin else [begin, *pieces]


def with_thought(message: dict[str, Any], thought: str | None) -> dict[str, Any]:
    """Return a sampled message with its reasoning, if there is any, before its text."""
    if not thought:
        return message
    parts: list[dict[str, str]] = [{"type": "thinking", "thinking": thought}]
    if message["content"]:
        parts.append({"type": "text", "text": message["content"]})
    return {**message, "content": parts}


def read_thought_message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Parse a sampled message with JSON tool calls, which may begin with a think block."""
    thought, rest = split_thought(pieces)
    message: dict[str, Any] = {"role": "assistant", **read_calls(rest)}
    if thought is not None:
        thought = thought.strip("\n")
        message["content"] = message["content"].lstrip("\n")
    return with_thought(message, thought)


def read_call_section(
    pieces: Sequence[Piece],
    begins_in_thought: bool,
    tags: tuple[Control, Control, Control, Control],
    read_call: ReadCall,
) -> dict[str, Any]:
    """Parse a sampled message of a format that writes all calls of a message in one section.

    `begins_in_thought` says whether the prompt opened the think block. `tags` are the tags
    that begin and end the section, and the tags that begin and end a call.
    """
    section, section_end, begin, end = tags
    pieces = begun_in_thought(pieces) if begins_in_thought else pieces
    thought, rest = split_thought(pieces, section)
    rest = [piece for piece in rest if piece not in (section, section_end)]
    return with_thought({"role": "assistant", **read_calls(rest, read_call, begin, end)}, thought)
