"""POST /v1/responses with OpenAI's own client, on a real socket."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict
from scripted_server import BASE, CHAT, EFFORTS, HELLO, THINKER, Served, serving

from planish.renderers import get_renderer
from planish.testing import tiny_model
from planish.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def served(model_dir, tmp_path_factory) -> Iterator[Served]:
    models: dict[str, Path] = dict.fromkeys((BASE, CHAT, THINKER, EFFORTS), model_dir)
    with serving(models, tmp_path_factory.mktemp("responses")) as served:
        yield served


@pytest.fixture(scope="module")
def client(served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with served.http() as http:
        yield http


PARAMETERS: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
CHAT_ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THOUGHT = "<think>\nSo it is.\n</think>\n\n"


def without_ids(value: Any) -> Any:
    """Return JSON without what differs between two answers with the same text."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if not isinstance(value, dict):
        return value
    changing = ("id", "item_id", "call_id", "created_at", "completed_at", "cached_tokens")
    return {key: without_ids(one) for key, one in value.items() if key not in changing}


def respond(client: openai.OpenAI, **options: Any) -> tuple[Any, list[Any]]:
    """Return a response, and the events of the streamed one."""
    options = {"model": CHAT, "input": "Hello", **options}
    response = client.responses.create(**options)
    return response, list(client.responses.create(**options, stream=True))


def check_stream(response: Any, events: list[Any]) -> None:
    """Check that the events add up to the response without streaming."""
    last = events[-1]
    assert last.type == f"response.{response.status}"
    assert without_ids(last.response.to_dict()) == without_ids(response.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert {event.response.status for event in events[:2]} == {"in_progress"}
    assert len({event.response.id for event in (*events[:2], last)}) == 1
    for index, item in enumerate(last.response.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added"
        assert own[0].item.id == item.id
        assert own[0].item.status == "in_progress"
        assert own[-1].type == "response.output_item.done"
        assert own[-1].item == item
        names = [event.type.removeprefix("response.") for event in own[1:-1]]
        text = "".join(event.delta for event in own if event.type.endswith("delta"))
        if item.type == "function_call":
            assert set(names[:-1]) <= {"function_call_arguments.delta"}
            assert own[-2].arguments == text == item.arguments
            continue
        kind, part = {
            "message": ("output_text", "content_part"),
            "reasoning": ("reasoning_text", "content_part"),
        }[item.type]
        if item.type == "reasoning" and item.summary:
            kind, part = "reasoning_summary_text", "reasoning_summary_part"
        [written] = item.content or item.summary
        assert names[0] == f"{part}.added"
        assert names[-2:] == [f"{kind}.done", f"{part}.done"]
        assert set(names[1:-2]) <= {f"{kind}.delta"}
        assert own[-3].text == own[-2].part.text == text == written.text


def test_a_response_equals_the_chat_completion(served, client):
    shared: Any = {"model": CHAT, "temperature": 0.8, "top_p": 0.9}
    seed = {"seed": 5, "top_k": 50, "min_p": 0.001}
    chat = client.chat.completions.create(messages=HELLO, max_tokens=12, extra_body=seed, **shared)
    response, events = respond(
        client, max_output_tokens=12, extra_body=seed, metadata={"run": "7"}, user="me", **shared
    )
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    [message] = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert message.content[0].annotations == []
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 12
    assert response.usage.total_tokens == chat.usage.total_tokens
    assert (response.metadata, response.user, response.model) == ({"run": "7"}, "me", CHAT)
    assert response.store is False
    check_stream(response, events)


def test_reasoning_text_and_calls_are_items(served, client):
    text = THOUGHT + "Hello you.\n" + CALL + "\n" + CALL.replace("1", "2")
    with served.engine.saying(text, served.tokenizer):
        response, events = respond(
            client,
            model=THINKER,
            tools=[ADD],
            include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        )
        check_stream(response, events)
        summarized, summary_events = respond(
            client, model=THINKER, tools=[ADD], reasoning={"summary": "auto"}
        )
        check_stream(summarized, summary_events)
    reasoning, message, first, second = response.output
    assert [part.text for part in reasoning.content] == ["So it is."]
    assert reasoning.summary == []
    assert message.content[0].text == "Hello you."
    assert (first.name, json.loads(first.arguments)) == ("add", {"a": 1})
    assert json.loads(second.arguments) == {"a": 2}
    assert first.call_id != second.call_id
    assert {item.status for item in response.output} == {"completed"}
    assert (response.status, response.incomplete_details) == ("completed", None)
    # The logprobs are those of the text: without the reasoning, the calls and the end token.
    logprobs = message.content[0].logprobs
    assert bytes(byte for one in logprobs for byte in one.bytes) == b"Hello you."
    thought = served.tokenizer.encode(THOUGHT, add_special_tokens=False)
    assert response.usage.output_tokens_details.reasoning_tokens == len(thought)
    assert [part.text for part in summarized.output[0].summary] == ["So it is."]
    assert not summarized.output[0].content


@pytest.mark.parametrize("form", ["objects", "json", "encrypted", "summary", "without ids"])
def test_items_sent_back_have_the_prompt_of_the_chat(served, client, form):
    question: Any = {"role": "user", "content": "Add 1."}
    include: Any = ["reasoning.encrypted_content"] if form == "encrypted" else []
    options: Any = {"reasoning": {"summary": "detailed"}} if form == "summary" else {}
    with served.engine.saying(THOUGHT + "Hello.\n" + CALL, served.tokenizer):
        response = client.responses.create(
            model=THINKER, input=[question], tools=[ADD], include=include, **options
        )
        first_prompt = served.engine.last_prompt
        sampled = served.engine.script
        chat = client.chat.completions.create(model=THINKER, messages=[question], tools=[CHAT_ADD])
    items: Any = list(response.output)
    if form != "objects":
        items = [item.to_dict() for item in items]
    if form == "encrypted":
        del items[0]["content"]
    if form == "without ids":
        for item in items:
            del item["id"], item["status"]
    call_id = response.output[-1].call_id
    output = {"type": "function_call_output", "call_id": call_id, "output": "2"}
    message = chat.choices[0].message
    tool = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}
    limits: Any = {"max_output_tokens": 1}
    client.responses.create(model=THINKER, input=[question, *items, output], tools=[ADD], **limits)
    prompt = served.engine.last_prompt
    assert prompt is not None
    assert first_prompt is not None
    assert prompt[: len(first_prompt) + len(sampled)] == [*first_prompt, *sampled]
    client.chat.completions.create(
        model=THINKER,
        messages=[question, message, tool],
        tools=[CHAT_ADD],
        max_tokens=1,
    )
    assert served.engine.last_prompt == prompt


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call_item(number: int) -> dict[str, Any]:
    arguments = f'{{"a": {number}}}'
    return {
        "type": "function_call",
        "call_id": f"call_{number}",
        "name": "add",
        "arguments": arguments,
    }


def chat_call(number: int) -> dict[str, Any]:
    function = {"name": "add", "arguments": f'{{"a": {number}}}'}
    return {"id": f"call_{number}", "type": "function", "function": function}


def output_item(number: int) -> dict[str, Any]:
    output = [{"type": "input_text", "text": f"{number}"}]
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": output}


def tool_message(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": f"{number}"}


def answer_item(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": [part]}


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        ({"input": "Hi"}, [user("Hi")]),
        (
            {"input": "Hi", "instructions": "Be brief."},
            [{"role": "system", "content": "Be brief."}, user("Hi")],
        ),
        (
            {
                "instructions": "One.",
                "input": [
                    {"role": "developer", "content": "Two."},
                    {
                        "type": "message",
                        "role": "system",
                        "content": [
                            {"type": "input_text", "text": "Th"},
                            {"type": "input_text", "text": "ree."},
                        ],
                    },
                    user("Hi"),
                    {"role": "developer", "content": "Four."},
                ],
            },
            [
                {"role": "system", "content": "One.\n\nTwo.\n\nThree."},
                user("Hi"),
                {"role": "system", "content": "Four."},
            ],
        ),
        (
            {"input": [user("Hi"), answer_item("Yes."), answer_item("No."), user("So?")]},
            [
                user("Hi"),
                {"role": "assistant", "content": "Yes."},
                {"role": "assistant", "content": "No."},
                user("So?"),
            ],
        ),
        (
            {
                "input": [
                    user("Hi"),
                    answer_item("Adding."),
                    call_item(1),
                    call_item(2),
                    output_item(1),
                    output_item(2),
                    call_item(3),
                    output_item(3),
                    answer_item("Six."),
                    user("Thanks"),
                ]
            },
            [
                user("Hi"),
                {
                    "role": "assistant",
                    "content": "Adding.",
                    "tool_calls": [chat_call(1), chat_call(2)],
                },
                tool_message(1),
                tool_message(2),
                {"role": "assistant", "content": None, "tool_calls": [chat_call(3)]},
                tool_message(3),
                {"role": "assistant", "content": "Six."},
                user("Thanks"),
            ],
        ),
        (
            {"input": [user("Hi"), call_item(1), answer_item("\nOn it."), output_item(1)]},
            [
                user("Hi"),
                {"role": "assistant", "content": "\nOn it.", "tool_calls": [chat_call(1)]},
                tool_message(1),
            ],
        ),
    ],
)
@pytest.mark.parametrize("with_tools", [False, True])
def test_items_have_the_prompt_of_the_chat_messages(served, http, body, messages, with_tools):
    tools, chat_tools = ({"tools": [ADD]}, {"tools": [CHAT_ADD]}) if with_tools else ({}, {})
    answer = http.post(
        "/v1/responses", json={"model": CHAT, "max_output_tokens": 1, **tools, **body}
    )
    assert answer.status_code == 200, answer.text
    prompt = served.engine.last_prompt
    chat = {"model": CHAT, "messages": messages, "max_tokens": 1, **chat_tools}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    assert served.engine.last_prompt == prompt


def test_reasoning_begins_a_message_of_its_own(served, http):
    def thought(text: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}

    empty = {"type": "reasoning", "summary": [], "encrypted_content": None}
    items = [
        *(user("Hi"), thought("One."), call_item(1), output_item(1)),
        *(thought("Two."), thought(" Three."), empty, answer_item("Yes.")),
        *(thought("Four."), call_item(2), output_item(2)),
    ]
    body = {"model": THINKER, "max_output_tokens": 1, "tools": [ADD], "input": items}
    assert http.post("/v1/responses", json=body).status_code == 200
    prompt = served.engine.last_prompt
    messages = [
        user("Hi"),
        {"role": "assistant", "reasoning_content": "One.", "tool_calls": [chat_call(1)]},
        tool_message(1),
        {"role": "assistant", "reasoning_content": "Two. Three.", "content": "Yes."},
        {"role": "assistant", "reasoning_content": "Four.", "tool_calls": [chat_call(2)]},
        tool_message(2),
    ]
    renderer = get_renderer("qwen3", served.tokenizer)
    system = renderer.create_conversation_prefix_with_tools([CHAT_ADD["function"]])
    for message in messages:
        message.setdefault("content", "")
    assert renderer.build_generation_prompt([*system, *messages]).to_ints() == prompt


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Iterator[Served]:
    """A model whose messages may have several segments of reasoning."""
    directory = tiny_model(tmp_path / "model", vocab_size=320)
    tokenizer = load_tokenizer(directory)
    names = ("start", "end", "message", "channel", "constrain", "call", "return")
    tokenizer.add_tokens([f"<|{name}|>" for name in names], special_tokens=True)
    tokenizer.save_pretrained(str(directory))
    with serving({BASE: directory, GPT_OSS: directory}, tmp_path / "data") as served:
        yield served


GPT_OSS = "openai/gpt-oss-20b"


def test_items_of_one_sample_become_one_message_again(gpt_oss):
    text = (
        "<|channel|>analysis<|message|>First.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"
        "<|channel|>analysis<|message|>More.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    with gpt_oss.client() as client:
        with gpt_oss.engine.saying(text, gpt_oss.tokenizer):
            response, events = respond(client, model=GPT_OSS, tools=[ADD])
            chat = client.chat.completions.create(model=GPT_OSS, messages=HELLO, tools=[CHAT_ADD])
        check_stream(response, events)
        types = [item.type for item in response.output]
        assert types == ["reasoning", "message", "reasoning", "function_call"]
        output: Any = {
            "type": "function_call_output",
            "call_id": response.output[-1].call_id,
            "output": "2",
        }
        client.responses.create(
            model=GPT_OSS,
            tools=[ADD],
            input=[HELLO[0], *response.output, output],
            max_output_tokens=1,
        )
        prompt = gpt_oss.engine.last_prompt
        message = chat.choices[0].message
        tool: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}
        client.chat.completions.create(
            model=GPT_OSS, tools=[CHAT_ADD], messages=[*HELLO, message, tool], max_tokens=1
        )
        assert gpt_oss.engine.last_prompt == prompt


def test_functions_of_namespaces_are_called(served, client):
    group: Any = {
        "type": "namespace",
        "name": "math",
        "description": "Adds and subtracts.",
        "tools": [{**ADD, "description": "Adds."}],
    }
    with served.engine.saying(CALL.replace("add", "math__add"), served.tokenizer):
        response, events = respond(client, tools=[group, ADD])
    check_stream(response, events)
    [call] = response.output
    assert (call.namespace, call.name) == ("math", "add")
    assert response.tools[0].tools[0].name == "add"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    client.responses.create(
        model=CHAT, input=[HELLO[0], call, output], tools=[group], max_output_tokens=1
    )
    prompt = served.tokenizer.decode(served.engine.last_prompt)
    assert '{"name": "math__add", "arguments": {"a": 1}}' in prompt
    assert '"name": "math__add", "description": "Adds and subtracts.\\nAdds."' in prompt


def test_a_message_without_text_is_an_item(served, client):
    with served.engine.saying("", served.tokenizer):
        response, events = respond(client)
        check_stream(response, events)
        assert [item.type for item in response.output] == ["message"]
    with served.engine.saying(THOUGHT, served.tokenizer):
        response, events = respond(client, model=THINKER)
        check_stream(response, events)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text == ""


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "blue"]


SCHEMA: Any = {**Answer.model_json_schema(), "additionalProperties": False}


def test_parsed_answers_and_calls_can_be_sent_back(served, client):
    options: Any = {"model": CHAT, "max_output_tokens": 60}
    parsed = client.responses.parse(input="Hello", text_format=Answer, **options)
    assert isinstance(parsed.output_parsed, Answer)
    assert parsed.text.format.type == "json_schema"
    tool: Any = {"type": "function", "name": "pick", "parameters": SCHEMA, "strict": True}
    called = client.responses.parse(
        input=[HELLO[0], *parsed.output], tools=[tool], tool_choice="required", **options
    )
    calls = [item for item in called.output if item.type == "function_call"]
    assert calls
    assert all(Answer(**call.parsed_arguments) for call in calls)
    outputs: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls
    ]
    client.responses.create(input=[HELLO[0], *called.output, *outputs], tools=[tool], **options)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "name": "pick"}, {"type": "function", "name": "no"}]
)
def test_a_tool_that_must_be_called_is_called(client, choice):
    tool: Any = {"type": "function", "name": "pick", "parameters": SCHEMA, "strict": True}
    options: Any = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
    if isinstance(choice, dict) and choice["name"] == "no":
        with pytest.raises(openai.BadRequestError, match="tool_choice names 'no'"):
            respond(client, **options)
        return
    response, _ = respond(client, max_output_tokens=80, **options)
    [call] = response.output
    Answer.model_validate_json(call.arguments)
    assert response.status == "completed"
    # A call that max_output_tokens ends early has the arguments so far.
    response, events = respond(client, max_output_tokens=60, temperature=0, **options)
    short, events = respond(client, max_output_tokens=45, temperature=0, **options)
    check_stream(short, events)
    assert short.status == "incomplete"
    for item in short.output:
        assert item.status == "incomplete"
        assert response.output[0].arguments.startswith(item.arguments)


@pytest.mark.parametrize("format_type", ["json_object", "json_schema"])
def test_text_has_the_form_that_was_asked_for(client, format_type):
    schema = {"name": "answer", "schema": SCHEMA, "strict": True}
    text_format = {"type": format_type, **(schema if format_type == "json_schema" else {})}
    response, events = respond(
        client,
        model=CHAT,
        text={"format": text_format, "verbosity": None},
        max_output_tokens=40,
        temperature=0,
    )
    check_stream(response, events)
    assert response.output_text.startswith("{")
    if format_type == "json_schema":
        Answer.model_validate_json(response.output_text)
        assert response.text.format.schema_ == SCHEMA


@pytest.mark.parametrize("effort", ["low", "xhigh", "none"])
def test_a_reasoning_effort_chooses_the_renderer(served, client, effort):
    options: Any = {"model": EFFORTS, "max_output_tokens": 1}
    response = client.responses.create(input="Hello", reasoning={"effort": effort}, **options)
    prompt = served.engine.last_prompt
    assert response.reasoning.effort == effort
    client.chat.completions.create(
        model=EFFORTS, messages=HELLO, reasoning_effort=effort, max_tokens=1
    )
    assert served.engine.last_prompt == prompt


def test_top_logprobs_are_those_of_the_chat(client):
    response, events = respond(
        client,
        top_logprobs=3,
        include=["message.output_text.logprobs"],
        max_output_tokens=12,
        extra_body={"seed": 4},
    )
    chat = client.chat.completions.create(
        model=CHAT, messages=HELLO, max_tokens=12, seed=4, logprobs=True, top_logprobs=3
    )
    [part] = response.output[0].content
    entries = [one.to_dict() for one in part.logprobs]
    assert entries == [one.to_dict() for one in chat.choices[0].logprobs.content]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [one.to_dict() for event in deltas for one in event.logprobs]
    assert streamed == entries
    check_stream(response, events)


NO_SCHEMA = {"format": {"type": "json_schema", "name": "x"}}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
UNKNOWN_OUTPUT = {"type": "function_call_output", "call_id": "call_9", "output": "x"}
THOUGHTS = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]}
BAD_TOOL = {**ADD, "name": "a b"}


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"store": True}, "store", "nothing is stored here.*leave store out or give false"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation in input"),
        ({"conversation": "conv_1"}, "conversation", "whole conversation in input"),
        ({"background": True}, "background", "leave it out"),
        ({"truncation": "auto", "input": "x" * 3000}, "input", "maximum context length"),
        ({"service_tier": "flex"}, "service_tier", "one tier"),
        ({"max_tool_calls": 3}, "max_tool_calls", "none here"),
        ({"prompt": {"id": "p"}}, "prompt", "give its text"),
        ({"max_tokens": 3}, "max_tokens", "give max_output_tokens"),
        ({"messages": HELLO}, "messages", "give input"),
        ({"response_format": {"type": "text"}}, "response_format", "give text.format"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "give reasoning.effort"),
        ({"stop": ["x"]}, "stop", "use /v1/chat/completions"),
        ({"no_such_option": 1}, "no_such_option", "leave it out"),
        ({"stream_options": {}}, "stream_options", "needs stream=true"),
        ({"top_logprobs": 2}, "top_logprobs", r"include=\['message.output_text.logprobs'\]"),
        ({"include": ["web_search_call.results"]}, "include", "reasoning.encrypted_content"),
        ({"text": {"verbosity": "low"}}, "text", "ask for it in the instructions"),
        ({"text": NO_SCHEMA}, "text", "text.format.schema is missing"),
        ({"reasoning": {"summary": "concise"}}, "reasoning", "give 'auto'"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "^reasoning.effort: .* no effort 'low'"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": None}, "input", "input is missing"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", r"input\[0\].role='tool'"),
        ({"input": [{"type": "message", "role": "user"}]}, "input", r"input\[0\].content is miss"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input", r"content\[0\].*only text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "send the item itself"),
        ({"input": [{"type": "web_search_call"}]}, "input", r"input\[0\].*no tool of this server"),
        ({"input": [{"type": "no_such_item"}]}, "input", r"input\[0\].*'function_call_output'"),
        ({"input": [user("x"), UNKNOWN_OUTPUT]}, "input", r"input\[1\].call_id='call_9'"),
        ({"input": [{**user("x"), "weight": 1}]}, "input", r"input\[0\].weight"),
        (
            {"input": [user("x"), {"type": "reasoning", "encrypted_content": "gAAAAA"}]},
            "input",
            r"input\[1\].encrypted_content is not from a planish server",
        ),
        (
            {"model": BASE, "instructions": "z", "tools": [ADD], "input": [user("x"), THOUGHTS]},
            "input",
            r"^input\[1\] has a thinking part, which renderer",
        ),
        ({"input": "x" * 100_000}, "input", "maximum context length"),
        ({"tools": [{"type": "web_search"}]}, "tools", r"tools\[0\].*Codex: web_search"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools", "one string parameter"),
        (
            {"tools": [{"type": "local_shell"}]},
            "tools",
            "type local_shell: .* offer a function in its place",
        ),
        ({"tools": [BAD_TOOL]}, "tools", r"tools\[0\].name='a b'"),
        ({"tools": [ADD, ADD]}, "tools", r"tools\[1\].name: two tools .* 'add'"),
        ({"tools": [CHAT_ADD]}, "tools", r"tools\[0\].(name is missing|function)"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"max_output_tokens": 4000}, "input", "max_output_tokens=4000.*truncate_max_tokens=true"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"metadata": {"a": 1}}, "metadata", "metadata.a=1"),
    ],
)
def test_errors_name_the_argument_and_the_remedy(http, options, param, message):
    body = {"model": CHAT, "input": "Hello", "max_output_tokens": 1, **options}
    answer = http.post("/v1/responses", content=json.dumps(body))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert re.search(message, error["message"]), error
    if param == "input" and "context" in error["message"]:
        assert error["code"] == "context_length_exceeded"


def test_options_that_change_nothing_are_accepted(http):
    options = {
        "store": False,
        "background": False,
        "truncation": "auto",
        "service_tier": "auto",
        "previous_response_id": None,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto", "effort": None},
        "text": {"verbosity": "medium", "format": {"type": "text"}},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "client_metadata": {"a": "b"},
        "tools": [],
        "tool_choice": "auto",
        "stream": False,
    }
    body = {"model": CHAT, "input": "Hello", "max_output_tokens": 1, **options}
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["prompt_cache_key"] == "k"


def test_an_error_in_the_middle_of_a_stream_fails_the_response(served, client):
    with served.engine.saying("Some", served.tokenizer, error=ValueError("out of luck")):
        events = list(client.responses.create(model=CHAT, input="Hello", stream=True))
        error, failed = events[-2:]
        assert (error.type, error.message) == ("error", "out of luck")
        assert failed.type == "response.failed"
        assert failed.response.status == "failed"
        assert failed.response.error.message == "out of luck"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        with pytest.raises(openai.BadRequestError, match="out of luck"):
            client.responses.create(model=CHAT, input="Hello")


async def test_the_client_streams_and_awaits(served):
    async with served.client_async() as client:
        options: Any = {"model": CHAT, "input": "Hello", "max_output_tokens": 60}
        parsed = await client.responses.parse(text_format=Answer, **options)
        assert isinstance(parsed.output_parsed, Answer)
        async with client.responses.stream(text_format=Answer, **options) as stream:
            types = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert isinstance(final.output_parsed, Answer)
        assert types[0] == "response.created"
        assert types[-1] == "response.completed"
        # Closing a stream ends its samples.
        stream = await client.responses.create(model=CHAT, input="Hello", stream=True)
        async for _ in stream:
            break
        await stream.close()
