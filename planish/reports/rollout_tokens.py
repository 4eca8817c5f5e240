"""The text of each token, and which tokens are control tokens.

Text comes from decoding, never from the vocabulary file. Some tokenizers drop the space before the
first word of a text, so each token is decoded together with another token in front. If several
tokens share a character, they form one piece with that character. Bytes that are not a valid
character are shown as U+FFFD. Pieces are cached for the whole run, so each token is decoded once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import groupby
from typing import Any

from markupsafe import Markup

from planish.logtree.html import visible
from planish.tokenizer import ModelTokenizer

REPLACEMENT_CHARACTER = "\ufffd"
MAX_PIECE_TOKENS = 16
"""Maximum tokens of a piece."""


@dataclass(frozen=True)
class Piece:
    """A token, or the shortest sequence of tokens that decodes to whole characters."""

    text: str
    """Its text, with visible signs for control characters."""
    num_tokens: int = 1
    """Number of tokens."""
    is_control: bool = False
    """Whether it is a special or added token, or a token without text."""

    @cached_property
    def length_code(self) -> str:
        """Length of the text in UTF-16 units, as browsers count, followed by "*n" for a piece of n
        > 1 tokens.
        """
        units = len(self.text.encode("utf-16-le")) // 2
        return str(units) if self.num_tokens == 1 else f"{units}*{self.num_tokens}"


IMAGE_SIGN = "\N{WHITE SQUARE}"
"""How a position of an image is shown. Its token is a negative number."""


def decode_keys(keys: Sequence[int], decode: Callable[[list[int]], Any]) -> str:
    """Return the text of tokens, in which one sign stands for the negative numbers of an image (see
    `ModelInput.to_keys`). `decode`: the method of a tokenizer, for the other tokens.
    """
    runs = groupby(keys, lambda key: key < 0)
    texts = [IMAGE_SIGN if is_image else decode(list(run)) for is_image, run in runs]
    return "".join(map(str, texts))


class DisplayDetokenizer:
    """Splits tokens into pieces of text. The tokenizer is one of `transformers`, or has its
    `encode`, `decode`, `all_special_ids` and `added_tokens_decoder`.
    """

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._control_ids = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self._prefix_ids = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._prefix_length = len(self._decode(self._prefix_ids))
        self._pieces: dict[int, Piece] = {}
        self._joined_texts: dict[tuple[int, ...], str] = {}
        """Cached texts of token sequences that share a character."""
        self._replacement_ids = tuple(
            tokenizer.encode(REPLACEMENT_CHARACTER, add_special_tokens=False)
        )

    def pieces(self, tokens: Sequence[int]) -> list[Piece]:
        """Return the pieces in order; their `num_tokens` sum to the number of tokens."""
        pieces: list[Piece] = []
        cached, start = self._pieces, 0
        while start < len(tokens):
            piece = cached.get(tokens[start]) or self._decode_piece(tokens[start])
            if REPLACEMENT_CHARACTER in piece.text:
                piece = self._join_tokens(tokens, start)
            pieces.append(piece)
            start += piece.num_tokens
        return pieces

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, with visible signs for control characters."""
        return "".join(piece.text for piece in self.pieces(tokens))

    def html(self, tokens: Sequence[int]) -> Markup:
        """Return the text with control tokens in <b>."""
        parts: list[str] = []
        plain: list[str] = []
        for piece in self.pieces(tokens):
            if piece.is_control:
                parts += (escape("".join(plain)), "<b>", escape(piece.text), "</b>")
                plain = []
            else:
                plain.append(piece.text)
        return Markup("".join((*parts, escape("".join(plain)))))

    def _decode_piece(self, token: int) -> Piece:
        if token < 0:
            return Piece(IMAGE_SIGN, is_control=True)  # not kept, because images are many
        text = visible(self._decode_continuation([token]))
        piece = Piece(text or f"<{token}>", is_control=not text or token in self._control_ids)
        self._pieces[token] = piece
        return piece

    def _join_tokens(self, tokens: Sequence[int], start: int) -> Piece:
        """Return the piece that begins at `start`, where the token is only a part of a character.
        If the following tokens do not complete the character, the piece is that token alone.
        """
        for end in range(start + 1, min(start + MAX_PIECE_TOKENS, len(tokens)) + 1):
            last_piece = self._pieces.get(tokens[end - 1]) or self._decode_piece(tokens[end - 1])
            if REPLACEMENT_CHARACTER not in last_piece.text:
                break
            joined_ids = tuple(tokens[start:end])
            text = self._joined_texts.get(joined_ids)
            if text is None:
                text = self._joined_texts[joined_ids] = visible(
                    self._decode_continuation(joined_ids)
                )
            if REPLACEMENT_CHARACTER not in text or joined_ids == self._replacement_ids:
                return Piece(text, len(joined_ids))
        return self._pieces[tokens[start]]

    def _decode_continuation(self, tokens: Sequence[int]) -> str:
        """Return the text that tokens have in the middle of a text."""
        return self._decode([*self._prefix_ids, *tokens])[self._prefix_length :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
