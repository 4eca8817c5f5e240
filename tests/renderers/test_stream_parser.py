"""The parts that a stream sends add up to the answer without streaming, and to what the renderer
parses.
"""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st
from streamed import Reading, parse_stream, parse_whole, stop_condition, streamed

from planish.detokenizer import Detokenizer, special_token_ids
from planish.engine.sampling.stopping import StopCondition
from planish.renderers import Renderer, get_renderer
from planish.renderers.message_parts import MessagePart, ParseOptions
from planish.renderers.stream_parser import SampleParser, message_parser, stop_gate, text_parser
from planish.renderers.tagged_parser import JsonEnd
from planish.testing import EOS_TOKEN_ID, NUM_TOKENS, save_byte_tokenizer
from planish.tokenizer import load_tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ADD = {"name": "add", "arguments": '{"a": 1, "b": 2}'}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def renderers(tokenizer) -> dict[str, Renderer]:
    return {
        name: get_renderer(name, tokenizer)
        for name in ("qwen3", "qwen3_instruct", "qwen3_5", "role_colon", "llama3")
    }


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def parser_of(renderer: Renderer, options: ParseOptions | None = None) -> SampleParser:
    return message_parser(renderer, Detokenizer.of_tokenizer(renderer.tokenizer), options)


def steps_of(
    renderer: Renderer, text: str, *stops: str, options: ParseOptions | None = None
) -> list[list[MessagePart]]:
    """Return the parts of a stream, one list per token and one for the end."""
    tokens = encode(renderer.tokenizer, text)
    return parse_stream(parser_of(renderer, options), tokens, stop_condition(renderer, *stops))


def read(
    renderer: Renderer, text: str, *stops: str, options: ParseOptions | None = None
) -> Reading:
    return streamed(renderer, encode(renderer.tokenizer, text), *stops, options=options)[1]


CONSTRAINED = ParseOptions(has_valid_calls=True)
ARGUMENTS = '{"text": "<é> </tool_ca stop\\n</tool_call> \\"", "b": [{}]}'


@pytest.mark.parametrize(
    ("stops", "written", "arguments"),
    [
        ((), ARGUMENTS + "}\n</tool_call>", ARGUMENTS),
        ((), '{"text": "<é> </tool_ca', '{"text": "<é> </tool_ca'),
        (("stop",), '{"text": "<é> </tool_ca stop', '{"text": "<é> </tool_ca '),
    ],
)
def test_arguments_of_constrained_calls_are_streamed_as_they_grow(
    renderers, stops, written, arguments
):
    renderer = renderers["qwen3_instruct"]
    text = f'Hi\n{CALL}\n<tool_call>\n{{"name": "say", "arguments": {written}'
    steps = steps_of(renderer, text, *stops, options=CONSTRAINED)
    pieces = [
        part.text for step in steps for part in step if (part.kind, part.call) == ("arguments", 1)
    ]
    assert len(pieces) > 10
    assert "".join(pieces) == arguments
    whole = read(renderer, text, *stops, options=CONSTRAINED)
    assert whole == Reading("Hi", "", (ADD, {"name": "say", "arguments": arguments}))


def test_text_after_a_constrained_call_is_not_part_of_its_arguments(renderers):
    text = f'<tool_call>\n{{"name": "say", "arguments": {ARGUMENTS}}}\n</tool_call>\n{CALL}'
    whole = read(renderers["qwen3_instruct"], text, options=CONSTRAINED)
    assert whole.calls == ({"name": "say", "arguments": ARGUMENTS}, ADD)


@given(st.recursive(st.text('ab"\\{}[]') | st.integers(), lambda inner: st.lists(inner)))
def test_the_end_of_a_json_object_is_found_in_pieces_of_any_length(value):
    text = json.dumps({"x": value}) + "}}\n"
    end = len(text) - 3
    for size in (1, 2, 3, 7, len(text)):
        finder, at = JsonEnd(), 0
        while (found := finder.find(text[at : at + size])) is None:
            at += size
        assert at + found == end


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
    name=st.sampled_from(["qwen3_instruct", "qwen3_5", "role_colon", "llama3"]),
)
def test_a_streamed_message_equals_the_parsed_message(tokenizer, renderers, pieces, cut, name):
    tokens = encode(tokenizer, "".join(pieces))
    tokens = tokens[: len(tokens) - cut] if cut < 3 else [*tokens, EOS_TOKEN_ID]
    renderer = renderers[name]
    for stops in (("END",), ("x y", "<tool")):
        streamed(renderer, tokens, *stops)
    _, whole = streamed(renderer, tokens)
    condition = stop_condition(renderer)
    if name == "role_colon" and "\n\nUser:" in tokenizer.decode(tokens):
        # The engine ends a sample at the stop string.
        text = "".join(part.text for part in parse_whole(parser_of(renderer), tokens, condition))
        assert text == "".join(pieces).partition("\n\nUser:")[0].removeprefix(" ")
        return
    message = renderer.parse_response(tokens).message
    if "unparsed_tool_calls" not in message:
        assert whole == Reading.of_message(message)


@settings(max_examples=100, deadline=None)
@given(
    thought=st.lists(PIECES, max_size=6),
    text=st.lists(PIECES, max_size=6),
    closed=st.booleans(),
    name=st.sampled_from(["qwen3", "qwen3_5"]),
)
def test_streamed_reasoning_equals_the_parsed_reasoning(
    tokenizer, renderers, thought, text, closed, name
):
    inner = "".join(thought).replace("<tool_call>", "")
    sample = f"<think>{inner}" + (f"</think>{''.join(text)}" if closed else "")
    tokens = encode(tokenizer, sample)
    streamed(renderers[name], tokens, "END")
    _, whole = streamed(renderers[name], tokens)
    message = renderers[name].parse_response(tokens).message
    if "unparsed_tool_calls" not in message:
        assert whole == Reading.of_message(message)


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, NUM_TOKENS - 1), max_size=60))
def test_streamed_text_of_any_tokens_equals_the_decoded_text(tokenizer, tokens):
    texts = Detokenizer.of_tokenizer(tokenizer)
    special_ids = special_token_ids(tokenizer)
    condition = StopCondition(texts, frozenset({EOS_TOKEN_ID}), ("\n",))
    steps = parse_stream(text_parser(texts, special_ids), tokens, condition)
    whole = parse_whole(text_parser(texts, special_ids), tokens, condition)
    text = "".join(part.text for part in whole)
    assert "".join(part.text for step in steps for part in step) == text
    sampled = tokens[
        : min((tokens.index(t) for t in (10, EOS_TOKEN_ID) if t in tokens), default=60)
    ]
    assert text == tokenizer.decode(sampled, skip_special_tokens=True)


def test_message_pieces_are_streamed_as_soon_as_possible(renderers):
    steps = steps_of(renderers["qwen3"], "<think>\nhm\n</think>\n\nYes, but" + CALL)
    readings = [Reading.of_parts(step) for step in steps if step and step[0].kind != "call"]
    assert [one.reasoning for one in readings[:2]] == ["h", "m"]
    assert "".join(one.content for one in readings) == "Yes, but"
    assert len(readings) == 2 + len("Yes,but")


def test_a_tool_call_is_sent_when_it_is_complete(renderers):
    text = f"{CALL}\n{CALL}"
    steps = steps_of(renderers["qwen3_instruct"], text)
    ends = [number for number, step in enumerate(steps) if step]
    tokens = encode(renderers["qwen3_instruct"].tokenizer, text)
    decode = renderers["qwen3_instruct"].tokenizer.decode
    assert [decode(tokens[: end + 1]) for end in ends] == [CALL, text]
    assert [[part.kind for part in steps[end]] for end in ends] == [["call", "arguments"]] * 2
    assert [part.call for end in ends for part in steps[end]] == [0, 0, 1, 1]


def test_a_call_before_a_stop_string_is_kept(renderers):
    reading = read(renderers["qwen3_instruct"], f"{CALL}\nBye END", "END")
    assert (reading.content.strip(), reading.calls) == ("Bye", (ADD,))


def test_text_that_a_stop_string_may_remove_is_held_back(renderers):
    steps = steps_of(renderers["llama3"], "go STO no STOP", "STOP")
    sent = [Reading.of_parts(step).content for step in steps]
    assert sent == ["g", "o", " ", "", "", "", "STO ", "n", "o", " ", "", "", "", "", ""]


def test_an_invalid_tool_call_stays_in_the_text(renderers):
    for text in (
        "So:\n<tool_call>\nadd(1)\n</tool_call>",
        "So:\n<tool_call>\nadd(1)\n</tool_call>\nBye",
        'So:\n<tool_call>\n{"name": "add", "arg',
    ):
        assert read(renderers["qwen3_instruct"], text) == Reading(text)
    text = f"A\n{CALL}\nB <tool_call>add</tool_call> C"
    assert read(renderers["qwen3_instruct"], text) == Reading(
        "A\nB <tool_call>add</tool_call> C", "", (ADD,)
    )


@pytest.mark.parametrize("text", [f"A\n{CALL} B", "<b>x</b><tool_call>y", "x\n\n<tool_call>"])
def test_without_tools_the_markup_of_calls_is_text(renderers, text):
    options = ParseOptions(reads_calls=False)
    for name in ("qwen3_instruct", "qwen3"):
        assert read(renderers[name], text, options=options) == Reading(text)


def test_without_reasoning_its_markup_is_text(renderers):
    text = "<think>x</think>\n\ny"
    options = ParseOptions(reads_reasoning=False)
    assert read(renderers["qwen3"], text, options=options) == Reading(text)
    assert read(renderers["qwen3"], text) == Reading("y", "x")


def test_reasoning_that_ends_without_a_beginning_is_text(renderers):
    assert read(renderers["qwen3"], "x</think>y") == Reading("x</think>y")
    assert read(renderers["qwen3_5"], "x</think>y") == Reading("y", "x")


def test_a_sample_can_continue_reasoning_or_an_answer(renderers):
    text = " x</think>\n\n y"
    for name in ("qwen3", "qwen3_5"):
        reasoning = read(renderers[name], text, options=ParseOptions(continues="reasoning"))
        assert reasoning == Reading(" y" if name == "qwen3" else "y", " x")
        answer = read(renderers[name], text, options=ParseOptions(continues="text"))
        assert answer == Reading(text)
    assert read(renderers["role_colon"], " x", options=ParseOptions(continues="text")) == Reading(
        " x"
    )


def test_the_gate_opens_with_the_answer(renderers, tokenizer):
    for name, text, answer in (
        ("qwen3", "<think>\na b\n</think>\n\nNow", "Now"),
        ("qwen3_5", "a b\n</think>\n\nNow", "Now"),
        ("qwen3", "\n\nNow", "Now"),
        ("qwen3", "<think>a</think>" + CALL, CALL),
    ):
        gate = stop_gate(lambda name=name: parser_of(renderers[name]), frozenset())
        for _ in range(2):
            tracker = gate.new_tracker()
            is_open = [tracker(token) for token in encode(tokenizer, text)]
            num_tokens = len(encode(tokenizer, answer))
            assert is_open == [False] * (len(is_open) - num_tokens) + [True] * num_tokens


def test_each_token_is_decoded_once(tokenizer, renderers):
    """The time of a stream is proportional to its text."""
    decoded = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return tokenizer.decode(tokens)

    parser = message_parser(renderers["qwen3_instruct"], Detokenizer(decode))
    text = "abc <tool" * 500 + CALL
    for token in encode(tokenizer, text):
        parser.add(token)
    parser.finish()
    assert Reading.of_parts(parser.take()) == Reading("abc <tool" * 500, "", (ADD,))
    assert decoded < 4 * 256


def test_parts_of_one_kind_are_joined(renderers):
    parts = parse_whole(
        parser_of(renderers["qwen3"]),
        encode(renderers["qwen3"].tokenizer, "<think>a b</think>c\n" + CALL),
        stop_condition(renderers["qwen3"]),
    )
    assert [(part.kind, part.text) for part in parts] == [
        ("reasoning", "a b"),
        ("text", "c"),
        ("call", "add"),
        ("arguments", ADD["arguments"]),
    ]
    assert all(before.kind != after.kind for before, after in pairwise(parts))
