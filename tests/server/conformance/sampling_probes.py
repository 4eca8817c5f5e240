"""Probes of SamplingClient."""

from __future__ import annotations

import pickle

from conformance.bench import Bench, awaited, probe, value


@probe("SamplingClient.sample", "num_samples, seed")
def _(bench: Bench) -> None:
    first, again = (bench.sample(4, params=bench.params(max_tokens=8)) for _ in range(2))
    tokens = [sequence.tokens for sequence in first.sequences]
    assert tokens == [sequence.tokens for sequence in again.sequences]
    assert len({tuple(part) for part in tokens}) > 1
    assert all(len(s.logprobs) == len(s.tokens) for s in first.sequences)


@probe("SamplingClient.sample", "temperature 0, top_k, top_p")
def _(bench: Bench) -> None:
    greedy = bench.sample(2, params=bench.params(temperature=0.0, seed=None)).sequences
    assert greedy[0].tokens == greedy[1].tokens
    assert bench.sample(params=bench.params(top_k=1)).sequences[0].tokens == greedy[0].tokens
    assert bench.sample(params=bench.params(top_p=0.5)).sequences


@probe("SamplingClient.sample", "stop tokens, stop strings, no stop")
def _(bench: Bench) -> None:
    params = {"max_tokens": 40, "temperature": 0.0}
    free = bench.sample(params=bench.params(stop=[], **params)).sequences[0]
    assert (free.stop_reason, len(free.tokens)) == ("length", 40)
    stopped = bench.sample(params=bench.params(stop=[free.tokens[3]], **params)).sequences[0]
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[3]) + 1]
    assert bench.sample(params=bench.params(stop=["a", "e"], **params)).sequences
    assert bench.sample(params=bench.params(stop="a", **params)).sequences


@probe("SamplingClient.sample", "include_prompt_logprobs, topk_prompt_logprobs")
def _(bench: Bench) -> None:
    response = bench.sample(include_prompt_logprobs=True, topk_prompt_logprobs=3)
    assert response.prompt_logprobs[0] is None
    assert all(p <= 0 for p in response.prompt_logprobs[1:])
    assert response.topk_prompt_logprobs[0] is None
    assert [len(row) for row in response.topk_prompt_logprobs[1:]] == [3, 3, 3]


@probe("SamplingClient.sample", "topk_sample_logprobs")
def _(bench: Bench) -> None:
    rows = bench.sample(topk_sample_logprobs=5).sequences[0].topk_logprobs
    assert all(len(row) == 5 for row in rows)


@probe("SamplingClient.sample", "target_prompt_logprobs")
def _(bench: Bench) -> None:
    targets = bench.types.TensorData(data=[2, 9, 3, -1, 4, -1], dtype="int64", shape=[3, 2])
    response = bench.sample(target_prompt_logprobs=targets, include_prompt_logprobs=True)
    rows = response.target_prompt_logprobs.tolist()
    assert [row[0] for row in rows] == response.prompt_logprobs[1:]
    assert rows[1][1] == 0.0


@probe("SamplingClient.sample", "prompt_alt_tokens_k")
def _(bench: Bench) -> None:
    alternatives = bench.sample(prompt_alt_tokens_k=2).prompt_alt_tokens
    assert alternatives.tokens.shape == [3, 2]


@probe("SamplingClient.sample", "prompt_logprobs_last_n")
def _(bench: Bench) -> None:
    response = bench.sample(include_prompt_logprobs=True, prompt_logprobs_last_n=2)
    assert [p is None for p in response.prompt_logprobs] == [True, True, False, False]


@probe("SamplingClient.sample", "200 at once")
def _(bench: Bench) -> None:
    pending = [
        bench.sampler.sample(bench.prompt(1, 2, i % 50), 2, bench.params(max_tokens=3))
        for i in range(200)
    ]
    assert all(len(value(item).sequences) == 2 for item in pending)


@probe("SamplingClient.sample", "a prompt that is too long", refused=True)
def _(bench: Bench) -> None:
    value(bench.sampler.sample(bench.prompt(*[1] * 200_000), 1, bench.params()))


@probe("SamplingClient.sample", "an image", refused=True)
def _(bench: Bench) -> None:
    chunk = bench.types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=4)
    value(bench.sampler.sample(bench.types.ModelInput(chunks=[chunk]), 1, bench.params()))


@probe("SamplingClient.sample_async")
def _(bench: Bench) -> None:
    assert awaited(bench.sampler.sample_async(bench.prompt(), 1, bench.params())).sequences


@probe("SamplingClient.compute_logprobs")
def _(bench: Bench) -> None:
    logprobs = value(bench.sampler.compute_logprobs(bench.prompt()))
    assert logprobs[0] is None
    assert len(logprobs) == 4


@probe("SamplingClient.compute_logprobs", "prompt_logprobs_last_n")
def _(bench: Bench) -> None:
    logprobs = value(bench.sampler.compute_logprobs(bench.prompt(), prompt_logprobs_last_n=1))
    assert [p is None for p in logprobs] == [True, True, True, False]


@probe("SamplingClient.compute_logprobs_async")
def _(bench: Bench) -> None:
    assert len(awaited(bench.sampler.compute_logprobs_async(bench.prompt()))) == 4


@probe("SamplingClient.get_base_model")
def _(bench: Bench) -> None:
    assert bench.sampler.get_base_model() == bench.base_model


@probe("SamplingClient.get_base_model_async")
def _(bench: Bench) -> None:
    assert awaited(bench.sampler.get_base_model_async()) == bench.base_model


@probe("SamplingClient.get_tokenizer", "no network, with --hub-tokenizers")
def _(bench: Bench) -> None:
    assert bench.sampler.get_tokenizer().encode("hello")


@probe("SamplingClient", "pickled and unpickled")
def _(bench: Bench) -> None:
    copy = pickle.loads(pickle.dumps(bench.sampler))
    assert bench.sample(sampler=copy).sequences[0].tokens == bench.sample().sequences[0].tokens


@probe("SamplingClient.get_sampler_handle")
def _(bench: Bench) -> None:
    assert isinstance(bench.sampler.get_sampler_handle(), str)


@probe("SamplingClient.from_sampler_handle")
def _(bench: Bench) -> None:
    copy = bench.of("SamplingClient").from_sampler_handle(bench.sampler.get_sampler_handle())
    assert bench.sample(sampler=copy).sequences


@probe("SamplingClient.create")
def _(bench: Bench) -> None:
    sampler = value(
        bench.of("SamplingClient").create(bench.service.holder, base_model=bench.base_model)
    )
    assert bench.sample(sampler=sampler).sequences


@probe("SamplingClient.get_telemetry")
def _(bench: Bench) -> None:
    bench.sampler.get_telemetry()


@probe("SamplingClient.on_queue_state_change", "a result that takes longer than one poll")
def _(bench: Bench) -> None:
    pending = [
        bench.sampler.sample(bench.prompt(), 8, bench.params(max_tokens=200, stop=[]))
        for _ in range(4)
    ]
    assert all(len(value(item).sequences[0].tokens) == 200 for item in pending)
