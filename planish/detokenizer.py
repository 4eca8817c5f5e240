"""The text of tokens: the bytes of each token, and decoding of tokens that arrive one by one.

A token may be only a part of a character. So the text of a token is known as bytes, and the text of
several tokens is their joined bytes, decoded as UTF-8. Bytes that are not valid UTF-8 become U+FFFD.

Some tokenizers (Llama 2, Mistral to v0.3) drop the space at the start of every text that they
decode. A sampled token continues a text, so its bytes include that space.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Container, Sequence

from planish.tokenizer import ModelTokenizer

REPLACEMENT_CHARACTER = "\ufffd"
"""The character that decoding returns for bytes that are not valid UTF-8."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Detokenizer:
    """The text of single tokens of one tokenizer, as bytes."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        vocabulary_entry: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        """Create an empty cache of token texts.

        `decode` turns tokens into text. `vocabulary_entry` returns the raw vocabulary entry of a
        token, such as "<0xE2>". The entry gives the bytes of a token that is only part of a UTF-8
        character. Without `vocabulary_entry`, the bytes of such tokens are unknown.
        """
        self.decode = decode
        self._vocabulary_entry = vocabulary_entry
        self._cache: dict[int, bytes | None] = {}

    @classmethod
    def of_tokenizer(cls, tokenizer: ModelTokenizer) -> Detokenizer:
        """Return the detokenizer of a tokenizer of `transformers`, or of an object like it. The
        texts of special tokens are part of the text.
        """

        def decode(tokens: Sequence[int]) -> str:
            text = tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            assert isinstance(text, str)
            return text

        def vocabulary_entry(token: int) -> str | None:
            entry = tokenizer.convert_ids_to_tokens(token)
            return entry if isinstance(entry, str) else None

        return cls(decode, vocabulary_entry)

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token adds after other tokens, or None if they are unknown."""
        try:
            return self._cache[token]
        except KeyError:
            text_bytes = self._cache[token] = self._compute_token_bytes(token)
            return text_bytes

    def text_bytes(self, token: int, *, begins_text: bool = False) -> bytes:
        """Return the bytes of a token, or of its text if its bytes are unknown. `begins_text`:
        return the bytes that the token has as the first token of a text.
        """
        token_bytes = self.token_bytes(token)
        if token_bytes is not None and not begins_text:
            return token_bytes
        text = self.decode([token])
        if token_bytes is not None and REPLACEMENT_CHARACTER in text:
            return token_bytes
        return text.encode("utf-8", "surrogatepass")

    def _compute_token_bytes(self, token: int) -> bytes | None:
        # Some tokenizers drop the space at the start of a text, so look at the second token.
        first, twice = self.decode([token]), self.decode([token, token])
        text = twice[len(first) :]
        if not twice.startswith(first) or (first and not text):
            return None
        if REPLACEMENT_CHARACTER not in text:
            return text.encode("utf-8", "surrogatepass")
        entry = self._vocabulary_entry(token)
        if entry is None:
            return None
        if byte := _BYTE_TOKEN.fullmatch(entry):
            return bytes([int(byte[1], 16)])
        if all(character in BYTE_OF for character in entry):
            return bytes(BYTE_OF[character] for character in entry)
        return text.encode() if REPLACEMENT_CHARACTER in entry else None


class TextDecoder:
    """Decodes the tokens of one text while they arrive."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        begins_text: bool = False,
        hidden_ids: Container[int] = (),
    ) -> None:
        """`begins_text`: whether the first token begins a text. Otherwise it continues one.
        `hidden_ids`: tokens that are not part of the text.
        """
        self._detokenizer = detokenizer
        self._begins_text = begins_text
        self._hidden_ids = hidden_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int, num_bytes: int | None = None) -> str:
        """Add a token, and return the characters that it completes. With `num_bytes`, add only the
        first bytes of the token.
        """
        if token in self._hidden_ids:
            return ""
        text_bytes = self._detokenizer.text_bytes(token)
        if num_bytes is not None:
            text_bytes = text_bytes[:num_bytes]
        if self._begins_text:
            at_start = self._detokenizer.text_bytes(token, begins_text=True)
            is_shorter = text_bytes[:1] == b" " and not at_start.startswith(b" ")
            text_bytes = text_bytes.removeprefix(b" ") if is_shorter else text_bytes
            self._begins_text = False
        return self._decoder.decode(text_bytes)

    def flush(self) -> str:
        """End the text, and return U+FFFD if it ends within a character."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def special_token_ids(tokenizer: ModelTokenizer) -> frozenset[int]:
    """Return the ids of the tokens that `decode` leaves out with `skip_special_tokens=True`."""
    added = tokenizer.added_tokens_decoder
    return frozenset(id_ for id_, token in added.items() if token.special)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character means in byte-level BPE vocabularies, as in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


BYTE_OF = _byte_alphabet()
"""The byte that each character means in byte-level BPE vocabularies."""
