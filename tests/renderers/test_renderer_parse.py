"""Sampled tokens are parsed into messages."""

import json

import numpy as np
import pytest
from family_tokenizers import family_tokenizer
from hypothesis import given, settings, strategies as st

from planish.renderers import Renderer, Termination, get_renderer, get_text_content

QWEN = family_tokenizer("qwen")
QWEN3 = get_renderer("qwen3", QWEN)
INSTRUCT = get_renderer("qwen3_instruct", QWEN)
LLAMA3 = get_renderer("llama3", family_tokenizer("llama3"))
ROLE_COLON = get_renderer("role_colon", family_tokenizer("llama3"))


def sampled(renderer: Renderer, text: str) -> list[int]:
    """Return the tokens of a text whose special tokens are special, as a model samples them."""
    return renderer.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("renderer", "text", "content", "termination"),
    [
        (INSTRUCT, "Hi!<|im_end|>", "Hi!", Termination.STOP_SEQUENCE),
        (INSTRUCT, "Hi!<|endoftext|>", "Hi!", Termination.EOS),
        (INSTRUCT, "Hi!", "Hi!", Termination.MALFORMED),
        (INSTRUCT, "", "", Termination.MALFORMED),
        (INSTRUCT, "<|im_end|>", "", Termination.STOP_SEQUENCE),
        (INSTRUCT, "Hi!<|im_end|>\n<|im_start|>user", "Hi!", Termination.MALFORMED),
        (INSTRUCT, "Hi!<|endoftext|><|im_end|>", "Hi!", Termination.MALFORMED),
        (INSTRUCT, " \nHi! \n<|im_end|>", " \nHi! \n", Termination.STOP_SEQUENCE),
        (INSTRUCT, "<think>no</think><|im_end|>", "<think>no</think>", Termination.STOP_SEQUENCE),
        (LLAMA3, "Hi!<|eot_id|>", "Hi!", Termination.STOP_SEQUENCE),
        (LLAMA3, "Hi!<|end_of_text|>", "Hi!", Termination.EOS),
        (LLAMA3, "Hi!", "Hi!", Termination.MALFORMED),
        (ROLE_COLON, " Hi!\n\nUser:", "Hi!", Termination.STOP_SEQUENCE),
        (ROLE_COLON, "Hi!\n\nUser:", "Hi!", Termination.STOP_SEQUENCE),
        (ROLE_COLON, "  Hi!\n\n\nUser:", " Hi!\n", Termination.STOP_SEQUENCE),
        (ROLE_COLON, " Hi!<|end_of_text|>", "Hi!", Termination.EOS),
        (ROLE_COLON, " Hi!\n\n<|eot_id|>", "Hi!", Termination.EOS),
        (ROLE_COLON, " Hi!", "Hi!", Termination.MALFORMED),
        (ROLE_COLON, " Hi!\n\nUser", "Hi!\n\nUser", Termination.MALFORMED),
        (ROLE_COLON, " Hi!\n\nUser:<|end_of_text|>", "Hi!", Termination.MALFORMED),
        (ROLE_COLON, " Hi!\n\nUser: and on and on", "Hi!", Termination.MALFORMED),
        (ROLE_COLON, "", "", Termination.MALFORMED),
    ],
)
def test_content_and_termination(renderer, text, content, termination):
    parsed = renderer.parse_response(sampled(renderer, text))
    assert parsed.message == {"role": "assistant", "content": content}
    assert parsed.termination is termination


def test_parse_returns_message_and_termination():
    parsed_message, termination = INSTRUCT.parse_response(sampled(INSTRUCT, "Hi!<|im_end|>"))
    assert get_text_content(parsed_message) == "Hi!"
    assert termination.is_clean


def test_a_termination_is_true_if_the_answer_ended_cleanly():
    assert bool(Termination.STOP_SEQUENCE)
    assert bool(Termination.EOS)
    assert not Termination.MALFORMED
    assert [ending.is_stop_sequence for ending in Termination] == [True, False, False]
    assert [ending.value for ending in Termination] == ["stop_sequence", "eos", "malformed"]


def test_a_stop_string_can_end_inside_a_token():
    """Samplers return the whole token that completes a stop string."""
    tokens = sampled(ROLE_COLON, " Hi!\n\nUser")
    longer = ROLE_COLON.tokenizer.convert_tokens_to_ids(":)")
    assert ROLE_COLON.tokenizer.decode([longer]) == ":)"
    parsed = ROLE_COLON.parse_response([*tokens, longer])
    assert parsed.message["content"] == "Hi!"
    assert parsed.termination is Termination.STOP_SEQUENCE


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (
            "<think>\nHm.\n\nYes.\n</think>\n\nHi!<|im_end|>",
            [{"type": "thinking", "thinking": "Hm.\n\nYes."}, {"type": "text", "text": "Hi!"}],
        ),
        ("<think>\n\n</think>\n\nHi!<|im_end|>", "Hi!"),
        ("Hi!<|im_end|>", "Hi!"),
        # The prompt ended with <think>.
        (
            "\nHm.\n</think>\n\nHi!<|im_end|>",
            [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Hi!"}],
        ),
        ("<think>\nHm, and then", [{"type": "thinking", "thinking": "Hm, and then"}]),
        (
            "Hi <think>not at the start</think> you<|im_end|>",
            "Hi <think>not at the start</think> you",
        ),
        (
            "<think>a <think> b</think>c</think>d<|im_end|>",
            [
                {"type": "thinking", "thinking": "a <think> b"},
                {"type": "text", "text": "c</think>d"},
            ],
        ),
        (
            "<think>use <tool_call>?</think>no<|im_end|>",
            [{"type": "thinking", "thinking": "use <tool_call>?"}, {"type": "text", "text": "no"}],
        ),
    ],
)
def test_reasoning_is_parsed(text, content):
    assert QWEN3.parse_response(sampled(QWEN3, text)).message["content"] == content


def test_the_text_of_a_tag_is_not_the_control_token():
    ids = [*QWEN3.codec.encode_text("<think>a</think>b"), QWEN.convert_tokens_to_ids("<|im_end|>")]
    assert QWEN3.parse_response(ids).message["content"] == "<think>a</think>b"


def test_text_content_excludes_reasoning():
    message, _ = QWEN3.parse_response(sampled(QWEN3, "<think>\nHm.\n</think>\n\nHi!<|im_end|>"))
    assert get_text_content(message) == "Hi!"
    assert get_text_content({"role": "assistant", "content": None}) == ""


def call(name: str, arguments: str) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            '<tool_call>\n{"name": "f", "arguments": {"x":1}}\n</tool_call>',
            "",
            [call("f", '{"x":1}')],
        ),
        (
            'One moment.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
            "One moment.",
            [call("f", "{}")],
        ),
        (
            '<tool_call>{"arguments": {"é": [1,2]}, "name": "f"}</tool_call>',
            "",
            [call("f", '{"é": [1, 2]}')],
        ),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', "", [call("f", "{}")]),
        (
            'a\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n'
            '{"name": "g", "arguments": {"s": "}\\"}"}}\n</tool_call>\nb',
            "a\nb",
            [call("f", "{}"), call("g", '{"s": "}\\"}"}')],
        ),
        (  # tags in strings are text
            '<tool_call>\n{"name": "f", "arguments": {"s": "\\"</tool_call>\\\\"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {"<tool_call>": "</tool_call>"}}\n</tool_call>'
            "\nb",
            "\nb",
            [
                call("f", '{"s": "\\"</tool_call>\\\\"}'),
                call("g", '{"<tool_call>": "</tool_call>"}'),
            ],
        ),
    ],
)
@pytest.mark.parametrize("family", ["qwen", "smollm2"])
def test_tool_calls_are_parsed(family, text, content, calls):
    renderer = get_renderer("qwen3_instruct", family_tokenizer(family))
    message, termination = renderer.parse_response(sampled(renderer, text + "<|im_end|>"))
    assert message == {"role": "assistant", "content": content, "tool_calls": calls}
    assert termination.is_stop_sequence


@pytest.mark.parametrize(
    ("inner", "error"),
    [
        ("{broken", "not JSON"),
        ("[1]", "not a JSON object with a name"),
        ('{"name": 1}', "not a JSON object with a name"),
        ('{"name": "f", "arguments": "x"}', "arguments"),
        ('{"name": "a\\"b", "arguments": {}}', "escaping"),
        ("[" * 100_000, "not JSON"),
        ('{"name": "f\\ud83d", "arguments": {}}', "half of a character"),
        ('{"name": "f", "arguments": {"x": "\\ud83d"}}', "half of a character"),
        ('{"arguments": {"x": "\\ud83d"}, "name": "f"}', "half of a character"),
    ],
)
def test_invalid_tool_calls_are_kept_and_rendered_unchanged(inner, error):
    text = f"Wait.\n<tool_call>\n{inner}\n</tool_call>"
    tokens = sampled(QWEN3, f"{text}<|im_end|>")
    message, termination = QWEN3.parse_response(tokens)
    assert "tool_calls" not in message
    (unparsed,) = message["unparsed_tool_calls"]
    assert unparsed["raw_text"] == f"<tool_call>\n{inner}\n</tool_call>"
    assert error in unparsed["error"]
    assert termination.is_clean
    question = {"role": "user", "content": "a"}
    again = INSTRUCT.build_supervised_example([question, message])[0].to_ints()
    assert again[-len(tokens) :] == tokens


@pytest.mark.parametrize("end", ["", "</tool_call>", "\\"])
def test_a_call_that_ends_in_a_string_is_not_closed(end):
    text = f'<tool_call>\n{{"name": "f", "arguments": {{"s": "a</tool_call>b{end}'
    message, _ = INSTRUCT.parse_response(sampled(INSTRUCT, text))
    assert message["content"] == ""
    [unparsed] = message["unparsed_tool_calls"]
    assert unparsed == {"raw_text": text, "error": "the call is not closed"}


def test_a_missing_quotation_mark_spoils_only_its_call():
    bad = '<tool_call>\n{"name": "f", "arguments": {"s": "a}}\n</tool_call>'
    good = '<tool_call>\n{"name": "g", "arguments": {"s": "b"}}\n</tool_call>'
    message, _ = INSTRUCT.parse_response(sampled(INSTRUCT, f"{bad}\n{good}<|im_end|>"))
    assert message["tool_calls"] == [call("g", '{"s": "b"}')]
    [unparsed] = message["unparsed_tool_calls"]
    assert unparsed["raw_text"] == bad


@pytest.mark.parametrize("name", ['say "hi"', "a\\b", "a\nb", ""])
def test_a_tool_whose_name_needs_escaping_cannot_be_offered(name):
    """A call of it could not be parsed."""
    with pytest.raises(ValueError, match="name"):
        INSTRUCT.create_conversation_prefix_with_tools([{"name": name, "parameters": {}}])


def test_an_unclosed_tool_call_is_unparsed():
    message, termination = INSTRUCT.parse_response(
        sampled(INSTRUCT, 'a<tool_call>\n{"name": "f", "arg')
    )
    assert message["content"] == "a"
    assert message["unparsed_tool_calls"] == [
        {"raw_text": '<tool_call>\n{"name": "f", "arg', "error": "the call is not closed"}
    ]
    assert termination is Termination.MALFORMED


words = st.text(alphabet=st.sampled_from('ab \n.:é東🙂<|>{}"\\'), max_size=40)
objects = st.dictionaries(
    words, words | st.integers() | st.none() | st.lists(st.booleans()), max_size=3
)


TRIMMED = ("llama3", "gemma3", "qwen3_5", "qwen3_8", "nemotron3")


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(text=words)
def test_rendered_answers_are_parsed_back(renderers, text):
    for case, renderer in renderers.items():
        if case.startswith("role_colon") and "\n\nUser:" in text:
            continue
        # Several templates trim, and Qwen3's drops line breaks after the think block.
        model = case.partition(" of ")[2] if case.startswith("template") else case
        content = (
            text.strip()
            if model.startswith((*TRIMMED, "Llama 3", "Gemma 3"))
            else text.lstrip("\n")
            if model.startswith(("qwen3", "smollm3", "Qwen3"))
            else text
        )
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": content}]
        prompt = renderer.build_generation_prompt(messages[:1]).to_ints()
        example, _ = renderer.build_supervised_example(messages)
        assert example.to_ints()[: len(prompt)] == prompt, case
        parsed = renderer.parse_response(example.to_ints()[len(prompt) :])
        assert parsed.message == messages[-1], case
        assert parsed.termination is Termination.STOP_SEQUENCE, case


@settings(max_examples=60, deadline=None)
@given(thought=words.map(lambda text: text.strip("\n")).filter(bool), text=words, arguments=objects)
def test_rendered_reasoning_and_tool_calls_are_parsed_back(thought, text, arguments):
    text = text.strip("\n")
    content = [
        {"type": "thinking", "thinking": thought},
        *([{"type": "text", "text": text}] if text else []),
    ]
    calls = [
        call("f", json.dumps(arguments, ensure_ascii=False)),
        call("g.h", json.dumps(arguments)),
    ]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "tool_calls": calls},
    ]
    prompt = QWEN3.build_generation_prompt(messages[:1]).to_ints()
    example = QWEN3.build_supervised_example(messages)[0].to_ints()
    assert QWEN3.parse_response(example[len(prompt) :]).message == messages[-1]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, 519), max_size=60))
def test_parsing_any_tokens_never_raises(renderers, tokens):
    for renderer in renderers.values():
        message, _ = renderer.parse_response([token % len(renderer.tokenizer) for token in tokens])
        renderer.build_generation_prompt([{"role": "user", "content": "a"}, message])


def test_token_arrays_can_be_parsed():
    tokens = np.array(sampled(INSTRUCT, "Hi!<|im_end|>"), dtype=np.int32)
    assert INSTRUCT.parse_response(tokens).message["content"] == "Hi!"
