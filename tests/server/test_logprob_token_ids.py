"""Logprobs of the tokens that a request lists, on a real socket."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from scripted_server import BASE, CHAT, HELLO, Served, serving

from planish import ModelInput
from planish.errors import UserError
from planish.service import CreateSampler, Sample
from planish.types import MAX_SCORED_TOKENS, SamplingParams

numbers = count()
IDS = [97, 5, 259, 32]
VOCABULARY = 272


@pytest.fixture(scope="module")
def served(model_dir, tmp_path_factory) -> Iterator[Served]:
    models: dict[str, Path] = dict.fromkeys((BASE, CHAT), model_dir)
    with serving(models, tmp_path_factory.mktemp("listed")) as served:
        yield served


@pytest.fixture(scope="module")
def client(served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def sampled(served: Served, temperature: float = 1.0, **options: Any) -> Any:
    """Return a sample of six tokens."""
    name = f"listed-{next(numbers)}"
    served.engine.submit(CreateSampler(name, base_model=BASE)).result(60)
    prompt, params = (
        ModelInput.from_ints([1, 2, 3]),
        SamplingParams(6, seed=3, temperature=temperature, top_p=0.9, logit_bias={7: 2.0}),
    )
    return served.engine.submit(Sample(name, prompt, 1, params, **options)).result(60)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_listed_logprobs_are_those_of_the_log_softmax(served, temperature):
    [listed] = sampled(served, temperature, logprob_token_ids=IDS).sequences
    [whole] = sampled(served, temperature, topk_sample_logprobs=VOCABULARY).sequences
    assert listed.tokens == whole.tokens
    softmax = np.zeros((6, VOCABULARY))
    for row, (ids, values) in enumerate(
        zip(whole.topk_logprobs_np.token_ids, whole.topk_logprobs_np.logprobs, strict=True)
    ):
        softmax[row, ids] = values
    assert np.allclose(np.exp(softmax).sum(axis=1), 1, atol=1e-5)
    assert listed.topk_logprobs_np.token_ids.tolist() == [IDS] * 6
    assert np.allclose(listed.topk_logprobs_np.logprobs, softmax[:, IDS], atol=1e-5)
    # The logprob of the sampled token is the same number in both places.
    [own] = sampled(served, temperature, logprob_token_ids=listed.tokens[:1]).sequences
    assert own.topk_logprobs_np.logprobs[0, 0] == own.logprobs_np[0]


def test_chats_and_texts_return_listed_logprobs(client):
    shared: Any = {"max_tokens": 5, "seed": 4, "extra_body": {"logprob_token_ids": IDS}}
    tops: Any = {"max_tokens": 5, "seed": 4}
    options: Any = {"model": CHAT, "messages": HELLO, "logprobs": True}
    [choice] = client.chat.completions.create(**options, **shared).choices
    chunks = list(client.chat.completions.create(**options, **shared, stream=True))
    entries = choice.logprobs.content
    streamed = [
        entry
        for chunk in chunks
        for one in chunk.choices
        if one.logprobs
        for entry in one.logprobs.content
    ]
    assert streamed == entries
    whole = client.chat.completions.create(**options, **tops, top_logprobs=20).choices[0]
    for entry, likeliest in zip(entries, whole.logprobs.content, strict=True):
        assert [one.bytes for one in entry.top_logprobs][:2] == [[97], [5]]
        assert len(entry.top_logprobs) == len(IDS)
        known = {tuple(one.bytes): one.logprob for one in likeliest.top_logprobs}
        for one in entry.top_logprobs:
            if tuple(one.bytes) in known:
                assert one.logprob == pytest.approx(known[tuple(one.bytes)], abs=1e-5)
    [text] = client.completions.create(
        model=BASE, prompt="The sea is", logprobs=0, **shared
    ).choices
    for token, logprob, top in zip(
        text.logprobs.tokens, text.logprobs.token_logprobs, text.logprobs.top_logprobs, strict=True
    ):
        assert {"a", "\x05", " ", token} <= set(top)
        assert top[token] == logprob
        assert list(top.values()) == sorted(top.values(), reverse=True)


def test_requests_with_and_without_listed_tokens_share_a_batch(client):
    [alone] = client.completions.create(
        model=BASE, prompt="One", max_tokens=8, seed=1, logprobs=3
    ).choices
    both = client.completions.create(
        model=BASE,
        prompt=["One", "Two"],
        max_tokens=8,
        seed=1,
        logprobs=3,
        extra_body={"logprob_token_ids": [1]},
    ).choices
    assert both[0].logprobs.token_logprobs == alone.logprobs.token_logprobs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logprob_token_ids": [1]}, "needs logprobs"),
        ({"logprob_token_ids": [], "logprobs": 0}, "at least 1 item"),
        ({"logprob_token_ids": [VOCABULARY], "logprobs": 0}, "outside the vocabulary"),
        ({"logprob_token_ids": [1] * (MAX_SCORED_TOKENS + 1), "logprobs": 0}, "at most 1024"),
        ({"logprob_token_ids": ["1"], "logprobs": 0}, "valid integer"),
    ],
)
def test_wrong_lists_are_rejected(client, options, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(model=BASE, prompt="x", max_tokens=1, extra_body=options)


def test_the_engine_limits_the_list(served):
    with pytest.raises(UserError, match="give at most 1,024"):
        sampled(served, logprob_token_ids=[1] * (MAX_SCORED_TOKENS + 1))
