# pyright: reportMissingImports=false
"""Inspect's tasks, options and messages reach planish's sampler, on a small random model. Needs
`planish[inspect]`; skipped without it.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import planish

pytest.importorskip("inspect_ai", reason="it needs an older fsspec; make test-extras runs it")

from inspect_ai import Task, eval_async, task
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Model,
    get_model,
)
from inspect_ai.scorer import match
from inspect_ai.solver import generate
from inspect_ai.tool import ToolInfo

from planish import ServiceClient
from planish.errors import PlanishError, UnsupportedError
from planish.evaluation import open_model
from planish.integrations.inspect.entry import provider
from planish.integrations.inspect.evaluator import InspectEvaluator, metrics_of
from planish.integrations.inspect.messages import renderer_messages
from planish.integrations.inspect.model import PlanishAPI
from planish.types import SamplingParams

# Inspect and what it needs warn of each other's newer versions.
pytestmark = pytest.mark.filterwarnings("default")

HELLO = [ChatMessageUser(content="hello")]
DRAWN = GenerateConfig(max_tokens=12, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def opened(small_model, tmp_path_factory):
    with ServiceClient(
        models={"tiny": small_model}, data_dir=tmp_path_factory.mktemp("data")
    ) as service:
        yield open_model(service, "tiny", "chatml")


@pytest.fixture
def api(opened):
    return PlanishAPI("tiny", model=opened)


def answered(api, config=DRAWN, messages=HELLO, **more):
    options = {"tools": [], "tool_choice": "none", **more}
    return asyncio.run(api.generate(messages, config=config, **options))


@task
def greetings():
    samples = [Sample(input=f"hello {number}", target="x") for number in range(3)]
    return Task(dataset=samples, solver=generate(), scorer=match())


def test_an_answer_is_what_the_sampler_draws(api, opened):
    output = answered(api)
    prompt = opened.renderer.build_generation_prompt([{"role": "user", "content": "hello"}])
    params = SamplingParams(
        max_tokens=12, temperature=1.0, seed=7, stop=opened.renderer.get_stop_sequences()
    )
    [expected] = opened.sampling_client.sample(prompt, 1, params).result().sequences
    assert output.completion == opened.renderer.parse_response(expected.tokens).message["content"]
    assert output.stop_reason == ("stop" if expected.stop_reason == "stop" else "max_tokens")
    assert output.usage.total_tokens == prompt.length + len(expected.tokens)
    assert output.usage.input_tokens + output.usage.input_tokens_cache_read == prompt.length


def test_choices_and_logprobs(api):
    output = answered(
        api, DRAWN.merge(GenerateConfig(num_choices=3, logprobs=True, top_logprobs=2))
    )
    assert len(output.choices) == 3
    assert len({choice.message.text for choice in output.choices}) == 3
    for choice in output.choices:
        scored = choice.logprobs.content
        assert 1 <= len(scored) <= 12
        for one in scored:
            assert one.logprob <= max(top.logprob for top in one.top_logprobs) + 1e-4
            assert len(one.top_logprobs) == 2
    assert answered(api).choices[0].logprobs is None


def test_a_stop_sequence_ends_the_answer_and_is_no_part_of_it(api):
    whole = answered(api).completion
    pairs = (whole[at : at + 2] for at in range(1, len(whole) - 1))
    # U+FFFD in a stop sequence does not match bytes that are no character.
    stop = next(pair for pair in pairs if "\ufffd" not in pair)
    at = whole.index(stop)
    output = answered(api, DRAWN.merge(GenerateConfig(stop_seqs=[stop])))
    assert (output.completion, output.stop_reason) == (whole[:at], "stop")


def test_no_room_for_an_answer(api):
    output = answered(api, messages=[ChatMessageUser(content="x" * 3000)])
    assert output.stop_reason == "model_length"
    assert "2048" in output.completion
    near = answered(
        api, DRAWN.merge(GenerateConfig(max_tokens=2000)), [ChatMessageUser(content="x" * 1900)]
    )
    assert near.stop_reason in ("model_length", "stop")
    assert near.usage.total_tokens <= 2048


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"logit_bias": {1: 2.0}},
        {"best_of": 2},
        {"prompt_logprobs": 1},
        {"extra_body": {"min_p": 0.1}},
    ],
)
def test_options_that_would_change_the_samples_are_rejected(api, options):
    with pytest.raises(UnsupportedError, match=next(iter(options))):
        answered(api, DRAWN.merge(GenerateConfig(**options)))


def test_a_hint_that_is_not_taken_is_said_once(api, caplog):
    config = DRAWN.merge(GenerateConfig(reasoning_effort="low", max_retries=2, cache_prompt=True))
    first = answered(api, config)
    answered(api, config)
    said = [record.message for record in caplog.records if "ignores" in record.message]
    assert said == [
        "planish ignores the option cache_prompt=True",
        "planish ignores the option reasoning_effort='low'",
    ]
    assert first.completion == answered(api).completion


def test_tools_and_images_are_rejected(api):
    tool = ToolInfo(name="calculate", description="calculates")
    with pytest.raises(UnsupportedError, match="tools"):
        answered(api, tools=[tool], tool_choice="auto")
    assert answered(api, tools=[tool], tool_choice="none").completion == answered(api).completion
    with pytest.raises(UnsupportedError, match="image"):
        answered(
            api,
            messages=[ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AA==")])],
        )
    with pytest.raises(UnsupportedError, match="tools"):
        answered(api, messages=[*HELLO, ChatMessageTool(content="4", function="calculate")])


def test_parts_of_a_message():
    thought = ChatMessageAssistant(
        content=[ContentReasoning(reasoning="hm"), ContentText(text="yes")]
    )
    plain = ChatMessageUser(content=[ContentText(text="one"), ContentText(text="two")])
    assert renderer_messages([plain, thought]) == [
        {"role": "user", "content": "one\ntwo"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "yes"}],
        },
    ]


def test_tokens_are_counted_by_the_model(api):
    assert asyncio.run(api.count_text_tokens("four")) == 4
    assert asyncio.run(api.tokenize("ab")) == [97, 98]


def test_the_evaluator_of_a_training_loop(opened, tmp_path):
    evaluator = InspectEvaluator(
        greetings(), config=DRAWN, renderer=opened.renderer, log_dir=str(tmp_path)
    )
    metrics = asyncio.run(evaluator(opened.sampling_client))
    assert metrics.keys() >= {"eval/greetings/match/accuracy", "eval/greetings/match/stderr"}
    assert (metrics["eval/greetings/num_examples"], metrics["eval/greetings/num_errors"]) == (3, 0)
    assert 0 <= metrics["eval/greetings/match/accuracy"] <= 1
    again = InspectEvaluator(
        greetings(), config=DRAWN, renderer=opened.renderer, log_dir=str(tmp_path), limit=2
    )
    assert asyncio.run(again(opened.sampling_client))["eval/greetings/num_examples"] == 2


def test_a_sample_that_fails_is_counted_and_a_task_that_fails_is_an_error(opened, tmp_path):
    picture = [ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AA==")])]
    samples = [Sample(input="hello", target="x"), Sample(input=picture, target="x")]
    mixed = Task(name="mixed", dataset=samples, solver=generate(), scorer=match())
    evaluator = InspectEvaluator(
        mixed, config=DRAWN, renderer=opened.renderer, log_dir=str(tmp_path)
    )
    metrics = asyncio.run(evaluator(opened.sampling_client))
    assert (metrics["eval/mixed/num_examples"], metrics["eval/mixed/num_errors"]) == (2, 1)
    refused = DRAWN.merge(GenerateConfig(best_of=2))
    for fail_on_error, message in ((True, "best_of"), (False, "none of its samples")):
        model = Model(provider("tiny", model=opened), refused)
        logs = eval_async(
            greetings(), model=model, log_dir=str(tmp_path), fail_on_error=fail_on_error
        )
        [log] = asyncio.run(logs)
        with pytest.raises(PlanishError, match=message):
            metrics_of(log)


def test_a_model_is_found_by_its_name(small_model, monkeypatch, tmp_path):
    """The registry is filled as the entry point of an installed planish fills it."""
    monkeypatch.setenv("PLANISH_MODELS", f"tiny={small_model}")
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path))

    async def ask():
        async with get_model("planish/tiny", renderer="role_colon", memoize=False) as model:
            assert model.api.model.renderer.name == "role_colon"
            return await model.generate("hello", config=DRAWN)

    assert asyncio.run(ask()).completion


def test_the_entry_point_names_a_module_that_loads_no_torch():
    program = "import sys, planish.integrations.inspect.entry; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(planish.__file__).parents[1],
    )
    assert done.stdout.strip() == "False"
