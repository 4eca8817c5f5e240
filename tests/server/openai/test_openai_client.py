"""OpenAI's own client: parsed answers, tools and their streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from answers import MIX, MODEL, QUESTION, TOKENS, Colour, mix

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(base_url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="tml-any", max_retries=0, timeout=500) as client:
        yield client


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_is_parsed(client, seed):
    answer = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Colour, max_tokens=TOKENS, seed=seed
    )
    assert isinstance(answer.choices[0].message.parsed, Colour)


def test_json_objects_are_json(client):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        response_format={"type": "json_object"},
        max_tokens=600,
        n=4,
        seed=1,
    )
    for choice in answer.choices:
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
    assert any(choice.finish_reason == "stop" for choice in answer.choices)


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"guided_regex": "[ab]/[cd]"}, {"a/c", "a/d", "b/c", "b/d"}),
        ({"guided_grammar": 'start: "x" | "y"'}, {"x", "y"}),
        ({"guided_json": {"enum": [1, "z"]}}, {"1", '"z"'}),
    ],
)
def test_other_constraints_hold_for_chats_and_texts(client, options, texts):
    shared: Any = {"model": MODEL, "max_tokens": 8, "n": 4, "extra_body": options}
    chat = client.chat.completions.create(messages=QUESTION, **shared)
    assert {choice.message.content for choice in chat.choices} <= texts
    text = client.completions.create(prompt="The sea is", **shared)
    assert {choice.text for choice in text.choices} <= texts


@pytest.mark.parametrize("options", [{"regex": "("}, {"grammar": "start: other"}])
def test_an_invalid_constraint_is_rejected(client, options):
    with pytest.raises(openai.BadRequestError, match="structured_outputs of kind"):
        client.completions.create(
            model=MODEL, prompt="x", extra_body={"structured_outputs": options}
        )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "mix"}}])
def test_a_tool_is_called_and_its_result_sent_back(client, choice):
    options: Any = {
        "model": MODEL,
        "tools": [MIX],
        "max_tokens": TOKENS,
        "parallel_tool_calls": False,
    }
    answer = client.chat.completions.create(messages=QUESTION, tool_choice=choice, **options)
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls
    result = mix(**json.loads(call.function.arguments))
    messages = [
        *QUESTION,
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": result},
    ]
    assert client.chat.completions.create(messages=messages, **options).choices


def test_strict_calls_are_valid_where_the_model_decides(client):
    strict = {"type": "function", "function": {**MIX["function"], "strict": True}}
    prompt: Any = [*QUESTION, {"role": "user", "content": "Answer with a tool call."}]
    answer = client.chat.completions.create(
        model=MODEL, messages=prompt, tools=[strict], max_tokens=TOKENS, n=16, seed=3
    )
    for choice in answer.choices:
        for call in choice.message.tool_calls or ():
            mix(**json.loads(call.function.arguments))


def test_streamed_calls_are_parsed(client):
    with client.chat.completions.stream(
        model=MODEL,
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(Colour)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=TOKENS,
    ) as stream:
        kinds = [event.type for event in stream]
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Colour)
    assert "tool_calls.function.arguments.done" in kinds
