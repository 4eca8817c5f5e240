"""Build the tokenizer of a GGUF file, with the same token ids.

A GGUF file contains only the name of its pre-tokenizer, which splits a text into words. planish
rejects names whose rules it does not know, because a similar rule would tokenize most texts
correctly and some wrongly. For the same reason it rejects files without a name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gguf import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from planish.errors import DamagedFileError, UnsupportedError
from planish.model.sources.gguf_file import GGUFFile

_SPACE = "\u2581"
"""The character that SentencePiece writes for a space."""
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LOWERCASE_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPERCASE_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_NON_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TEKKEN_SPLIT = rf"{_LOWERCASE_WORD}|{_UPPERCASE_WORD}|\p{{N}}{_NON_WORDS}"
GPT4O_SPLIT = (
    rf"{_LOWERCASE_WORD}{_CONTRACTION}|{_UPPERCASE_WORD}{_CONTRACTION}|\p{{N}}{{1,3}}{_NON_WORDS}"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}| ?", r"|\p{N}{1,3}| ?")


SPLIT_PATTERNS = {
    "qwen2": QWEN2_SPLIT,
    "deepseek-r1-qwen": QWEN2_SPLIT,
    "llama-bpe": LLAMA3_SPLIT,
    "dbrx": LLAMA3_SPLIT,
    "smaug-bpe": LLAMA3_SPLIT,
    "tekken": TEKKEN_SPLIT,
    "gpt-4o": GPT4O_SPLIT,
}
"""The regular expressions with which some pre-tokenizers split a text, by the pre-tokenizer's name.
"""

MERGE_IGNORING_PRE_TOKENIZERS = ("llama-bpe", "tekken")
"""The pre-tokenizers of tokenizers with `ignore_merges`: a word that is itself a token is not built
by merges. By default, these tokenizers also add the BOS token.
"""

SENTENCEPIECE_ARCHITECTURES = ("llama", "gemma3")
"""The architectures whose SentencePiece tokenizers are supported: Llama 2, Mistral 7B, Gemma 3."""

_SPECIAL_TOKEN = re.compile(r"<\|?[^\s<>|]+\|?>|\[/?[A-Z_]+\]")
"""The form of special tokens in chat templates: <|im_end|>, <end_of_turn>, [/INST]."""


def build_tokenizer(source: GGUFFile) -> Tokenizer:
    """Build the BPE tokenizer from the file's tables, with the same token ids.

    Raises UnsupportedError or DamagedFileError if the tables do not describe a tokenizer that
    planish supports.
    """
    metadata = source.metadata
    tokenizer_model = metadata.get("tokenizer.ggml.model")
    is_sentencepiece = (
        tokenizer_model == "llama" and source.architecture in SENTENCEPIECE_ARCHITECTURES
    )
    if tokenizer_model != "gpt2" and not is_sentencepiece:
        raise UnsupportedError(
            f"{source.path} has a {tokenizer_model!r} tokenizer; planish converts 'gpt2', and "
            f"'llama' of the architectures {', '.join(SENTENCEPIECE_ARCHITECTURES)}"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    token_types = metadata.get("tokenizer.ggml.token_type")
    if not tokens or not token_types or len(tokens) != len(token_types):
        raise DamagedFileError(
            f"{source.path} has no tokens, or token types of another length; get the file again"
        )
    vocab = {
        token: index
        for index, (token, token_type) in enumerate(zip(tokens, token_types, strict=True))
        if token_type != TokenType.UNUSED
    }
    try:
        tokenizer = (
            _sentencepiece_tokenizer(source, vocab, token_types)
            if is_sentencepiece
            else _byte_level_tokenizer(source, vocab)
        )
    except UnsupportedError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise DamagedFileError(
            f"{source.path}: the merges do not fit the tokens ({error}); get the file again"
        ) from error
    if metadata.get(
        "tokenizer.ggml.add_bos_token",
        is_sentencepiece or metadata["tokenizer.ggml.pre"] in MERGE_IGNORING_PRE_TOKENIZERS,
    ):
        bos = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A {tokens[bos]} $B",
            special_tokens=[(tokens[bos], bos)],
        )
    for added_type, add_tokens in (
        (TokenType.CONTROL, tokenizer.add_special_tokens),
        (TokenType.USER_DEFINED, tokenizer.add_tokens),
    ):
        is_special = added_type == TokenType.CONTROL
        added_tokens = [
            token
            for token, token_type in zip(tokens, token_types, strict=True)
            if token_type == added_type
        ]
        add_tokens(
            [AddedToken(token, special=is_special, normalized=False) for token in added_tokens]
        )
    _check_special_tokens(source, tokenizer, vocab)
    return tokenizer


def _check_special_tokens(source: GGUFFile, tokenizer: Tokenizer, vocab: Mapping[str, int]) -> None:
    """Raise UnsupportedError if the tokenizer splits a special token.

    Some converters mark special tokens as normal text. A chat then has the tokens of their letters.
    """
    metadata = source.metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")]
    special_tokens = {tokens[index] for index in ids if index is not None}
    special_tokens.update(_SPECIAL_TOKEN.findall(metadata.get("tokenizer.chat_template") or ""))
    for token in sorted(special_tokens & vocab.keys()):
        if tokenizer.encode(token, add_special_tokens=False).ids != [vocab[token]]:
            raise UnsupportedError(
                f"{source.path} marks the special token {token} as normal text "
                "(tokenizer.ggml.token_type), so a text with it would get the tokens of its "
                "letters; get a file of another converter"
            )


def _byte_level_tokenizer(source: GGUFFile, vocab: Mapping[str, int]) -> Tokenizer:
    """Return the byte-level BPE tokenizer with the file's merges."""
    pre_tokenizer = _pre_tokenizer_name(source)
    merge_lines = source.metadata.get("tokenizer.ggml.merges", [])
    merges = [tuple(merge.split(" ", 1)) for merge in merge_lines]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=dict(vocab),
            merges=merges,
            ignore_merges=pre_tokenizer in MERGE_IGNORING_PRE_TOKENIZERS,
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(pre_tokenizer)
    if SPLIT_PATTERNS.get(pre_tokenizer) == QWEN2_SPLIT:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_tokenizer(
    source: GGUFFile, vocab: Mapping[str, int], token_types: Sequence[int]
) -> Tokenizer:
    """Return the tokenizer of a SentencePiece BPE model, which has scores instead of merges.

    SentencePiece merges the two neighbours whose joint piece has the highest score. So the list of
    merges contains every split of a piece into two pieces, ordered by the score of the joint piece.
    Characters outside the vocabulary become their UTF-8 bytes. The tokenizers of Llama 2 and
    Mistral add a space before a text and after each special token, as llama.cpp does.
    """
    metadata = source.metadata
    scores = metadata["tokenizer.ggml.scores"]
    normal_pieces = {
        piece for piece, index in vocab.items() if token_types[index] == TokenType.NORMAL
    }
    scored_merges = []
    for piece in normal_pieces:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in normal_pieces and right in normal_pieces:
                scored_merges.append(
                    (-scores[vocab[piece]], vocab[left], vocab[right], left, right)
                )
    merges = [(left, right) for *_, left, right in sorted(scored_merges)]
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    unknown = metadata["tokenizer.ggml.tokens"][unknown_id]
    model = models.BPE(
        vocab=dict(vocab), merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    replace_space = normalizers.Replace(" ", _SPACE)
    decoder_steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace_space])
        tokenizer.decoder = decoders.Sequence([*decoder_steps, decoders.Strip(" ", 1, 0)])
        tokenizer.add_special_tokens([AddedToken(unknown, special=True, normalized=False)])
    else:
        tokenizer.normalizer = replace_space
        tokenizer.decoder = decoders.Sequence(decoder_steps)
    return tokenizer


def _pre_tokenizer_name(source: GGUFFile) -> str:
    """Return the name of the file's pre-tokenizer.

    Raises UnsupportedError if the file has none, or one that planish does not support.
    """
    name = source.metadata.get("tokenizer.ggml.pre", "default")
    supported = ("smollm", "gpt-2", *SPLIT_PATTERNS)
    if name in supported:
        return str(name)
    problem = f"has the pre-tokenizer {name!r}; planish supports {', '.join(supported)}"
    if name == "default":
        # Converters of 2023 and early 2024 wrote no name. llama.cpp then splits words like GPT-2.
        problem = (
            "does not name its pre-tokenizer (tokenizer.ggml.pre is missing or 'default'), so it "
            "is unknown how the model splits a text into words. Get a newer file, or write the "
            "name into a copy: gguf-new-metadata --pre-tokenizer NAME "
            f"{source.path.name} NEW.gguf. NAME is one of {', '.join(supported)}"
        )
    raise UnsupportedError(f"{source.path} {problem}")


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer that llama.cpp calls `name`, one of the supported names."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "gpt-2":
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    byte_level_without_split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERNS[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, byte_level_without_split])


def tokenizer_settings(source: GGUFFile) -> dict[str, Any]:
    tokens = source.metadata["tokenizer.ggml.tokens"]
    role_names = {
        "bos_token": "bos",
        "eos_token": "eos",
        "pad_token": "padding",
        "unk_token": "unknown",
    }
    token_ids = {
        role: source.metadata.get(f"tokenizer.ggml.{name}_token_id")
        for role, name in role_names.items()
    }
    return {
        "chat_template": source.metadata.get("tokenizer.chat_template"),
        "max_length": source.field("context_length"),
        "special_tokens": {
            role: tokens[token] for role, token in token_ids.items() if token is not None
        },
    }
