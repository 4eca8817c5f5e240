"""Stop conditions: the tokens and strings at which a sample ends before `max_tokens`.

A stop string may span several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planish.types import SamplingParams


@dataclass(frozen=True)
class StopCondition:
    """The stop tokens and stop strings of one request.

    If both are empty, samples run to `max_tokens`.
    """

    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

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
        if not self.strings or len(tokens) <= min_tokens:
            return False
        window = max(len(string.encode()) for string in self.strings) + 3
        recent = tokens[max(min_tokens, len(tokens) - window) :]
        # The window may start in the middle of a UTF-8 character, whose remaining bytes are at most
        # three tokens. So skip tokens until the text starts with a whole character.
        for skipped in range(4):
            text = decode(recent[skipped:])
            if any(string in text for string in self.strings):
                return True
            if not text.startswith("\ufffd"):
                break
        return False
