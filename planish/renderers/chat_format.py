"""The interface of a chat format: how one family of models writes a conversation.

A format is a frozen dataclass. Its methods are pure functions of messages that `read_messages` has
checked. A format holds no tokenizer, so formats can be pickled and compared. `Renderer` does what
all formats share: checking, tokenising and weighting. A new family needs one module with such a
class, and one line in the registry.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from planish.renderers.codec import Codec, Control, Piece, split_text
from planish.renderers.message_parts import MessageParser, ParseOptions, PlainParser
from planish.renderers.messages import Capabilities, CheckedMessage
from planish.renderers.termination import ParsedResponse, cut_at_stop
from planish.renderers.tool_calls import as_text


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
    untrainable_reason: str | None = None
    """Why this message cannot be a training target, and the remedy; None if it can."""


class ChatFormat(Protocol):
    """How one family of models writes a conversation."""

    @property
    def capabilities(self) -> Capabilities:
        """What the format can express."""
        ...

    def opening(self) -> tuple[Piece, ...]:
        """Return the pieces before the first message."""
        ...

    def turns(self, messages: Sequence[CheckedMessage]) -> list[Turn]:
        """Return the turns of the messages, and of the default system message if it is added."""
        ...

    def prompt_turns(self, messages: Sequence[CheckedMessage], role: str) -> list[Turn]:
        """Return the turns of the prompt for the next message, which `role` will write. The last
        turn is the header of that message.
        """
        ...

    def extends(self, messages: Sequence[CheckedMessage], answer: int) -> bool:
        """Return whether the prompt after `messages` begins with the prompt before the message
        `answer` and that message.
        """
        ...

    def example_ends(self, messages: Sequence[CheckedMessage]) -> list[int]:
        """Return the number of messages in each training example of a conversation. An example
        contains all messages before its end, and trains those after the end of the example before.
        """
        ...

    def prefill(self, text: str) -> tuple[Piece, ...]:
        """Return the pieces of `text`, the given start of the message to be sampled."""
        ...

    def overlap(self, last: CheckedMessage) -> tuple[Piece, ...]:
        """Return the pieces of the next message's header that the model writes in order to stop.

        `last`: the message before that header. A format with a stop token returns no pieces. In
        role_colon the model stops by writing `User:`, so the pieces after an answer are `User:`.
        """
        ...

    def stop(self, codec: Codec) -> list[str] | list[int]:
        """Return the stop strings or stop tokens of a sampled message."""
        ...

    def parse(self, codec: Codec, tokens: Sequence[int]) -> ParsedResponse:
        """Parse the sampled tokens of an assistant message."""
        ...

    def message_parser(self, options: ParseOptions) -> MessageParser:
        """Return a parser of one assistant message whose text arrives in pieces."""
        ...


class FixedHistory(ABC):
    """The methods of formats whose rule for history is the same for all conversations. The rule is
    a part of their capabilities.
    """

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What the format can express."""

    @abstractmethod
    def turns(self, messages: Sequence[CheckedMessage]) -> list[Turn]:
        """Return the turns of the messages."""

    @abstractmethod
    def suffix(self, messages: Sequence[CheckedMessage], role: str) -> tuple[Piece, ...]:
        """Return the header of the next message, which `role` will write."""

    def prompt_turns(self, messages: Sequence[CheckedMessage], role: str) -> list[Turn]:
        """Return the turns of the prompt for the next message, which is one of `role`, the header
        of that message last.
        """
        return [*self.turns(messages), Turn(self.suffix(messages, role), (), None, sampled=True)]

    def extends(self, messages: Sequence[CheckedMessage], answer: int) -> bool:
        """Return whether prompts begin with the earlier prompts and their answers."""
        return self.capabilities.extends

    def example_ends(self, messages: Sequence[CheckedMessage]) -> list[int]:
        """Return the number of messages in each training example: all, or those up to the end of
        each user turn or of each answer.
        """
        if self.capabilities.extends:
            return [len(messages)]
        if self.capabilities.extends_in_turn:
            users = [index for index, message in enumerate(messages) if message.role == "user"]
            return [*users[1:], len(messages)]
        ends = [i + 1 for i, message in enumerate(messages) if message.role == "assistant"]
        return ends if ends[-1:] == [len(messages)] else [*ends, len(messages)]


class StopTokenFormat(FixedHistory):
    """The methods of formats whose sampled messages end with a stop token. A format derives from
    this class and adds the other methods of `ChatFormat`.
    """

    begin: ClassVar[tuple[Piece, ...]] = ()
    """The pieces before the first message, such as a beginning-of-sequence token."""
    stops: ClassVar[tuple[Control, ...]]
    """The tokens at which the model stops."""

    def opening(self) -> tuple[Piece, ...]:
        """Return the pieces before the first message."""
        return self.begin

    def tags(self) -> Sequence[str]:
        """Return the tags of reasoning and tool calls that a message may contain."""
        return ()

    def prefill(self, text: str) -> tuple[Piece, ...]:
        """Return the pieces of `text`. Tags of reasoning and tool calls become controls."""
        return tuple(split_text(text, self.tags()))

    def overlap(self, last: CheckedMessage) -> tuple[Piece, ...]:
        """Return no pieces: the model stops at a stop token."""
        return ()

    def stop(self, codec: Codec) -> list[int]:
        """Return the ids of the stop tokens. Stop tokens that the vocabulary lacks are left out."""
        ids = [codec.control_id(token.text) for token in self.stops]
        return [id_ for id_ in ids if id_ is not None]

    def parse(self, codec: Codec, tokens: Sequence[int]) -> ParsedResponse:
        """Parse the sampled tokens of an assistant message. Never raises."""
        body, ending = cut_at_stop(codec, tokens, *self.stop(codec))
        return ParsedResponse(self.read_message(codec.split(body, self.tags())), ending)

    def read_message(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the sampled message that `pieces` contain: an answer of plain text, unless a
        format overrides this method.
        """
        return {"role": "assistant", "content": as_text(pieces)}

    def message_parser(self, options: ParseOptions) -> MessageParser:
        """Return a parser of one assistant message whose text arrives in pieces: plain text, unless
        a format overrides this method.
        """
        return PlainParser()
