"""Tokens as texts and bytes, one by one, for lists of logprobs.

A token may be a part of a character only. Its text then holds a replacement character, and its
bytes are the truth; those of several tokens together are UTF-8 again. Byte-level vocabularies write
each byte as a character of their own; others write text, or `<0x0A>` for a byte.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The character by which byte-level BPE (GPT-2's, and all after it) writes each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(256 + rank): byte for rank, byte in enumerate(others)
    }


_ALPHABET = _byte_level_alphabet()


class TokenTexts:
    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is one of `transformers`."""
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_byte_level = "ByteLevel" in repr(getattr(backend, "decoder", None))
        self._special = set(getattr(tokenizer, "added_tokens_decoder", {}))
        self.of = lru_cache(maxsize=1 << 16)(self._of)

    def _of(self, token: int) -> tuple[str, bytes]:
        """Text and bytes of one token."""
        text = self._tokenizer.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text, self._bytes(token, text)

    def _bytes(self, token: int, text: str) -> bytes:
        written = self._tokenizer.convert_ids_to_tokens(token)
        if token in self._special or not isinstance(written, str):
            return text.encode()
        if self._is_byte_level and all(character in _ALPHABET for character in written):
            return bytes(_ALPHABET[character] for character in written)
        byte = _BYTE.fullmatch(written)
        return bytes([int(byte.group(1), 16)]) if byte else text.encode()
