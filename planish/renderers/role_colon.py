r"""`User: ...\n\nAssistant: ...\n\n`: a transcript that any language model can continue, for base
models.

Roles are ordinary words, so text that contains `\n\nUser:` looks like a turn. Prompts may contain
this string, as few-shot examples do. An answer that contains the string is rejected as a training
target, because it would teach the model to stop in the middle. A model stops by writing the next
`User:`. Therefore these tokens follow the last assistant message of a supervised example, and are
trained with that message.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from planish.renderers.chat_format import FixedHistory, Turn
from planish.renderers.codec import Codec, Control, Piece
from planish.renderers.message_parts import HeldText, MessageParser, ParseOptions, PartList
from planish.renderers.messages import Capabilities, CheckedMessage
from planish.renderers.termination import ParsedResponse, Termination, eos_ids

STOP = "\n\nUser:"


@dataclass(frozen=True)
class RoleColon(FixedHistory):
    """The format of transcripts with role names."""

    bos: str | None = None
    """The tokenizer's beginning-of-sequence token, if it has one."""

    @property
    def capabilities(self) -> Capabilities:
        """What the format can express, and the tokens that it requires."""
        return Capabilities(roles=("system", "user", "assistant"))

    def opening(self) -> tuple[Piece, ...]:
        """Return the beginning-of-sequence token, if the tokenizer has one."""
        return (Control(self.bos),) if self.bos else ()

    def turns(self, messages: Sequence[CheckedMessage]) -> list[Turn]:
        """Return one turn per message."""
        return [self._turn(index, message) for index, message in enumerate(messages)]

    def suffix(self, messages: Sequence[CheckedMessage], role: str) -> tuple[Piece, ...]:
        """Return the name of `role` with a colon."""
        return (f"{role.capitalize()}:",)

    def prefill(self, text: str) -> tuple[Piece, ...]:
        """Return `text` as one piece of ordinary text."""
        return (text,)

    def overlap(self, last: CheckedMessage) -> tuple[Piece, ...]:
        """Return `User:` after an answer, because the model writes it in order to stop."""
        return ("User:",) if last.role == "assistant" else ()

    def stop(self, codec: Codec) -> list[str]:
        """Return the stop string, a blank line and `User:`."""
        return [STOP]

    def parse(self, codec: Codec, tokens: Sequence[int]) -> ParsedResponse:
        """Parse the sampled tokens of an assistant message. Never raises."""
        eos_tokens = eos_ids(codec)
        eos_position = next(
            (position for position, token in enumerate(tokens) if token in eos_tokens), None
        )
        body, separator, _ = codec.decode(tokens[:eos_position]).partition(STOP)
        if separator and eos_position is None and STOP not in codec.decode(tokens[:-1]):
            ending = Termination.STOP_SEQUENCE
        elif not separator and eos_position == len(tokens) - 1:
            ending = Termination.EOS
        else:
            ending = Termination.MALFORMED
        if not separator:
            body = body.removesuffix("\n\n")
        return ParsedResponse({"role": "assistant", "content": body.removeprefix(" ")}, ending)

    def message_parser(self, options: ParseOptions) -> MessageParser:
        """Return a parser of one assistant message whose text arrives in pieces."""
        return RoleColonParser(begins_message=options.continues is None)

    def _turn(self, index: int, message: CheckedMessage) -> Turn:
        stops_early = message.role == "assistant" and STOP in message.text
        reason = f"its text contains the stop sequence {STOP!r}; remove that from the answer"
        return Turn(
            header=self.suffix((), message.role),
            output=(f" {message.text}\n\n",),
            message=index,
            sampled=True,
            untrainable_reason=reason if stops_early else None,
        )


@dataclass
class RoleColonParser:
    """Parses messages of a transcript: plain text after a space."""

    begins_message: bool = True
    """Whether the sample begins the message. Then the space after the colon is left out."""
    parts: PartList = field(default_factory=PartList)
    tags: Sequence[str] = ()
    has_begun_answer: bool = True

    def __post_init__(self) -> None:
        self._text = HeldText(lambda text: self.parts.add("text", text), "\n")

    def feed(self, piece: str | Control) -> None:
        """Add text."""
        text = piece.text if isinstance(piece, Control) else piece
        if self.begins_message and text:
            text, self.begins_message = text.removeprefix(" "), False
        self._text.feed(text)

    def finish(self, stop: int | str | None) -> None:
        """End the message. The blank line before the next role is not part of it."""
        held = self._text.take_held()
        self.parts.add("text", held if stop == STOP else held.removesuffix("\n\n"))
