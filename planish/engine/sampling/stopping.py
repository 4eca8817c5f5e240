"""Stop conditions: the tokens and strings at which a sample ends before `max_tokens`.

A stop string may span several tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from planish.types import SamplingParams

_MAX_KNOWN = 4096, 512
"""The maximum sizes of the caches `_texts` and `_windows`. A full cache is cleared. Repetitive text
needs few entries. Without the caches, text that nearly matches long stop strings would take as long
as several decoding steps of a small model.
"""


@dataclass(frozen=True)
class StopCondition:
    """The stop tokens and stop strings of one request.

    If both are empty, samples run to `max_tokens`.
    """

    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    _texts: dict[tuple[int, ...], bool] = field(default_factory=dict, repr=False, compare=False)
    """The cached results of `_ends`, keyed by its one or two tokens."""
    _windows: dict[tuple[int, ...], bool] = field(default_factory=dict, repr=False, compare=False)
    """The cached results of `_search`, keyed by the searched tokens."""

    @cached_property
    def _reversed(self) -> list[str]:
        return sorted(string[::-1] for string in self.strings)

    @cached_property
    def _window(self) -> int:
        return max(len(string.encode()) for string in self.strings) + 3

    @classmethod
    def from_params(cls, params: SamplingParams, eos_token_ids: Sequence[int]) -> StopCondition:
        """Return the stop condition for `stop` and `stop_token_ids` of `params`.

        If `stop` is None, it means the model's end-of-sequence tokens.
        """
        stop = eos_token_ids if params.stop is None else params.stop
        items: Sequence[str | int] = (stop,) if isinstance(stop, str) else stop
        ids = [item for item in items if not isinstance(item, str)]
        return cls(
            token_ids=frozenset([*ids, *params.stop_token_ids]),
            strings=tuple(item for item in items if isinstance(item, str)),
        )

    def is_met(
        self,
        tokens: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        min_tokens: int = 0,
    ) -> bool:
        """Return whether the last of `tokens` completes a stop token or stop string.

        Stop strings are searched only in the text after the first `min_tokens` tokens.

        The caller must call this method after every token. Only the text of the last tokens is
        searched for a stop string. Every token with text adds at least one byte. So a string of n
        bytes that ends in the last token starts at most n tokens before it. The window has three
        more tokens, because some tokenizers change the start of the text that they decode. They
        drop a leading space, or they replace a whole run of byte tokens that starts in the middle
        of a character.

        Tokens without text also count towards the window. Control tokens that the tokenizer hides
        are an example. A stop string may be missed if several such tokens interrupt it.
        """
        if tokens[-1] in self.token_ids:
            return True
        if not self.strings or len(tokens) <= min_tokens or not self._may_end(tokens, decode):
            return False
        return self._is_found(tokens, decode, min_tokens)

    def _may_end(self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> bool:
        """Return False if certainly no stop string ends in the last token.

        This check decodes at most the last two tokens, and nothing if its result is cached. So it
        is much faster than decoding the whole window.
        """
        may_end = self._ends((tokens[-1],), decode)
        if may_end and len(tokens) > 1:
            may_end = self._ends((tokens[-2], tokens[-1]), decode)
        return may_end

    def _ends(self, tokens: tuple[int, ...], decode: Callable[[Sequence[int]], str]) -> bool:
        """Return whether a stop string may end in the last of `tokens`, which are one or two.

        Only the text of `tokens` is known here. The result is True if earlier tokens or an
        incomplete character leave the question open.
        """
        known = self._texts.get(tokens)
        if known is None:
            text, before = decode(tokens), decode(tokens[:-1]) if tokens[:-1] else ""
            # `_can_end` gets the text with a leading space, because the tokenizer may have dropped
            # one.
            is_known = text.startswith(before) and len(text) > len(before)
            known = (
                not is_known
                or "\ufffd" in text
                or self._can_end(f" {text}", len(before) + bool(before))
            )
            if len(self._texts) >= _MAX_KNOWN[0]:
                self._texts.clear()
            self._texts[tokens] = known
        return known

    def _can_end(self, text: str, start: int) -> bool:
        """Return whether a stop string may end within text[start:].

        Up to that end, either `text` ends with the whole stop string, or the stop string ends with
        `text`. In the second case the stop string starts in earlier tokens. The first character of
        `text` is a space that `_ends` adds. It does not have to be part of the stop string.
        """
        for end in range(start + 1, len(text) + 1):
            if text[:end].endswith(self.strings):
                return True
            tail = (text[1:end] or text[:end])[::-1]
            at = bisect_left(self._reversed, tail)
            if at < len(self.strings) and self._reversed[at].startswith(tail):
                return True
        return False

    def _is_found(
        self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str], min_tokens: int
    ) -> bool:
        """Return whether the window of the last tokens contains a stop string."""
        recent = tokens[max(min_tokens, len(tokens) - self._window) :]
        key = tuple(recent)
        found = self._windows.get(key)
        if found is None:
            found = self._search(recent, decode)
            if len(self._windows) >= _MAX_KNOWN[1]:
                self._windows.clear()
            self._windows[key] = found
        return found

    def _search(self, recent: Sequence[int], decode: Callable[[Sequence[int]], str]) -> bool:
        # The window may start in the middle of a UTF-8 character, whose remaining bytes are at most
        # three tokens. So skip tokens until the text starts with a whole character.
        for skipped in range(4):
            text = decode(recent[skipped:])
            if any(string in text for string in self.strings):
                return True
            if not text.startswith("\ufffd"):
                break
        return False
