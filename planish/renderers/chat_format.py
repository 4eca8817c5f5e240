"""What a chat format is: how one family of models writes a conversation.

A format is plain data and pure functions of checked messages; it holds no tokenizer, so it pickles
and two of them compare. The Renderer does what all formats share: checking, tokenising, weighting.
A new family is one new module with one such class and one line in the registry.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from planish.renderers.codec import Codec, Piece
from planish.renderers.messages import Abilities, Checked
from planish.renderers.termination import Parsed


@dataclass(frozen=True)
class Turn:
    """One message as pieces. The header announces it; the output is what its author writes, the end
    mark included.
    """

    header: tuple[Piece, ...]
    output: tuple[Piece, ...]
    message: int | None
    """Index of the message; None for a default system message that the format adds."""
    sampled: bool = False
    """The output is what a model samples after the header, so no token may span the border between
    the two.
    """
    untrainable: str | None = None
    """Why this message cannot be a training target, and the remedy."""


class ChatFormat(Protocol):
    @property
    def abilities(self) -> Abilities: ...

    def opening(self) -> tuple[Piece, ...]:
        """What comes before the first message."""
        ...

    def turns(self, messages: Sequence[Checked]) -> list[Turn]: ...

    def suffix(self, messages: Sequence[Checked], role: str) -> tuple[Piece, ...]:
        """The header of the message to be sampled next."""
        ...

    def prefill(self, text: str) -> tuple[Piece, ...]: ...

    def overlap(self, last: Checked) -> tuple[Piece, ...]:
        """What a model writes after its last message in order to stop, if that is part of the next
        header.
        """
        ...

    def stop(self, codec: Codec) -> list[str] | list[int]: ...

    def parse(self, codec: Codec, tokens: Sequence[int]) -> Parsed: ...
