"""Gemma 3's chat format. A turn is `<start_of_turn>role`, a line break, the text, `<end_of_turn>`.

The assistant's role is called `model`. There is no system role: the format writes a system message,
followed by an empty line, at the start of the first user message. As in the chat template, the text
of user and assistant messages is trimmed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planish.renderers.chat_format import StopTokenFormat, Turn
from planish.renderers.codec import Control, Piece
from planish.renderers.messages import Capabilities, CheckedMessage

BOS, START, END = "<bos>", "<start_of_turn>", "<end_of_turn>"


@dataclass(frozen=True)
class Gemma3(StopTokenFormat):
    """The format of Gemma 3 models."""

    begin = (Control(BOS),)
    stops = (Control(END),)

    @property
    def capabilities(self) -> Capabilities:
        """What the format can express, and the tokens that it requires."""
        return Capabilities(roles=("system", "user", "assistant"), required=(BOS, START, END))

    def turns(self, messages: Sequence[CheckedMessage]) -> list[Turn]:
        """Return one turn per message. Raises ValueError for a system message that is not first, or
        that no user message follows.
        """
        turns: list[Turn] = []
        system: str | None = None
        for index, message in enumerate(messages):
            if message.role == "system":
                following = messages[index + 1].role if index + 1 < len(messages) else None
                if index or following != "user":
                    raise ValueError(
                        f"messages[{index}] is a system message; Gemma 3 supports one only at the "
                        "start of a conversation, before a user message: move its text into a "
                        "user message"
                    )
                system = f"{message.text}\n\n"
                reason = "the format writes it into the first user message; train on that message"
                turns.append(Turn((), (), index, untrainable_reason=reason))
                continue
            text = message.text.strip()
            if system is not None:
                text, system = system + text, None
            header = self.suffix(messages[:index], message.role)
            output = (text, Control(END))
            turns.append(Turn(header, output, index, sampled=message.role == "assistant"))
        return turns

    def suffix(self, messages: Sequence[CheckedMessage], role: str) -> tuple[Piece, ...]:
        """Return the header of the next message, which `role` will write."""
        # A model stops sampling at `<end_of_turn>`. So the line break after `<end_of_turn>` is
        # part of the next header, not of the sampled output.
        lead = ("\n",) if any(message.role != "system" for message in messages) else ()
        return (*lead, Control(START), "model\n" if role == "assistant" else f"{role}\n")
