r"""SmolLM3: ChatML with a system message of its own.

The rules follow the model's chat template:

* Every conversation begins with a system message. It states a date and the reasoning mode, then the
  given system message or a default one, then the tools. Without tools, the system message has no
  end mark.
* `/think` or `/no_think` in the system message sets the reasoning mode of the conversation, and the
  template removes the flag. With `/system_override`, the system message is only the given text.
* Without thinking, every assistant message begins with an empty think block, also in history. With
  thinking, messages keep their reasoning. So every prompt extends the earlier prompts.
* A tool is written as the text of a Python dictionary. A tool result is a user message.

Three differences from the template are intended. The template leaves out the tool calls of earlier
messages; here they are written as the model samples them. The template leaves out system messages
that are not first; here they are rejected. And the template reads the tag `</think>` in a system
message as the flag `/think`; here it is text.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from planish.renderers.chat_format import StopTokenFormat, Turn
from planish.renderers.chatml import (
    END,
    REASONING_NOT_SAMPLED,
    START,
    THOUGHT_RULES,
    read_thought_message,
)
from planish.renderers.codec import Piece, split_text
from planish.renderers.forms import THINK, THINK_END, ThoughtForm
from planish.renderers.message_parts import MessageParser, ParseOptions
from planish.renderers.messages import Capabilities, CheckedMessage
from planish.renderers.tagged_parser import CallTags, TaggedParser
from planish.renderers.tool_calls import CALL_TAGS, QWEN_CALLS, TOOLS_CONCLUSION, call_pieces

TAGS = (THINK.text, THINK_END.text, *CALL_TAGS)
EMPTY_THOUGHT: tuple[Piece, ...] = (THINK, "\n\n", THINK_END, "\n")
OVERRIDE_FLAG = "/system_override"
THINK_FLAGS = re.compile(r"(?<!<)/(no_)?think")
"""The flags of the reasoning mode. Unlike in the template, `</think>` is no flag."""

# The exact wording of the chat template, because the model was trained on it.
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face."
DEFAULT_THINKING_SYSTEM = (
    f"{DEFAULT_SYSTEM} Your role as an assistant involves thoroughly exploring questions through a "
    "systematic thinking process before providing the final precise and accurate solutions. This "
    "requires engaging in a comprehensive cycle of analysis, summarizing, exploration, "
    "reassessment, reflection, backtracking, and iteration to develop well-considered thinking "
    "process. Please structure your response into two main sections: Thought and Solution using "
    "the specified format: <think> Thought section </think> Solution section. In the Thought "
    "section, detail your reasoning process in steps. Each step should include detailed "
    "considerations such as analysing questions, summarizing relevant findings, brainstorming new "
    "ideas, verifying the accuracy of the current steps, refining any errors, and revisiting "
    "previous steps. In the Solution section, based on various attempts, explorations, and "
    "reflections from the Thought section, systematically present the final solution that you deem "
    "correct. The Solution section should be logical, accurate, and concise and detail necessary "
    "steps needed to reach the conclusion."
)
TOOLS_INTRODUCTION = (
    "### Tools\n\nYou may call one or more functions to assist with the user query.\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n\n<tools>"
)


@dataclass(frozen=True)
class SmolLM3(StopTokenFormat):
    """The format of SmolLM3."""

    stops = (END,)

    date: str
    """The date in the system message, such as "2025-06-28"."""
    thinks: bool = True
    """The reasoning mode of conversations whose system message sets none."""

    @property
    def capabilities(self) -> Capabilities:
        """What the format can express, and the tokens that it requires."""
        return Capabilities(
            roles=("system", "user", "assistant", "tool"),
            thinking=True,
            samples_thinking=self.thinks,
            thought=ThoughtForm((THINK,), (THINK_END, "\n")),
            calls=QWEN_CALLS,
            required=(START.text, END.text),
        )

    def turns(self, messages: Sequence[CheckedMessage]) -> list[Turn]:
        """Return the turns of the messages. The first turn is the system message."""
        turns = [self._system_turn(messages)]
        for index, message in enumerate(messages):
            if message.role == "system":
                if index:
                    raise ValueError(
                        f"messages[{index}] is a system message; SmolLM3 supports one only at the "
                        "start of the conversation"
                    )
                continue
            separator = _separator(messages, index)
            if message.role == "assistant":
                turns.append(
                    self._assistant_turn(separator, message, index, self._thinks_in(messages))
                )
            else:
                turns.append(Turn((*separator, START, "user\n"), (message.text, END), index))
        return turns

    def suffix(self, messages: Sequence[CheckedMessage], role: str) -> tuple[Piece, ...]:
        """Return the header of the next message. Without thinking, an assistant's header includes
        an empty think block.
        """
        is_closed = role == "assistant" and not self._thinks_in(messages)
        separator = _separator(messages, len(messages))
        return (*separator, START, f"{role}\n", *(EMPTY_THOUGHT if is_closed else ()))

    def tags(self) -> Sequence[str]:
        """Return the tags of reasoning and tool calls."""
        return TAGS

    def read_message(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the sampled message that `pieces` contain."""
        return read_thought_message(pieces)

    def message_parser(self, options: ParseOptions) -> MessageParser:
        """Return a parser of one assistant message whose text arrives in pieces."""
        return TaggedParser(options, CallTags(), THOUGHT_RULES)

    def _thinks_in(self, messages: Sequence[CheckedMessage]) -> bool:
        """Return whether the model thinks in this conversation."""
        flags = [flag[0] for flag in THINK_FLAGS.finditer(_system_text(messages))]
        return "/no_think" not in flags and (bool(flags) or self.thinks)

    def _system_turn(self, messages: Sequence[CheckedMessage]) -> Turn:
        index = 0 if messages[0].role == "system" else None
        tools = messages[0].tools
        text = _system_text(messages)
        instructions_text = THINK_FLAGS.sub("", text).rstrip()
        if OVERRIDE_FLAG in text:
            if tools:
                raise ValueError(
                    f"messages[0] has tools and {OVERRIDE_FLAG}, with which SmolLM3 leaves out the "
                    "tools; remove one of the two"
                )
            return Turn(
                (START, "system\n"), (instructions_text.replace(OVERRIDE_FLAG, "").rstrip(), END), 0
            )
        thinks = self._thinks_in(messages)
        header = (
            START,
            "system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\n"
            f"Today Date: {date.fromisoformat(self.date):%d %B %Y}\n"
            f"Reasoning Mode: {'/think' if thinks else '/no_think'}\n\n"
            "## Custom Instructions\n\n",
        )
        default = DEFAULT_THINKING_SYSTEM if thinks else DEFAULT_SYSTEM
        instructions = (
            (instructions_text,) if instructions_text else tuple(split_text(default, TAGS))
        )
        output: tuple[Piece, ...] = (*instructions, "\n\n")
        if tools:
            # The template writes a tool as the caller's dictionary, which in the model card's
            # example is the function alone.
            tool_texts = "".join(f"\n{json.loads(tool)['function']}" for tool in tools)
            output = (*output, TOOLS_INTRODUCTION + tool_texts, *TOOLS_CONCLUSION, "\n\n", END)
        return Turn(header, output, index)

    def _assistant_turn(
        self, separator: tuple[Piece, ...], message: CheckedMessage, index: int, thinks: bool
    ) -> Turn:
        header = (*separator, START, "assistant\n", *(() if thinks else EMPTY_THOUGHT))
        thought = (message.thinking or "").strip("\n")
        think_block: tuple[Piece, ...] = (
            (THINK, f"\n{thought}\n", THINK_END, "\n") if thought else ()
        )
        output = (*think_block, message.text.lstrip("\n"), *call_pieces(message), END)
        reason = REASONING_NOT_SAMPLED if thought and not thinks else None
        return Turn(header, output, index, sampled=True, untrainable_reason=reason)


def _system_text(messages: Sequence[CheckedMessage]) -> str:
    """Return the text of the given system message; "" if there is none."""
    return messages[0].text if messages[0].role == "system" else ""


def _separator(messages: Sequence[CheckedMessage], index: int) -> tuple[Piece, ...]:
    """Return the line break before the turn of messages[index], if the turn before it has an end
    mark. A system message without tools has no end mark.
    """
    has_system = messages[0].role == "system"
    if index > has_system or (has_system and messages[0].tools):
        return ("\n",)
    return ("\n",) if OVERRIDE_FLAG in _system_text(messages) else ()
