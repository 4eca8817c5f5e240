"""Anthropic's own client: answers, streams, tools, thinking, errors and lists. It is installed by
make test-extras.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel, ConfigDict
from scripted_server import BASE, CHAT, EFFORTS, HELLO, THINKER, WAIT

from planish.server.results import Unavailable

anthropic = pytest.importorskip("anthropic")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:anthropic")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":1, "b": 2}}\n</tool_call>'
ADD: Any = {
    "name": "add",
    "description": "Adds",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
OPTIONS: Any = {"model": CHAT, "max_tokens": 200, "messages": HELLO}


@pytest.fixture(scope="module")
def client(served) -> Iterator[Any]:
    with anthropic.Anthropic(
        base_url=served.url, api_key="tml-first", max_retries=0, timeout=WAIT
    ) as client:
        yield client


def test_a_message_is_parsed(served, client):
    with served.engine.saying("Hi there.", served.tokenizer):
        message = client.messages.create(**OPTIONS, system="Be kind.", stop_sequences=["!"])
    assert [block.text for block in message.content] == ["Hi there."]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == 10
    assert message._request_id.startswith("req_")


def test_the_async_client_streams(served):
    async def text() -> str:
        async with (
            anthropic.AsyncAnthropic(
                base_url=served.url, auth_token="tml-first", api_key=None, max_retries=0
            ) as client,
            client.messages.stream(**OPTIONS) as stream,
        ):
            pieces = [piece async for piece in stream.text_stream]
            assert "".join(pieces) == await stream.get_final_text()
            return "".join(pieces)

    with served.engine.saying("Hi there.", served.tokenizer):
        assert asyncio.run(text()) == "Hi there."


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_a_stream_gives_the_message_of_a_plain_answer(served, client, display):
    said = f"<think>\nHm.\n</think>\n\nI add.\n{CALL}\n{CALL}"
    options: Any = {
        **OPTIONS,
        "model": THINKER,
        "tools": [ADD],
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": display},
    }
    with served.engine.saying(said, served.tokenizer):
        whole = client.messages.create(**options)
        with client.messages.stream(**options) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        with client.beta.messages.stream(
            **options, betas=["interleaved-thinking-2025-05-14"]
        ) as stream:
            beta = stream.get_final_message()
    assert {"signature", "input_json", "text"} <= set(kinds)
    assert ("thinking" in kinds) == (display == "summarized")
    for message in (streamed, beta):
        assert message.stop_reason == whole.stop_reason == "tool_use"
        assert message.usage.input_tokens == whole.usage.input_tokens
        assert message.usage.output_tokens == whole.usage.output_tokens
        for block, expected in zip(message.content, whole.content, strict=True):
            fields = {"type", "text", "thinking", "signature", "name", "input"}
            assert block.model_dump(include=fields) == expected.model_dump(include=fields)
    # The message is sent back as it is, with the results in any order.
    uses = [block for block in streamed.content if block.type == "tool_use"]
    assert [use.input for use in uses] == 2 * [{"a": 1, "b": 2}]
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": "3"} for use in reversed(uses)
    ]
    messages = [
        *HELLO,
        {"role": "assistant", "content": streamed.content},
        {"role": "user", "content": results},
    ]
    options |= {"messages": messages, "max_tokens": 3}
    assert client.messages.create(**options).role == "assistant"
    del options["max_tokens"]
    assert client.messages.count_tokens(**options).input_tokens > 100


def test_the_tool_runner_calls_functions(served, client):
    seen = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add.

        Args:
            a: a number
            b: a number
        """
        seen.append((a, b))
        return str(a + b)

    with served.engine.saying(CALL, served.tokenizer):
        runner = client.beta.messages.tool_runner(
            model=CHAT, max_tokens=200, messages=HELLO, tools=[add], max_iterations=2
        )
        messages = list(runner)
    assert seen == [(1, 2), (1, 2)]
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use"]


def test_an_answer_is_parsed_into_a_type(client):
    class Colour(BaseModel):
        model_config = ConfigDict(extra="forbid")
        name: Literal["red", "green"]

    message = client.messages.parse(**OPTIONS, output_format=Colour)
    assert isinstance(message.parsed_output, Colour)


def test_a_required_tool_is_called(client):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    message = client.messages.create(
        **OPTIONS,
        tools=[{**ADD, "input_schema": schema}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    [block] = message.content
    assert block.input["a"] in (1, 2)


def test_errors_have_their_classes(served, client):
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: ") as error:
        client.messages.create(**{**OPTIONS, "messages": [{"role": "user", "content": "x" * 5000}]})
    assert error.value.request_id == error.value.body["request_id"]
    assert error.value.type == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**OPTIONS, "model": "claude"})
    with pytest.raises(anthropic.NotFoundError, match="batches"):
        client.messages.batches.list()
    with (
        anthropic.Anthropic(base_url=served.url, api_key="tml-none", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(**OPTIONS)
    with served.engine.saying("Hi.", served.tokenizer, Unavailable("stopping", 0.5)):
        with pytest.raises(anthropic.OverloadedError):
            client.messages.create(**OPTIONS)
        with (
            client.messages.stream(**OPTIONS) as stream,
            pytest.raises(anthropic.APIStatusError, match="stopping"),
        ):
            stream.get_final_message()


def test_models_are_listed_page_by_page(client):
    names = [model.id for model in client.models.list()]
    assert {BASE, CHAT, THINKER, EFFORTS} <= set(names)
    assert [model.id for model in client.models.list(limit=1)] == names
    model = client.models.retrieve(CHAT)
    assert (model.id, model.max_input_tokens, model.lifecycle) == (CHAT, 2048, "active")


def test_a_ping_keeps_a_silent_stream_alive(served, client, monkeypatch):
    from planish.server.openai import streaming

    monkeypatch.setattr(streaming, "KEEP_ALIVE_SECONDS", 0.05)
    with served.engine.saying("Hi there.", served.tokenizer, paused_after=2):
        with httpx.Client(base_url=served.url, timeout=WAIT) as http:
            body = {**OPTIONS, "stream": True}
            headers = {"x-api-key": "tml-first"}
            with http.stream("POST", "/v1/messages", json=body, headers=headers) as response:
                lines = iter(response.iter_lines())
                assert "event: ping" in lines
                assert next(lines) == 'data: {"type":"ping"}'
                served.engine.resumed.set()
                assert "event: message_stop" in lines
        served.engine.resumed.clear()
        stream = client.messages.create(**OPTIONS, stream=True)
        kinds = []
        for event in stream:
            kinds.append(event.type)
            if event.type == "content_block_delta":
                served.engine.resumed.set()
        assert kinds[-1] == "message_stop"
