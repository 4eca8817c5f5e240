"""Stop conditions: the tokens and strings at which a sample ends before `max_tokens`.

A stop string may span several tokens, and tokens may be parts of characters. So the strings are
matched as bytes. The matcher keeps the longest suffix of the text that is a prefix of a stop
string. The bytes of each new token extend or shorten this suffix. So the cost of a token does not
depend on the length of the text.

The matcher also says where the text of a stopped sample ends, and which tokens a stop string may
still remove. So nobody else has to search for stop strings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from planish.detokenizer import REPLACEMENT_CHARACTER, Detokenizer
from planish.service import StopGate, TextEnd
from planish.types import SamplingParams

_MAX_CACHE_ENTRIES = 4096
"""The maximum number of entries in a condition's cache. A full cache is cleared.

Spelling out all stop strings of a request adds at most about one entry per byte of these strings,
because each token adds at most one. They have at most 4,096 bytes together.
"""


@dataclass(frozen=True)
class _ByteMatch:
    """A stop string in the bytes of a text."""

    string: bytes
    num_bytes: int
    """The number of bytes from the beginning of the string to the end of the last token."""


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
    _cache: dict[tuple[bytes, int], tuple[bytes, _ByteMatch | None] | None] = field(
        default_factory=dict[tuple[bytes, int], tuple[bytes, _ByteMatch | None] | None],
        repr=False,
        compare=False,
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

    def advance(self, matched_suffix: bytes, token: int) -> tuple[bytes, _ByteMatch | None] | None:
        """Extend the suffix `matched_suffix` of a text by one token.

        `matched_suffix` is the longest suffix of the text that is a prefix of a stop string. Return
        this suffix of the new text, and the stop string that ends in the token. If several end
        there, return the one that begins first. Return None if the token's bytes are unknown.
        """
        key = (matched_suffix, token)
        try:
            return self._cache[key]
        except KeyError:
            if len(self._cache) >= _MAX_CACHE_ENTRIES:
                self._cache.clear()
            result = self._cache[key] = self._advance(matched_suffix, token)
            return result

    def _advance(self, matched_suffix: bytes, token: int) -> tuple[bytes, _ByteMatch | None] | None:
        token_bytes = self.detokenizer.token_bytes(token)
        if token_bytes is None:
            return None
        text, strings = matched_suffix + token_bytes, self._sorted_strings
        matches = [
            _ByteMatch(string, len(text) - at + len(string))
            for at, byte in enumerate(token_bytes, len(matched_suffix) + 1)
            for string in self._by_last_byte.get(byte, ())
            if text.endswith(string, 0, at)
        ]
        match = max(matches, key=lambda match: match.num_bytes, default=None)
        # The loop tries the suffixes of the text, the longest first. Each failed try shortens the
        # result by one byte, and each token lengthens it by at most the token's bytes. So over a
        # long text, the loop runs about once per byte.
        for start in range(len(text)):
            suffix = text[start:]
            index = bisect_left(strings, suffix)
            if index < len(strings) and strings[index].startswith(suffix):
                return suffix, match
        return b"", match

    def position_of(self, tokens: Sequence[int], num_bytes: int) -> tuple[int, int]:
        """Return where the last `num_bytes` bytes of a text begin: the index of a token, and the
        number of its bytes before this position. The bytes of these tokens must be known.
        """
        index = len(tokens)
        while num_bytes > 0:
            index -= 1
            num_bytes -= len(self.detokenizer.token_bytes(tokens[index]) or b"")
        return index, -num_bytes

    def find_in_text(self, tokens: Sequence[int], first: int) -> TextEnd | None:
        """Return where the first stop string begins in the decoded text of the last tokens, or None
        if there is none. Tokens before index `first` are not searched.

        Use this only for tokens whose bytes are unknown, because it decodes `window_size` tokens.
        """
        window: list[int] = []
        for index in range(len(tokens) - 1, first - 1, -1):
            if self.detokenizer.token_bytes(tokens[index]) != b"":
                window.append(index)
                if len(window) == self.window_size:
                    break
        window.reverse()
        # The window may start in the middle of a UTF-8 character, whose remaining bytes are at most
        # three tokens. So skip tokens until the text starts with a whole character.
        for num_skipped in range(4):
            indices = window[num_skipped:]
            text = self.detokenizer.decode([tokens[index] for index in indices])
            found = [(at, string) for string in self.strings if (at := text.find(string)) >= 0]
            if found:
                at, string = min(found, key=lambda match: match[0])
                return self._end_at(tokens, indices, at, string)
            if not text.startswith(REPLACEMENT_CHARACTER):
                break
        return None

    def _end_at(
        self, tokens: Sequence[int], indices: Sequence[int], at: int, string: str
    ) -> TextEnd:
        """Return the position of character `at` in the decoded text of tokens."""
        begin = 0
        for number, index in enumerate(indices, start=1):
            text = self.detokenizer.decode([tokens[index] for index in indices[:number]])
            if len(text) > at:
                return TextEnd(index, len(text[begin:at].encode("utf-8", "surrogatepass")), string)
            begin = len(text)
        raise AssertionError("the position is outside of the text")


class StopMatcher:
    """A matcher that detects when one sample meets its stop condition."""

    def __init__(self, condition: StopCondition, gate: StopGate | None = None) -> None:
        """Start before the first token of a sample. While `gate` is closed, the matcher ignores
        stop strings, and all stop tokens that are not in `gate.open_ids`.
        """
        self._condition = condition
        self._gate = None if gate is None else gate.new_tracker()
        self._open_ids = condition.token_ids if gate is None else gate.open_ids
        self._first_token = condition.min_tokens
        """The index of the first token in which stop strings are searched."""
        self._matched_suffix = b""
        self._decode_until_length = 0
        """While the text has at most this number of tokens, its end is decoded after every token. A
        token whose bytes are unknown raises the number, because a stop string may include that
        token.
        """

    def text_end(self, tokens: Sequence[int]) -> TextEnd | None:
        """Return where the text ends if the last of `tokens` completes a stop token or a stop
        string, and None otherwise. The caller must call this method after every token.
        """
        condition, token = self._condition, tokens[-1]
        if self._gate is not None and self._gate(token):
            self._gate = None
            self._open_ids = condition.token_ids
            self._first_token = max(self._first_token, len(tokens) - 1)
        if token in condition.token_ids and token in self._open_ids:
            return TextEnd(len(tokens) - 1, 0, token)
        if not condition.strings or self._gate is not None or len(tokens) <= self._first_token:
            return None
        advanced = condition.advance(self._matched_suffix, token)
        if advanced is None:
            self._matched_suffix = b""
            self._decode_until_length = len(tokens) + condition.window_size
            return condition.find_in_text(tokens, self._first_token)
        self._matched_suffix, match = advanced
        if match is not None:
            index, offset = condition.position_of(tokens, match.num_bytes)
            return TextEnd(index, offset, match.string.decode("utf-8", "surrogatepass"))
        if len(tokens) <= self._decode_until_length:
            return condition.find_in_text(tokens, self._first_token)
        return None

    def num_unsettled(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens at the end of the sample that a stop string may still remove,
        completely or in part.
        """
        if len(tokens) <= self._decode_until_length:
            return min(self._condition.window_size, len(tokens) - self._first_token)
        if not self._matched_suffix:
            return 0
        index, _ = self._condition.position_of(tokens, len(self._matched_suffix))
        return len(tokens) - index
