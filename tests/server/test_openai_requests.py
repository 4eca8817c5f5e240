"""Requests that clients of other servers send: how much text fits, options of other servers, keys
that clients copy into messages, and errors that name what is wrong.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from scripted_server import BASE, CHAT, HELLO, Served, serving

from planish.integrations.openai_endpoint import ChatEndpoint, PromptSize
from planish.testing import EOS_TOKEN_ID

CONTEXT = 2048


@pytest.fixture(scope="module")
def served(model_dir, tmp_path_factory) -> Iterator[Served]:
    models: dict[str, Path] = dict.fromkeys((BASE, CHAT), model_dir)
    with serving(models, tmp_path_factory.mktemp("openai")) as served:
        yield served


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with served.http() as http:
        yield http


def complete(http: httpx.Client, **options: Any) -> dict[str, Any]:
    body = {"model": BASE, "prompt": [1, 2], "max_tokens": 2, **options}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def error_of(http: httpx.Client, path: str = "/v1/completions", **options: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": BASE, "prompt": [1, 2], "max_tokens": 2}
    if "chat" in path:
        body = {"model": CHAT, "messages": HELLO, "max_tokens": 2}
    answer = http.post(path, json={**body, **options})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "options", "param"),
    [
        ("/v1/completions", {"prompt": [1] * (CONTEXT + 1)}, "prompt"),
        ("/v1/completions", {"prompt": [1] * CONTEXT}, "prompt"),
        ("/v1/completions", {"prompt": [1] * (CONTEXT - 1)}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 100_000}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * (CONTEXT + 1)}]},
            "messages",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 100_000}]},
            "messages",
        ),
        ("/v1/chat/completions", {"max_tokens": 65_535}, "messages"),
    ],
)
def test_a_text_that_exceeds_the_context_has_openais_code(http, path, options, param):
    """Agents look for the code or the wording, and truncate the conversation then."""
    error = error_of(http, path, **options)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == param
    assert "this model's maximum context length is" in error["message"]


def test_max_tokens_can_be_lowered_to_what_the_context_leaves(served: Served, http: httpx.Client):
    prompt = [1] * (CONTEXT - 3)
    options = {"prompt": prompt, "max_tokens": 65_535, "seed": 1, "stop_token_ids": []}
    assert "truncate_max_tokens" in error_of(http, **options)["message"]
    answer = complete(http, **options, truncate_max_tokens=True, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3
    assert error_of(http, prompt=[1] * CONTEXT, truncate_max_tokens=True)["code"] == (
        "context_length_exceeded"
    )


def test_the_server_may_lower_max_tokens(model_dir: Path, tmp_path: Path):
    with (
        serving({BASE: model_dir}, tmp_path, truncate_max_tokens=True) as served,
        served.http() as http,
    ):
        options = {"prompt": [1] * (CONTEXT - 3), "max_tokens": 65_535}
        assert complete(http, **options, ignore_eos=True)["usage"]["completion_tokens"] == 3
        error_of(http, **options, truncate_max_tokens=False)


def test_minus_one_is_no_limit(http: httpx.Client):
    prompt = [1] * (CONTEXT - 40)
    options = {"prompt": prompt, "ignore_eos": True}
    assert complete(http, **options, max_tokens=-1)["usage"]["completion_tokens"] == 40
    for name in ("max_tokens", "max_completion_tokens"):
        body = {"model": CHAT, "messages": HELLO, name: -1, "stop": ["e"]}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert error_of(http, "/v1/chat/completions", max_tokens=0)["param"] == "max_tokens"
    assert error_of(http, max_tokens=-2)["param"] == "max_tokens"


def test_ignore_eos_samples_beyond_the_end_token(served: Served, http: httpx.Client):
    options = {"max_tokens": 3000, "seed": 3, "temperature": 2.0, "truncate_max_tokens": True}
    short = complete(http, **options, return_token_ids=True)["choices"][0]
    assert short["finish_reason"] == "stop", "the seed must lead to an end token"
    assert short["token_ids"][-1] == EOS_TOKEN_ID
    long = complete(http, **options, return_token_ids=True, ignore_eos=True)["choices"][0]
    assert long["finish_reason"] == "length"
    assert long["token_ids"][: len(short["token_ids"])] == short["token_ids"]
    assert len(long["token_ids"]) == CONTEXT - 2
    assert long["text"].startswith(short["text"])
    assert len(long["text"]) > len(short["text"])


def test_an_empty_list_of_stops_is_no_stop(http: httpx.Client):
    options = {"seed": 1, "max_tokens": 20}
    assert (
        complete(http, **options, stop=[])["choices"][0]["text"]
        == complete(http, **options)["choices"][0]["text"]
    )


def test_a_client_of_judges_learns_the_size_of_its_prompts(
    served: Served, http: httpx.Client, monkeypatch
):
    monkeypatch.setenv("JUDGE_KEY", "tml-first")

    def measured(url: str, model: str) -> PromptSize:
        endpoint = ChatEndpoint(url, model, api_key_env="JUDGE_KEY")
        return asyncio.run(endpoint.measure(HELLO))  # type: ignore[arg-type]

    tokens = http.post("/tokenize", json={"model": CHAT, "messages": HELLO}).json()["count"]
    assert measured(f"{served.url}/v1", CHAT) == PromptSize(tokens, CONTEXT)
    assert measured(f"{served.url}/v1", "none") == PromptSize(None, None)
    assert measured("http://127.0.0.1:9/v1", CHAT) == PromptSize(None, None)


COPIED: dict[str, Any] = {
    "id": "msg_1",
    "annotations": [{"type": "url_citation"}],
    "refusal": None,
    "provider_specific_fields": {"a": 1},
}


def test_keys_that_clients_copy_from_answers_change_nothing(served: Served, http: httpx.Client):
    def prompt_of(**copied: Any) -> list[int]:
        messages = [*HELLO, {"role": "assistant", "content": "Hi", **copied}, *HELLO]
        answer = http.post("/tokenize", json={"model": CHAT, "messages": messages})
        assert answer.status_code == 200, answer.text
        return answer.json()["tokens"]

    assert prompt_of(**COPIED) == prompt_of()
    assert prompt_of(content=None, refusal="Hi") == prompt_of()
    part = {"type": "text", "text": "Hi"}
    for copied in ({"annotations": [], "id": "p1"}, {"cache_control": {"type": "ephemeral"}}):
        assert prompt_of(content=[{**part, **copied}]) == prompt_of()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    streamed = {**call, "index": 0, "provider_specific_fields": {"a": 1}}
    assert prompt_of(tool_calls=[streamed]) == prompt_of(tool_calls=[call])
    for wrong in (
        {"refusal": "No"},
        {"invented": 1},
        {"content": [{**part, "invented": 1}]},
        {"tool_calls": [{**call, "invented": 1}]},
    ):
        messages = [*HELLO, {"role": "assistant", "content": "Hi", **wrong}, *HELLO]
        error = error_of(http, "/v1/chat/completions", messages=messages)
        assert ("refusal" if "refusal" in wrong else "invented") in error["message"]


def _call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}


def _result(name: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": f"result {name}", **more}


TOOL: Any = {"type": "function", "function": {"name": "one", "parameters": {"type": "object"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [_call("one"), _call("two")]}


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "tools"])
def test_tool_results_are_put_into_the_order_of_their_calls(http: httpx.Client, tools):
    def prompt_of(*results: dict[str, Any]) -> list[int]:
        body = {"model": CHAT, "messages": [*HELLO, CALLS, *results, *HELLO, CALLS], "tools": tools}
        answer = http.post("/tokenize", json={**body, "add_generation_prompt": True})
        assert answer.status_code == 200, answer.text
        return answer.json()["tokens"]

    one, two = _result("one"), _result("two")
    assert prompt_of(two, one) == prompt_of(one, two)
    assert prompt_of(one) != prompt_of(one, two)
    # Without ids, results answer the calls in their order.
    without_ids = [{"role": "tool", "content": each["content"]} for each in (one, two)]
    assert prompt_of(*without_ids) == prompt_of(one, two)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([_result("two")], "the call 'one' of messages[1] has no result, but a later call has"),
        ([_result("one"), _result("three")], "messages[3].tool_call_id='three' answers no call"),
        ([_result("one"), _result("one")], "messages[3].tool_call_id='one' answers a call that"),
        ([_result("two", invented=1), _result("one")], "messages[2] has unknown keys ['invented']"),
        ([_result("two", content=5), _result("one")], "messages[2]['content'] is a int"),
    ],
)
def test_wrong_tool_results_are_reported(http: httpx.Client, results, message: str):
    for tools in ([], [TOOL]):
        error = error_of(
            http, "/v1/chat/completions", messages=[*HELLO, CALLS, *results], tools=tools
        )
        assert error["param"] == "messages"
        assert message in error["message"]


def test_an_error_that_mentions_tools_names_the_parameter_at_fault(http: httpx.Client):
    """Errors of messages with the word "tool" named `tools`."""
    path = "/v1/chat/completions"
    system = {"role": "system", "content": "Be brief."}
    for messages, message in (
        (
            [{**HELLO[0], "tool_calls": [_call("one")]}],
            "messages[0] is of role 'user' and has tool",
        ),
        ([{**HELLO[0], "tool_call_id": "one"}], "messages[0] is of role 'user' and has 'tool_call"),
        (
            [{**system, "tools": [TOOL]}, *HELLO],
            "messages[0] has the key 'tools': give the tools in",
        ),
        ([{**system, "weight": 0}, *HELLO], "messages[0] has the key 'weight'"),
        ([{**system, "invented": 1}, *HELLO], "messages[0] has unknown keys ['invented']"),
        ([{**system, "content": None}, *HELLO], "messages[0] has no content"),
        (
            [{**system, "content": [{"type": "image"}]}, *HELLO],
            "messages[0].content[0] is an image, and Qwen/Qwen3-4B-Instruct-2507 reads only text",
        ),
    ):
        for tools in ([], [TOOL]):
            error = error_of(http, path, messages=messages, tools=tools)
            assert (error["param"], message in error["message"]) == ("messages", True), error
    parts = {**system, "content": [{"type": "text", "text": "Be brief."}]}
    prompts = [
        http.post("/tokenize", json={"model": CHAT, "messages": [one, *HELLO], "tools": [TOOL]})
        for one in (system, parts)
    ]
    assert prompts[0].json()["tokens"] == prompts[1].json()["tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": [str(n) for n in range(17)]}, "at most 16 items"),
        ({"stop": ["a", ""]}, r"stop[1]='': string should have at least 1 character"),
        ({"stop": ["a", 1]}, "stop[1]=1: input should be a valid string"),
        ({"prompt": [[1], ["a"]]}, "prompt[1][0]='a': input should be a valid integer"),
        ({"prompt": [1, -2]}, "prompt[1]=-2"),
        ({"max_tokens": "5"}, "max_tokens='5'"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]=''"),
    ],
)
def test_the_fault_of_the_meant_form_is_reported(http: httpx.Client, options, message: str):
    """17 stops were "input should be a valid string"."""
    assert message in error_of(http, **options)["message"]


def test_a_tool_choice_without_a_name_is_reported(http: httpx.Client):
    tools = [{"type": "function", "function": {"name": "f"}}]
    choice = {"type": "function", "function": {}}
    error = error_of(http, "/v1/chat/completions", tools=tools, tool_choice=choice)
    assert error["message"] == "tool_choice.function.name is missing"


@pytest.mark.parametrize(
    ("schema", "strict", "message"),
    [
        ({"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}, False, "back to itself"),
        (
            {
                "oneOf": [
                    {"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab"
                ]
            },
            True,
            "use `anyOf`, or leave strict out",
        ),
    ],
)
def test_errors_of_schemas_name_the_keyword(http: httpx.Client, schema, strict, message: str):
    named = {"name": "a", "schema": schema, "strict": strict}
    error = error_of(http, response_format={"type": "json_schema", "json_schema": named})
    assert message in error["message"]
    assert error["param"] == "response_format"


@pytest.mark.parametrize("path", ["//v1/chat/completions", "/v1//chat/completions"])
def test_two_slashes_are_named(served: Served, path: str):
    answer = httpx.post(f"{served.url}{path}", json={}, timeout=60)
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert f"POST {path}; the path has two slashes" in message


def test_a_missing_key_names_the_header_of_openais_clients(served: Served):
    for headers in ({}, {"Authorization": "tml-first"}):
        answer = httpx.get(f"{served.url}/v1/models", headers=headers, timeout=60)
        assert answer.status_code == 401
        assert "Authorization: Bearer KEY" in answer.json()["error"]["message"]
    with pytest.raises(openai.AuthenticationError, match="unknown"), served.client("no") as client:
        client.models.list()
