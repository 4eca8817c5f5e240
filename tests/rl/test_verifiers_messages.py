"""Conversion of messages between verifiers and planish; does not need verifiers."""

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace as Object

import pytest

from planish.errors import UnsupportedError, UserError
from planish.integrations.verifiers import library as verifiers_library
from planish.integrations.verifiers.datasets import canonical_env_args
from planish.integrations.verifiers.messages import (
    answer_fields,
    check_sampling,
    read_answer,
    read_message,
    read_tool,
)
from planish.renderers import Message, get_renderer
from planish.renderers.renderer import with_tools

CALL = {"type": "function", "id": "call_0", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (Object(role="text", content="hi"), {"role": "user", "content": "hi"}),
        (
            Object(role="user", content=[{"type": "text", "text": "a"}]),
            {"role": "user", "content": "a"},
        ),
        (
            Object(role="tool", content="5", tool_call_id="x"),
            {"role": "tool", "content": "5", "tool_call_id": "x"},
        ),
        (Object(role="assistant", content=None), {"role": "assistant", "content": ""}),
    ],
)
def test_verifiers_messages_are_converted(given, wanted):
    assert read_message(given) == wanted


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize("role", ["user", "tool"])
def test_images_become_parts(role):
    content = [{"type": "text", "text": "Is"}, IMAGE, {"type": "text", "text": "red?"}]
    message = read_message(Object(role=role, content=content, tool_call_id="x"))
    assert message["content"] == [
        {"type": "text", "text": "Is"},
        {"type": "image", "image": "data:image/png;base64,AAAA"},
        {"type": "text", "text": "red?"},
    ]


def test_images_of_the_assistant_and_audio_are_rejected():
    with pytest.raises(UnsupportedError, match="assistant has an image"):
        read_message(Object(role="assistant", content=[IMAGE]))
    with pytest.raises(UnsupportedError, match="'input_audio'"):
        read_message(Object(role="user", content=[{"type": "input_audio"}]))


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "plain"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}],
        },
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ],
)
def test_an_answer_survives_the_conversion_to_verifiers_and_back(answer):
    """The equality shows that a prompt extends the previous one."""
    fields = answer_fields(answer)
    calls = fields["tool_calls"] and [Object(**call) for call in fields["tool_calls"]]
    back = read_message(Object(role="assistant", **{**fields, "tool_calls": calls}))
    assert back == read_answer(fields) == answer


def test_an_unparsable_tool_call_stays_text():
    spoiled = [{"raw_text": "<tool_call>{</tool_call>", "error": "not JSON"}]
    fields = answer_fields({"role": "assistant", "content": "see", "unparsed_tool_calls": spoiled})
    assert fields["content"] == "see\n<tool_call>{</tool_call>"
    assert fields["tool_calls"] is None


def test_tools_are_added_to_the_system_message(tokenizer):
    renderer = get_renderer("qwen3_instruct", tokenizer)
    tool = read_tool(
        Object(name="add", description="Adds.", parameters={"type": "object", "properties": {}})
    )
    asked: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    messages = with_tools(renderer, asked, [tool])
    assert [message["role"] for message in messages] == ["system", "user"]
    text = tokenizer.decode(renderer.build_generation_prompt(messages).to_ints())
    assert "Be brief." in text
    assert '"name": "add"' in text
    assert with_tools(renderer, asked, []) == asked


def test_sampling_options_of_verifiers_are_rejected():
    check_sampling({"n": 1, "extra_body": {}, "stop": None})
    for arguments in ({"n": 2}, {"temperature": 0.0}, {"stop": ["\n"]}):
        with pytest.raises(UnsupportedError, match=next(iter(arguments))):
            check_sampling(arguments)


def test_env_args_have_one_canonical_form():
    assert canonical_env_args('{"b": 1, "a": [2]}') == canonical_env_args('{"a":[2],"b":1}')


@pytest.mark.parametrize(
    ("found", "error"),
    [(None, UserError), ("0.4.0", UnsupportedError), ("0.1.9", UnsupportedError)],
)
def test_a_missing_or_unsupported_verifiers_is_rejected(found, error, monkeypatch):
    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(verifiers_library, "version", version)
    with pytest.raises(error, match=r"planish\[verifiers\]"):
        verifiers_library.require_verifiers()
