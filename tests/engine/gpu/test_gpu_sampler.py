"""The sampler's tests on a GPU: transformers on the CPU is the oracle, and each fast path equals
its slow reference but for rounding.

Bits may depend on the batch here, for there is no row tiling for GPUs; see rounding.py.
"""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import test_sampler
import torch
from backends import load_on
from rounding import assert_equal_but_for_rounding

# Collected here once more, with the fixtures below.
from test_sampler import (  # noqa: F401
    Job,
    adapter,
    drawn,
    mixed_requests,
    request,
    run,
    sampler_of,
    test_a_sample_that_outgrows_its_slot_equals_transformers,
    test_bf16_logprobs_are_close_to_float32,
    test_cancelling_frees_memory_at_any_time,
    test_chunked_prefill_equals_transformers,
    test_fail_ends_all_requests_and_the_sampler_still_works,
    test_greedy_sampling_equals_transformers_generate,
    test_logprobs_equal_transformers,
    test_on_token_receives_every_sampled_token_in_order,
    test_prompt_logprobs_top_k_targets_and_alternatives_equal_transformers,
    test_prompt_only_samples_nothing_even_in_a_full_context,
    test_stops,
    test_the_prefix_cache_never_serves_another_version,
    tokens,
)
from transformers import AutoModelForCausalLM

from planish.errors import NonFiniteError
from planish.model.decoder.decoder import Decoder
from planish.model.layers.lora import LoraWeights
from planish.types import SampleResponse

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _there(device):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_sampler, "CPU", device)
        yield


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model_dir(request, model_of):
    return model_of(request.param)


@pytest.fixture(scope="module")
def decoder(model_dir, device) -> Decoder:
    return load_on(model_dir, torch.float32, device)


@pytest.fixture(scope="module")
def theirs(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def test_batch_and_cache_change_rounding_only(decoder):
    """Requests of all kinds, nine samples at a time, then all of them again with their prompts in
    the cache.
    """
    sampler = sampler_of(decoder, max_batch=9, max_prefill_tokens_per_step=96)
    alone = [run(sampler_of(decoder), op)[0] for op in mixed_requests()]
    for _ in range(2):
        assert_equal_but_for_rounding(run(sampler, *mixed_requests()), alone)


def test_the_same_seed_gives_the_same_tokens_in_a_second_run(decoder):
    first, second = (run(sampler_of(decoder), *mixed_requests()) for _ in range(2))
    assert_equal_but_for_rounding(first, second)


def test_a_cached_prefix_equals_an_uncached_one(decoder):
    cached, uncached = sampler_of(decoder), sampler_of(decoder, prefix_cache_bytes=0)
    ops = [request(tokens(200)[: 150 + seed], 3, seed=seed, max_tokens=40) for seed in range(5)]
    run(cached, *ops)
    found, expected = run(cached, *ops), run(uncached, *ops)
    assert all(response.prompt_cache_hit_tokens >= 128 for response in found)
    assert not any(response.prompt_cache_hit_tokens for response in expected)
    assert_equal_but_for_rounding(found, expected)


def test_samples_of_one_prompt_equal_one_request_each(decoder):
    """The first samples of a request do not depend on how many are beside them; other rows then
    hold them.
    """
    ops = [
        [request(tokens(length), n, seed=11, max_tokens=70) for length in (5, 64, 130)]
        for n in (9, 4)
    ]
    many, few = (run(sampler_of(decoder), *of_count) for of_count in ops)
    for response in many:
        assert len({tuple(sequence.tokens) for sequence in response.sequences}) == 9
    first = [replace(response, sequences=response.sequences[:4]) for response in many]
    assert_equal_but_for_rounding(first, few)


@pytest.mark.parametrize(
    "ranks", [(4, 32, 5), (16,) * 11], ids=["of three ranks", "eleven of one rank"]
)
def test_requests_with_many_adapters_equal_requests_alone(decoder, ranks):
    adapters = [None, *(adapter(decoder, seed, rank) for seed, rank in enumerate(ranks))]
    jobs: list[Job] = [
        (
            request(tokens(50, seed=i // 4), 2, seed=i, max_tokens=40),
            adapters[i % len(adapters)],
            i % len(adapters),
        )
        for i in range(2 * len(adapters))
    ]
    together = run(sampler_of(decoder), *jobs)
    assert_equal_but_for_rounding(together, [run(sampler_of(decoder), job)[0] for job in jobs])
    assert len({tuple(found) for found, _ in drawn(together)}) == len(drawn(together))


def test_many_join_and_leave(decoder):
    """Sixty requests that come while others run, of which some are withdrawn: the rest is as if
    nobody had been there.
    """
    rng = np.random.default_rng(0)
    common = tokens(90, seed=9)
    ops = [
        request(
            common[: int(rng.integers(0, 90))] + tokens(int(rng.integers(1, 80)), seed=i),
            int(rng.integers(1, 6)),
            seed=i,
            max_tokens=int(rng.integers(1, 90)),
        )
        for i in range(60)
    ]
    sampler = sampler_of(decoder, max_batch=40, max_prefill_tokens_per_step=256)
    futures: list[Future[SampleResponse]] = []
    for number, op in enumerate(ops):
        futures.append(Future())
        sampler.submit(op, None, "base", futures[-1])
        for _ in range(int(rng.integers(0, 6))):
            sampler.step()
        if number % 7 == 6:
            futures[-3].cancel()
    while sampler.busy:
        sampler.step()
    test_sampler.assert_nothing_left(sampler)
    kept = [(op, future) for op, future in zip(ops, futures, strict=True) if not future.cancelled()]
    assert 40 < len(kept) < 60
    chosen = kept[::4]
    alone = [run(sampler_of(decoder), op)[0] for op, _ in chosen]
    assert_equal_but_for_rounding([future.result(timeout=0) for _, future in chosen], alone)


def test_logits_that_are_not_finite_stay_with_their_own_requests(decoder):
    layout = adapter(decoder, 1).layout
    broken = LoraWeights(layout, layout.init(1) * 0 + 1e38, decoder.backend)
    fine = adapter(decoder, 2)
    ops = [request(tokens(70, seed), 2, seed=seed, max_tokens=70) for seed in range(3)]
    expected = run(sampler_of(decoder), *((op, fine, "fine") for op in ops))
    sampler = sampler_of(decoder)
    futures: dict[str, list[Future[SampleResponse]]] = {"broken": [], "fine": []}
    for op in ops:
        for version, weights in (("broken", broken), ("fine", fine)):
            futures[version].append(Future())
            sampler.submit(op, weights, version, futures[version][-1])
    while sampler.busy:
        sampler.step()
    for future in futures["broken"]:
        with pytest.raises(NonFiniteError):
            future.result(timeout=0)
    assert_equal_but_for_rounding(
        [future.result(timeout=0) for future in futures["fine"]], expected
    )
    # Slots that held what is not finite are others' now.
    assert_equal_but_for_rounding(run(sampler, *((op, fine, "fine") for op in ops)), expected)
