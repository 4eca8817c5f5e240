"""The interface of a chat format: how one family of models writes a conversation.

A format is a frozen dataclass. Its methods are pure functions of messages that `read_messages` has
checked. A format holds no tokenizer, so formats can be pickled and compared. `Renderer` does what
all formats share: checking, tokenising and weighting. A new family needs one module with such a
class, and one line in the registry.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from planish.renderers.codec import Codec, Piece
from planish.renderers.messages import Abilities, Checked
from planish.renderers.termination import Parsed


@dataclass(frozen=True)
class Turn:
    """One message as pieces: the header, which names the role, and the output, which is the text of
    the message with its end mark.
    """

    header: tuple[Piece, ...]
    output: tuple[Piece, ...]
    message: int | None
    """Index of the message; None for a default system message that the format adds."""
    sampled: bool = False
    """Whether the model samples the output after the header. Then no token may span the boundary
    between the two.
    """
    untrainable: str | None = None
    """Why this message cannot be a training target, and the remedy; None if it can."""


class ChatFormat(Protocol):
    """How one family of models writes a conversation."""

    @property
    def abilities(self) -> Abilities:
        """What the format can express."""
        ...

    def opening(self) -> tuple[Piece, ...]:
        """Return the pieces before the first message."""
        ...

    def turns(self, messages: Sequence[Checked]) -> list[Turn]:
        """Return the turns of the messages, and of the default system message if it is added."""
        ...

    def suffix(self, messages: Sequence[Checked], role: str) -> tuple[Piece, ...]:
        """Return the header of the next message, which `role` will write."""
        ...

    def prefill(self, text: str) -> tuple[Piece, ...]:
        """Return the pieces of `text`, the given start of the message to be sampled."""
        ...

    def overlap(self, last: Checked) -> tuple[Piece, ...]:
        """Return the pieces of the next message's header that the model writes in order to stop.

        `last`: the message before that header. A format with a stop token returns no pieces. In
        role_colon the model stops by writing `User:`, so the pieces after an answer are `User:`.
        """
        ...

    def stop(self, codec: Codec) -> list[str] | list[int]:
        """Return the stop strings or stop tokens of a sampled message."""
        ...

    def parse(self, codec: Codec, tokens: Sequence[int]) -> Parsed:
        """Parse the sampled tokens of an assistant message."""
        ...
