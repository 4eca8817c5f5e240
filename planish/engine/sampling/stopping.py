"""Stop conditions: the tokens and strings at which a sample ends before `max_tokens`.

A stop string may span several tokens, and tokens may be parts of characters. So the strings are
matched as bytes. The matcher keeps the longest suffix of the text that is a prefix of a stop
string. The bytes of each new token extend or shorten this suffix. So the cost of a token does not
depend on the length of the text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from planish.types import SamplingParams

_MAX_CACHE_ENTRIES = 4096
"""The maximum number of entries in a condition's cache. A full cache is cleared.

The stop strings of a request have at most 4,096 bytes together. While a text spells out a stop
string, each token adds at most one entry. So spelling out all stop strings adds at most about one
entry per byte of these strings.
"""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_REPLACEMENT_CHARACTER = "\ufffd"
"""The character that decoding returns for bytes that are not valid UTF-8."""


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
        character. Without `vocabulary_entry`, a text with such tokens is decoded again after every
        token.
        """
        self.decode = decode
        self._vocabulary_entry = vocabulary_entry
        self._cache: dict[int, bytes | None] = {}

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token adds after other tokens, or None if they are unknown."""
        try:
            return self._cache[token]
        except KeyError:
            text_bytes = self._cache[token] = self._compute_token_bytes(token)
            return text_bytes

    def _compute_token_bytes(self, token: int) -> bytes | None:
        # Some tokenizers drop the space at the start of a text, so look at the second token.
        first, twice = self.decode([token]), self.decode([token, token])
        text = twice[len(first) :]
        if not twice.startswith(first) or (first and not text):
            return None
        if _REPLACEMENT_CHARACTER not in text:
            return text.encode("utf-8", "surrogatepass")
        entry = self._vocabulary_entry(token)
        if entry is None:
            return None
        if byte := _BYTE_TOKEN.fullmatch(entry):
            return bytes([int(byte[1], 16)])
        if all(character in _BYTE_OF for character in entry):
            return bytes(_BYTE_OF[character] for character in entry)
        return None


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character means in byte-level BPE vocabularies, as in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()


@dataclass(frozen=True)
class StopCondition:
    """The stop tokens and stop strings of one request.

    If both are empty, samples run to `max_tokens`.
    """

    detokenizer: Detokenizer = field(repr=False, compare=False)
    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    min_tokens: int = 0
    """Stop strings are searched only in the text after the first `min_tokens` tokens."""
    _cache: dict[tuple[bytes, int], tuple[bytes, bool] | None] = field(
        default_factory=dict, repr=False, compare=False
    )
    """The cached results of `_advance`."""

    @classmethod
    def from_params(
        cls, params: SamplingParams, eos_token_ids: Sequence[int], detokenizer: Detokenizer
    ) -> StopCondition:
        """Return the stop condition for `stop`, `stop_token_ids` and `min_tokens` of `params`.

        If `stop` is None, it means the model's end-of-sequence tokens.
        """
        stop = eos_token_ids if params.stop is None else params.stop
        items: Sequence[str | int] = (stop,) if isinstance(stop, str) else stop
        ids = [item for item in items if not isinstance(item, str)]
        return cls(
            detokenizer,
            token_ids=frozenset([*ids, *params.stop_token_ids]),
            strings=tuple(item for item in items if isinstance(item, str)),
            min_tokens=params.min_tokens,
        )

    @cached_property
    def _sorted_strings(self) -> list[bytes]:
        return sorted(string.encode("utf-8", "surrogatepass") for string in self.strings)

    @cached_property
    def _by_last_byte(self) -> dict[int, tuple[bytes, ...]]:
        """The stop strings by their last byte."""
        return {
            last: tuple(string for string in self._sorted_strings if string[-1] == last)
            for last in {string[-1] for string in self._sorted_strings}
        }

    @cached_property
    def window_size(self) -> int:
        """The number of tokens that are decoded to confirm a match.

        Every token with text adds at least one byte. So a stop string of n bytes starts at most n
        tokens before its end. The window has three more tokens, because some tokenizers decode the
        first tokens of a text differently. Some drop a leading space. Others return replacement
        characters for a whole run of byte tokens that starts in the middle of a character.
        """
        return max(len(string) for string in self._sorted_strings) + 3

    def advance(self, matched_suffix: bytes, token: int) -> tuple[bytes, bool] | None:
        """Extend the suffix `matched_suffix` of a text by one token.

        `matched_suffix` is the longest suffix of the text that is a prefix of a stop string. Return
        this suffix of the new text, and whether a stop string ends in the token. Return None if the
        token's bytes are unknown.
        """
        key = (matched_suffix, token)
        try:
            return self._cache[key]
        except KeyError:
            if len(self._cache) >= _MAX_CACHE_ENTRIES:
                self._cache.clear()
            result = self._cache[key] = self._advance(matched_suffix, token)
            return result

    def _advance(self, matched_suffix: bytes, token: int) -> tuple[bytes, bool] | None:
        token_bytes = self.detokenizer.token_bytes(token)
        if token_bytes is None:
            return None
        text, strings = matched_suffix + token_bytes, self._sorted_strings
        is_match = any(
            text.endswith(self._by_last_byte.get(byte, ()), 0, at)
            for at, byte in enumerate(token_bytes, len(matched_suffix) + 1)
        )
        # The loop tries the suffixes of the text, the longest first. Each failed try shortens the
        # result by one byte, and each token lengthens it by at most the token's bytes. So over a
        # long text, the loop runs about once per byte.
        for start in range(len(text)):
            suffix = text[start:]
            index = bisect_left(strings, suffix)
            if index < len(strings) and strings[index].startswith(suffix):
                return suffix, is_match
        return b"", is_match

    def contains_stop_string(self, tokens: Sequence[int]) -> bool:
        """Return whether the text of the last tokens contains a stop string."""
        recent_tokens: list[int] = []
        for token in reversed(tokens[self.min_tokens :]):
            if self.detokenizer.token_bytes(token) != b"":
                recent_tokens.append(token)
                if len(recent_tokens) == self.window_size:
                    break
        recent_tokens.reverse()
        # The window may start in the middle of a UTF-8 character, whose remaining bytes are at most
        # three tokens. So skip tokens until the text starts with a whole character.
        for num_skipped in range(4):
            text = self.detokenizer.decode(recent_tokens[num_skipped:])
            if any(string in text for string in self.strings):
                return True
            if not text.startswith(_REPLACEMENT_CHARACTER):
                break
        return False


class StopMatcher:
    """A matcher that detects when one sample meets its stop condition."""

    def __init__(self, condition: StopCondition) -> None:
        """Start before the first token of a sample."""
        self._condition = condition
        self._matched_suffix = b""
        self._decode_until_length = 0
        """While the text has at most this number of tokens, its end is decoded after every token. A
        token whose bytes are unknown raises the number, because a stop string may include that
        token.
        """

    def is_met(self, tokens: Sequence[int]) -> bool:
        """Return whether the last of `tokens` completes a stop token or stop string.

        The caller must call this method after every token. A match of the bytes is confirmed in the
        decoded text, because some tokenizers decode the first token of a text differently from
        later tokens.
        """
        condition, token = self._condition, tokens[-1]
        if token in condition.token_ids:
            return True
        if not condition.strings or len(tokens) <= condition.min_tokens:
            return False
        advanced = condition.advance(self._matched_suffix, token)
        if advanced is None:
            self._matched_suffix, self._decode_until_length = (
                b"",
                len(tokens) + condition.window_size,
            )
            return condition.contains_stop_string(tokens)
        self._matched_suffix, is_match = advanced
        return (
            is_match or len(tokens) <= self._decode_until_length
        ) and condition.contains_stop_string(tokens)
