"""Prompts that continue from sampled tokens."""

from typing import Any

import pytest
from family_tokenizers import family_tokenizer
from hypothesis import given, settings, strategies as st
from variants import slow_after

from planish.renderers import Message, Renderer, get_renderer

QWEN = family_tokenizer("qwen")
RENDERERS = {
    "role_colon": get_renderer("role_colon", family_tokenizer("smollm2")),
    "role_colon with bos": get_renderer("role_colon", family_tokenizer("llama3")),
    "llama3": get_renderer("llama3", family_tokenizer("llama3")),
    "chatml": get_renderer("chatml", family_tokenizer("smollm2", "smollm2")),
    "qwen3_instruct": get_renderer("qwen3_instruct", QWEN),
    "qwen3 keeping history": get_renderer("qwen3", QWEN, strip_thinking_from_history=False),
}
INSTRUCT = RENDERERS["qwen3_instruct"]
ROLE_COLON = RENDERERS["role_colon with bos"]

# No line breaks or blanks at the ends: formats that trim them would render another text than was
# sampled.
TEXT = st.text("abc 7\n.<|é🙂", max_size=12).map(str.strip)
TURNS = st.lists(st.tuples(TEXT, st.lists(TEXT, min_size=1, max_size=2)), min_size=1, max_size=3)


def say(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}  # type: ignore[typeddict-item]


def prompt(renderer: Renderer, messages: list[Message]) -> list[int]:
    return renderer.build_generation_prompt(messages).to_ints()


def canonical_answer(renderer: Renderer, messages: list[Message]) -> list[int]:
    """Return the tokens of the last message, sampled as the tokenizer would write them."""
    example, _ = renderer.build_supervised_example(messages)
    return example.to_ints()[len(prompt(renderer, messages[:-1])) :]


@pytest.mark.parametrize("name", slow_after(3, list(RENDERERS)))
@settings(max_examples=30, deadline=None)
@given(turns=TURNS)
def test_a_continued_prompt_equals_a_rendered_one(name: str, turns: list[tuple[str, list[str]]]):
    renderer = RENDERERS[name]
    messages = [say("user", "Hello")]
    tokens = prompt(renderer, messages)
    for answer, replies in turns:
        messages.append(say("assistant", answer))
        sampled = canonical_answer(renderer, messages)
        number = len(messages) - 1
        messages += [say("user", text) for text in replies]
        continuation = renderer.build_continuation(messages, number, sampled)
        assert continuation is not None
        tokens = tokens + sampled + continuation.to_ints()
    assert tokens == prompt(renderer, messages)


def test_tool_results_share_one_turn():
    calls = [{"function": {"name": "add", "arguments": '{"a": 1}'}}] * 2
    messages = [
        say("user", "Add"),
        say("assistant", "", tool_calls=calls),
        say("tool", "1"),
        say("tool", "2"),
    ]
    before = prompt(INSTRUCT, messages[:1])
    sampled = canonical_answer(INSTRUCT, messages[:2])
    continuation = INSTRUCT.build_continuation(messages, 1, sampled)
    assert continuation is not None
    assert before + sampled + continuation.to_ints() == prompt(INSTRUCT, messages)


def test_sampled_tokens_are_kept_in_a_continuation():
    """A model may sample several tokens where the tokenizer has one, and other blanks in a call."""
    end: Any = QWEN.convert_tokens_to_ids("<|im_end|>")
    spelled = [token for letter in "The answer" for token in QWEN.encode(letter)]
    assert spelled != QWEN.encode("The answer")
    messages = [say("user", "?"), say("assistant", "The answer"), say("user", "And?")]
    continuation = INSTRUCT.build_continuation(messages, 1, [*spelled, end])
    assert continuation is not None
    assert (
        QWEN.decode(continuation.to_ints())
        == "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_continuation_adds_the_end_mark_of_a_truncated_answer():
    cut = QWEN.encode("The ans")
    messages = [say("user", "?"), say("assistant", "The ans")]
    continuation = INSTRUCT.build_continuation(messages, 1, cut)
    assert continuation is not None
    added = continuation.to_ints()
    assert QWEN.decode(added) == "<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(INSTRUCT, messages[:1]) + cut + added == prompt(INSTRUCT, messages)


@pytest.mark.parametrize(
    ("cut", "added"),
    [
        (" Hi", "\n\nUser: And?\n\nAssistant:"),
        (" Hi\n\n", "User: And?\n\nAssistant:"),
        (" Hi\n", "\n\nUser: And?\n\nAssistant:"),
    ],
)
def test_a_continuation_adds_the_stop_string_of_a_truncated_answer(cut, added):
    messages = [say("user", "?"), say("assistant", cut.strip()), say("user", "And?")]
    tokenizer = ROLE_COLON.tokenizer
    continuation = ROLE_COLON.build_continuation(
        messages, 1, tokenizer.encode(cut, add_special_tokens=False)
    )
    assert continuation is not None
    assert tokenizer.decode(continuation.to_ints()) == added


def test_build_continuation_returns_none_if_nothing_can_follow():
    tokenizer, words = QWEN, ROLE_COLON.tokenizer
    messages = [say("user", "?"), say("assistant", "Hi"), say("user", "And?")]
    to_system = [*messages[:2], say("system", "Be brief.")]
    encode = lambda text: words.encode(text, add_special_tokens=False)  # noqa: E731
    # The end-of-sequence token of a base model, or text after the end.
    assert INSTRUCT.build_continuation(messages, 1, tokenizer.encode("Hi<|endoftext|>")) is None
    assert INSTRUCT.build_continuation(messages, 1, tokenizer.encode("Hi<|im_end|>\n")) is None
    assert ROLE_COLON.build_continuation(messages, 1, encode(" Hi<|end_of_text|>")) is None
    assert ROLE_COLON.build_continuation(messages, 1, encode(" Hi\n\nUser: and")) is None
    # It announced a user, and the system speaks; or the assistant goes on.
    assert ROLE_COLON.build_continuation(messages, 1, encode(" Hi\n\nUser:")) is not None
    assert ROLE_COLON.build_continuation(to_system, 1, encode(" Hi\n\nUser:")) is None
    assert ROLE_COLON.build_continuation(messages[:2], 1, encode(" Hi\n\nUser:")) is None


@pytest.mark.parametrize("name", ["qwen3", "qwen3_disable_thinking"])
def test_a_format_that_rewrites_history_has_no_continuation(name):
    renderer = get_renderer(name, QWEN)
    messages = [say("user", "?"), say("assistant", "Hi"), say("user", "And?")]
    assert renderer.build_continuation(messages, 1, QWEN.encode("Hi<|im_end|>")) is None
