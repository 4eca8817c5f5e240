"""Llama 3's headers: `<|start_header_id|>role<|end_header_id|>`, a blank line, the text,
`<|eot_id|>`.

The tokens are those of the Llama 3.0 chat template, which trims the text of every message.
Templates of Llama 3.1 and later add a preamble with the current date to the system message. The
preamble is omitted, because a prompt that changes every day makes runs irreproducible.

Tools are those of the template of Llama 3.1, without the dates. The tools are written into the
first user message. A call is a JSON object with a name and parameters, and is the whole text of its
message. A tool result is JSON in a message of the role `ipython`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planish.renderers.call_syntax import LLAMA_CALLS, read_llama_call
from planish.renderers.chat_format import StopTokenFormat, Turn
from planish.renderers.codec import Control, Piece
from planish.renderers.message_parts import MessageParser, ParseOptions, PlainParser
from planish.renderers.messages import Capabilities, CheckedMessage
from planish.renderers.tagged_parser import BareCallParser
from planish.renderers.tool_calls import as_text, has_calls

BOS, START, END, EOT = "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
CALL_STARTS = ("{", "<|python_tag|>")

# The exact wording of the chat template, because the models were trained on it.
ENVIRONMENT = "Environment: ipython\n\n"
TOOLS_INTRODUCTION = (
    "Given the following functions, please respond with a JSON for a function call with its proper "
    "arguments that best answers the given prompt.\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and '
    "its value}.Do not use variables.\n\n"
)


@dataclass(frozen=True)
class Llama3(StopTokenFormat):
    """The format of Llama 3 models."""

    begin = (Control(BOS),)
    stops = (Control(EOT),)

    @property
    def capabilities(self) -> Capabilities:
        """What the format can express, and the tokens that it requires."""
        return Capabilities(
            roles=("system", "user", "assistant", "tool"),
            calls=LLAMA_CALLS,
            required=(BOS, START, END, EOT),
        )

    def turns(self, messages: Sequence[CheckedMessage]) -> list[Turn]:
        """Return one turn per message, with trimmed text. Raises ValueError for tools without a
        user message after the system message, and for text beside a call.
        """
        tools = messages[0].tools
        if tools and (len(messages) < 2 or messages[1].role != "user"):
            raise ValueError(
                "messages[0] offers tools, which Llama 3 writes into the first user message; let "
                "messages[1] be a user message"
            )
        turns = []
        for index, message in enumerate(messages):
            text = message.text.strip()
            if tools and index == 0:
                text = ENVIRONMENT + text
            elif tools and index == 1:
                texts = [json.dumps(json.loads(t), indent=4, ensure_ascii=False) for t in tools]
                text = TOOLS_INTRODUCTION + "".join(f"{tool}\n\n" for tool in texts) + text
            elif message.role == "tool":
                text = json.dumps(message.text, ensure_ascii=False)
            elif has_calls(message):
                text = _call_text(message, index)
            header = self.suffix((), "ipython" if message.role == "tool" else message.role)
            output = (text, Control(EOT))
            turns.append(Turn(header, output, index, sampled=message.role == "assistant"))
        return turns

    def suffix(self, messages: Sequence[CheckedMessage], role: str) -> tuple[Piece, ...]:
        """Return the header of the next message, which `role` will write."""
        return (Control(START), role, Control(END), "\n\n")

    def read_message(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the sampled message that `pieces` contain."""
        text = as_text(pieces)
        calls = _read_calls(text.strip())[0] if text.strip().startswith(CALL_STARTS) else None
        if calls is None:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def message_parser(self, options: ParseOptions) -> MessageParser:
        """Return a parser of one assistant message whose text arrives in pieces."""
        return BareCallParser(PlainParser(), options, _read_calls, CALL_STARTS)


def _call_text(message: CheckedMessage, index: int) -> str:
    texts = [f'{{"name": "{call.name}", "parameters": {call.arguments}}}' for call in message.calls]
    texts += message.unparsed_calls
    if len(texts) > 1 or message.text.strip():
        raise ValueError(
            f"messages[{index}]: Llama 3 writes one tool call in a message, and no text beside it; "
            "split the message"
        )
    return texts[0]


def _read_calls(text: str) -> tuple[list[dict[str, Any]] | None, str | None]:
    """Read one call. A message has no more, so several calls are text."""
    calls, error = read_llama_call(text.removeprefix("<|python_tag|>"))
    if calls is not None and len(calls) > 1:
        return None, "there is more than one call"
    return calls, error
