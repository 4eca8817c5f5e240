"""The logprobs of an answer, in the forms of chat and of text completions.

There is one entry for each sampled token, including the token that ended the sample. So the entries
match the token ids one by one. A token may be only a part of a character. The token's text then
contains U+FFFD, but its bytes are exact: the joined bytes of consecutive tokens are valid UTF-8.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.detokenizer import Detokenizer, TextDecoder
from planish.service import SampledToken
from planish.types import SampledSequence
from planish.wire.pacing import pause_if_due

TopTokens = Sequence[tuple[int, float]]
"""The most likely tokens at a position, as (token id, logprob), likeliest first; or the tokens that
a request lists in `logprob_token_ids`, in the order of the list.
"""


@dataclass(frozen=True)
class ScoredToken:
    """A token with its logprob, and the top tokens at its position."""

    token: int
    logprob: float | None
    """None for the first token of a prompt."""
    top: TopTokens | None = None

    @property
    def top_tokens(self) -> TopTokens:
        """The top tokens. The logprob of the token itself is `logprob`, because the last bits of
        the engine's two values may differ.
        """
        return [
            (token, self.logprob if token == self.token and self.logprob is not None else logprob)
            for token, logprob in self.top or ()
        ]

    @classmethod
    def of_sample(cls, token: SampledToken) -> ScoredToken:
        """Return a token of a stream."""
        top = zip(token.top_tokens.tolist(), token.top_logprobs.tolist(), strict=True)
        return cls(token.token, token.logprob, list(top))


def scored_tokens(sequence: SampledSequence) -> list[ScoredToken]:
    """Return the tokens of a sample."""
    return score_tokens(sequence.tokens, sequence.logprobs, sequence.topk_logprobs)


def score_tokens(
    tokens: Sequence[int],
    logprobs: Sequence[float | None] | None,
    tops: Sequence[TopTokens | None] | None,
) -> list[ScoredToken]:
    """Return tokens with their logprobs. None: there are no logprobs, or no top tokens."""
    nothing = [None] * len(tokens)
    return [
        ScoredToken(*values)
        for values in zip(tokens, logprobs or nothing, tops or nothing, strict=True)
    ]


def token_text(detokenizer: Detokenizer, token: int) -> str:
    """Return the text of one token."""
    return detokenizer.text_bytes(token).decode(errors="replace")


def chat_logprobs(detokenizer: Detokenizer, tokens: Iterable[ScoredToken]) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice."""
    entries: list[dict[str, Any]] = []
    for one in tokens:
        pause_if_due()
        top = [_chat_entry(detokenizer, *other) for other in one.top_tokens]
        entries.append({**_chat_entry(detokenizer, one.token, one.logprob), "top_logprobs": top})
    return {"content": entries, "refusal": None}


def _chat_entry(detokenizer: Detokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    token_bytes = detokenizer.text_bytes(token)
    text = token_bytes.decode(errors="replace")
    return {"token": text, "logprob": logprob, "bytes": list(token_bytes)}


@dataclass
class CompletionLogprobs:
    """The `logprobs` object of a text choice: four parallel lists with one entry per token."""

    detokenizer: Detokenizer
    special_ids: Container[int]
    """Tokens that are not part of a sampled text."""
    tokens: list[str] = field(default_factory=list[str])
    token_logprobs: list[float | None] = field(default_factory=list[float | None])
    top_logprobs: list[dict[str, float] | None] = field(
        default_factory=list[dict[str, float] | None]
    )
    text_offset: list[int] = field(default_factory=list[int])
    """For each token, the number of characters of the choice's text before the character in which
    the token begins.
    """
    _num_characters: int = 0
    _decoder: TextDecoder = field(init=False)

    def __post_init__(self) -> None:
        self._decoder = TextDecoder(self.detokenizer, hidden_ids=self.special_ids)

    def add_prompt(self, text: str, tokens: Sequence[ScoredToken]) -> None:
        """Add the tokens of a prompt whose text is `text`. A special token at its start that the
        tokenizer has added, such as BOS, is not part of the text.
        """
        added: set[int] = set()
        for one in tokens:
            special = token_text(self.detokenizer, one.token)
            if one.token not in self.special_ids or text.startswith(special):
                break
            added.add(one.token)
        self._decoder = TextDecoder(self.detokenizer, begins_text=True, hidden_ids=added)
        for one in tokens:
            pause_if_due()
            self.add(one)
            self.text_offset[-1] = min(self.text_offset[-1], len(text))
        self._num_characters = len(text)
        self._decoder = TextDecoder(self.detokenizer, hidden_ids=self.special_ids)

    def add(self, one: ScoredToken) -> None:
        """Add a token."""
        self.tokens.append(token_text(self.detokenizer, one.token))
        self.token_logprobs.append(one.logprob)
        self.top_logprobs.append(self._top(one))
        self.text_offset.append(self._num_characters)
        self._num_characters += len(self._decoder.feed(one.token))

    def take_json(self) -> dict[str, Any]:
        """Return the four lists with the entries since the last call, and empty the lists."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        body = {name: getattr(self, name) for name in names}
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return body

    def _top(self, one: ScoredToken) -> dict[str, float] | None:
        """Map the texts of the top tokens and of the token itself to their logprobs, likeliest
        first. If two tokens have the same text, the result contains the likelier one.
        """
        if one.logprob is None:
            return None
        top: dict[str, float] = {}
        entries = (*one.top_tokens, (one.token, one.logprob))
        for token, logprob in sorted(entries, key=lambda entry: -entry[1]):
            top.setdefault(token_text(self.detokenizer, token), logprob)
        return top
