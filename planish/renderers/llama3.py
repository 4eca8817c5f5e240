"""Llama 3's headers: `<|start_header_id|>role<|end_header_id|>`, a blank line, the text,
`<|eot_id|>`.

The tokens are those of the Llama 3.0 chat template, which trims the text of every message.
Templates of Llama 3.1 and later add a preamble with the current date and a tool protocol to the
system message. Both are omitted, because a prompt that changes every day makes runs irreproducible.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planish.renderers.chat_format import StopTokenFormat, Turn
from planish.renderers.codec import Control, Piece
from planish.renderers.messages import Capabilities, CheckedMessage

BOS, START, END, EOT = "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"


@dataclass(frozen=True)
class Llama3(StopTokenFormat):
    """The format of Llama 3 models."""

    begin = (Control(BOS),)
    stops = (Control(EOT),)

    @property
    def capabilities(self) -> Capabilities:
        """What the format can express, and the tokens that it requires."""
        return Capabilities(roles=("system", "user", "assistant"), required=(BOS, START, END, EOT))

    def turns(self, messages: Sequence[CheckedMessage]) -> list[Turn]:
        """Return one turn per message, with trimmed text."""
        turns = []
        for index, message in enumerate(messages):
            header = self.suffix((), message.role)
            output = (message.text.strip(), Control(EOT))
            turns.append(Turn(header, output, index, sampled=message.role == "assistant"))
        return turns

    def suffix(self, messages: Sequence[CheckedMessage], role: str) -> tuple[Piece, ...]:
        """Return the header of the next message, which `role` will write."""
        return (Control(START), role, Control(END), "\n\n")
