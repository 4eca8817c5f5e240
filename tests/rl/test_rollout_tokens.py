"""The display of tokens: pieces join to the text, characters stay whole, and every token is
visible.
"""

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from planish.logtree.html import visible
from planish.reports.rollout_tokens import DisplayDetokenizer
from planish.tokenizer import load_tokenizer, save_tokenizer

IM_START, IM_END, THINK = 257, 258, 264


@pytest.fixture(scope="module")
def detokenizer(tokenizer):
    return DisplayDetokenizer(tokenizer)


@given(text=st.text())
def test_the_pieces_of_a_text_join_to_the_text(detokenizer, text):
    tokens = list(text.encode("utf-8", "replace"))
    pieces = detokenizer.pieces(tokens)
    assert "".join(piece.text for piece in pieces) == visible(
        text.encode("utf-8", "replace").decode()
    )
    assert sum(piece.num_tokens for piece in pieces) == len(tokens)


@given(tokens=st.lists(st.integers(0, 269)))
def test_every_token_is_in_exactly_one_visible_piece(detokenizer, tokens):
    pieces = detokenizer.pieces(tokens)
    assert sum(piece.num_tokens for piece in pieces) == len(tokens)
    assert all(piece.text for piece in pieces)
    assert not any(ord(sign) < 32 and sign not in "\n\t" for piece in pieces for sign in piece.text)


def test_a_character_split_across_tokens_is_one_piece(detokenizer):
    assert [
        (piece.text, piece.length_code) for piece in detokenizer.pieces(list("aé😀".encode()))
    ] == [
        ("a", "1"),
        ("é", "1*2"),
        ("😀", "2*4"),
    ]


def test_invalid_utf8_bytes_are_shown_one_by_one(detokenizer):
    cut_off = "😀".encode()[:3]
    assert [piece.text for piece in detokenizer.pieces([*cut_off, 65])] == ["\ufffd"] * 3 + ["A"]
    assert [(piece.text, piece.num_tokens) for piece in detokenizer.pieces("\ufffdA".encode())] == [
        ("\ufffd", 3),
        ("A", 1),
    ]


def test_control_tokens_are_shown_by_name(detokenizer):
    pieces = detokenizer.pieces([IM_START, 65, IM_END, THINK, 0, 13])
    assert [(piece.text, piece.is_control) for piece in pieces] == [
        ("<|im_start|>", True),
        ("A", False),
        ("<|im_end|>", True),
        ("<think>", True),
        ("␀", False),
        ("␍", False),
    ]
    assert (
        detokenizer.html([IM_START, *b"<b>", IM_END])
        == "<b>&lt;|im_start|&gt;</b>&lt;b&gt;<b>&lt;|im_end|&gt;</b>"
    )


def test_an_unknown_token_is_shown_by_its_id(detokenizer):
    [piece] = detokenizer.pieces([99999])
    assert (piece.text, piece.is_control) == ("<99999>", True)


def test_a_leading_space_is_shown_although_the_decoder_drops_it(tmp_path):
    words = Tokenizer(
        models.WordLevel({"▁a": 0, "▁big": 1, "▁cat": 2, "<unk>": 3, "s": 4}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    save_tokenizer(
        tmp_path, words, chat_template=None, max_length=100, special_tokens={"unk_token": "<unk>"}
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([1]) == "big"
    assert [piece.text for piece in DisplayDetokenizer(tokenizer).pieces([0, 1, 2, 4])] == [
        " a",
        " big",
        " cat",
        "s",
    ]
