"""When a sample ends before `max_tokens`: at a token, or at a string, which may lie across token
borders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopCondition:
    """The stops of one request. No tokens and no strings: run to `max_tokens`."""

    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, stop: str | Sequence[str] | Sequence[int] | None, eos_token_ids: Sequence[int]
    ) -> StopCondition:
        """`stop` as in SamplingParams: None means the model's end-of-sequence tokens, anything else
        replaces them.
        """
        if stop is None:
            return cls(token_ids=frozenset(eos_token_ids))
        if isinstance(stop, str):
            return cls(strings=(stop,))
        return cls(
            token_ids=frozenset(item for item in stop if not isinstance(item, str)),
            strings=tuple(item for item in stop if isinstance(item, str)),
        )

    def met(self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> bool:
        """Whether the last of `tokens` completes a stop; to be asked after every token.

        A string is looked for in the text of the last tokens only. Every token that adds text adds
        at least one byte, so a string of n bytes that ends in the last token starts at most n
        tokens before it; three more tokens complete a character of which the window would otherwise
        hold only the end. Tokens without text (control tokens, whose text is empty where the
        tokenizer hides them) end a string's window early, as they end the text around them.
        """
        if tokens[-1] in self.token_ids:
            return True
        if not self.strings:
            return False
        window = max(len(string.encode()) for string in self.strings) + 3
        text = decode(tokens[-window:])
        return any(string in text for string in self.strings)
