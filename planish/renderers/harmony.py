r"""gpt-oss: the Harmony format, `<|start|>role<|channel|>channel<|message|>text<|end|>`.

An assistant writes its reasoning to the channel `analysis`, its answer to `final`, and tool calls
to `commentary`, each as a message of its own. The rules follow the model's chat template and the
package `openai-harmony`:

* A system message of the conversation becomes Harmony's developer message, which contains
  instructions and tools.
* Harmony's own system message states the date and the reasoning effort. If the conversation has
  tools, one more line names the channel for their calls. Without an effort, the message consists of
  this line alone, or is omitted if there are no tools.
* The last answer ends with `<|return|>`. A later prompt replaces this token by `<|end|>`.
  Reasoning before the last answer is left out. So prompts of different turns never extend each
  other.
* Text before a tool call is a message on the channel `commentary`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planish.renderers.chat_format import StopTokenFormat, Turn
from planish.renderers.codec import Piece, split_text
from planish.renderers.forms import CallForm, ThoughtForm
from planish.renderers.harmony_parser import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
    TAGS,
    HarmonyParser,
    called_function,
    channel_of,
    looks_like_header,
)
from planish.renderers.message_parts import MessageParser, ParseOptions
from planish.renderers.messages import Capabilities, CheckedMessage
from planish.renderers.tool_calls import (
    answered_call,
    as_text,
    call_fields,
    find_piece,
    has_calls,
    last_answer_index,
    read_named_call,
)
from planish.renderers.typescript import harmony_namespace

FINAL: tuple[Piece, ...] = (CHANNEL, "final", MESSAGE)
CALL_HEADER: tuple[Piece, ...] = (CHANNEL, "commentary ", CONSTRAIN, "json", MESSAGE)
HARMONY_CALLS = CallForm((" to=functions.",), CALL_HEADER, (), between=None, answer=FINAL)
HARMONY_THOUGHT = ThoughtForm((CHANNEL, "analysis", MESSAGE), (END, START, "assistant"))
CALLS_LINE = "Calls to these tools must go to the commentary channel: 'functions'."


@dataclass(frozen=True)
class Harmony(StopTokenFormat):
    """The format of gpt-oss."""

    stops = (RETURN, CALL)

    effort: str | None = None
    """The reasoning effort in the system message: low, medium or high. With None, the system
    message states no date and no effort.
    """
    date: str = ""
    """The current date in the system message, such as 2025-06-28."""

    @property
    def capabilities(self) -> Capabilities:
        """What the format can express, and the tokens that it requires."""
        required = (START, MESSAGE, END, CHANNEL, CONSTRAIN, RETURN, CALL)
        return Capabilities(
            roles=("system", "user", "assistant", "tool"),
            thinking=True,
            samples_thinking=True,
            thought=HARMONY_THOUGHT,
            calls=HARMONY_CALLS,
            required=tuple(tag.text for tag in required),
            extends=False,
        )

    def turns(self, messages: Sequence[CheckedMessage]) -> list[Turn]:
        """Return one turn per message, with Harmony's own system message first if there is one."""
        turns: list[Turn] = []
        first = messages[0]
        system = self._system(bool(first.tools))
        if system:
            turns.append(Turn((START, "system"), (MESSAGE, system, END), None))
        last_answer = last_answer_index(messages)
        for index, message in enumerate(messages):
            if message.role == "assistant":
                is_last = index == len(messages) - 1
                is_kept = is_last or (has_calls(message) and index > last_answer)
                turns.append(_assistant_turn(message, index, is_kept, is_last))
            elif message.role == "tool":
                header = (START, f"functions.{_function_name(messages, index)} to=assistant")
                output = (CHANNEL, "commentary", MESSAGE, message.text, END)
                turns.append(Turn(header, output, index))
            elif message.role == "user":
                turns.append(Turn((START, "user"), (MESSAGE, message.text, END), index))
            else:
                text = _developer_text(message)
                if text:
                    turns.append(Turn((START, "developer"), (MESSAGE, text, END), index))
                else:
                    reason = "the format leaves out an empty system message"
                    turns.append(Turn((), (), index, untrainable_reason=reason))
        return turns

    def suffix(self, messages: Sequence[CheckedMessage], role: str) -> tuple[Piece, ...]:
        """Return the header of the next message, which `role` will write."""
        return (START, "developer" if role == "system" else role)

    def tags(self) -> Sequence[str]:
        """Return Harmony's tags."""
        return TAGS

    def read_message(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Parse the sampled messages of an assistant's turn into one message."""
        thoughts: list[str] = []
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        unparsed: list[dict[str, str]] = []
        header: list[Piece] = []
        position = 0
        while position < len(pieces):
            if pieces[position] != MESSAGE:
                header.append(pieces[position])
                position += 1
                continue
            end = find_piece(pieces, END, START, start=position + 1)
            text = as_text(pieces[position + 1 : end])
            header_text = as_text(header)
            name = called_function(header_text)
            if name is not None:
                call, error = read_named_call(name, text)
                if call is not None:
                    calls.append(call)
                else:
                    call_header = header_text.removeprefix(START.text).removeprefix("assistant")
                    raw = call_header + MESSAGE.text + text
                    unparsed.append({"raw_text": raw, "error": str(error)})
            elif channel_of(header) == "analysis":
                thoughts.append(text)
            else:
                texts.append(text)
            header = []
            position = end + 1 if end < len(pieces) and pieces[end] == END else end
        if not (thoughts or texts or calls or unparsed) and len(header) == 1:
            # The model wrote plain text instead of the format, so the text is the answer. A short
            # text may also be the beginning of a header, which is not an answer.
            text = as_text(header)
            texts += [] if looks_like_header(header) else [text]
        parts = [{"type": "thinking", "thinking": text} for text in thoughts if text]
        content: Any = "".join(texts)
        if parts:
            content = [*parts, *([{"type": "text", "text": content}] if content else [])]
        return {"role": "assistant", "content": content, **call_fields(calls, unparsed)}

    def message_parser(self, options: ParseOptions) -> MessageParser:
        """Return a parser of one assistant message whose text arrives in pieces."""
        return HarmonyParser(options)

    def _system(self, has_tools: bool) -> str:
        lines = CALLS_LINE if has_tools else ""
        if self.effort is None:
            return lines
        return (
            "You are ChatGPT, a large language model trained by OpenAI.\n"
            f"Knowledge cutoff: 2024-06\nCurrent date: {self.date}\n\nReasoning: {self.effort}\n\n"
            "# Valid channels: analysis, commentary, final. Channel must be included for every "
            "message." + (f"\n{lines}" if lines else "")
        )


def _developer_text(message: CheckedMessage) -> str:
    text = f"# Instructions\n\n{message.text}\n\n" if message.text else ""
    if message.tools:
        tools = [json.loads(tool)["function"] for tool in message.tools]
        text += f"# Tools\n\n{harmony_namespace(tools)}"
    return text


def _function_name(messages: Sequence[CheckedMessage], index: int) -> str:
    call = answered_call(messages, index)
    name = messages[index].name or (call.name if call else "")
    if not name:
        raise ValueError(
            f"messages[{index}] is a tool result without 'name', and every call before it has a "
            "result already; give the name of the function that was called"
        )
    return name.removeprefix("functions.")


def _assistant_turn(message: CheckedMessage, index: int, is_kept: bool, is_last: bool) -> Turn:
    parts: list[tuple[Piece, ...]] = []
    if message.thinking and is_kept:
        parts.append((CHANNEL, "analysis", MESSAGE, message.thinking, END))
    if message.text and has_calls(message):
        parts.append((CHANNEL, "commentary", MESSAGE, message.text, END))
    parts += [
        (f" to=functions.{call.name}", *CALL_HEADER, call.arguments, CALL) for call in message.calls
    ]
    parts += [(*split_text(raw, TAGS), CALL) for raw in message.unparsed_calls]
    if not has_calls(message):
        parts.append((*FINAL, message.text, RETURN if is_last else END))
    output: list[Piece] = []
    for number, part in enumerate(parts):
        output += [*((START, "assistant") if number else ()), *part]
    return Turn((START, "assistant"), tuple(output), index, sampled=True)
