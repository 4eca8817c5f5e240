"""The bytes of tokens, and texts whose tokens arrive one by one."""

from pathlib import Path

import pytest
from sentencepiece_tokenizer import sentencepiece_tokenizer

from planish.detokenizer import Detokenizer, TextDecoder, special_token_ids
from planish.testing import EOS_TOKEN_ID, save_byte_tokenizer
from planish.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_texts_and_bytes_of_tokens_are_correct(tokenizer):
    texts = Detokenizer.of_tokenizer(tokenizer)
    text = "Grüße, 😀!\n<|im_end|>"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(texts.text_bytes, tokens)).decode() == text
    assert texts.text_bytes(EOS_TOKEN_ID) == b"<|im_end|>"
    assert texts.text_bytes(0xC3) == b"\xc3"
    assert texts.text_bytes(271) == b""


def test_special_tokens_are_those_that_decoding_skips(tokenizer):
    special_ids = special_token_ids(tokenizer)
    for token in range(len(tokenizer)):
        is_skipped = not tokenizer.decode([token], skip_special_tokens=True)
        assert (token in special_ids) == is_skipped


def test_characters_are_returned_when_they_are_complete(tokenizer):
    decoder = TextDecoder(Detokenizer.of_tokenizer(tokenizer), hidden_ids={EOS_TOKEN_ID})
    tokens = [*"aé😀".encode(), EOS_TOKEN_ID, 0xE2]
    assert [decoder.feed(token) for token in tokens] == ["a", "", "é", "", "", "", "😀", "", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.feed(0x62, num_bytes=0) == ""


@pytest.mark.parametrize("kind", ["first", "each"])
def test_a_space_at_the_start_is_kept_if_the_text_continues(kind: str, tmp_path: Path):
    """As in Llama 2 and Mistral 7B, whose `decode` drops the first space of every text."""
    tokenizer = sentencepiece_tokenizer(kind)
    texts = Detokenizer.of_tokenizer(tokenizer)
    tokens = tokenizer.encode("The answer is 東京 42.", add_special_tokens=False)
    bos = tokenizer.bos_token_id
    assert isinstance(bos, int)
    for begins_text, expected in (
        (False, " The answer is 東京 42."),
        (True, "The answer is 東京 42."),
    ):
        decoder = TextDecoder(texts, begins_text=begins_text, hidden_ids={bos})
        pieces = [decoder.feed(token) for token in (bos, *tokens)]
        assert "".join(pieces) == expected
    assert b"".join(map(texts.text_bytes, tokens)).decode() == " The answer is 東京 42."
