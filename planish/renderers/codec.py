"""Text to token ids and back, with control tokens only where a format puts them.

A format writes a message as pieces: strings, which are ordinary text whatever they contain, and
`Control`s, which are the format's own marks. Neighbouring strings are tokenised together, as the
model's tokenizer does between two marks, so that the ids equal those of the rendered chat template.
Invariants: an id of a guarded token (special tokens, and other added tokens of the form <...>, such
as <think>) never comes out of a string; a Control that the vocabulary lacks is written as ordinary
text (formats name those they cannot do without); the time is linear in the text.

The tokenizer is asked as it is first. Only if a guarded id comes out (a text that names a special
token) the text is tokenised again by a private copy of the tokenizer that has no such tokens;
switching them off in the tokenizer itself (`split_special_tokens`) would change it for other
threads, and does not reach added tokens that are not special.

Tokenizers made from SentencePiece (Mistral 7B, Llama 2) put a blank before every text. Where the
text goes on after another, which a format tokenises apart, another private copy writes it without.
"""

import json
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from tokenizers import Tokenizer


@dataclass(frozen=True)
class Control:
    """A mark of the format: one token where the vocabulary has it, the same characters as text
    where not.
    """

    text: str


Piece = str | Control


@dataclass
class Codec:
    """A tokenizer of `transformers`, or anything with its encode, decode and conversion methods."""

    tokenizer: Any
    guarded: dict[int, str] = field(init=False, repr=False)
    _control_ids: dict[str, int | None] = field(init=False, repr=False, default_factory=dict)
    _copies: "dict[tuple[bool, bool], PlainCopy]" = field(
        init=False, repr=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        missing = [
            name
            for name in ("encode", "decode", "convert_tokens_to_ids")
            if not hasattr(self.tokenizer, name)
        ]
        if missing:
            raise ValueError(
                f"tokenizer is a {type(self.tokenizer).__name__} without {', '.join(missing)}; give a tokenizer of "
                "transformers, such as training_client.get_tokenizer()"
            )
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        self.guarded = {
            int(id_): token.content
            for id_, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        # Characters that the vocabulary lacks become the model's unknown token; that is no mark of
        # any format.
        unknown = getattr(
            getattr(getattr(self.tokenizer, "backend_tokenizer", None), "model", None),
            "unk_token",
            None,
        )
        self.guarded = {id_: text for id_, text in self.guarded.items() if text != unknown}

    def control_id(self, text: str) -> int | None:
        """The id of `text` as one token, or None if the vocabulary has no such token."""
        if text not in self._control_ids:
            id_ = self.tokenizer.convert_tokens_to_ids(text)
            # Unknown tokens map to the id of the unknown token, which may be any token at all.
            known = isinstance(id_, int) and self.tokenizer.convert_ids_to_tokens(id_) == text
            self._control_ids[text] = id_ if known else None
        return self._control_ids[text]

    def require(self, texts: Iterable[str], renderer: str) -> None:
        """ValueError if one of `texts` is not a single token; guards them from now on."""
        for text in texts:
            id_ = self.control_id(text)
            if id_ is None:
                name = getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__
                raise ValueError(
                    f"renderer {renderer} needs {text!r} as one token, and tokenizer {name} has none; choose the renderer "
                    "of this model's family (recommended_renderer_name), or role_colon, which needs no special tokens"
                )
            self.guarded[id_] = text

    def encode(self, pieces: Iterable[Piece], after: int | None = None) -> list[int]:
        """The ids of `pieces`; `after`: the id before them, None where they begin a sequence."""
        ids: list[int] = []

        def text() -> list[int]:
            return self.encode_text("".join(run), ids[-1] if ids else after)

        run: list[str] = []
        for piece in pieces:
            id_ = self.control_id(piece.text) if isinstance(piece, Control) else None
            if id_ is None:
                run.append(piece.text if isinstance(piece, Control) else piece)
                continue
            ids += text()
            run.clear()
            ids.append(id_)
        return ids + text()

    def encode_text(self, text: str, after: int | None = None) -> list[int]:
        """The ids of ordinary text; no guarded id is among them. `after` as in `encode`."""
        if not text:
            return []
        text = whole_characters(text)
        going_on = self._copy(guards=False, goes_on=True) if self._would_add_blank(after) else None
        ids = (
            going_on.encode(text)
            if going_on
            else self.tokenizer.encode(text, add_special_tokens=False)
        )
        if self._is_plain(ids):
            return ids
        plain = self._copy(guards=True, goes_on=going_on is not None)
        if plain is not None:
            ids = plain.encode(text)
            if self._is_plain(ids):
                return ids
        # A vocabulary of whole words has the mark as a word of its own; a single character cannot
        # be one.
        ids = [
            id_
            for character in text
            for id_ in self.tokenizer.encode(character, add_special_tokens=False)
        ]
        if not self._is_plain(ids):
            name = next(self.guarded[id_] for id_ in ids if id_ in self.guarded)
            raise ValueError(
                f"the text of a message cannot be written without the special token {name!r}; remove it from the text"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def split(self, ids: Sequence[int], marks: Sequence[str]) -> list[Piece]:
        """Decode, with `marks` as Controls: by their ids, or by their text where the vocabulary has
        no such token.
        """
        by_id = {id_: mark for mark in marks if (id_ := self.control_id(mark)) is not None}
        written = [mark for mark in marks if self.control_id(mark) is None]
        pieces: list[Piece] = []
        start = 0
        for position, id_ in enumerate(ids):
            if id_ in by_id:
                pieces += split_text(self.decode(ids[start:position]), written)
                pieces.append(Control(by_id[id_]))
                start = position + 1
        return pieces + split_text(self.decode(ids[start:]), written)

    def _is_plain(self, ids: Iterable[int]) -> bool:
        return self.guarded.keys().isdisjoint(ids)

    def _would_add_blank(self, after: int | None) -> bool:
        """Whether the tokenizer would put a blank before a text where it would not in one piece
        with what is before it.
        """
        if after is None or after == getattr(self.tokenizer, "bos_token_id", None):
            return False
        at_begin, after_mark = self._blanks
        return at_begin and not (after_mark and after in self.guarded)

    @cached_property
    def _blanks(self) -> tuple[bool, bool]:
        """Whether the tokenizer puts a blank before a text that begins, and before one that follows
        a special token.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        mark = next(iter(self.guarded.values()), None)

        def adds(before: str) -> bool:
            if not isinstance(backend, Tokenizer):
                return False
            written = "".join(backend.encode(f"{before}a", add_special_tokens=False).tokens)
            return written.removeprefix(before)[:1] in ("▁", "Ġ")

        return adds(""), mark is not None and adds(mark)

    def _copy(self, *, guards: bool, goes_on: bool) -> "PlainCopy | None":
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if (guards, goes_on) not in self._copies and isinstance(backend, Tokenizer):
            self._copies[guards, goes_on] = PlainCopy.of(
                backend, self.guarded if guards else (), goes_on
            )
        return self._copies.get((guards, goes_on))


@dataclass(frozen=True)
class PlainCopy:
    """A tokenizer without its guarded tokens, or without blanks of its own; the other added tokens
    stay themselves.
    """

    tokenizer: Tokenizer
    renumbered: dict[int, int]
    """Ids of added tokens here -> their own. `Tokenizer.from_str` numbers added tokens anew,
    without gaps.
    """

    @classmethod
    def of(cls, tokenizer: Tokenizer, guarded: Container[int], goes_on: bool = False) -> Self:
        spec = json.loads(tokenizer.to_str())
        spec["added_tokens"] = [
            token for token in spec["added_tokens"] if token["id"] not in guarded
        ]
        if goes_on:
            _take_blanks(spec)
        copy = Tokenizer.from_str(json.dumps(spec))
        copy.no_truncation()
        copy.no_padding()
        own = {token["content"]: token["id"] for token in spec["added_tokens"]}
        return cls(
            copy,
            {id_: own[token.content] for id_, token in copy.get_added_tokens_decoder().items()},
        )

    def encode(self, text: str) -> list[int]:
        return [
            self.renumbered.get(id_, id_)
            for id_ in self.tokenizer.encode(text, add_special_tokens=False).ids
        ]


def _take_blanks(spec: dict[str, Any]) -> None:
    """Change a tokenizer.json so that no blank is put before a text."""
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
    """`text` cut at each occurrence of a mark; empty strings are left out."""
    if not marks:
        return [text] if text else []
    parts = re.split("(" + "|".join(re.escape(mark) for mark in marks) + ")", text)
    return [Control(part) if number % 2 else part for number, part in enumerate(parts) if part]


def whole_characters(text: str) -> str:
    """With U+FFFD for each half of a character (a lone surrogate), which JSON and file names can
    hold and no tokenizer takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
