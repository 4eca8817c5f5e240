"""The parts that a stream sends add up to the answer without streaming."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.renderers import Renderer, get_renderer
from planish.renderers.codec import Codec
from planish.renderers.stream_parser import (
    Reading,
    StreamedSample,
    marks_of,
    read_message,
    read_text,
)
from planish.server.openai.models import TokenTexts
from planish.testing import EOS_TOKEN_ID, NUM_TOKENS, save_byte_tokenizer
from planish.tokenizer import load_tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def renderers(tokenizer) -> dict[str, Renderer]:
    return {
        name: get_renderer(name, tokenizer)
        for name in ("qwen3", "qwen3_instruct", "role_colon", "llama3")
    }


def stream(growing: StreamedSample, tokens: Sequence[int]) -> list[Reading]:
    deltas = []
    for token in tokens:
        growing.add(token)
        if growing.is_due:
            deltas.append(growing.delta())
    return [*deltas, growing.rest()]


def message(renderer: Renderer, *stops: str) -> StreamedSample:
    return StreamedSample(read_message(renderer), stops, marks_of(renderer))


def joined(deltas: Sequence[Reading]) -> Reading:
    return Reading(
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        tuple(call for delta in deltas for call in delta.calls),
    )


def whole(growing: StreamedSample, tokens: Sequence[int]) -> Reading:
    growing.tokens = list(tokens)
    return growing.whole()


ARGUMENTS = '{"text": "<é> </tool_ca stop\\n", "b": [{}]}'


@pytest.mark.parametrize(
    ("stops", "written", "arguments"),
    [
        ((), ARGUMENTS + "}\n</tool_call>", ARGUMENTS),
        ((), '{"text": "<é> </tool_ca', '{"text": "<é> </tool_ca'),
        (("stop",), '{"text": "<é> </tool_ca stop', '{"text": "<é> </tool_ca '),
    ],
)
def test_arguments_of_constrained_calls_are_streamed_as_they_grow(
    tokenizer, renderers, stops, written, arguments
):
    opening = f'Hi\n{CALL}\n<tool_call>\n{{"name": "say", "arguments": '
    tokens = tokenizer.encode(opening + written)
    growing = message(renderers["qwen3_instruct"], *stops)
    growing.opens_calls = True
    sent: list[str] = []
    calls: list[dict[str, Any]] = []
    for reading in stream(growing, tokens):
        calls += reading.calls
        if len(calls) == 1 and reading.open_call is not None:
            assert reading.open_call["function"]["name"] == "say"
            sent.append(reading.open_call["function"]["arguments"])
    assert all(after.startswith(before) for before, after in pairwise(sent))
    assert len(set(sent)) > 10
    last = whole(growing, tokens)
    assert last.content == "Hi"
    assert list(last.calls) == calls
    if written.startswith(ARGUMENTS):
        assert last.calls[1]["function"]["arguments"] == arguments
        assert arguments.startswith(sent[-1])
    else:
        assert last.open_call == {"function": {"name": "say", "arguments": arguments}}
        assert sent[-1] == arguments


PIECES = st.sampled_from(
    [
        "a",
        " ",
        "\n",
        "é",
        "😀",
        "x y",
        "\n\nUser:",
        "\n\nUs",
        "<tool_call>",
        "</tool_call>",
        CALL,
        "END",
        "EN",
        "{",
        "\ufffd",
    ]
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(PIECES, max_size=12),
    cut=st.integers(0, 3),
    name=st.sampled_from(["qwen3_instruct", "role_colon", "llama3"]),
)
def test_a_streamed_message_equals_the_parsed_message(tokenizer, renderers, pieces, cut, name):
    tokens = tokenizer.encode("".join(pieces), add_special_tokens=False)
    tokens = tokens[: len(tokens) - cut] if cut < 3 else [*tokens, EOS_TOKEN_ID]
    for stops in ((), ("END",), ("x y", "<tool")):
        assert joined(stream(message(renderers[name], *stops), tokens)) == whole(
            message(renderers[name], *stops), tokens
        )


@settings(max_examples=100, deadline=None)
@given(
    thought=st.lists(PIECES, max_size=6), text=st.lists(PIECES, max_size=6), closed=st.booleans()
)
def test_streamed_reasoning_equals_the_parsed_reasoning(
    tokenizer, renderers, thought, text, closed
):
    inner = "".join(thought).replace("<tool_call>", "")
    sample = f"<think>{inner}" + (f"</think>{''.join(text)}" if closed else "")
    tokens = tokenizer.encode(sample, add_special_tokens=False)
    streamed = joined(stream(message(renderers["qwen3"], "END"), tokens))
    assert streamed == whole(message(renderers["qwen3"], "END"), tokens)


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, NUM_TOKENS - 1), max_size=60))
def test_streamed_text_of_any_tokens_equals_the_parsed_text(tokenizer, tokens):
    read = read_text(Codec(tokenizer), frozenset({EOS_TOKEN_ID}))
    growing = StreamedSample(read, ("\n",))
    sent = ""
    for token in tokens:
        growing.add(token)
        sent += growing.delta().content
    assert sent + growing.rest().content == whole(StreamedSample(read, ("\n",)), tokens).content


def test_message_pieces_are_streamed_as_soon_as_possible(tokenizer, renderers):
    tokens = tokenizer.encode("<think>\nhm\n</think>\n\nYes, but" + CALL, add_special_tokens=False)
    streamed = stream(message(renderers["qwen3"]), [*tokens, EOS_TOKEN_ID])
    deltas = [delta for delta in streamed if delta != Reading("")]
    assert [delta.reasoning for delta in deltas[:2]] == ["h", "m"]
    assert "".join(delta.content for delta in deltas[:-1]) == "Yes, but"
    assert deltas[-1].calls[0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    assert len(deltas) > 8


def test_a_tool_call_is_sent_when_it_is_complete(tokenizer, renderers):
    text = f"{CALL}\n{CALL}"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    growing = message(renderers["qwen3_instruct"])
    counts = []
    for token in tokens:
        growing.add(token)
        counts.append(len(growing.delta().calls))
    assert len(growing.rest().calls) == 0
    ends = [index for index, count in enumerate(counts) if count]
    assert [counts[index] for index in ends] == [1, 1]
    assert [tokenizer.decode(tokens[: end + 1]) for end in ends] == [CALL, text]


def test_a_call_before_a_stop_string_is_kept(tokenizer, renderers):
    tokens = tokenizer.encode(f"{CALL}\nBye END", add_special_tokens=False)
    reading = whole(message(renderers["qwen3_instruct"], "END"), tokens)
    assert (reading.content.strip(), len(reading.calls)) == ("Bye", 1)


def test_text_that_a_stop_string_may_remove_is_held_back(tokenizer, renderers):
    growing = message(renderers["qwen3_instruct"], "STOP")
    sent = []
    for token in tokenizer.encode("go STO no STOP", add_special_tokens=False):
        growing.add(token)
        sent.append(growing.delta().content)
    assert "".join(sent) == "go STO no"
    assert growing.rest().content == " "


def test_an_invalid_tool_call_stays_in_the_text(tokenizer, renderers):
    tokens = tokenizer.encode("So:\n<tool_call>\nadd(1)\n</tool_call>", add_special_tokens=False)
    reading = whole(message(renderers["qwen3_instruct"]), tokens)
    assert reading == Reading("So:\n<tool_call>\nadd(1)\n</tool_call>")


def test_long_texts_are_decoded_rarely(tokenizer):
    reads = 0
    read = read_text(Codec(tokenizer), frozenset())

    def counting(tokens: Sequence[int]) -> Reading:
        nonlocal reads
        reads += 1
        return read(tokens)

    deltas = stream(StreamedSample(counting, ()), [97] * 5_000)
    assert "".join(delta.content for delta in deltas) == "a" * 5_000
    assert reads < 1500


def test_texts_and_bytes_of_tokens_are_correct(tokenizer):
    texts = TokenTexts(tokenizer)
    text = "Grüße, 😀!\n<|im_end|>"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(texts.decode_token(token)[1] for token in tokens).decode() == text
    assert texts.decode_token(EOS_TOKEN_ID) == ("<|im_end|>", b"<|im_end|>")
    assert texts.decode_token(0xC3) == ("\ufffd", b"\xc3")
    assert texts.decode_token(271) == ("", b"")
