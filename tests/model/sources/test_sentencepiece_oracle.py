# pyright: reportMissingImports=false
"""Tokenizers of SentencePiece's kind equal the real sentencepiece. Needs it (`make test-extras`);
skipped without it.
"""

import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_llama2_tokenizer
from tokenizers import Tokenizer
from transformers import LlamaTokenizer

from planish.model.sources.gguf_file import read_gguf
from planish.model.sources.gguf_tokenizer import build_tokenizer

sentencepiece = pytest.importorskip("sentencepiece", reason="make test-extras runs it")

WORDS = [
    "the",
    "answer",
    "is",
    "a",
    "sea",
    "of",
    "words,",
    "and",
    "one",
    "more:",
    "42",
    "or",
    "1,000!",
    "Größe",
    "naïve",
    "привет",
    "мир",
    "日本語",
    "テスト",
    "def",
    "f(x):",
    "return",
    "x*x",
]
UNSEEN = ["é", "漢", "🤖", "\t", "\n", "\n\n", "ß", "'"]


def random_text(generator: random.Random) -> str:
    """Return words and characters that the pieces lack, with one or more spaces between."""
    parts = [
        generator.choice(WORDS if generator.random() < 0.8 else UNSEEN)
        + " " * generator.choice([0, 1, 1, 1, 2, 3, 8])
        for _ in range(generator.randint(1, 12))
    ]
    return "".join(parts)


@pytest.fixture(scope="module", name="oracle", params=[330, 420, 700])
def _oracle(request) -> Any:
    """A model that sentencepiece trained with Llama 2's options."""
    generator, model = random.Random(0), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([random_text(generator) for _ in range(4000)]),
        model_writer=model,
        model_type="bpe",
        vocab_size=request.param,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        character_coverage=0.999,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module", name="tokenizer")
def _tokenizer(oracle, tmp_path_factory) -> Tokenizer:
    """planish's tokenizer of a GGUF file with the same pieces."""
    pieces = [oracle.id_to_piece(token) for token in range(259, oracle.get_piece_size())]
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return build_tokenizer(read_gguf(write_llama2_tokenizer(path, pieces)))


@pytest.fixture(scope="module", name="of_transformers")
def _of_transformers(oracle, tmp_path_factory) -> Any:
    path: Path = tmp_path_factory.mktemp("llama") / "tokenizer.model"
    path.write_bytes(oracle.serialized_model_proto())
    return LlamaTokenizer.from_pretrained(path.parent, legacy=True)


def texts(*, begin_with_space: bool) -> Iterator[str]:
    generator = random.Random(1)
    for _ in range(1000):
        text = random_text(generator)
        yield " " * generator.randint(1, 9) + text if begin_with_space else text


@pytest.mark.parametrize("begin_with_space", [False, True])
def test_tokens_equal_those_of_sentencepiece(oracle, tokenizer, begin_with_space):
    for text in texts(begin_with_space=begin_with_space):
        encoding = tokenizer.encode(text)
        assert encoding.ids == [1, *oracle.encode(text)], text
        assert tokenizer.decode(encoding.ids) == oracle.decode(encoding.ids) == text


def test_transformers_puts_no_space_before_a_text_that_begins_with_one(oracle, of_transformers):
    """Of a tokenizer.model, transformers 5 makes a tokenizer that differs from sentencepiece, and
    so from llama.cpp and planish, in these texts only.
    """
    for text in texts(begin_with_space=False):
        assert of_transformers.encode(text, add_special_tokens=False) == oracle.encode(text), text
    for text in texts(begin_with_space=True):
        expected = oracle.encode(text.removeprefix(" "))
        assert of_transformers.encode(text, add_special_tokens=False) == expected, text
