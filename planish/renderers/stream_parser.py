"""Parse a sample while its tokens arrive, and return the parts that can be sent to a client.

A part that was sent cannot be taken back. Therefore the end of an unfinished text is held back
while later tokens may change its meaning. Such an end is half a character, a token that a stop
string may still remove, the beginning of a tag, white space that may belong to the chat format, or
an unfinished tool call, which may turn out to be text. If a grammar constrains the calls, an
unfinished call cannot become text, so its arguments are returned as they grow.

Each token is parsed once, so the time is proportional to the text. A finished sample is parsed by
the same code, so the pieces of a stream add up to the answer without streaming.

`SampleParser` knows nothing of the API that it serves. The engine says where a stop string begins
(`SampledToken.text_end`), so the parser does not search for stop strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence

from planish.detokenizer import Detokenizer, TextDecoder
from planish.renderers.codec import Control
from planish.renderers.message_parts import MessageParser, MessagePart, ParseOptions, PlainParser
from planish.renderers.renderer import Renderer
from planish.service import StopGate, TextEnd
from planish.wire.pacing import pause_if_due


class SampleParser:
    """Parses one sample whose tokens arrive one by one."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        parser: MessageParser,
        tag_ids: dict[int, str] | None = None,
        hidden_ids: Container[int] = (),
        *,
        begins_text: bool = False,
    ) -> None:
        """`parser` parses the text. `tag_ids` maps tokens to the tags of `parser` that they are;
        the other tags are found in the text. `hidden_ids`: tokens that are not part of the text.
        `begins_text`: whether the first token begins a text, as the first token after a tag does.
        Some tokenizers drop a space at the start of a text.
        """
        self._detokenizer = detokenizer
        self._parser = parser
        self._tag_ids = tag_ids or {}
        self._hidden_ids = hidden_ids
        self._decoder = self._new_decoder(begins_text)
        known_tags = set(self._tag_ids.values())
        self._tag_finder = _TagFinder([tag for tag in parser.tags if tag not in known_tags])
        self._unsettled_tokens: list[int] = []
        self._num_settled = 0
        self._is_finished = False

    def add(self, token: int, num_unsettled: int = 0, text_end: TextEnd | None = None) -> None:
        """Add a token. `num_unsettled` and `text_end` are those of its `SampledToken`."""
        if self._is_finished:
            return
        self._unsettled_tokens.append(token)
        if text_end is not None:
            self.finish(text_end)
            return
        settled = self._unsettled_tokens[: len(self._unsettled_tokens) - num_unsettled]
        del self._unsettled_tokens[: len(settled)]
        for one in settled:
            self._feed(one)

    def add_all(self, tokens: Sequence[int], text_end: TextEnd | None) -> None:
        """Add the tokens of a finished sample, and end it."""
        self._unsettled_tokens += tokens
        self.finish(text_end)

    def finish(self, text_end: TextEnd | None = None) -> None:
        """End the sample at `text_end`, by default after its last token."""
        if self._is_finished:
            return
        self._is_finished = True
        tokens, self._unsettled_tokens = self._unsettled_tokens, []
        num_whole = len(tokens) if text_end is None else text_end.token - self._num_settled
        for token in tokens[:num_whole]:
            pause_if_due()
            self._feed(token)
        if text_end is not None and text_end.num_bytes:
            self._feed_text(self._decoder.feed(tokens[num_whole], text_end.num_bytes))
        self._feed_text(self._decoder.flush())
        self._feed_pieces(self._tag_finder.flush())
        self._parser.finish(None if text_end is None else text_end.stop)

    def take(self) -> list[MessagePart]:
        """Return the parts since the last call."""
        return self._parser.parts.take()

    @property
    def has_begun_answer(self) -> bool:
        """Whether the text of the answer or a call has begun. False during the reasoning."""
        return self._parser.has_begun_answer

    def _feed(self, token: int) -> None:
        self._num_settled += 1
        tag = self._tag_ids.get(token)
        if tag is None:
            self._feed_text(self._decoder.feed(token))
            return
        self._feed_text(self._decoder.flush())
        self._feed_pieces(self._tag_finder.flush())
        self._parser.feed(Control(tag))
        self._decoder = self._new_decoder(begins_text=True)

    def _feed_text(self, text: str) -> None:
        if text:
            self._feed_pieces(self._tag_finder.feed(text))

    def _feed_pieces(self, pieces: Sequence[str | Control]) -> None:
        for piece in pieces:
            self._parser.feed(piece)

    def _new_decoder(self, begins_text: bool) -> TextDecoder:
        return TextDecoder(self._detokenizer, begins_text=begins_text, hidden_ids=self._hidden_ids)


def text_parser(detokenizer: Detokenizer, special_ids: Container[int]) -> SampleParser:
    """Return a parser of text that continues a prompt. Special tokens are left out."""
    return SampleParser(detokenizer, PlainParser(), hidden_ids=special_ids)


def message_parser(
    renderer: Renderer, detokenizer: Detokenizer, options: ParseOptions | None = None
) -> SampleParser:
    """Return a parser of an assistant message in the format of `renderer`."""
    options = options or ParseOptions()
    parser = renderer.format.message_parser(options)
    ids = {renderer.codec.control_id(tag): tag for tag in parser.tags}
    tag_ids = {id_: tag for id_, tag in ids.items() if id_ is not None}
    return SampleParser(detokenizer, parser, tag_ids, begins_text=options.continues is None)


def stop_gate(new_parser: Callable[[], SampleParser], open_ids: frozenset[int]) -> StopGate:
    """Return a gate that opens when the reasoning of a message has ended and its answer begins.
    `new_parser` creates the parser of one sample. The stop tokens `open_ids` always end a sample.
    """

    def new_tracker() -> Callable[[int], bool]:
        parser = new_parser()

        def has_begun_answer(token: int) -> bool:
            parser.add(token)
            parser.take()
            return parser.has_begun_answer

        return has_begun_answer

    return StopGate(new_tracker, open_ids)


class _TagFinder:
    """Finds tags in text that arrives in pieces."""

    def __init__(self, tags: Sequence[str]) -> None:
        """`tags` are the tags to find."""
        self._tags = tags
        self._pattern = re.compile("(" + "|".join(map(re.escape, tags)) + ")") if tags else None
        self._held = ""
        """The end of the text, which may be the beginning of a tag."""

    def feed(self, text: str) -> list[str | Control]:
        """Add text. Return the text and the tags that later text cannot change."""
        if self._pattern is None:
            return [text]
        parts = self._pattern.split(self._held + text)
        pieces = [Control(part) if number % 2 else part for number, part in enumerate(parts)]
        last = parts[-1]
        num_held = max(_overlap(last, tag) for tag in self._tags)
        self._held = last[len(last) - num_held :]
        pieces[-1] = last[: len(last) - num_held]
        return [piece for piece in pieces if piece]

    def flush(self) -> list[str | Control]:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return [held] if held else []


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `tag`."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
