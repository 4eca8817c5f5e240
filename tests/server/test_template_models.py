"""Models that no renderer of planish knows, served with their own chat templates."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from scripted_server import BASE, Served, serving

from planish.renderers import get_renderer
from planish.tokenizer import load_tokenizer

TEMPLATES = Path(__file__).parents[1] / "renderers/chat_templates"
CODER, THINKER = "some/coder", "some/thinker"
PARAMETERS: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS},
}
CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
QUESTION: Any = {"role": "user", "content": "Add <|im_end|> to 1."}


def thinking_template() -> str:
    """Return a template whose prompts end within the reasoning, as Qwen3-Thinking-2507's."""
    source = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    header = "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable"
    assert header in source
    return source.replace(header, header.replace("assistant\\n", "assistant\\n<think>\\n"))


@pytest.fixture(scope="module")
def served(model_dir, tmp_path_factory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("models")
    sources = {
        CODER: (TEMPLATES / "qwen3_coder.jinja").read_text(encoding="utf-8"),
        THINKER: thinking_template(),
    }
    models: dict[str, Path] = {BASE: model_dir}
    for name, source in sources.items():
        models[name] = Path(shutil.copytree(model_dir, root / name))
        (models[name] / "chat_template.jinja").write_text(source, encoding="utf-8")
    with serving(models, tmp_path_factory.mktemp("templates")) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def expected_prompt(served: Served, model: str, messages: Any, tools: Any) -> list[int]:
    tokenizer: Any = load_tokenizer(served.engine.tokenizer_directory(model))
    renderer = get_renderer("template", tokenizer)
    functions = [tool["function"] for tool in tools]
    prefix = renderer.create_conversation_prefix_with_tools(functions) if tools else []
    return renderer.build_generation_prompt([*prefix, *messages]).to_ints()


def test_chat_completions_offer_tools_and_read_calls(served, client):
    options: Any = {"model": CODER, "messages": [QUESTION], "tools": [ADD]}
    with served.engine.saying(f"Wait.\n{CALL}", served.tokenizer):
        answer = client.chat.completions.create(**options).choices[0].message
        chunks = list(client.chat.completions.create(**options, stream=True))
    assert served.engine.last_prompt == expected_prompt(served, CODER, [QUESTION], [ADD])
    assert answer.content == "Wait."
    [call] = answer.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Wait."
    streamed = [call.function for delta in deltas for call in delta.tool_calls or []]
    assert "".join(one.arguments or "" for one in streamed) == call.function.arguments
    history: Any = [
        QUESTION,
        answer.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "2"},
    ]
    with served.engine.saying("It is 2.", served.tokenizer):
        answer = client.chat.completions.create(model=CODER, messages=history, tools=[ADD])
    assert answer.choices[0].message.content == "It is 2."
    text = served.tokenizer.decode(served.engine.last_prompt)
    assert text.endswith(
        f"Wait.\n\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n2\n</tool_response>\n"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_reasoning_begins_in_the_prompt(served, client):
    with served.engine.saying("So it is.\n</think>\n\nYes.", served.tokenizer):
        answer = client.chat.completions.create(model=THINKER, messages=[QUESTION])
        stream = list(
            client.chat.completions.create(model=THINKER, messages=[QUESTION], stream=True)
        )
    message: Any = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("So it is.", "Yes.")
    deltas: list[Any] = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    text = served.tokenizer.decode(served.engine.last_prompt)
    assert text.endswith("<|im_start|>assistant\n<think>\n")
    assert text.count("<|im_end|>") == 2, "one is the user's text"
    assert served.engine.last_prompt.count(served.tokenizer.eos_token_id) == 1


def test_the_other_apis_use_the_template_too(served, client):
    with served.engine.saying(CALL, served.tokenizer):
        response = client.responses.create(
            model=CODER,
            input=QUESTION["content"],
            tools=[{"type": "function", **ADD["function"], "strict": False}],
        )
        of_responses = served.engine.last_prompt
        headers = {"x-api-key": "tml-first", "anthropic-version": "2023-06-01"}
        tool = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
        with httpx.Client(base_url=served.url, headers=headers, timeout=60) as http:
            body = {"model": CODER, "max_tokens": 99, "messages": [QUESTION], "tools": [tool]}
            message = http.post("/v1/messages", json=body).json()
    assert of_responses == expected_prompt(served, CODER, [QUESTION], [ADD])
    assert served.engine.last_prompt == of_responses
    [call] = [item for item in response.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"a": 1}
    [block] = [block for block in message["content"] if block["type"] == "tool_use"]
    assert (block["name"], block["input"]) == ("add", {"a": 1})


@pytest.mark.parametrize(
    "options",
    [
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
        {"reasoning_effort": "high"},
    ],
)
def test_reasoning_that_the_template_cannot_turn_on_is_a_400(client, options):
    with pytest.raises(openai.BadRequestError, match="no switch that turns reasoning on"):
        client.chat.completions.create(model=CODER, messages=[QUESTION], **options)


@pytest.mark.slow
def test_a_required_call_is_constrained(served, client):
    answer = client.chat.completions.create(
        model=CODER,
        messages=[QUESTION],
        tools=[ADD],
        tool_choice="required",
        max_tokens=300,
        seed=1,
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "add"
