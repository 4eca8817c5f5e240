"""The OpenAI-compatible endpoints with OpenAI's own client, on a real socket."""

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
import server_client
import torch
from scripted_server import BASE, CHAT, EFFORTS, HELLO, KEYS, THINKER, WAIT, Served, serving
from server_client import TENANT, Client, running, sample
from server_process import wait_until

from planish import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient
from planish.errors import UserError
from planish.renderers import get_renderer
from planish.server.openai import requests, routes
from planish.server.openai.models import OpenAIModels
from planish.server.settings import ServerSettings
from planish.service import Sample, SaveWeightsForSampler
from planish.testing import EOS_TOKEN_ID


@pytest.fixture(scope="module")
def served(model_dir, tmp_path_factory) -> Iterator[Served]:
    models: dict[str, Path] = dict.fromkeys((BASE, CHAT, THINKER, EFFORTS), model_dir)
    with serving(models, tmp_path_factory.mktemp("openai")) as served:
        yield served


@pytest.fixture(scope="module")
def client(served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def test_a_chat_completion_equals_the_sample_of_the_engine(served, client):
    answer = client.chat.completions.create(
        model=CHAT,
        messages=HELLO,
        max_completion_tokens=12,
        seed=5,
        temperature=0.8,
        logprobs=True,
        top_logprobs=3,
    )
    renderer = get_renderer("qwen3_instruct", served.tokenizer)
    prompt = renderer.build_generation_prompt(HELLO).to_ints()
    params = SamplingParams(12, seed=5, stop=renderer.get_stop_sequences(), temperature=0.8)
    [sequence] = served.drawn(CHAT, prompt, params).sequences
    [choice] = answer.choices
    assert choice.message.content == served.tokenizer.decode(sequence.tokens)
    assert choice.finish_reason == "length"
    assert [row.logprob for row in choice.logprobs.content] == pytest.approx(sequence.logprobs)
    assert b"".join(bytes(row.bytes) for row in choice.logprobs.content) == bytes(
        token for token in sequence.tokens if token < 256
    )
    assert all(len(row.top_logprobs) == 3 for row in choice.logprobs.content)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 12)
    assert answer.model == CHAT
    assert answer.object == "chat.completion"


def joined(chunks: list[Any], index: int) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(
        (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
        for choice in choices
    )


def test_a_streamed_message_equals_the_unstreamed_one(client):
    options: Any = {
        "model": CHAT,
        "messages": HELLO,
        "max_tokens": 40,
        "seed": 3,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    for choice in whole.choices:
        assert joined(chunks, choice.index) == choice.message.content
        mine = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert [
            row for one in mine if one.logprobs for row in one.logprobs.content
        ] == choice.logprobs.content
        assert [one.finish_reason for one in mine if one.finish_reason] == [choice.finish_reason]
    assert whole.choices[0].message.content != whole.choices[1].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].choices == []


def test_streamed_text_equals_the_unstreamed_text(client):
    options: Any = {
        "model": BASE,
        "prompt": ["One", "Two"],
        "max_tokens": 30,
        "seed": 3,
        "n": 2,
        "logprobs": 2,
    }
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True))
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for choice in whole.choices:
        assert joined(chunks, choice.index) == choice.text
        mine = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for one in mine for x in getattr(one.logprobs, name)] == getattr(
                choice.logprobs, name
            )


def test_text_continues_a_prompt(served, client):
    prompt = served.tokenizer.encode("Once upon")
    sequence = served.drawn(
        BASE, prompt, SamplingParams(8, seed=1, stop=[EOS_TOKEN_ID], top_p=0.9)
    ).sequences[0]
    for given in ("Once upon", prompt, [prompt], ["Once upon"]):
        answer = client.completions.create(
            model=BASE, prompt=given, max_tokens=8, seed=1, top_p=0.9
        )
        assert answer.choices[0].text == served.tokenizer.decode(
            sequence.tokens, skip_special_tokens=True
        )
    assert client.completions.create(model=BASE, prompt="a").usage.completion_tokens <= 16


def test_a_prompt_can_be_scored_with_echo(served, client):
    """As evaluation tools do it: the prompt's own logprobs, and nothing drawn."""
    text = "A text, ünd"
    answer = client.completions.create(model=BASE, prompt=text, max_tokens=0, echo=True, logprobs=2)
    [choice] = answer.choices
    prompt = served.tokenizer.encode(text)
    assert choice.text == text
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == len(prompt)
    assert choice.logprobs.text_offset[:3] == [0, 1, 2]
    assert answer.usage.completion_tokens == 0
    one_more = client.completions.create(
        model=BASE, prompt=text, max_tokens=1, echo=True, logprobs=2
    ).choices[0]
    assert one_more.logprobs.token_logprobs[: len(prompt)] == choice.logprobs.token_logprobs
    assert one_more.text.startswith(text)
    echoed = client.completions.create(model=BASE, prompt=text, max_tokens=2, echo=True)
    assert echoed.choices[0].text.startswith(text)


def test_stop_strings_end_the_text_and_are_removed(served, client):
    options: Any = {"model": BASE, "prompt": "Go", "max_tokens": 60, "seed": 9}
    text = client.completions.create(**options).choices[0].text
    stop = text[20:22]
    stopped = client.completions.create(**options, stop=[stop, "never to be seen"]).choices[0]
    assert stopped.text == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"
    streamed = list(client.completions.create(**options, stop=stop, stream=True))
    assert joined(streamed, 0) == stopped.text


def test_a_seed_repeats_a_sample_and_its_absence_does_not(client):
    def text(**options: Any) -> str:
        return (
            client.completions.create(model=BASE, prompt="x", max_tokens=20, **options)
            .choices[0]
            .text
        )

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text() != text()
    assert text(temperature=0) == text(temperature=0)


# Checkpoints


@pytest.fixture(scope="module")
def trained(served) -> Iterator[Any]:
    """A training client of planish on the same server, whose model is far from its base."""
    with ServiceClient(base_url=served.url, api_key="tml-first") as service_client:
        training_client = service_client.create_lora_training_client(CHAT, rank=4, seed=1)
        datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [97, 97, 97]})
        for _ in range(3):
            training_client.forward_backward([datum], "cross_entropy")
            training_client.optim_step(AdamParams(learning_rate=0.1)).result(WAIT)
        yield training_client


@pytest.mark.slow
def test_a_checkpoint_is_served_at_once(served, client, trained):
    path = trained.save_weights_for_sampler("now").result(WAIT).path
    [listed] = [model for model in client.models.list() if model.id == path]
    assert listed == client.models.retrieve(path)
    assert abs(listed.created - time.time()) < WAIT
    answer = client.completions.create(
        model=path, prompt=[5, 6, 7], max_tokens=9, seed=4, logprobs=0
    )
    params = SamplingParams(9, seed=4, stop=[EOS_TOKEN_ID])
    [sequence] = (
        trained.create_sampling_client(path)
        .sample(ModelInput.from_ints([5, 6, 7]), 1, params)
        .result(WAIT)
        .sequences
    )
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(sequence.logprobs)
    assert answer.choices[0].text == served.tokenizer.decode(sequence.tokens)
    assert (
        answer.choices[0].text
        != client.completions.create(model=CHAT, prompt=[5, 6, 7], max_tokens=9, seed=4)
        .choices[0]
        .text
    )
    # Saved again under its name, it is the new one.
    datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [98, 98, 98]})
    trained.forward_backward([datum], "cross_entropy")
    trained.optim_step(AdamParams(learning_rate=0.1)).result(WAIT)
    assert trained.save_weights_for_sampler("now", overwrite=True).result(WAIT).path == path
    again = client.completions.create(
        model=path, prompt=[5, 6, 7], max_tokens=9, seed=4, logprobs=0
    )
    assert again.choices[0].logprobs.token_logprobs != answer.choices[0].logprobs.token_logprobs
    message = client.chat.completions.create(model=path, messages=HELLO, max_tokens=3)
    assert message.model == path


def test_a_checkpoint_selects_its_renderer(served, client, trained):
    path = (
        trained.save_weights_for_sampler("plain", user_metadata={"renderer_name": "role_colon"})
        .result(WAIT)
        .path
    )
    prompt = get_renderer("role_colon", served.tokenizer).build_generation_prompt(HELLO)
    answer = client.chat.completions.create(model=path, messages=HELLO, max_tokens=2)
    assert answer.usage.prompt_tokens == prompt.length
    with pytest.raises(openai.BadRequestError, match="role_colon.*tool") as error:
        client.chat.completions.create(model=path, messages=HELLO, tools=TOOLS)
    assert error.value.param == "tools"


def test_tenants_list_only_their_own_models(served, client, trained):
    path = trained.save_weights_for_sampler("private").result(WAIT).path
    with served.client("tml-second") as second:
        assert [model.id for model in second.models.list()] == [BASE, CHAT, THINKER, EFFORTS]
        for call in (
            lambda: second.models.retrieve(path),
            lambda: second.completions.create(model=path, prompt="x"),
            lambda: second.chat.completions.create(model=path, messages=HELLO),
        ):
            with pytest.raises(openai.NotFoundError, match="does not exist") as error:
                call()
            assert error.value.code == "model_not_found"


@pytest.mark.parametrize(
    "name", ["no/such", "tinker://x/sampler_weights/y", "tinker://../weights/x", "", "/etc/passwd"]
)
def test_models_of_other_tenants_do_not_exist(client, name):
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model=name, prompt="x")
    assert error.value.code == "model_not_found"


def test_an_unknown_endpoint_is_named_in_the_error(served, client):
    """What OpenAI's client shows is the message of its own form."""
    for call, message in (
        (
            lambda: client.embeddings.create(model=BASE, input="x"),
            "there is no endpoint POST /v1/embeddings: .* no embeddings",
        ),
        (lambda: client.moderations.create(input="x"), "no endpoint POST /v1/moderations"),
    ):
        with pytest.raises(openai.NotFoundError, match=message) as error:
            call()
        assert error.value.type == "not_found_error"
    with (
        openai.OpenAI(base_url=served.url, api_key="tml-first", max_retries=0) as client_without_v1,
        pytest.raises(
            openai.NotFoundError,
            match="POST /chat/completions; the endpoints for OpenAI's clients start with /v1",
        ),
    ):
        client_without_v1.chat.completions.create(model=BASE, messages=HELLO)


@pytest.mark.parametrize("key", ["tml-third", "x" * 200])
def test_unknown_keys_are_rejected(served, key):
    with served.client(key) as stranger:
        for call in (
            stranger.models.list,
            lambda: stranger.completions.create(model=BASE, prompt="x"),
        ):
            with pytest.raises(openai.AuthenticationError) as error:
                call()
            assert error.value.code == "invalid_api_key"


# Tools and thoughts

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def test_tool_calls_are_parsed(served, client):
    with served.engine.saying(f"Let me see.\n{CALL}\n{CALL}", served.tokenizer):
        choice = client.chat.completions.create(model=CHAT, messages=HELLO, tools=TOOLS).choices[0]
        chunks = list(
            client.chat.completions.create(model=CHAT, messages=HELLO, tools=TOOLS, stream=True)
        )
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert [call.function.name for call in choice.message.tool_calls] == ["add", "add"]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
    assert joined(chunks, 0) == "Let me see."
    # As OpenAI streams calls: each begins with its name and its id, and its arguments follow.
    parts = [
        call for chunk in chunks for one in chunk.choices for call in one.delta.tool_calls or ()
    ]
    assert [part.index for part in parts] == [0, 0, 1, 1]
    assert [part.function.name for part in parts] == ["add", None, "add", None]
    assert [bool(part.id) for part in parts] == [True, False, True, False]
    assert [part.function.arguments for part in parts] == 2 * ["", '{"a": 1, "b": 2}']
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert [one.finish_reason for chunk in chunks[:-1] for one in chunk.choices] == [None] * (
        len(chunks) - 1
    )


def test_a_conversation_continues_after_a_tool_call(served, client):
    with served.engine.saying(CALL, served.tokenizer):
        message = (
            client.chat.completions.create(model=CHAT, messages=HELLO, tools=TOOLS)
            .choices[0]
            .message
        )
    assert message.content is None
    sent = [
        {"role": "system", "content": "Be exact."},
        *HELLO,
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"},
    ]
    answer = client.chat.completions.create(model=CHAT, messages=sent, tools=TOOLS, max_tokens=2)
    renderer = get_renderer("qwen3_instruct", served.tokenizer)
    expected = renderer.build_generation_prompt(
        [
            *renderer.create_conversation_prefix_with_tools([TOOLS[0]["function"]], "Be exact."),
            *HELLO,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [call.model_dump() for call in message.tool_calls],
            },
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"},
        ]
    )
    assert answer.usage.prompt_tokens == expected.length
    without = client.chat.completions.create(
        model=CHAT, messages=HELLO, tools=TOOLS, tool_choice="none", max_tokens=2
    )
    assert without.usage.prompt_tokens == renderer.build_generation_prompt(HELLO).length


def test_an_error_names_the_message_of_the_request(client):
    """Tools put a system message before the messages of a request."""
    wrong = [*HELLO, {"role": "user", "content": 5}]
    for tools in ([], TOOLS):
        with pytest.raises(openai.BadRequestError, match=r"messages\[1\]\['content'\] is a int"):
            client.chat.completions.create(model=CHAT, messages=wrong, tools=tools)


def test_a_conversation_continues_after_a_call_that_was_cut_off(client):
    text = {"type": "string", "minLength": 40, "maxLength": 60, "pattern": "^[a-z ]*$"}
    parameters = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    options: Any = {
        "model": CHAT,
        "tools": [{"type": "function", "function": {"name": "say", "parameters": parameters}}],
        "tool_choice": "required",
        "max_tokens": 60,
        "seed": 2,
    }
    message = client.chat.completions.create(messages=HELLO, **options).choices[0].message
    [call] = message.tool_calls
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "The arguments are no JSON."}
    sent = [*HELLO, message.model_dump(), result]
    assert client.chat.completions.create(messages=sent, **options).choices


def test_reasoning_is_returned_in_its_own_field(served, client):
    with served.engine.saying("<think>\nHm.\n</think>\n\nYes.", served.tokenizer):
        message: Any = (
            client.chat.completions.create(model=THINKER, messages=HELLO).choices[0].message
        )
        chunks: Any = list(
            client.chat.completions.create(model=THINKER, messages=HELLO, stream=True)
        )
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    assert joined(chunks, 0) == "Yes."
    # Clients give back what they got; the format decides which thoughts the model sees again.
    sent = [*HELLO, message.model_dump(), {"role": "user", "content": "Sure?"}]
    thought = {"type": "thinking", "thinking": "Hm."}
    parts = [
        *HELLO,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Yes."}]},
        sent[-1],
    ]
    expected = get_renderer("qwen3", served.tokenizer).build_generation_prompt(parts)
    answer = client.chat.completions.create(model=THINKER, messages=sent, max_tokens=1)
    assert answer.usage.prompt_tokens == expected.length
    with pytest.raises(openai.BadRequestError, match="thinking"):
        client.chat.completions.create(model=CHAT, messages=sent)


# Values that change nothing, and options of other servers

_NO_EFFECT: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "min_tokens": 0,
    "top_k": 0,
    "min_p": 0,
    "stop_token_ids": [],
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "logit_bias": {},
    "best_of": 1,
    "store": False,
    "service_tier": "auto",
    "priority": 0,
    "guided_decoding_backend": "auto",
    "response_format": {"type": "text"},
    "truncate_prompt_tokens": None,
    "anything": None,
    "user": "me",
    "metadata": {"a": "b"},
}
_NO_EFFECT_IN_A_CHAT: dict[str, Any] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "echo": False,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning_effort": "none",
    "chat_template_kwargs": {"enable_thinking": False},
    "include_reasoning": True,
    "modalities": ["text"],
    "verbosity": "medium",
}


def test_large_requests_are_checked_outside_the_event_loop(client, monkeypatch):
    """pydantic holds the interpreter lock for 60 ms for 100,000 messages that are not objects."""
    in_loop: list[bool] = []

    def read(*arguments: Any) -> Any:
        in_loop.append(asyncio._get_running_loop() is not None)
        return requests.read_request(*arguments)

    monkeypatch.setattr(routes, "read_request", read)
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.chat.completions.create(model=BASE, messages=["x"] * 10_000)
    assert in_loop == [False]


def test_values_that_change_nothing_are_accepted(client):
    plain: Any = {"model": CHAT, "max_tokens": 5, "seed": 2}
    chat = client.chat.completions.create(**plain, messages=HELLO)
    same = client.chat.completions.create(
        **plain, messages=HELLO, extra_body={**_NO_EFFECT, **_NO_EFFECT_IN_A_CHAT}
    )
    assert same.choices[0].message == chat.choices[0].message
    text = client.completions.create(**plain, prompt="x")
    same = client.completions.create(
        **plain, prompt="x", extra_body={**_NO_EFFECT, "suffix": "", "add_special_tokens": True}
    )
    assert same.choices[0].text == text.choices[0].text


@pytest.mark.parametrize(
    ("options", "renderer"),
    [
        ({}, "qwen3"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "qwen3_disable_thinking"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "qwen3"),
        ({"chat_template_kwargs": {}}, "qwen3"),
        ({"reasoning_effort": "none"}, "qwen3_disable_thinking"),
        ({"reasoning_effort": "high"}, "qwen3"),
    ],
)
def test_thinking_can_be_switched_off(served, client, options, renderer):
    answer = client.chat.completions.create(
        model=THINKER, messages=HELLO, max_tokens=1, extra_body=options
    )
    prompt = get_renderer(renderer, served.tokenizer).build_generation_prompt(HELLO)
    assert answer.usage.prompt_tokens == prompt.length


@pytest.mark.parametrize(
    ("effort", "renderer"),
    [
        ("none", "qwen3_8_disable_thinking"),
        ("low", "qwen3_8_low_reasoning"),
        ("medium", "qwen3_8_medium_reasoning"),
        ("xhigh", "qwen3_8_xhigh_reasoning"),
    ],
)
def test_a_reasoning_effort_chooses_the_renderer(served, client, effort, renderer):
    answer: Any = client.chat.completions.create(
        model=EFFORTS,
        messages=HELLO,
        max_tokens=1,
        reasoning_effort=effort,
        extra_body={"return_token_ids": True},
    )
    prompt = get_renderer(renderer, served.tokenizer).build_generation_prompt(HELLO)
    assert answer.prompt_token_ids == prompt.to_ints()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (EFFORTS, {"reasoning_effort": "high"}, "'high'; give none or low or medium or xhigh"),
        (THINKER, {"reasoning_effort": "xhigh"}, "'xhigh'; give none or low or medium or high"),
        (CHAT, {"reasoning_effort": "high"}, "'high'; give none"),
        (
            THINKER,
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            "contradicts chat_template_kwargs.enable_thinking=false",
        ),
    ],
)
def test_other_reasoning_efforts_are_rejected(client, model, options, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.chat.completions.create(
            model=model, messages=HELLO, max_tokens=1, extra_body=options
        )
    assert caught.value.param == "reasoning_effort"


def test_stop_tokens_end_an_answer(served, client):
    for stop in (None, "never to be seen"):
        with served.engine.saying("One, two", served.tokenizer):
            assert served.engine.script is not None
            [comma] = served.tokenizer.encode(",", add_special_tokens=False)
            served.engine.script = served.engine.script[: served.engine.script.index(comma) + 1]
            options: Any = {"extra_body": {"stop_token_ids": [comma]}, "stop": stop}
            message = client.chat.completions.create(model=CHAT, messages=HELLO, **options)
            text = client.completions.create(model=BASE, prompt="x", **options)
        assert message.choices[0].message.content == text.choices[0].text == "One"
    drawn = client.completions.create(
        model=BASE,
        prompt="x",
        max_tokens=300,
        seed=1,
        extra_body={"stop_token_ids": list(range(32, 127)), "return_token_ids": True},
    ).choices[0]
    assert drawn.finish_reason == "stop"
    assert 32 <= drawn.token_ids[-1] < 127
    assert drawn.token_ids[-1] not in drawn.token_ids[:-1]


def test_token_ids_are_returned_on_request(served, client):
    options: Any = {"max_tokens": 8, "seed": 3, "extra_body": {"return_token_ids": True}}
    chat: Any = client.chat.completions.create(model=CHAT, messages=HELLO, **options)
    renderer = get_renderer("qwen3_instruct", served.tokenizer)
    assert chat.prompt_token_ids == renderer.build_generation_prompt(HELLO).to_ints()
    assert len(chat.choices[0].token_ids) == 8
    chunks: Any = list(
        client.chat.completions.create(model=CHAT, messages=HELLO, stream=True, **options)
    )
    assert chunks[0].prompt_token_ids == chat.prompt_token_ids
    streamed = [token for chunk in chunks for one in chunk.choices for token in one.token_ids]
    assert streamed == chat.choices[0].token_ids
    text: Any = client.completions.create(model=BASE, prompt=["x", "yz"], **options)
    assert [one.prompt_token_ids for one in text.choices] == [
        served.tokenizer.encode(prompt) for prompt in ("x", "yz")
    ]
    chunks = list(client.completions.create(model=BASE, prompt=["x", "yz"], stream=True, **options))
    for index, choice in enumerate(text.choices):
        mine = [one for chunk in chunks for one in chunk.choices if one.index == index]
        assert [token for one in mine for token in one.token_ids] == choice.token_ids
        assert mine[0].prompt_token_ids == choice.prompt_token_ids


def test_texts_and_chats_are_tokenized_as_in_vllm(served, http):
    def post(path: str, **body: Any) -> dict[str, Any]:
        return http.post(path, json=body).json()

    text = "Füße, 1\n"
    tokens = served.tokenizer.encode(text)
    body = post("/tokenize", model=BASE, prompt=text, return_token_strs=True)
    assert (body["tokens"], body["count"]) == (tokens, len(tokens))
    assert len(body["token_strs"]) == len(tokens)
    assert body["max_model_len"] > 0
    assert post("/detokenize", model=BASE, tokens=tokens) == {"prompt": text}
    chat = post("/tokenize", model=CHAT, messages=HELLO, add_generation_prompt=True)
    renderer = get_renderer("qwen3_instruct", served.tokenizer)
    assert chat["tokens"] == renderer.build_generation_prompt(HELLO).to_ints()
    assert chat["token_strs"] is None
    for path, body, param in (
        ("/tokenize", {"prompt": "x" * (8 << 20)}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"messages": HELLO, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 10**6}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        assert post(path, model=BASE, **body)["error"]["param"] == param, path


# Constraints, which make the answers of a random model valid

_FLAG: Any = {
    "type": "object",
    "properties": {"flag": {"type": "boolean"}},
    "required": ["flag"],
    "additionalProperties": False,
}
_SET_FLAG: Any = {"type": "function", "function": {"name": "set", "parameters": _FLAG}}


@pytest.mark.parametrize("model", [BASE, CHAT, THINKER])
def test_an_answer_has_the_form_that_was_asked_for(client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=HELLO,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": _FLAG}},
        max_tokens=200,
        seed=1,
        n=4,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    for choice in answer.choices:
        assert json.loads(choice.message.content) in ({"flag": True}, {"flag": False})
    text = client.completions.create(
        model=model, prompt="x", max_tokens=9, n=9, seed=1, extra_body={"guided_regex": "(a|b)+/"}
    )
    for choice in text.choices:
        wanted = r"[ab]+/" if choice.finish_reason == "stop" else r"[ab]{9}"
        assert re.fullmatch(wanted, choice.text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set"}}])
def test_a_tool_that_must_be_called_is_called(client, choice):
    options: Any = {
        "model": CHAT,
        "messages": HELLO,
        "tools": [*TOOLS, _SET_FLAG] if choice != "required" else [_SET_FLAG],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": 2,
    }
    [whole] = client.chat.completions.create(**options).choices
    assert whole.finish_reason == "tool_calls"
    [call] = whole.message.tool_calls
    assert call.function.name == "set"
    assert json.loads(call.function.arguments) in ({"flag": True}, {"flag": False})
    chunks = list(client.chat.completions.create(**options, stream=True))
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(part.function.arguments for part in parts) == call.function.arguments


@pytest.mark.parametrize("max_tokens", [60, 400])
def test_arguments_are_streamed_as_they_grow(client, max_tokens):
    """An answer that ends early has incomplete arguments, streamed or not."""
    text = {"type": "string", "minLength": 40, "maxLength": 60, "pattern": "^[a-z ]*$"}
    parameters = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    options: Any = {
        "model": CHAT,
        "messages": HELLO,
        "tools": [{"type": "function", "function": {"name": "say", "parameters": parameters}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": max_tokens,
        "seed": 2,
    }
    [whole] = client.chat.completions.create(**options).choices
    [call] = whole.message.tool_calls
    assert whole.finish_reason == ("length" if max_tokens == 60 else "tool_calls")
    chunks = list(client.chat.completions.create(**options, stream=True))
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert [part.function.name for part in parts if part.function.name] == ["say"]
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert joined(chunks, 0) == (whole.message.content or "")
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_several_required_calls_end_with_the_answer(client):
    answer = client.chat.completions.create(
        model=CHAT,
        messages=HELLO,
        tools=[_SET_FLAG],
        tool_choice="required",
        max_tokens=600,
        seed=3,
        n=4,
    )
    for choice in answer.choices:
        assert len(choice.message.tool_calls or ()) >= 1


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
        ({"extra_body": {"structured_outputs": {"grammar": "start: y"}}}, "structured_outputs"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "x",
                        "strict": True,
                        "schema": {"type": "array", "uniqueItems": True},
                    },
                }
            },
            "response_format",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"properties": 5}},
                    }
                ],
            },
            "tools",
        ),
    ],
)
def test_a_constraint_that_cannot_be_compiled_is_rejected_by_name(client, options, param):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model=CHAT, messages=HELLO, stream=stream, **options)
        assert error.value.param == param
        assert error.value.message.count("SamplingParams") == 0


# HTTP

_AUTHORIZED = {"Authorization": "Bearer tml-first"}


@pytest.fixture(scope="module")
def http(served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, headers=_AUTHORIZED, timeout=WAIT) as http:
        yield http


def test_the_description_is_that_of_the_types_that_check_requests(http):
    description = http.get("/openapi.json").json()
    parts = description["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(description))) <= set(parts)
    required: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
        "/v1/completions": {"prompt": "x", "max_tokens": 1},
        "/v1/responses": {"input": "x", "max_output_tokens": 1},
        "/tokenize": {},
        "/detokenize": {"tokens": [1]},
    }
    for path in required:
        content = description["paths"][path]["post"]["requestBody"]["content"]
        reference = content["application/json"]["schema"]["$ref"]
        for name, schema in parts[reference.rpartition("/")[2]]["properties"].items():
            # Parameters that only describe the client have any value.
            is_client_information = schema == {"anyOf": [{}, {"type": "null"}]}
            body = {"model": BASE, **required[path], name: [[]]}
            error = http.post(path, json=body).json().get("error") or {}
            assert (error.get("param") == name) is not is_client_information, (name, error)


def test_a_path_names_its_methods(http):
    for path, methods in (
        ("/v1/chat/completions", "POST"),
        ("/v1/models", "GET, HEAD"),
        ("/healthz", "GET, HEAD"),
        ("/api/v1/create_session", "POST"),
    ):
        answer = http.delete(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)


def test_a_byte_order_mark_is_read(http):
    body = json.dumps({"model": BASE, "prompt": "x", "max_tokens": 1}).encode()
    assert http.post("/v1/completions", content=b"\xef\xbb\xbf" + body).is_success


def test_the_list_of_models_ends_with_a_slash_or_without(http):
    lists = [http.get(f"/v1/models{end}").json() for end in ("", "/")]
    assert lists[0] == lists[1]
    assert lists[0]["object"] == "list"


# What is refused


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": "much"}, "presence_penalty"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"extra_body": {"min_tokens": -1}}, "min_tokens"),
        ({"max_tokens": 2, "extra_body": {"min_tokens": 3}}, "min_tokens"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"extra_body": {"continue_final_message": True}}, "messages"),
        ({"extra_body": {"add_generation_prompt": False}}, "add_generation_prompt"),
        (
            {"extra_body": {"add_generation_prompt": True, "continue_final_message": True}},
            "continue_final_message",
        ),
        ({"extra_body": {"skip_special_tokens": 1}}, "skip_special_tokens"),
        ({"extra_body": {"unheard_of": 1}}, "unheard_of"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"extra_body": {"allowed_token_ids": [-1]}}, "allowed_token_ids"),
        (
            {"extra_body": {"allowed_token_ids": [1], "guided_regex": "a"}},
            "allowed_token_ids",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop": [1]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "subtract"}},
            },
            "tool_choice",
        ),
        (
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
            "chat_template_kwargs",
        ),
        ({"extra_body": {"chat_template_kwargs": {"tone": "low"}}}, "chat_template_kwargs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"guided_json": "{"}}, "guided_json"),
        ({"stop": ["x" * 200]}, "stop"),
        ({"extra_body": {"guided_choice": []}}, "guided_choice"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}}, "guided_choice"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
        ({"extra_body": {"guided_json": {"title": "x" * (65 << 10)}}}, "guided_json"),
        ({"extra_body": {"guided_json": {"title": "x" * (257 << 10)}}}, "guided_json"),
    ],
)
def test_unsupported_parameters_are_rejected(client, options, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{"model": CHAT, "messages": HELLO, **options})
    assert error.value.param == param
    assert param in error.value.message


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], "a", 5]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "stream": True}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": [10**6]}, None),
        ({"prompt": "x" * 3000}, "prompt"),
        ({"prompt": "x" * (8 << 20)}, "prompt"),
        ({"prompt": ["x" * 9000] * 1000}, "prompt"),
        ({"max_tokens": 5000}, "prompt"),
        ({"prompt": ["x"] * 1024, "n": 128, "max_tokens": 1000}, "n"),
        ({"prompt": ["x"] * 1000, "n": 8, "max_tokens": 100, "logprobs": 20}, "n"),
        ({"prompt": ["x" * 1500] * 400, "echo": True, "max_tokens": 0, "logprobs": 20}, "n"),
        (
            {"extra_body": {"stream_options": {"include_obfuscation": True}}, "stream": True},
            "stream_options",
        ),
    ],
)
def test_requests_that_cannot_be_sampled_are_rejected(client, options, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(**{"model": BASE, "prompt": "x", **options})
    assert error.value.param == param


@pytest.mark.parametrize("message", [{"content": "x" * (8 << 20)}, {"content": ""}])
def test_messages_with_more_text_than_the_context_are_rejected_before_tokenizing(http, message):
    copies = 1 if message["content"] else 30_000
    messages = copies * [{"role": "user", **message}]
    answer = http.post("/v1/chat/completions", json={"model": BASE, "messages": messages})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert "this model's maximum context length is at most" in error["message"]
    assert error["param"] == "messages"


def test_an_invalid_body_is_rejected(client):
    with pytest.raises(openai.BadRequestError, match="not JSON"):
        client.post(
            "/completions",
            cast_to=object,
            content=b"{",
            options={"headers": {"content-type": "application/json"}},
        )


def test_an_error_in_the_middle_of_a_stream_is_an_event(served, client):
    with served.engine.saying("Some", served.tokenizer, error=ValueError("out of luck")):
        stream = client.chat.completions.create(model=CHAT, messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="out of luck"):
            list(stream)
        with pytest.raises(openai.BadRequestError, match="out of luck"):
            client.chat.completions.create(model=CHAT, messages=HELLO)


def test_an_internal_error_is_reported(served, client):
    with served.engine.saying("Some", served.tokenizer, error=KeyError("secret")):
        with pytest.raises(
            openai.InternalServerError, match="internal error of the server.*KeyError"
        ) as error:
            client.chat.completions.create(model=CHAT, messages=HELLO)
        assert error.value.type == "server_error"
        with pytest.raises(openai.APIError, match="internal error of the server.*KeyError"):
            list(client.completions.create(model=BASE, prompt="x", stream=True))
    wait_until_idle(served)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_lack_of_memory_is_answered_with_503(served, client, error):
    patient = client.with_options(max_retries=0)
    with served.engine.saying("Some", served.tokenizer, error=error):
        for send in (
            lambda: patient.chat.completions.create(model=CHAT, messages=HELLO),
            lambda: patient.completions.create(model=BASE, prompt="x"),
        ):
            with pytest.raises(openai.APIStatusError, match="out of memory; send") as refused:
                send()
            assert refused.value.status_code == 503
            assert refused.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.APIError, match="out of memory; send"):
            list(patient.completions.create(model=BASE, prompt="x", stream=True))
    wait_until_idle(served)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_a_body_for_which_memory_does_not_suffice_is_answered_with_503(served, monkeypatch, path):
    def parse(body: bytes) -> Any:
        raise orjson.JSONDecodeError("Not enough memory to allocate buffer for parsing", "", 0)

    monkeypatch.setattr("planish.wire.fields.orjson.loads", parse)
    answer = httpx.post(
        served.url + path,
        content=b"{}",
        headers={"authorization": f"Bearer {next(iter(KEYS))}"},
        timeout=WAIT,
    )
    assert answer.status_code == 503
    assert b"out of memory" in answer.content


def test_an_error_that_quotes_a_client_is_no_lack_of_memory(served, client):
    error = UserError("stop='DefaultCPUAllocator' is wrong")
    with (
        served.engine.saying("Some", served.tokenizer, error=error),
        pytest.raises(openai.BadRequestError, match="is wrong"),
    ):
        client.chat.completions.create(model=CHAT, messages=HELLO)


# Who hangs up, and many at once


def wait_until_idle(served: Served) -> None:
    wait_until(served.is_idle)


def test_closing_a_stream_cancels_its_samples(served, client, caplog):
    before = served.server.counters.sampled_tokens.total()
    options = {"max_tokens": 1900, "n": 32, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(model=BASE, prompt="x", stream=True, **options)
    next(iter(stream))
    assert not served.is_idle()
    stream.close()
    wait_until_idle(served)
    assert served.server.counters.sampled_tokens.total() - before < 32 * 1900
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_closing_the_connection_cancels_the_samples(served, client, caplog):
    before = served.server.counters.sampled_tokens.total()
    sent = {"model": BASE, "prompt": "x", "max_tokens": 1900, "n": 32, "ignore_eos": True}
    body = json.dumps(sent).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer "
        f"tml-first\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: not served.is_idle())
    wait_until_idle(served)
    assert served.server.counters.sampled_tokens.total() - before < 32 * 1900
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.slow
def test_many_completions_are_served_concurrently(served):
    async def main() -> list[str | None]:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="tml-second", max_retries=0
        ) as client:
            asked = [
                client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=6, seed=seed)
                for seed in range(40)
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    with served.client() as client:
        alone = client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=6, seed=7)
        contents = asyncio.run(main())
    assert contents[7] == alone.choices[0].message.content
    assert len(set(contents)) > 30
    wait_until_idle(served)


async def test_saving_a_checkpoint_again_does_not_disturb_waiting_requests(model_dir, tmp_path):
    async with running(model_dir, tmp_path, ServerSettings(sampling_slots=1)) as server:
        model = await (await Client.start(server)).model()
        models = OpenAIModels(server, {server_client.BASE: model_dir})
        operation = sample("", n=1)

        async def saved() -> str:
            saving = SaveWeightsForSampler(model.model_id, "latest", overwrite=True)
            found = await models.find(TENANT, orjson.loads(await model.run(saving))["path"])
            return await models.sampler_id(TENANT, found)

        turn = await server.sampling_queue.acquire_slots("somebody", 1, 0)
        old = await saved()
        waiting = [asyncio.create_task(models.sample(TENANT, old, operation)) for _ in range(2)]
        await asyncio.sleep(0)
        new = await saved()
        turn.release()
        assert all(response.sequences for response in await asyncio.gather(*waiting))
        assert [sampler.id for sampler in server.samplers.open_samplers()] == [new]


async def test_loading_a_model_does_not_block_other_requests(model_dir, data_dir, monkeypatch):
    async with server_client.running(model_dir, data_dir) as server:
        models = OpenAIModels(server, {server_client.BASE: model_dir})
        served = await models.find(TENANT, server_client.BASE)
        operation = Sample("", ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1))
        is_loaded = threading.Event()
        monkeypatch.setattr(server.engine._engine, "check_sample", lambda *_: is_loaded.wait(100))
        asked = [asyncio.create_task(models.check(TENANT, served, [operation])) for _ in range(50)]
        try:
            await asyncio.sleep(0.1)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 50)
        finally:
            is_loaded.set()
            await asyncio.gather(*asked)
