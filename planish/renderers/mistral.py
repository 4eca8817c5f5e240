"""Mistral's format since tokenizer version 7: `[INST]question[/INST]answer</s>`.

Mistral Small 3, Ministral 3 and Magistral are of this kind. The marks are single tokens, and no
blanks surround them, unlike in the format of Mistral 7B. The models' chat templates put a default
system message before a conversation without one. Tools and thinking are not supported.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planish.renderers.chat_format import StopTokenFormat, Turn
from planish.renderers.codec import Control, Piece
from planish.renderers.messages import Capabilities, CheckedMessage

BOS, EOS = Control("<s>"), Control("</s>")
SYSTEM, SYSTEM_END = Control("[SYSTEM_PROMPT]"), Control("[/SYSTEM_PROMPT]")
USER, USER_END = Control("[INST]"), Control("[/INST]")


@dataclass(frozen=True)
class Mistral(StopTokenFormat):
    """The format of Mistral models with tokenizer version 7 or later."""

    begin = (BOS,)
    stops = (EOS,)
    default_system: str | None = None

    @property
    def capabilities(self) -> Capabilities:
        """What the format can express, and the tokens that it requires."""
        required = (BOS, EOS, SYSTEM, SYSTEM_END, USER, USER_END)
        return Capabilities(
            roles=("system", "user", "assistant"), required=tuple(tag.text for tag in required)
        )

    def turns(self, messages: Sequence[CheckedMessage]) -> list[Turn]:
        """Return one turn per message, with the default system message first if needed."""
        turns = []
        if self.default_system is not None and messages[0].role != "system":
            turns.append(Turn((SYSTEM,), (self.default_system, SYSTEM_END), message=None))
        for index, message in enumerate(messages):
            if message.role == "assistant":
                turns.append(Turn((), (message.text, EOS), index, sampled=True))
            else:
                is_system = message.role == "system"
                begin, end = (SYSTEM, SYSTEM_END) if is_system else (USER, USER_END)
                turns.append(Turn((begin,), (message.text, end), index))
        return turns

    def suffix(self, messages: Sequence[CheckedMessage], role: str) -> tuple[Piece, ...]:
        """Return the mark before the next message of `role`; an assistant message has none."""
        return {"system": (SYSTEM,), "user": (USER,)}.get(role, ())
