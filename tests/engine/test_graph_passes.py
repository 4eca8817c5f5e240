"""The engine as it runs on a GPU against the plain one, on a small model; without a GPU its kernels are interpreted, and steps are run again instead of launched."""

import pytest
import torch
from test_sampler import adapter, request, run, tokens

from planish.engine.graph_passes import GraphPasses, graph_sizes
from planish.engine.passes import PlainPasses
from planish.engine.sampler import Sampler, SamplerSettings
from planish.model.decoder import Decoder
from planish.testing import tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Decoder:
    # One layer: the interpreter takes seconds for each. That layers have tables of their own is tested with the tables.
    directory = tiny_model(tmp_path_factory.mktemp("model"), family="qwen3", layers=1)
    return Decoder.load(directory, torch.float32, DEVICE)


def sampler_of(decoder: Decoder, **settings) -> Sampler:
    return Sampler(decoder, SamplerSettings(**settings), lambda _: "", None)


@pytest.fixture
def with_kernels(monkeypatch):
    def switch(kernels: str) -> None:
        monkeypatch.setenv("PLANISH_KERNELS", kernels)

    return switch


def test_a_gpu_s_sampler_draws_what_the_plain_one_does(decoder, with_kernels):
    """Several adapters and none, prompts that share a beginning, samples that end early and others that join, in more rows than one graph has."""
    tenants = [None, adapter(decoder, 1), adapter(decoder, 2, rank=4)]
    jobs = []
    for index in range(6):
        prompt = tokens(70 if index % 2 else 40) + tokens(index, seed=index)
        op = request(prompt, 1 + index % 3, max_tokens=2 + index % 4, seed=index, topk_sample_logprobs=2)
        jobs.append((op, tenants[index % 3], f"version {index % 3}"))
    answers = []
    for kernels, passes in (("torch", PlainPasses), ("triton", GraphPasses)):
        with_kernels(kernels)
        sampler = sampler_of(decoder, max_batch=5, prefill_tokens=64)
        assert isinstance(sampler._passes, passes)
        answers.append([s for response in run(sampler, *jobs) for s in response.sequences])
    for plain, graphs in zip(*answers, strict=True):
        assert graphs.tokens == plain.tokens
        assert graphs.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
        for ours, theirs in zip(graphs.topk_logprobs, plain.topk_logprobs, strict=True):
            assert [token for token, _ in ours] == [token for token, _ in theirs]


def test_an_idle_sampler_keeps_no_adapter(decoder, with_kernels):
    with_kernels("triton")
    sampler = sampler_of(decoder, max_batch=2)
    run(sampler, (request(tokens(5), max_tokens=2), adapter(decoder, 1), "one"))
    assert isinstance(sampler._passes, GraphPasses)
    assert not sampler._passes._adapters._slots
    assert not sampler._passes._prefill_adapters._slots


def test_graphs_hold_every_batch_with_little_to_spare():
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(256)[-3:] == [128, 192, 256]
    assert graph_sizes(1500)[-4:] == [768, 1024, 1280, 1500]
