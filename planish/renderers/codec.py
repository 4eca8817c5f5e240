"""Convert text to token ids and back. Control tokens appear only where a format puts them.

A format writes a message as pieces: strings, which are ordinary text whatever they contain, and
`Control`s, which are the format's marks. Adjacent strings are tokenised together, as the model's
tokenizer does between two marks, so the ids equal those of the rendered chat template.

Invariants: encoding a string never gives the id of a guarded token (a special token, or another
added token of the form <...>, such as <think>). A Control that the vocabulary lacks is written as
ordinary text; a format lists the Controls that it requires. Time is linear in the text.

A text is first encoded by the tokenizer itself. The result contains a guarded id if the text spells
a special token. Only then is the text encoded again, by a private copy of the tokenizer without
guarded tokens. The option `split_special_tokens` is no alternative: it would change the tokenizer
for other threads, and it does not cover added tokens that are not special.

Tokenizers made from SentencePiece (Mistral 7B, Llama 2) put a blank before every text. That blank
would be wrong within a text. So if a format splits a text and tokenises the parts separately,
another private copy encodes the later parts without the blank.
"""

import json
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from tokenizers import Tokenizer

from planish.tokenizer import ModelTokenizer

MAX_CACHED_TEXTS = 1024
MAX_CACHED_CHARACTERS = 1000
"""The ids of this many texts, each of at most so many characters, are kept."""


_spelled_tokens: ContextVar[list[str] | None] = ContextVar("spelled_tokens", default=None)


@contextmanager
def token_bounds() -> Iterator[list[str]]:
    """Within the block, codecs do not tokenise text. They return as many zeros as the text can have
    tokens at most, so the length of a prompt is an upper bound, and takes a fraction of the time.

    The value of the block is a list, to which codecs add the guarded tokens that texts spell.

    The block changes only this thread (and asyncio task). Tokenizers that are no fast tokenizers of
    transformers still tokenise.
    """
    spelled: list[str] = []
    token = _spelled_tokens.set(spelled)
    try:
        yield spelled
    finally:
        _spelled_tokens.reset(token)


def counts_tokens() -> bool:
    """Return whether this thread is in a block of `token_bounds`."""
    return _spelled_tokens.get() is not None


@dataclass(frozen=True)
class Control:
    """A mark of a format: one token if the vocabulary has it, otherwise ordinary text."""

    text: str


Piece = str | Control


@dataclass
class Codec:
    """Encodes pieces with a tokenizer of `transformers`, or with any object that has its encode,
    decode and conversion methods. Raises ValueError if one of these methods is missing.
    """

    tokenizer: ModelTokenizer
    guarded_tokens: dict[int, str] = field(init=False, repr=False)
    _control_ids: dict[str, int | None] = field(init=False, repr=False, default_factory=dict)
    _restricted_copies: "dict[tuple[bool, bool], RestrictedTokenizer]" = field(
        init=False, repr=False, default_factory=dict
    )

    _cached_ids: dict[str, list[int]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        missing = [
            name
            for name in ("encode", "decode", "convert_tokens_to_ids")
            if not hasattr(self.tokenizer, name)
        ]
        if missing:
            raise ValueError(
                f"tokenizer is a {type(self.tokenizer).__name__} without {', '.join(missing)}; "
                "give a tokenizer of transformers, such as training_client.get_tokenizer()"
            )
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        # Characters that the vocabulary lacks become the unknown token, so ordinary text must be
        # able to contain it.
        unknown = getattr(getattr(self._backend, "model", None), "unk_token", None)
        self.guarded_tokens = {
            int(id_): token.content
            for id_, token in added.items()
            if token.content != unknown
            and (token.special or (token.content.startswith("<") and token.content.endswith(">")))
        }

    @cached_property
    def guarded_pattern(self) -> re.Pattern[str]:
        """Finds the text of a guarded token."""
        return re.compile("|".join(map(re.escape, self.guarded_tokens.values())) or "(?!)")

    def control_id(self, text: str) -> int | None:
        """Return the id of `text` as one token, or None if the vocabulary has no such token."""
        if text not in self._control_ids:
            id_ = self.tokenizer.convert_tokens_to_ids(text)
            # The tokenizer returns the unknown token's id for a text outside the vocabulary. So
            # check that the id maps back to the text.
            is_known = isinstance(id_, int) and self.tokenizer.convert_ids_to_tokens(id_) == text
            self._control_ids[text] = id_ if is_known else None
        return self._control_ids[text]

    def require(self, texts: Iterable[str], renderer: str) -> None:
        """Guard the tokens `texts` from now on, for the format `renderer`. Raises ValueError if one
        of them is not a single token.
        """
        for text in texts:
            id_ = self.control_id(text)
            if id_ is None:
                name = getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__
                raise ValueError(
                    f"renderer {renderer} needs {text!r} as one token, and tokenizer {name} has "
                    "none; choose the renderer of this model's family "
                    "(recommended_renderer_name), or role_colon, which needs no special tokens"
                )
            self.guarded_tokens[id_] = text

    def encode(self, pieces: Iterable[Piece], after: int | None = None) -> list[int]:
        """Return the ids of `pieces`. `after` is the id before them; None at a sequence's start."""
        ids: list[int] = []

        def encode_adjacent_texts() -> list[int]:
            return self.encode_text("".join(adjacent_texts), ids[-1] if ids else after)

        adjacent_texts: list[str] = []
        for piece in pieces:
            id_ = self.control_id(piece.text) if isinstance(piece, Control) else None
            if id_ is None:
                adjacent_texts.append(piece.text if isinstance(piece, Control) else piece)
                continue
            ids += encode_adjacent_texts()
            adjacent_texts.clear()
            ids.append(id_)
        return ids + encode_adjacent_texts()

    def encode_text(self, text: str, after: int | None = None) -> list[int]:
        """Return the ids of ordinary text, none of them guarded. `after` is the id before the text;
        None at a sequence's start. Raises ValueError if the text cannot be written without a
        guarded id.
        """
        if not text:
            return []
        text = whole_characters(text)
        spelled = _spelled_tokens.get()
        if spelled is not None and self._backend is not None:
            if match := self.guarded_pattern.search(text):
                spelled.append(match[0])
            return [0] * self._max_tokens(text)
        adds_blank = self._would_add_blank(after)
        continuing_copy = self._copy(guards=False, continues_text=True) if adds_blank else None
        ids = continuing_copy.encode(text) if continuing_copy else self._encode(text)
        if self._is_plain(ids):
            return ids
        plain_copy = self._copy(guards=True, continues_text=continuing_copy is not None)
        if plain_copy is not None:
            ids = plain_copy.encode(text)
            if self._is_plain(ids):
                return ids
        # Even the copy can return a guarded id: in a word-level vocabulary the token is an ordinary
        # word too. So encode each character alone, because no guarded token is a single character.
        ids = [id_ for character in text for id_ in self._encode(character)]
        if not self._is_plain(ids):
            name = next(self.guarded_tokens[id_] for id_ in ids if id_ in self.guarded_tokens)
            raise ValueError(
                f"the text of a message cannot be written without the special token {name!r}; "
                "remove it from the text"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        if not ids:
            return ""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def split(self, ids: Sequence[int], marks: Sequence[str]) -> list[Piece]:
        """Decode `ids` into pieces, with each of `marks` as a Control. Marks are found by their
        ids, or by their text if the vocabulary has no such token.
        """
        by_id = {id_: mark for mark in marks if (id_ := self.control_id(mark)) is not None}
        text_marks = [mark for mark in marks if self.control_id(mark) is None]
        pieces: list[Piece] = []
        start = 0
        for position, id_ in enumerate(ids):
            if id_ in by_id:
                pieces += split_text(self.decode(ids[start:position]), text_marks)
                pieces.append(Control(by_id[id_]))
                start = position + 1
        return pieces + split_text(self.decode(ids[start:]), text_marks)

    def _encode(self, text: str) -> list[int]:
        """Return the ids of `text` as the tokenizer gives them."""
        # The prompts of a dataset share worked examples and the texts between control tokens, and a
        # call of the tokenizer takes about 0.1 ms.
        ids = self._cached_ids.get(text)
        if ids is None:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            if len(text) > MAX_CACHED_CHARACTERS:
                return ids
            if len(self._cached_ids) >= MAX_CACHED_TEXTS:
                self._cached_ids.clear()
            self._cached_ids[text] = ids
        return list(ids)

    def _max_tokens(self, text: str) -> int:
        """Return an upper bound of the number of tokens of a text.

        A token has at least one byte of the normalised text. SentencePiece's blank takes the place
        of a space and may precede the text. It has three bytes.
        """
        assert self._backend is not None
        normalizer = self._backend.normalizer
        normalized = text if normalizer is None else normalizer.normalize_str(text)
        return len(normalized.replace(" ", "▁").encode()) + 3

    def _is_plain(self, ids: Iterable[int]) -> bool:
        return self.guarded_tokens.keys().isdisjoint(ids)

    def _would_add_blank(self, after: int | None) -> bool:
        """Return whether the tokenizer would put a wrong blank before a text that follows `after`.

        Tokenizers made from SentencePiece put a blank before the first text of each call. Before
        the continuation of a text, this blank is wrong.
        """
        if after is None or after == getattr(self.tokenizer, "bos_token_id", None):
            return False
        at_begin, after_mark = self._blanks
        return at_begin and not (after_mark and after in self.guarded_tokens)

    @cached_property
    def _blanks(self) -> tuple[bool, bool]:
        """Whether the tokenizer puts a blank before text: (at the start, after a special token)."""
        mark = next(iter(self.guarded_tokens.values()), None)

        def adds(before: str) -> bool:
            if self._backend is None:
                return False
            token_text = "".join(
                self._backend.encode(f"{before}a", add_special_tokens=False).tokens
            )
            return token_text.removeprefix(before)[:1] in ("▁", "Ġ")

        return adds(""), mark is not None and adds(mark)

    @cached_property
    def _backend(self) -> Tokenizer | None:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return backend if isinstance(backend, Tokenizer) else None

    def _copy(self, *, guards: bool, continues_text: bool) -> "RestrictedTokenizer | None":
        key = (guards, continues_text)
        if self._backend is not None and key not in self._restricted_copies:
            guarded_tokens = self.guarded_tokens if guards else ()
            self._restricted_copies[key] = RestrictedTokenizer.without(
                self._backend, guarded_tokens, continues_text
            )
        return self._restricted_copies.get(key)


@dataclass(frozen=True)
class RestrictedTokenizer:
    """A copy of a tokenizer without its guarded tokens, or without the blank before each text."""

    tokenizer: Tokenizer
    original_ids: dict[int, int]
    """Maps ids of added tokens in the copy to their ids in the original.

    The ids differ, because `Tokenizer.from_str` numbers added tokens consecutively.
    """

    @classmethod
    def without(
        cls, tokenizer: Tokenizer, guarded_tokens: Container[int], continues_text: bool = False
    ) -> Self:
        """Return a copy of `tokenizer` without the added tokens whose ids are in `guarded_tokens`.

        `continues_text`: the copy also puts no blank before a text.
        """
        spec = json.loads(tokenizer.to_str())
        spec["added_tokens"] = [
            token for token in spec["added_tokens"] if token["id"] not in guarded_tokens
        ]
        if continues_text:
            _remove_blanks(spec)
        copy = Tokenizer.from_str(json.dumps(spec))
        copy.no_truncation()
        copy.no_padding()
        ids_by_content = {token["content"]: token["id"] for token in spec["added_tokens"]}
        return cls(
            copy,
            {
                id_: ids_by_content[token.content]
                for id_, token in copy.get_added_tokens_decoder().items()
            },
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` in the original tokenizer."""
        return [
            self.original_ids.get(id_, id_)
            for id_ in self.tokenizer.encode(text, add_special_tokens=False).ids
        ]


def _remove_blanks(spec: dict[str, Any]) -> None:
    """Change the contents of a tokenizer.json so that it puts no blank before a text."""
    normalizer, splitter = spec.get("normalizer") or {}, spec.get("pre_tokenizer") or {}
    if "normalizers" in normalizer:
        normalizer["normalizers"] = [
            part for part in normalizer["normalizers"] if part["type"] != "Prepend"
        ]
    elif normalizer.get("type") == "Prepend":
        spec["normalizer"] = None
    for part in splitter.get("pretokenizers", [splitter]):
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"
        elif part.get("type") == "ByteLevel":
            part["add_prefix_space"] = False


def split_text(text: str, marks: Sequence[str]) -> list[Piece]:
    """Split `text` at each occurrence of a mark, and leave out empty strings."""
    if not marks:
        return [text] if text else []
    parts = re.split("(" + "|".join(re.escape(mark) for mark in marks) + ")", text)
    return [Control(part) if number % 2 else part for number, part in enumerate(parts) if part]


def whole_characters(text: str) -> str:
    """Replace each lone surrogate (half a character) of `text` with U+FFFD. JSON and file names can
    contain lone surrogates, but no tokenizer accepts them.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
