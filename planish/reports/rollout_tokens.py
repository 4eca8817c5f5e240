"""Tokens as a person reads them: which text each one is, and which are controls.

Text comes from decoding, never from the vocabulary file. A token is decoded behind another one,
since some tokenizers drop the space before a first word. Where a character is split over several
tokens, those are one piece and show the character once; bytes that make no character show as
U+FFFD. Pieces are kept for the whole run, so a token is decoded once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

from markupsafe import Markup

from planish.logtree.html import visible

REPLACEMENT = "\ufffd"
LONGEST_PIECE = 16


@dataclass(frozen=True)
class Piece:
    """The fewest tokens that are whole text."""

    text: str
    """With signs in place of what a page cannot show."""
    tokens: int = 1
    is_control: bool = False
    """A special or added token, or one without text."""

    @cached_property
    def size(self) -> str:
        """Length in UTF-16 units, as browsers count, and "*n" where n tokens share it."""
        units = len(self.text.encode("utf-16-le")) // 2
        return str(units) if self.tokens == 1 else f"{units}*{self.tokens}"


class TokenTexts:
    """The pieces of one tokenizer (of `transformers`, or with its `encode`, `decode` and
    `added_tokens_decoder`).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._controls = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._behind = len(self._decode(self._before))
        self._known: dict[int, Piece] = {}
        self._runs: dict[tuple[int, ...], str] = {}
        self._replacement = tuple(tokenizer.encode(REPLACEMENT, add_special_tokens=False))

    def pieces(self, tokens: Sequence[int]) -> list[Piece]:
        """The pieces in order; their `tokens` sum to the number of tokens."""
        pieces: list[Piece] = []
        known, at = self._known, 0
        while at < len(tokens):
            piece = known.get(tokens[at]) or self._learn(tokens[at])
            if REPLACEMENT in piece.text:
                piece = self._joined(tokens, at)
            pieces.append(piece)
            at += piece.tokens
        return pieces

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(piece.text for piece in self.pieces(tokens))

    def html(self, tokens: Sequence[int]) -> Markup:
        """The text with its control tokens in <b>."""
        parts: list[str] = []
        plain: list[str] = []
        for piece in self.pieces(tokens):
            if piece.is_control:
                parts += (escape("".join(plain)), "<b>", escape(piece.text), "</b>")
                plain = []
            else:
                plain.append(piece.text)
        return Markup("".join((*parts, escape("".join(plain)))))

    def _learn(self, token: int) -> Piece:
        text = visible(self._decoded([token]))
        piece = Piece(text or f"<{token}>", is_control=not text or token in self._controls)
        self._known[token] = piece
        return piece

    def _joined(self, tokens: Sequence[int], start: int) -> Piece:
        """The piece that begins with the incomplete token at `start`; that token alone if no
        character comes of it.
        """
        for end in range(start + 1, min(start + LONGEST_PIECE, len(tokens)) + 1):
            last = self._known.get(tokens[end - 1]) or self._learn(tokens[end - 1])
            if REPLACEMENT not in last.text:
                break
            run = tuple(tokens[start:end])
            text = self._runs.get(run)
            if text is None:
                text = self._runs[run] = visible(self._decoded(run))
            if REPLACEMENT not in text or run == self._replacement:
                return Piece(text, len(run))
        return self._known[tokens[start]]

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self._decode([*self._before, *tokens])[self._behind :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
