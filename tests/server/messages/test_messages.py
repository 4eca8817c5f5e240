"""POST /v1/messages on a real socket: prompts, answers, streams and errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from scripted_server import BASE, CHAT, EFFORTS, HELLO, THINKER, WAIT
from server_process import wait_until

from planish.errors import UserError
from planish.renderers import get_renderer
from planish.server.results import TooManyRequests, Unavailable

MESSAGES = "/v1/messages"
SYSTEM_FIRST = "HuggingFaceTB/SmolLM3-3B"
ALL = [BASE, CHAT, THINKER, EFFORTS, SYSTEM_FIRST]
ADD: Any = {
    "name": "add",
    "description": "Adds",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
}
ADD_IN_CHAT: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds",
        "parameters": ADD["input_schema"],
    },
}


LONG: Any = {"format": {"type": "json_schema", "schema": {"type": "string", "minLength": 999}}}
"""The format of an answer that cannot end early."""


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'


def request(**options: Any) -> dict[str, Any]:
    return {"model": CHAT, "max_tokens": 500, "messages": HELLO, **options}


def answer(http: httpx.Client, **options: Any) -> dict[str, Any]:
    response = http.post(MESSAGES, json=request(**options))
    assert response.status_code == 200, response.text
    return response.json()


def events_of(http: httpx.Client, **options: Any) -> list[dict[str, Any]]:
    response = http.post(MESSAGES, json=request(stream=True, **options))
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            events.append(event)
    return events


def error_of(http: httpx.Client, status: int, **options: Any) -> str:
    response = http.post(MESSAGES, json=request(**options))
    assert response.status_code == status, response.text
    body = response.json()
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"]
    kinds = {400: "invalid_request_error", 404: "not_found_error"}
    assert body["error"]["type"] == kinds[status]
    return body["error"]["message"]


def prompt_in_chat(http: httpx.Client, model: str, messages: Any, **options: Any) -> list[int]:
    """The prompt that the chat endpoint builds."""
    body = {"model": model, "messages": messages, "max_tokens": 1, "return_token_ids": True}
    response = http.post("/v1/chat/completions", json={**body, **options})
    assert response.status_code == 200, response.text
    return response.json()["prompt_token_ids"]


def prompt_of(http: httpx.Client, served: Any, **options: Any) -> list[int]:
    """The prompt that reaches the engine."""
    answer(http, **{"max_tokens": 1, **options})
    seen = served.engine.last_prompt
    assert seen is not None
    count = http.post(
        f"{MESSAGES}/count_tokens",
        json={key: value for key, value in request(**options).items() if key != "max_tokens"},
    )
    assert count.json() == {"input_tokens": len(seen)}
    return seen


# Answers and their streams


def test_a_text_is_one_block(served, http):
    with served.engine.saying("Hi there.", served.tokenizer):
        body = answer(http)
        events = events_of(http)
    assert body["content"] == [{"type": "text", "text": "Hi there."}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", CHAT)
    prompt = get_renderer("qwen3_instruct", served.tokenizer).build_generation_prompt(HELLO)
    assert body["usage"]["input_tokens"] == prompt.length
    assert body["usage"]["output_tokens"] == len("Hi there.") + 1
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == prompt.length
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == body["usage"]


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that a client makes of events. Every block begins once and ends once."""
    blocks: list[dict[str, Any]] = []
    open_index = None
    texts: list[str] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert open_index is None
                assert event["index"] == len(blocks)
                open_index, texts = event["index"], []
                blocks.append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_index
                for key, value in event["delta"].items():
                    if key == "partial_json":
                        texts.append(value)
                    elif key != "type":
                        blocks[-1][key] += value
            case "content_block_stop":
                assert event["index"] == open_index
                open_index = None
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads("".join(texts))
                    blocks[-1].pop("id")
    assert open_index is None
    return blocks


@pytest.mark.parametrize(
    ("said", "content", "reason"),
    [
        (call('{"a": 1}'), [("add", {"a": 1})], "tool_use"),
        (f"Let me see.\n{call('{}')}\n{call('{}')}", ["Let me see.", ("add", {}), ("add", {})], 0),
        (f"{call('{}')}\nafter", [("add", {}), "\nafter"], "tool_use"),
        ("<tool_call>\nno JSON\n</tool_call>", ["<tool_call>\nno JSON\n</tool_call>"], "end_turn"),
        (call('{"x": NaN}'), [("add", {"x": None})], "tool_use"),
        ("", [], "end_turn"),
    ],
)
def test_calls_are_blocks_in_the_order_of_the_text(served, http, said, content, reason):
    with served.engine.saying(said, served.tokenizer):
        body = answer(http, tools=[ADD])
        events = events_of(http, tools=[ADD])
    expected = [
        {"type": "text", "text": one}
        if isinstance(one, str)
        else {"type": "tool_use", "name": one[0], "input": one[1]}
        for one in content
    ]
    ids = [block.pop("id") for block in body["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids)
    assert body["content"] == rebuilt(events) == expected
    assert body["stop_reason"] == events[-2]["delta"]["stop_reason"] == (reason or "tool_use")


def test_numbers_of_any_size_reach_the_client(served, http):
    arguments = '{"a": 123456789012345678901234567890}'
    with served.engine.saying(call(arguments), served.tokenizer):
        body = answer(http, tools=[ADD])
    assert body["content"][0]["input"] == json.loads(arguments)


def test_reasoning_is_a_thinking_block(served, http):
    with served.engine.saying("<think>\nHm.\n</think>\n\nYes.", served.tokenizer):
        shown = answer(http, model=THINKER)
        hidden = answer(http, model=THINKER, thinking={"type": "adaptive", "display": "omitted"})
        events = events_of(http, model=THINKER)
        hidden_events = events_of(
            http, model=THINKER, thinking={"type": "adaptive", "display": "omitted"}
        )
    assert [block["type"] for block in shown["content"]] == ["thinking", "text"]
    assert shown["content"][0]["thinking"] == "Hm."
    assert shown["content"][0]["signature"]
    assert hidden["content"][0]["thinking"] == ""
    assert rebuilt(events) == shown["content"]
    assert rebuilt(hidden_events) == hidden["content"]
    assert "Hm." not in json.dumps(hidden_events)


def test_stop_reasons(served, http):
    with served.engine.saying("one two three", served.tokenizer):
        stopped = answer(http, stop_sequences=["never", " two"])
        events = events_of(http, stop_sequences=["never", " two"])
    assert stopped["content"] == [{"type": "text", "text": "one"}]
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " two")
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " two"}
    assert answer(http, max_tokens=3, output_config=LONG)["stop_reason"] == "max_tokens"


def test_more_tokens_than_the_context_leaves_may_be_asked_for(served, http):
    """Agents ask for 32,000. The stop reason tells that the context ended the answer."""
    long = [{"role": "user", "content": "x" * 1990}]
    options: Any = {"messages": long, "max_tokens": 32_000, "output_config": LONG}
    body = answer(http, **options)
    assert body["stop_reason"] == "model_context_window_exceeded"
    assert sum(body["usage"].values()) <= 2048
    assert events_of(http, **options)[-2]["delta"]["stop_reason"] == body["stop_reason"]


# Prompts


def test_the_prompt_is_that_of_the_chat_endpoint(served, http):
    chat = [
        {"role": "system", "content": "Be exact. Be kind."},
        *HELLO,
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}},
                {"type": "function", "function": {"name": "add", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "Error: no numbers"},
        {"role": "user", "content": "Good. Go on."},
    ]
    blocks = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I add.", "citations": None},
                {
                    "type": "tool_use",
                    "id": "a",
                    "name": "add",
                    "input": {"a": 1, "b": 2},
                    "caller": {"type": "direct"},
                },
                {"type": "tool_use", "id": "b", "name": "add", "input": {}},
            ],
        },
        {
            # In another order than the calls. Two messages of the user are one turn.
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "b",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no numbers"}],
                },
                {"type": "tool_result", "tool_use_id": "a", "content": "3"},
                {"type": "text", "text": "Good.", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "user", "content": " Go on."},
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b;"},
        {"type": "text", "text": "Be exact.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": " Be kind."},
    ]
    expected = prompt_in_chat(http, CHAT, chat, tools=[ADD_IN_CHAT])
    tool = {**ADD, "type": "custom", "cache_control": {"type": "ephemeral"}}
    options = {"messages": blocks, "system": system, "tools": [tool]}
    assert prompt_of(http, served, **options) == expected
    unused = {
        "metadata": {"user_id": "x"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "service_tier": "auto",
        "output_config": {"effort": "high"},
        "thinking": {"type": "adaptive"},
    }
    assert prompt_of(http, served, **options, **unused) == expected


@pytest.mark.parametrize(
    "arguments",
    ['{"a":1,"b":2}', '{"b": 1.0, "a": "\\u00e9", "1": 1e3}', '{"a": 123456789012345678901}'],
)
@pytest.mark.parametrize("display", ["summarized", "omitted"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_sampled_message_is_sent_back_token_by_token(served, http, arguments, display, streams):
    """What the client sends back has the tokens that the chat endpoint's message has."""
    said = f"<think>\nHm.\n</think>\n\nI add.\n{call(arguments)}"
    options: Any = {
        "model": THINKER,
        "tools": [ADD],
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": display},
    }
    with served.engine.saying(said, served.tokenizer):
        chat = http.post(
            "/v1/chat/completions",
            json={"model": THINKER, "messages": HELLO, "tools": [ADD_IN_CHAT]},
        )
        if streams:
            events = events_of(http, **options)
            content = rebuilt([json.loads(json.dumps(event)) for event in events])
            ids = [
                event["content_block"]["id"]
                for event in events
                if event.get("content_block", {}).get("type") == "tool_use"
            ]
            content[-1]["id"] = ids[0]
        else:
            content = answer(http, **options)["content"]
    message = chat.json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    expected = prompt_in_chat(http, THINKER, [*HELLO, message, result], tools=[ADD_IN_CHAT])
    block = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "3"}
    sent = [
        *HELLO,
        {"role": "assistant", "content": content},
        {"role": "user", "content": [block]},
    ]
    prompt = prompt_of(http, served, messages=sent, **options)
    assert prompt == expected
    assert arguments in served.tokenizer.decode(prompt)


def test_an_assistant_message_at_the_end_is_continued(served, http):
    prefill = [*HELLO, {"role": "assistant", "content": "The best answer is ("}]
    expected = prompt_in_chat(
        http, CHAT, prefill, continue_final_message=True, add_generation_prompt=False
    )
    assert prompt_of(http, served, messages=prefill) == expected
    with served.engine.saying("B)", served.tokenizer):
        assert answer(http, messages=prefill)["content"] == [{"type": "text", "text": "B)"}]
    schema = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    message = error_of(http, 400, messages=prefill, output_config=schema)
    assert "messages: an assistant message at the end is continued" in message


def test_a_system_message_may_stand_between_others(served, http):
    messages = [*HELLO, {"role": "system", "content": [{"type": "text", "text": "Hurry."}]}]
    assert prompt_of(http, served, messages=messages) == prompt_in_chat(
        http, CHAT, [*HELLO, {"role": "system", "content": "Hurry."}]
    )
    # Claude Code looks for this wording, and then puts its reminders into user messages.
    message = error_of(http, 400, model=SYSTEM_FIRST, messages=messages, system="Be kind.")
    assert message.startswith("messages.1.role: Input should be 'user' or 'assistant': messages.1 ")


def test_a_deferred_tool_is_described_where_it_is_referenced(served, http):
    find = {**ADD, "name": "find"}
    deferred = {**ADD, "defer_loading": True}
    listed = prompt_of(http, served, tools=[find, deferred])
    assert listed == prompt_of(http, served, tools=[find])
    found = [
        *HELLO,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "f", "name": "find", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "f",
                    "content": [{"type": "tool_reference", "tool_name": "add"}],
                }
            ],
        },
    ]
    text = served.tokenizer.decode(prompt_of(http, served, tools=[find, deferred], messages=found))
    specification = json.dumps(ADD_IN_CHAT["function"])
    assert text.count(f"<function>{specification}</function>") == 1
    assert text.startswith(served.tokenizer.decode(listed[: listed.index(257) + 1]))
    choice = {"type": "tool", "name": "add"}
    assert "add" in error_of(http, 400, tools=[find, deferred], tool_choice=choice)
    body = answer(http, tools=[find, deferred], messages=found, tool_choice=choice, max_tokens=60)
    assert body["content"][0]["name"] == "add"
    assert "not in tools" in error_of(http, 400, tools=[find], messages=found)


# Constraints


@pytest.mark.parametrize("model", [CHAT, THINKER])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_tool_that_must_be_called_is_called(http, model, choice):
    fixed = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]}
    body = answer(
        http,
        model=model,
        tools=[{**ADD, "input_schema": {**fixed, "additionalProperties": False}}],
        tool_choice={**choice, "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
        max_tokens=100,
    )
    [block] = body["content"]
    assert (block["name"], block["input"]) == ("add", {"a": 7})
    assert body["stop_reason"] == "tool_use"


def test_a_call_that_was_cut_off_has_its_complete_part(http):
    text = {"type": "string", "minLength": 40, "maxLength": 60, "pattern": "^[a-z ]*$"}
    schema = {
        "type": "object",
        "properties": {"n": {"const": 1}, "text": text},
        "required": ["n", "text"],
    }
    options: Any = {
        "tools": [{**ADD, "input_schema": schema}],
        "tool_choice": {"type": "any"},
        "max_tokens": 60,
    }
    body = answer(http, **options)
    assert body["stop_reason"] == "max_tokens"
    [block] = body["content"]
    assert block["input"] == {"n": 1}
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "The call was cut off."}
    sent = [
        *HELLO,
        {"role": "assistant", "content": body["content"]},
        {"role": "user", "content": [result]},
    ]
    assert answer(http, messages=sent, **options)["content"]


def test_the_answer_has_the_format_that_was_asked_for(http):
    schema = {"enum": ["red", "green"]}
    config = {"format": {"type": "json_schema", "schema": schema}}
    body = answer(http, output_config=config)
    assert json.loads(body["content"][0]["text"]) in ("red", "green")
    wrong = {"format": {"type": "json_schema", "schema": {"type": "colour"}}}
    assert error_of(http, 400, output_config=wrong).startswith("output_config.format")


# Thinking and effort


@pytest.mark.parametrize(
    ("model", "options", "renderer"),
    [
        (THINKER, {}, "qwen3"),
        (THINKER, {"thinking": {"type": "adaptive"}}, "qwen3"),
        (THINKER, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "qwen3"),
        (THINKER, {"thinking": {"type": "disabled"}}, "qwen3_disable_thinking"),
        (CHAT, {"thinking": {"type": "disabled"}}, "qwen3_instruct"),
        (CHAT, {"thinking": {"type": "adaptive"}}, "qwen3_instruct"),
        (EFFORTS, {"output_config": {"effort": "low"}}, "qwen3_8_low_reasoning"),
        (EFFORTS, {"output_config": {"effort": "xhigh"}}, "qwen3_8_xhigh_reasoning"),
        (EFFORTS, {"output_config": {"effort": "high"}}, "qwen3_8_xhigh_reasoning"),
    ],
)
def test_thinking_and_effort_choose_the_renderer(served, http, model, options, renderer):
    expected = get_renderer(renderer, served.tokenizer).build_generation_prompt(HELLO)
    assert prompt_of(http, served, model=model, **options) == expected.to_ints()


# Errors

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
USE = {"type": "tool_use", "id": "a", "name": "add", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "3"}


def turns(*contents: Any) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [
        {"role": roles[number % 2], "content": content} for number, content in enumerate(contents)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": turns([IMAGE])}, "messages.0.content[0] is an image, and "),
        ({"messages": []}, "messages"),
        ({"messages": turns("a", [IMAGE])}, "messages.1.content.0.type='image'"),
        ({"messages": turns([{"type": "video"}])}, "messages.0.content.0.type='video': give one"),
        ({"messages": turns([{"type": "text", "text": 5}])}, "messages.0.content.0.text: give a"),
        (
            {"messages": turns([{"type": "text", "text": "x", "citations": [1]}])},
            "messages.0.content.0.citations is not supported here",
        ),
        ({"messages": turns("a", [USE])}, "messages.1.content.0: `tool_use` ids were found"),
        ({"messages": turns("a", [USE], "b")}, "without `tool_result` blocks immediately after: a"),
        ({"messages": turns([RESULT])}, "messages.0.content.0: unexpected `tool_use_id`"),
        (
            {"messages": turns("a", [USE], [RESULT, RESULT])},
            "Found multiple `tool_result` blocks with id: a",
        ),
        (
            {"messages": turns("a", [USE], [{"type": "text", "text": "x"}, RESULT])},
            "messages.2.content.1: tool_result blocks must come before",
        ),
        (
            {"messages": turns("a", [USE], [{**RESULT, "content": [IMAGE]}])},
            "messages.2.content[0] is an image, and ",
        ),
        ({"messages": turns("a", [{**USE, "input": "{}"}])}, "messages.1.content.0.input"),
        (
            {"messages": turns("a", [{"type": "thinking", "thinking": "x", "signature": ""}], "b")},
            "messages.1 has a thinking part, which renderer qwen3_instruct cannot write",
        ),
        (
            {"messages": turns("a", [{"type": "redacted_thinking", "data": "EmwK"}], "b")},
            "messages.1.content.0: Invalid `signature` in `redacted_thinking` block",
        ),
        ({"system": [IMAGE]}, "system.0.type='image'"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]},
            "tools.0.type='web_search_20250305' is not supported here: this server runs no tools",
        ),
        ({"tools": [{"name": "add"}]}, "tools.0.input_schema is missing"),
        ({"tools": [{**ADD, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [ADD, ADD]}, "two tools have the name 'add'"),
        ({"tools": [{**ADD, "colour": 1}]}, "tools.0.colour is not supported here"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "x"}}, "not in tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: give name"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type='enabled': "),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"effort": "low"}}, "output_config.effort='low': renderer"),
        ({"model": EFFORTS, "output_config": {"effort": "max"}}, "no effort 'max'; give none or"),
        ({"stop_sequences": ["x" * 200]}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"n": 2}, "n is not supported here"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported here"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0]",
        ),
    ],
)
def test_what_cannot_be_done_is_an_error_that_names_it(http, options, message):
    assert message in error_of(http, 400, **options)


def test_conversations_that_the_server_should_keep_are_refused_as_the_client_expects(http):
    response = http.post(MESSAGES, json=request(thread={"type": "create"}))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert "send all messages" in error["message"]


def test_a_text_longer_than_the_context_is_named_as_agents_expect(http):
    long = [{"role": "user", "content": "x" * 3000}]
    assert "prompt is too long: 3019 tokens > 2047 maximum" in error_of(http, 400, messages=long)
    huge = [{"role": "user", "content": "x" * 300_000}]
    message = error_of(http, 400, messages=huge)
    assert message.startswith("prompt is too long: ")
    assert " tokens > 2047 maximum" in message
    count = http.post(f"{MESSAGES}/count_tokens", json={"model": CHAT, "messages": long})
    assert count.status_code == 400


def test_a_model_that_does_not_exist_is_not_found(http):
    assert "does not exist" in error_of(http, 404, model="claude-sonnet-4-5")


def test_keys_are_read_from_both_headers(served):
    with httpx.Client(base_url=served.url, timeout=WAIT) as client:
        for headers in ({"x-api-key": "tml-first"}, {"authorization": "Bearer tml-second"}):
            body = request(max_tokens=1)
            assert client.post(MESSAGES, json=body, headers=headers).status_code == 200
        for headers in ({}, {"x-api-key": "tml-wrong"}):
            response = client.post(MESSAGES, json=request(), headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (TooManyRequests("slow down", 3.0), 429, "rate_limit_error"),
        (Unavailable("the server is stopping", 5.0), 529, "overloaded_error"),
        (UserError("out of luck"), 400, "invalid_request_error"),
        (RuntimeError("secret"), 500, "api_error"),
        (MemoryError(), 529, "overloaded_error"),
    ],
)
def test_errors_of_the_engine_have_their_kind(served, http, error, status, kind):
    with served.engine.saying("Hi.", served.tokenizer, error):
        response = http.post(MESSAGES, json=request())
        events = events_of(http)
    assert response.status_code == status
    body = response.json()["error"]
    assert body["type"] == kind
    assert "secret" not in body["message"]
    if isinstance(error, Unavailable | TooManyRequests):
        assert response.headers["retry-after"] == f"{error.retry_after:g}"
    # The text so far, and then the error.
    assert events[-1] == {"type": "error", "error": body}
    assert "message_stop" not in [event["type"] for event in events]


def test_a_body_that_is_too_large_has_its_kind(http):
    response = http.post(MESSAGES, content=bytes(65 << 20))
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "request_too_large"


@pytest.mark.parametrize(
    ("method", "path", "remedy"),
    [
        ("POST", "/v1/messages/batches", "send each request to POST /v1/messages"),
        ("GET", "/v1/messages", "POST /v1/messages"),
        ("POST", "/v1/complete", "send the messages to POST /v1/messages"),
        ("POST", "/v1/v1/messages", "must not end with /v1"),
    ],
)
def test_other_endpoints_are_not_found(http, method, path, remedy):
    response = http.request(method, path)
    assert response.status_code == 404
    assert response.json()["type"] == "error"
    assert remedy in response.json()["error"]["message"]


# Models


def test_models_have_the_form_that_the_client_reads(http, served):
    models = http.get("/v1/models").json()
    assert [entry["id"] for entry in models["data"]] == ALL
    assert (models["has_more"], models["first_id"], models["last_id"]) == (False, ALL[0], ALL[-1])
    first = models["data"][0]
    assert (first["type"], first["max_input_tokens"]) == ("model", 2048)
    assert http.get(f"/v1/models/{CHAT}").json()["id"] == CHAT
    page = http.get("/v1/models", params={"limit": 2, "after_id": BASE}).json()
    assert [entry["id"] for entry in page["data"]] == [CHAT, THINKER]
    assert page["has_more"]
    page = http.get("/v1/models", params={"limit": 2, "before_id": EFFORTS}).json()
    assert [entry["id"] for entry in page["data"]] == [CHAT, THINKER]
    assert page["has_more"]
    missing = http.get("/v1/models/none")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"
    with served.http() as plain:  # without the header, the form is OpenAI's
        assert plain.get("/v1/models").json()["object"] == "list"
        assert "/v1/messages" in plain.get("/openapi.json").json()["paths"]


# Who hangs up


def test_closing_a_stream_cancels_its_sample(served, http):
    before = served.server.counters.sampled_tokens.total()
    body = request(stream=True, max_tokens=1900, model=BASE)
    with http.stream("POST", MESSAGES, json=body) as response:
        assert "message_start" in next(response.iter_lines())
    wait_until(served.is_idle)
    assert served.server.counters.sampled_tokens.total() - before < 1900
