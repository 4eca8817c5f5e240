"""How a chat format writes reasoning and tool calls, as data.

grammars.py builds the grammars of constrained sampling from these forms.
"""

from dataclasses import dataclass

from planish.renderers.codec import Control, Piece

THINK, THINK_END = Control("<think>"), Control("</think>")


@dataclass(frozen=True)
class Pattern:
    """A part of a call that the model chooses, as a regular expression."""

    regex: str


@dataclass(frozen=True)
class ThoughtForm:
    """The form of sampled reasoning."""

    begin: tuple[Piece, ...]
    """The pieces before the reasoning. Empty if the prompt ends with them."""
    end: tuple[Piece, ...]
    """The pieces after the reasoning, up to the answer."""


@dataclass(frozen=True)
class CallForm:
    """The form of tool calls.

    Each call is `begin`, the name, `before_arguments`, the arguments, `end`. All calls together are
    `opening`, the calls separated by `between`, and `closing`.
    """

    begin: tuple[Piece, ...]
    before_arguments: tuple[Piece | Pattern, ...]
    end: tuple[Piece, ...]
    opening: tuple[Piece, ...] = ()
    between: tuple[Piece, ...] | None = ()
    """None if a message has at most one call."""
    closing: tuple[Piece, ...] = ()
    lead: tuple[Piece, ...] = ()
    """The pieces before the calls of a message without text."""
    xml: bool = False
    """Whether each argument is an XML element, `<parameter=name>`. Otherwise the arguments are a
    JSON object.
    """
    answer: tuple[Piece, ...] = ()
    """The pieces before an answer without calls.

    If there are such pieces, no message has both an answer and calls.
    """


THINK_BLOCK_FORM = ThoughtForm((THINK,), (THINK_END, "\n\n"))
