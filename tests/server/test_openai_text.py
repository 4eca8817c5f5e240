"""The text, the tool calls and the logprobs of answers, with OpenAI's own client."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted_server import BASE, CHAT, HELLO, THINKER, Served, serving
from sentencepiece_tokenizer import sentencepiece_tokenizer

from planish import SamplingParams
from planish.detokenizer import Detokenizer
from planish.renderers import get_renderer
from planish.testing import EOS_TOKEN_ID, tiny_model


@pytest.fixture(scope="module")
def served(model_dir, tmp_path_factory) -> Iterator[Served]:
    models: dict[str, Path] = dict.fromkeys((BASE, CHAT, THINKER), model_dir)
    with serving(models, tmp_path_factory.mktemp("openai")) as served:
        yield served


@pytest.fixture(scope="module")
def client(served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def chat(client: openai.OpenAI, **options: Any) -> tuple[Any, list[Any]]:
    """Return the choice of a chat completion, and the choices of the streamed one."""
    options = {"model": CHAT, "messages": HELLO, **options}
    [choice] = client.chat.completions.create(**options).choices
    chunks = list(client.chat.completions.create(**options, stream=True))
    return choice, [one for chunk in chunks for one in chunk.choices]


def complete(client: openai.OpenAI, **options: Any) -> tuple[Any, list[Any]]:
    """Return the choice of a text completion, and the choices of the streamed one."""
    options = {"model": BASE, "prompt": "The sea is", **options}
    [choice] = client.completions.create(**options).choices
    chunks = list(client.completions.create(**options, stream=True))
    return choice, [one for chunk in chunks for one in chunk.choices]


def content_of(choices: list[Any]) -> str:
    return "".join(choice.delta.content or "" for choice in choices)


def reasoning_of(choices: list[Any]) -> str:
    return "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in choices)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize(
    "text", [f"A\n{CALL}\nB", "<b>x</b><tool_call>y", '{"x": "\n\n<tool_call>"}']
)
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS, "tool_choice": "none"}])
@pytest.mark.parametrize("model", [CHAT, THINKER])
def test_without_callable_tools_the_text_is_returned_as_it_is(served, client, text, options, model):
    with served.engine.saying(text, served.tokenizer):
        choice, streamed = chat(client, model=model, **options)
        called, _ = chat(client, model=model, tools=TOOLS)
    assert choice.message.content == content_of(streamed) == text
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert bool(called.message.tool_calls) == (CALL in text)


def test_a_constant_of_a_schema_may_contain_the_markup_of_a_call(served, client):
    text = json.dumps({"v": "<b>x</b><tool_call>y</tool_call> z"})
    options: Any = {"response_format": {"type": "json_object"}}
    with served.engine.saying(text, served.tokenizer):
        choice, streamed = chat(client, **options)
    assert choice.message.content == content_of(streamed) == text


def test_a_constrained_answer_without_reasoning_may_contain_its_markup(served, client):
    options: Any = {"guided_choice": ["x"], "chat_template_kwargs": {"enable_thinking": False}}
    with served.engine.saying("<think>x</think>y", served.tokenizer):
        choice, streamed = chat(client, model=THINKER, extra_body=options)
        thought, _ = chat(client, model=THINKER)
    assert choice.message.content == content_of(streamed) == "<think>x</think>y"
    assert thought.message.content == "y"


def test_the_text_ends_where_the_engine_found_the_stop_string(client):
    """A match within the first `min_tokens` tokens is text."""
    options: Any = {"max_tokens": 60, "temperature": 0, "seed": 1}
    text = complete(client, **options)[0].text
    stop = text[5:6]
    choice, streamed = complete(
        client, **options, stop=stop, extra_body={"min_tokens": 20, "return_token_ids": True}
    )
    ids = choice.token_ids
    assert len(ids) > 20 or choice.finish_reason == "length"
    assert choice.text.startswith(text[:6])
    assert "".join(one.text for one in streamed) == choice.text
    # Only the text of later tokens may be cut.
    assert len(choice.text.encode()) >= 20
    never, _ = complete(client, max_tokens=20, seed=1, stop=stop, extra_body={"min_tokens": 20})
    assert never.finish_reason == "length"


@pytest.mark.parametrize("endpoint", [chat, complete])
def test_a_stop_string_may_span_a_special_token(served, client, endpoint):
    """The engine searches the text with its special tokens. A completion leaves them out."""
    with served.engine.saying("a<|im_start|>b, c", served.tokenizer):
        across, streamed = endpoint(client, stop="<|im_start|>b,")
        between, _ = endpoint(client, stop="ab")
    texts = [one.message.content if endpoint is chat else one.text for one in (across, between)]
    assert texts[0] == "a"
    assert texts[1] == ("a<|im_start|>b, c" if endpoint is chat else "ab, c")
    pieces = [one.delta.content or "" if endpoint is chat else one.text for one in streamed]
    assert "".join(pieces) == "a"


@pytest.mark.parametrize("stop", ["\n\n", ["o", "hm"], "Yes"])
def test_stop_strings_sleep_until_the_reasoning_has_ended(served, client, stop):
    text = "<think>\no hm\n\nYes\n</think>\n\nYes, oh hm.\n\nBye"
    answer = "Yes, oh hm.\n\nBye"
    ends = [answer.index(one) for one in ([stop] if isinstance(stop, str) else stop)]
    with served.engine.saying(text, served.tokenizer):
        choice, streamed = chat(client, model=THINKER, stop=stop)
        without, _ = chat(client, model=THINKER, stop="never")
        closed, _ = chat(
            client,
            model=THINKER,
            stop=stop,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
    assert choice.message.reasoning_content == reasoning_of(streamed) == "o hm\n\nYes"
    assert choice.message.content == content_of(streamed) == answer[: min(ends)]
    assert without.message.content == answer
    # Without reasoning, stop strings apply to the whole message.
    assert not closed.message.content


def test_stop_tokens_of_a_request_sleep_during_the_reasoning(served, client):
    [comma] = served.tokenizer.encode(",", add_special_tokens=False)
    options = {"extra_body": {"stop_token_ids": [comma], "return_token_ids": True}}
    with served.engine.saying("<think>a,b</think>c,d", served.tokenizer):
        choice, streamed = chat(client, model=THINKER, **options)
    assert (choice.message.reasoning_content, choice.message.content) == ("a,b", "c")
    assert choice.token_ids[-1] == comma
    assert content_of(streamed) == "c"


@pytest.mark.parametrize("endpoint", [chat, complete])
@pytest.mark.parametrize("stop_token", [EOS_TOKEN_ID, ord(",")])
def test_there_is_a_logprob_for_each_token_id(served, client, endpoint, stop_token):
    options: Any = {"extra_body": {"stop_token_ids": [stop_token], "return_token_ids": True}}
    options["logprobs"] = True if endpoint is chat else 0
    with served.engine.saying("One, two", served.tokenizer):
        choice, streamed = endpoint(client, **options)

    def tokens_of(logprobs: Any) -> list[str]:
        return [row.token for row in logprobs.content] if endpoint is chat else logprobs.tokens

    ids = choice.token_ids
    assert ids[-1] == stop_token
    texts = Detokenizer.of_tokenizer(served.tokenizer)
    assert tokens_of(choice.logprobs) == [texts.text_bytes(token).decode() for token in ids]
    assert [token for one in streamed for token in one.token_ids] == ids
    assert [token for one in streamed for token in tokens_of(one.logprobs)] == tokens_of(
        choice.logprobs
    )


def test_the_logprob_of_the_end_is_that_of_the_engine(served, client):
    options: Any = {"max_tokens": 400, "seed": 4, "logprobs": 0, "prompt": "x"}
    ids = list(range(32, 127))
    choice, _ = complete(client, **options, extra_body={"stop_token_ids": ids})
    params = SamplingParams(400, seed=4, stop=[EOS_TOKEN_ID], stop_token_ids=ids)
    [sequence] = served.drawn(BASE, served.tokenizer.encode("x"), params).sequences
    assert choice.logprobs.token_logprobs == pytest.approx(sequence.logprobs)


def test_top_logprobs_begin_with_the_likeliest_and_contain_the_token_itself(client):
    choice, _ = complete(client, max_tokens=40, seed=6, logprobs=3)
    logprobs = choice.logprobs
    for text, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        values = list(top.values())
        assert values == sorted(values, reverse=True)
        assert text in top
        assert text == "\ufffd" or top[text] == logprob
        assert len(top) <= 4
    only, _ = complete(client, max_tokens=2, seed=6, logprobs=0)
    assert only.logprobs.top_logprobs == [
        {text: logprob}
        for text, logprob in zip(only.logprobs.tokens, only.logprobs.token_logprobs, strict=True)
    ]


def test_text_offsets_count_the_characters_of_the_text(served, client):
    text = "éa😀b"
    with served.engine.saying(text, served.tokenizer):
        choice, streamed = complete(client, logprobs=0)
    offsets = [0, 0, 1, 2, 2, 2, 2, 3, 4]
    assert choice.logprobs.text_offset == offsets
    assert [offset for one in streamed for offset in one.logprobs.text_offset] == offsets
    prompt = "éx"
    echoed = client.completions.create(
        model=BASE, prompt=prompt, echo=True, logprobs=1, max_tokens=0
    ).choices[0]
    assert echoed.logprobs.text_offset == [0, 0, 1]
    assert echoed.logprobs.tokens == ["\ufffd", "\ufffd", "x"]
    assert echoed.logprobs.top_logprobs[0] is None
    assert all("x" in top or len(top) == 2 for top in echoed.logprobs.top_logprobs[1:])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_text_is_sent_while_the_engine_samples(served, path):
    body: Any = {"model": CHAT, "prompt": "x", "messages": HELLO, "stream": True}
    del body["messages" if path == "/v1/completions" else "prompt"]
    with (
        served.engine.saying("abc", served.tokenizer, paused_after=2),
        served.http() as http,
        http.stream("POST", path, json=body) as answer,
    ):
        text = ""
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                text += choice.get("delta", {}).get("content") or choice.get("text", "")
            if text == "ab":
                served.engine.resumed.set()
    assert text == "abc"


def test_events_are_not_split_at_the_line_breaks_of_unicode(served):
    text = "a\u2028b\u2029c\u0085d"
    with (
        served.engine.saying(text, served.tokenizer),
        served.http() as http,
        http.stream(
            "POST", "/v1/completions", json={"model": BASE, "prompt": "x", "stream": True}
        ) as answer,
    ):
        data = answer.read().decode()
        assert answer.headers["x-accel-buffering"] == "no"
    lines = data.splitlines()
    events = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert all(not line or line.startswith("data: ") for line in lines)


# Continuing the last message

_CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


def test_an_answer_continues_the_last_message(served, client):
    begun = {"role": "assistant", "content": "It is <tool_call> \n"}
    extra = {**_CONTINUE, "return_token_ids": True}
    renderer = get_renderer("qwen3_instruct", served.tokenizer)
    with served.engine.saying("  x", served.tokenizer):
        options: Any = {"model": CHAT, "messages": [*HELLO, begun], "extra_body": extra}
        answer: Any = client.chat.completions.create(**options)
        streamed = [
            one
            for chunk in client.chat.completions.create(**options, stream=True)
            for one in chunk.choices
        ]
    header = renderer.build_generation_prompt(HELLO).to_ints()
    assert answer.prompt_token_ids == [*header, *renderer.codec.encode_text(begun["content"])]
    assert answer.choices[0].message.content == content_of(streamed) == "  x"
    with served.http() as http:
        body = {"model": CHAT, "messages": options["messages"], **_CONTINUE}
        assert http.post("/tokenize", json=body).json()["tokens"] == answer.prompt_token_ids


def test_an_answer_continues_reasoning(served, client):
    thought: Any = {"role": "assistant", "content": "", "reasoning_content": "Hm, "}
    with served.engine.saying(" a b</think>\n\nYes. a b", served.tokenizer):
        choice, streamed = chat(
            client, model=THINKER, messages=[*HELLO, thought], extra_body=_CONTINUE, stop=" b"
        )
    assert choice.message.reasoning_content == reasoning_of(streamed) == " a b"
    assert choice.message.content == content_of(streamed) == "Yes. a"


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        (
            [*HELLO, {"role": "assistant", "content": "x"}],
            {"guided_regex": "a"},
            "continue_final_message",
        ),
        (HELLO, {}, "messages"),
        (
            [
                *HELLO,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}"},
                        }
                    ],
                },
            ],
            {},
            "messages",
        ),
    ],
)
def test_messages_that_cannot_be_continued_are_rejected(client, messages, options, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            model=CHAT, messages=messages, extra_body={**_CONTINUE, **options}
        )
    assert error.value.param == param


# Tokenizers that put a blank before texts


@pytest.fixture(scope="module", params=["first", "each"])
def blanks(request, tmp_path_factory) -> Iterator[Served]:
    directory = tiny_model(tmp_path_factory.mktemp("blanks"), vocab_size=500)
    sentencepiece_tokenizer(request.param).save_pretrained(directory)
    with serving({BASE: directory}, tmp_path_factory.mktemp("data")) as served:
        yield served


def test_the_first_space_of_a_completion_is_kept(blanks):
    with blanks.client() as client:
        blanks.engine.script = blanks.tokenizer.encode("a place", add_special_tokens=False)
        choice, streamed = complete(client, logprobs=0)
        stopped, _ = complete(client, stop=" place")
        chosen, _ = chat(client, model=BASE, logprobs=True)
        blanks.engine.script = None
    assert choice.text == "".join(one.text for one in streamed) == " a place"
    assert "".join(choice.logprobs.tokens) == " a place"
    assert stopped.text == " a"
    assert b"".join(bytes(row.bytes) for row in chosen.logprobs.content) == b" a place"
    assert chosen.message.content == "a place"
    lengths = [len(token) for token in choice.logprobs.tokens]
    offsets = choice.logprobs.text_offset
    assert [after - before for before, after in pairwise(offsets)] == lengths[:-1]


def test_an_echoed_prompt_has_its_own_offsets(blanks):
    with blanks.client() as client:
        [choice] = client.completions.create(
            model=BASE, prompt="The sea is", echo=True, logprobs=0, max_tokens=2, seed=1
        ).choices
    logprobs = choice.logprobs
    assert choice.text.startswith("The sea is")
    ids = blanks.tokenizer.encode("The sea is")
    begin = len(ids) - len(blanks.tokenizer.encode("The sea is", add_special_tokens=False))
    assert logprobs.text_offset[: begin + 1] == [0] * (begin + 1)
    assert logprobs.text_offset[len(ids)] == len("The sea is")
    assert "".join(logprobs.tokens[begin : len(ids)]) == " The sea is"
