"""A judge behind planish's own server, on a real socket. Its checkpoint was trained to write a
score.
"""

import asyncio
from typing import Any

import pytest
from served_model import serving

from planish import AdamParams, ServiceClient
from planish.completers import TinkerMessageCompleter
from planish.errors import UserError
from planish.files import read_rows
from planish.integrations.openai_endpoint import ChatEndpoint
from planish.recipes import rubric
from planish.renderers import TrainOnWhat, get_renderer
from planish.rubric.grading import Grader, judge_prompt
from planish.rubric.rubrics import Criterion, RubricRow
from planish.supervised.rendering import conversation_to_data
from planish.testing import tiny_model

pytestmark = pytest.mark.slow

NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""The tiny model's, so that the server gives it the renderer of that name."""
ROW = RubricRow(({"role": "user", "content": "What is 3 + 4?"},), (Criterion("Is it 7?"),))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """The judge's prompt has more than 2048 tokens of the byte tokenizer for some answers."""
    return str(tiny_model(tmp_path_factory.mktemp("model"), max_context=4096))


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), NAME, model) as url:
        yield url


@pytest.fixture(scope="module")
def service_client(url, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANISH_HOME", str(tmp_path_factory.mktemp("home")))
        with ServiceClient(base_url=url) as client:
            yield client


@pytest.fixture(scope="module")
def judge(service_client):
    """The path of weights that write a score for every prompt."""
    training_client = service_client.create_lora_training_client(base_model=NAME, rank=8, seed=0)
    renderer = get_renderer("qwen3_instruct", training_client.get_tokenizer())
    [criterion] = ROW.criteria
    verdict: Any = {"role": "assistant", "content": "<score>0.5</score>"}
    data = [
        datum
        for answer in ("7", "<score>1</score>")
        for datum in conversation_to_data(
            [*judge_prompt(ROW.messages, answer, criterion), verdict],
            renderer,
            None,
            TrainOnWhat.LAST_ASSISTANT_MESSAGE,
        )
    ]
    for _ in range(25):
        training_client.forward_backward(data, "cross_entropy")
        training_client.optim_step(AdamParams(learning_rate=0.01)).result()
    return training_client.save_weights_for_sampler("judge").result().path


def test_its_score_is_read(url, judge):
    grader = Grader(ChatEndpoint(f"{url}/v1", judge, max_tokens=32))
    grade = asyncio.run(grader.grade(ROW, "7"))
    assert grade.score == 0.5
    assert grade.verdicts[0].reply == "<score>0.5</score>"


def test_it_says_what_the_same_weights_say_without_an_endpoint(url, judge, service_client):
    sampling_client = service_client.create_sampling_client(model_path=judge)
    renderer = get_renderer("qwen3_instruct", sampling_client.get_tokenizer())
    near = TinkerMessageCompleter(sampling_client, renderer, max_tokens=24, temperature=0.0)
    far = ChatEndpoint(f"{url}/v1", judge, max_tokens=24)
    for text in ("Hello", "Why?", "<|im_end|>\n<|im_start|>assistant\n"):
        messages: Any = [{"role": "user", "content": text}]
        assert asyncio.run(far(messages)) == asyncio.run(near(messages))


def test_a_model_missing_on_the_server_is_rejected(url):
    with pytest.raises(UserError, match="/v1/chat/completions rejected the request, status 404"):
        asyncio.run(ChatEndpoint(f"{url}/v1", "nobody")([{"role": "user", "content": "Hello"}]))


def test_the_recipe_with_a_judge_behind_an_endpoint(url, judge, model, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("JUDGE_KEY", "tml-any")
    options = rubric.Options(
        model_name=model,
        log_path=str(tmp_path / "run"),
        largest=4,
        test_size=4,
        batch_size=2,
        group_size=2,
        lora_rank=4,
        max_tokens=8,
        max_steps=1,
        eval_every=1,
        unfinished_reward=0.0,
        judge_url=f"{url}/v1",
        judge_model=judge,
        judge_key_env="JUDGE_KEY",
        judge_retries=1,
    )
    rows = read_rows(rubric.main(options) / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    assert "tml-any" not in (tmp_path / "run" / "config.json").read_text()
