# pyright: reportOptionalSubscript=false, reportOptionalIterable=false, reportOptionalMemberAccess=false, reportArgumentType=false
"""The sampler equals transformers, and every fast path equals its slow reference: shared prompts,
prefix cache, batching, adapters.
"""

import random
from asyncio import CancelledError  # not a subclass of Exception
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import pytest
import torch
from backends import CPU, load_on, with_tiling
from transformers import AutoModelForCausalLM

from planish.engine.sampling import reservations, sampler as sampler_module, scheduler
from planish.engine.sampling.prompt_scores import PromptScores
from planish.engine.sampling.requests import Prompt, PromptTensors
from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.errors import NonFiniteError
from planish.model.decoder.decoder import Decoder
from planish.model.kernels.cpp import ops
from planish.model.kernels.reference.probe import probe
from planish.model.layers.lora import LoraLayout, LoraWeights
from planish.model.layers.row_tiling import FIXED, RowTiling
from planish.model.sequences.kv_cache import KVPool, SeparateKVPool, SlotOwner
from planish.service import Sample, SampledToken
from planish.testing import EOS_TOKEN_ID, tiny_model
from planish.types import LoraConfig, ModelInput, SampleResponse, SamplingParams, TensorData

NO_STOP: list[int] = []
Job = tuple[Sample, LoraWeights | None, Any]


def text_of(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model(path, family="qwen3")
    return path


@pytest.fixture(scope="module")
def decoder(model_dir) -> Decoder:
    return load_on(model_dir, torch.float32, CPU)


@pytest.fixture(scope="module")
def theirs(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def tiling(decoder) -> RowTiling:
    return probe(decoder.backend) or FIXED


def sampler_of(decoder: Decoder, tiling: RowTiling | None = None, **settings) -> Sampler:
    return Sampler(with_tiling(decoder, tiling), SamplerSettings(**settings), text_of)


def request(prompt: Sequence[int], n: int = 1, **options) -> Sample:
    names = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p", "min_p")
    params = {"stop": NO_STOP, "max_tokens": 12, **{k: v for k, v in options.items() if k in names}}
    rest = {k: v for k, v in options.items() if k not in names}
    return Sample("sampler", ModelInput.from_ints(prompt), n, SamplingParams(**params), **rest)


def run(sampler: Sampler, *ops: Sample | Job) -> list[SampleResponse]:
    futures: list[Future[SampleResponse]] = []
    for job in ops:
        op, weights, version = job if isinstance(job, tuple) else (job, None, "base")
        sampler.validate(op)
        futures.append(Future())
        sampler.submit(op, weights, version, futures[-1])
    prompts: set[Prompt] = set()
    for _ in range(5000):
        if not sampler.busy:
            break
        sampler.step()
        prompts.update(sampler._scheduler.prompts)
    assert not sampler.busy
    assert_nothing_left(sampler)
    assert all(prompt.tensors == PromptTensors() for prompt in prompts)
    return [future.result(timeout=0) for future in futures]


def assert_nothing_left(sampler: Sampler) -> None:
    assert sampler._scheduler.reservations.num_reserved == 0
    assert not sampler._slots.prompt_pools.pools_in_use()
    assert not sampler._slots.sample_pools.pools_in_use()
    assert not sampler._requests


def drawn(responses: list[SampleResponse]) -> list[tuple[list[int], list[float]]]:
    return [(s.tokens, s.logprobs) for response in responses for s in response.sequences]


def bits_equal(one: SampleResponse, other: SampleResponse) -> bool:
    return drawn([one]) == drawn([other])


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def adapter(decoder: Decoder, seed: int, rank: int = 8) -> LoraWeights:
    layout = LoraLayout(decoder.config, LoraConfig(rank=rank))
    noise = 0.05 * torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))
    return LoraWeights(layout, layout.init(seed) + noise, decoder.backend)


def full_logprobs(theirs, prompt: list[int], temperature: float = 1.0) -> torch.Tensor:
    with torch.inference_mode():
        return (theirs(torch.tensor([prompt])).logits[0] / temperature).log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_logprobs_equal_transformers(decoder, theirs, temperature):
    prompt = tokens(75)
    (response,) = run(
        sampler_of(decoder),
        request(prompt, 3, max_tokens=70, temperature=temperature, top_k=50, top_p=0.9),
    )
    for sequence in response.sequences:
        rows = full_logprobs(theirs, prompt + sequence.tokens, temperature)[len(prompt) - 1 : -1]
        expected = rows[torch.arange(70), sequence.tokens]
        assert (torch.tensor(sequence.logprobs) - expected).abs().max() < 2e-5


def test_greedy_sampling_equals_transformers_generate(decoder, theirs):
    prompt = tokens(40, seed=3)
    (response,) = run(sampler_of(decoder), request(prompt, max_tokens=40, temperature=0.0))
    expected = theirs.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=40, eos_token_id=None
    )[0, 40:]
    assert response.sequences[0].tokens == expected.tolist()
    rows = full_logprobs(theirs, prompt + response.sequences[0].tokens)[len(prompt) - 1 : -1]
    assert (torch.tensor(response.sequences[0].logprobs) - rows.amax(-1)).abs().max() < 2e-5


def mixed_requests() -> list[Sample]:
    """Return requests with prompts of many lengths, common prefixes, several samples each, and all
    sampling options.
    """
    common = tokens(100, seed=9)
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"temperature": 0.0},
    ]
    return [
        request(
            common[: 20 * (i % 6)] + tokens(3 + 9 * i, seed=i),
            1 + i % 3,
            seed=i,
            max_tokens=5 + 13 * (i % 5),
            **options[i % 6],
        )
        for i in range(14)
    ]


@pytest.mark.slow
def test_deterministic_sampling_does_not_depend_on_batch_or_cache(decoder, tiling):
    for chosen in (tiling, FIXED):
        sampler = sampler_of(decoder, chosen, max_batch=9, max_prefill_tokens_per_step=96)
        together = drawn(run(sampler, *mixed_requests()))
        responses = run(sampler, *mixed_requests())
        assert sum(response.prompt_cache_hit_tokens for response in responses) > 300
        assert drawn(responses) == together
        alone = [run(sampler_of(decoder, chosen), op)[0] for op in mixed_requests()]
        assert drawn(alone) == together


@pytest.mark.slow
def test_without_determinism_batch_and_cache_change_only_rounding(decoder):
    sampler = sampler_of(decoder, max_batch=9, max_prefill_tokens_per_step=96)
    for _ in range(2):
        for batched, op in zip(run(sampler, *mixed_requests()), mixed_requests(), strict=True):
            (alone,) = run(sampler_of(decoder), op)
            for a, b in zip(batched.sequences, alone.sequences, strict=True):
                assert a.tokens == b.tokens
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


def test_samples_of_a_request_differ_and_do_not_depend_on_their_number(decoder, tiling):
    prompt = tokens(130)
    sampler = sampler_of(decoder, tiling)
    (shared,) = run(sampler, request(prompt, 5, seed=11, max_tokens=40))
    full = [sequence.tokens for sequence in shared.sequences]
    assert len({tuple(row) for row in full}) == 5
    (fewer,) = run(sampler_of(decoder, tiling), request(prompt, 3, seed=11, max_tokens=40))
    assert [sequence.tokens for sequence in fewer.sequences] == full[:3]
    ids = [sequence.sequence_id for sequence in shared.sequences]
    assert len(set(ids)) == 5


def test_equal_prompts_of_several_requests_are_computed_once(decoder, monkeypatch):
    sampler = sampler_of(decoder)
    computed = []
    original = sampler._prefill_pass
    monkeypatch.setattr(
        sampler,
        "_prefill_pass",
        lambda batch: (computed.append([n for _, n in batch]), original(batch)),
    )
    run(sampler, *[request(tokens(70), seed=i) for i in range(6)])
    assert computed == [[70]]


def test_a_common_prefix_within_one_batch_is_computed_once(decoder, monkeypatch):
    sampler = sampler_of(decoder)
    computed = []
    original = sampler._prefill_pass
    monkeypatch.setattr(
        sampler,
        "_prefill_pass",
        lambda batch: (computed.append([n for _, n in batch]), original(batch)),
    )
    common = tokens(100)
    run(sampler, *[request(common + tokens(20, seed=i + 1)) for i in range(4)])
    assert computed == [[120], [24, 24, 24]]


def test_requests_with_many_adapters_equal_requests_alone(decoder, tiling):
    adapters = [
        None,
        adapter(decoder, 1, rank=4),
        adapter(decoder, 2, rank=32),
        adapter(decoder, 3, rank=5),
    ]
    jobs: list[Job] = [
        (request(tokens(50, seed=i // 4), 2, seed=i, max_tokens=20), adapters[i % 4], f"v{i % 4}")
        for i in range(12)
    ]
    together = drawn(run(sampler_of(decoder, tiling), *jobs))
    alone = drawn([run(sampler_of(decoder, tiling), job)[0] for job in jobs])
    assert together == alone
    assert together[0] != together[2]


def test_the_prefix_cache_never_serves_another_version(decoder):
    sampler = sampler_of(decoder)
    prompt, first, second = tokens(100), adapter(decoder, 1), adapter(decoder, 2)
    run(sampler, (request(prompt, seed=0), first, "first"))
    (crossed,) = run(sampler, (request(prompt, seed=0), second, "second"))
    assert crossed.prompt_cache_hit_tokens == 0
    (again,) = run(sampler, (request(prompt, seed=0), second, "second"))
    assert again.prompt_cache_hit_tokens == 96
    assert again.sequences[0].tokens == crossed.sequences[0].tokens
    sampler.evict_prefixes("second")
    assert run(sampler, (request(prompt, seed=0), second, "second"))[0].prompt_cache_hit_tokens == 0


@pytest.mark.parametrize("shared", [False, True])
def test_owners_share_cached_prefixes_only_if_told_to(decoder, shared):
    """Neither a cached prefix nor the prompt of a running request serves another owner."""
    sampler = Sampler(decoder, SamplerSettings(), text_of, shares_prefixes=shared)
    prompt = tokens(100)
    ops = [request(prompt, 2, seed=0, owner=owner) for owner in ("first", "second")]
    both = run(sampler, *ops)
    prompts = 1 if shared else 2
    assert len(sampler._prefill.prefix_cache) == prompts * 3
    assert bits_equal(both[0], both[1])
    for op in ops:
        assert run(sampler, op)[0].prompt_cache_hit_tokens == 96
    (other,) = run(sampler, request(prompt, seed=0, owner="third"))
    assert other.prompt_cache_hit_tokens == (96 if shared else 0)
    sampler.evict_prefixes("base")
    assert not len(sampler._prefill.prefix_cache)


@pytest.mark.parametrize("chunk", [32, 50, 1000])
def test_chunked_prefill_equals_transformers(decoder, theirs, chunk):
    prompt = tokens(700)
    (response,) = run(
        sampler_of(decoder, max_prefill_tokens_per_step=chunk),
        request(prompt, max_tokens=3, seed=1, prompt_logprobs=True),
    )
    expected = full_logprobs(theirs, prompt)[torch.arange(699), prompt[1:]]
    assert (torch.tensor(response.prompt_logprobs[1:]) - expected).abs().max() < 5e-5
    assert response.prompt_logprobs[0] is None


def test_a_sample_that_outgrows_its_slot_equals_transformers(decoder, theirs):
    prompt = tokens(10)
    (response,) = run(sampler_of(decoder), request(prompt, 2, max_tokens=300, seed=5))
    for sequence in response.sequences:
        rows = full_logprobs(theirs, prompt + sequence.tokens)[len(prompt) - 1 : -1]
        assert (
            torch.tensor(sequence.logprobs) - rows[torch.arange(300), sequence.tokens]
        ).abs().max() < 5e-5


def test_prompt_logprobs_top_k_targets_and_alternatives_equal_transformers(decoder, theirs):
    prompt = tokens(150)
    targets = np.full((149, 2), -1)
    targets[::3, 0] = prompt[1::3][: len(targets[::3])]
    targets[5, 1] = 7
    op = request(
        prompt,
        max_tokens=4,
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        prompt_logprobs_last_n=40,
        target_prompt_logprobs=TensorData.from_numpy(targets),
        prompt_alt_tokens_k=2,
        temperature=0.8,
        seed=3,
    )
    (response,) = run(sampler_of(decoder), op)
    rows = full_logprobs(theirs, prompt)
    own = rows[torch.arange(149), prompt[1:]]
    assert response.prompt_logprobs[:110] == [None] * 110
    assert (torch.tensor(response.prompt_logprobs[110:]) - own[109:]).abs().max() < 2e-5
    assert response.topk_prompt_logprobs[:110] == [None] * 110
    for i in (110, 149):
        expected = rows[i - 1].topk(3)
        assert [token for token, _ in response.topk_prompt_logprobs[i]] == expected.indices.tolist()
        np.testing.assert_allclose(
            [p for _, p in response.topk_prompt_logprobs[i]], expected.values, atol=2e-5
        )
    answered = response.target_prompt_logprobs.to_numpy()
    asked = targets >= 0
    np.testing.assert_allclose(
        answered[asked], rows.numpy()[:149][np.nonzero(asked)[0], targets[asked]], atol=2e-5
    )
    assert not answered[~asked].any()
    warm = full_logprobs(theirs, prompt, 0.8).numpy()[:149]
    alt = response.prompt_alt_tokens
    np.testing.assert_allclose(
        alt.logprobs.to_numpy(), np.take_along_axis(warm, alt.tokens.to_numpy(), 1), atol=2e-5
    )
    assert len(np.unique(alt.tokens.to_numpy())) > 30
    sequence = response.sequences[0]
    after = full_logprobs(theirs, prompt + sequence.tokens, 0.8)[149:-1]
    for i, top in enumerate(sequence.topk_logprobs):
        assert [token for token, _ in top] == after[i].topk(2).indices.tolist()


def test_alternative_prompt_tokens_do_not_depend_on_chunked_prefill(decoder, tiling, monkeypatch):
    op = request(tokens(150), prompt_alt_tokens_k=9, seed=3, temperature=0.8)
    whole = run(sampler_of(decoder, tiling), op)[0].prompt_alt_tokens
    monkeypatch.setattr(scheduler, "_MAX_ALT_TOKENS_PER_STEP", 9 * 70)
    sampler, computed = sampler_of(decoder, tiling), []
    original = sampler._prefill_pass
    monkeypatch.setattr(
        sampler,
        "_prefill_pass",
        lambda batch: (computed.append([n for _, n in batch]), original(batch)),
    )
    pieces = run(sampler, op)[0].prompt_alt_tokens
    assert computed == [[64], [64], [22]]
    assert np.array_equal(whole.tokens.to_numpy(), pieces.tokens.to_numpy())
    assert np.array_equal(whole.logprobs.to_numpy(), pieces.logprobs.to_numpy())


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_logprobs": True},
        {"prompt_logprobs": True, "topk_prompt_logprobs": 3},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 20},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 60},
        {"targets": True},
    ],
)
def test_scoring_a_prompt_uses_its_cached_prefix(decoder, tiling, options):
    """A teacher scores several answers to one question in this way."""
    answers = [tokens(200) + tokens(20, seed=seed) for seed in range(3)]
    if options.pop("targets", False):
        targets = np.full((219, 1), -1)
        targets[199:, 0] = 5
        options = {"target_prompt_logprobs": TensorData.from_numpy(targets)}
    ops = [request(answer, max_tokens=1, seed=0, **options) for answer in answers]
    together = run(sampler_of(decoder, tiling), *ops)
    alone = [run(sampler_of(decoder, tiling), op)[0] for op in ops]
    assert [response.prompt_cache_hit_tokens for response in together] == [0, 192, 192]
    assert [response.prompt_cache_hit_tokens for response in alone] == [0, 0, 0]
    assert [r.prompt_logprobs for r in together] == [r.prompt_logprobs for r in alone]
    assert [r.topk_prompt_logprobs for r in together] == [r.topk_prompt_logprobs for r in alone]
    if options.get("target_prompt_logprobs"):
        for one, other in zip(together, alone, strict=True):
            assert np.array_equal(
                one.target_prompt_logprobs.to_numpy(), other.target_prompt_logprobs.to_numpy()
            )


def test_scoring_a_cached_prompt_is_limited_per_step(decoder, tiling, monkeypatch):
    sampler, rows = sampler_of(decoder, tiling, max_prefill_tokens_per_step=64), []
    score = sampler._prefill._add_scores
    monkeypatch.setattr(
        sampler._prefill,
        "_add_scores",
        lambda *given: rows.append(len(given[2])) or score(*given),
    )
    op = request(tokens(300), prompt_logprobs=True, prompt_only=True)
    first, again = (run(sampler, op)[0].prompt_logprobs for _ in range(2))
    assert again == first
    assert rows == [64] * 4 + [44] + [64] * 4 + [44]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_prefill_tokens_per_step": 64},
        {"prefix_cache_bytes": 100_000},
        {"prefix_cache_bytes": 0},
    ],
)
def test_prompt_logprobs_do_not_depend_on_the_prefix_cache(decoder, tiling, settings):
    """Requests with and without prompt logprobs, of two versions, use a cache that holds few or no
    chunks.
    """
    ops: list[Job] = []
    for version, weights in (("base", None), ("adapted", adapter(decoder, 1))):
        for number in range(8):
            prompt = tokens(40 + 40 * (number % 3)) + tokens(5 * number + 1, seed=number)
            questions = (
                {} if number % 4 == 3 else {"prompt_logprobs": True, "topk_prompt_logprobs": 2}
            )
            ops.append((request(prompt, seed=number, max_tokens=2, **questions), weights, version))
    sampler = sampler_of(decoder, tiling, **settings)
    alone = [run(sampler_of(decoder, tiling), op)[0] for op in ops]
    for _ in range(2):
        found = run(sampler, *ops)
        assert [r.prompt_logprobs for r in found] == [r.prompt_logprobs for r in alone]
        assert [r.topk_prompt_logprobs for r in found] == [r.topk_prompt_logprobs for r in alone]
        assert drawn(found) == drawn(alone)


def test_prompt_only_samples_nothing_even_in_a_full_context(decoder, theirs):
    prompt = tokens(decoder.config.max_context)
    op = Sample(
        "s",
        ModelInput.from_ints(prompt),
        1,
        SamplingParams(),
        prompt_logprobs=True,
        prompt_only=True,
    )
    (response,) = run(sampler_of(decoder), op)
    assert response.sequences == []
    expected = full_logprobs(theirs, prompt)[torch.arange(len(prompt) - 1), prompt[1:]]
    assert (torch.tensor(response.prompt_logprobs[1:]) - expected).abs().max() < 1e-4


def test_stops(decoder):
    prompt = tokens(30)
    sampler = sampler_of(decoder)
    (free,) = run(sampler, request(prompt, seed=2, max_tokens=200))
    whole = free.sequences[0].tokens
    assert free.sequences[0].stop_reason == "length"
    third = next(i for i, token in enumerate(whole) if i >= 3 and token not in whole[:i])
    (by_id,) = run(sampler, request(prompt, seed=2, max_tokens=200, stop=[whole[third]]))
    assert by_id.sequences[0].tokens == whole[: third + 1]
    assert by_id.sequences[0].stop_reason == "stop"
    (by_eos,) = run(sampler, request(prompt, 8, seed=2, max_tokens=400, stop=None))
    for sequence in by_eos.sequences:
        if sequence.stop_reason == "stop":
            assert sequence.tokens[-1] == EOS_TOKEN_ID
        assert EOS_TOKEN_ID not in sequence.tokens[:-1]
    text = text_of(whole)
    readable = next(i for i in range(5, len(text) - 2) if "\ufffd" not in text[i : i + 2])
    stop = text[readable : readable + 2]
    (by_text,) = run(sampler, request(prompt, seed=2, max_tokens=200, stop=stop))
    assert by_text.sequences[0].tokens == whole[: len(by_text.sequences[0].tokens)]
    assert text_of(by_text.sequences[0].tokens).find(stop) + len(stop) == len(
        text_of(by_text.sequences[0].tokens)
    )


def test_unseeded_requests_differ_and_seeded_ones_repeat(decoder):
    sampler = sampler_of(decoder)
    a, b = run(sampler, request(tokens(9)), request(tokens(9)))
    assert drawn([a]) != drawn([b])
    c, d = run(sampler, request(tokens(9), seed=1), request(tokens(9), seed=1))
    assert drawn([c]) == drawn([d])


def test_requests_beyond_memory_wait_and_give_the_same_samples(decoder, tiling):
    unlimited = drawn(run(sampler_of(decoder, tiling), *mixed_requests()))
    per_position = sampler_of(decoder)._slots.spec.bytes_per_position
    tight = sampler_of(
        decoder,
        tiling,
        kv_cache_bytes=per_position * 400,
        prefix_cache_bytes=per_position * 64,
        max_batch=3,
    )
    assert drawn(run(tight, *mixed_requests())) == unlimited
    assert len(tight._prefill.prefix_cache) <= 2


def of_all_lengths() -> list[Sample]:
    """Return requests of many lengths, so that a freed slot rarely fits the next request."""
    chosen = random.Random(0)
    return [
        request(
            tokens(chosen.choice((3, 70, 140, 300)), seed=number),
            n=chosen.choice((1, 3)),
            max_tokens=chosen.choice((2, 70, 150)),
            seed=number,
        )
        for number in range(40)
    ]


def in_step() -> list[Sample]:
    """Return one request whose samples all outgrow their slots in the same step."""
    return [request(tokens(3), n=16, max_tokens=140, seed=0)]


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "most"), [(of_all_lengths, 3000), (in_step, 64 + 16 * 192)])
@pytest.mark.parametrize("kind", [KVPool, SeparateKVPool])
def test_kv_pools_allocate_at_most_an_eighth_more_than_the_budget(
    model_dir, monkeypatch, asked, most, kind
):
    if kind is KVPool:
        monkeypatch.setattr(ops, "load_library", lambda: None)
    decoder = load_on(model_dir, torch.float32, CPU)
    if decoder.backend.pool_class is not kind:
        pytest.skip("this machine has no C++ kernels")
    monkeypatch.setattr(reservations, "_FIRST_EXPECTED_TOKENS", 1)
    per_position = sampler_of(decoder)._slots.spec.bytes_per_position
    sampler = sampler_of(
        decoder, max_batch=24, kv_cache_bytes=most * per_position, prefix_cache_bytes=0
    )
    taken, allocate = [], kind.allocate

    def noted(pool: KVPool, owner: SlotOwner) -> None:
        allocate(pool, owner)
        taken.append(sampler._slots.budget.allocated_positions)

    monkeypatch.setattr(kind, "allocate", noted)
    run(sampler, *asked())
    assert 0.8 * most < max(taken) <= most * 9 // 8
    assert sampler._slots.budget.allocated_positions == 0


def test_samples_that_end_together_are_freed_in_one_call(decoder, monkeypatch):
    """Freeing one slot at a time would copy or clear the pool once per slot, layer by layer."""
    freed = []
    kind = decoder.backend.pool_class
    free = kind._free_slots

    def noted(pool: KVPool, slots: list[int]) -> None:
        freed.append(len(slots))
        free(pool, slots)

    monkeypatch.setattr(kind, "_free_slots", noted)
    run(sampler_of(decoder), request(tokens(9), n=8, max_tokens=5, stop=[], seed=0))
    assert freed == [8, 1]


def test_cancelling_frees_memory_at_any_time(decoder):
    sampler = sampler_of(decoder, max_prefill_tokens_per_step=64, max_batch=4)
    ops = [
        request(tokens(100, seed=i % 3), 3, max_tokens=50, prompt_logprobs=i == 4) for i in range(6)
    ]
    for steps in (0, 1, 2, 5, 30):
        futures: list[Future[SampleResponse]] = [Future() for _ in ops]
        for op, future in zip(ops, futures, strict=True):
            sampler.submit(op, None, "base", future)
        for _ in range(steps):
            sampler.step()
        cancelled = [future for future in futures[:5] if future.cancel()]
        assert cancelled
        for _ in range(500):
            sampler.step()
        assert futures[5].done()
        assert not sampler.busy
        assert_nothing_left(sampler)


def test_on_token_receives_every_sampled_token_in_order(decoder):
    for asked, told_topk in ((0, 0), (3, 3)):
        told: list[SampledToken] = []
        op = request(
            tokens(30), 3, max_tokens=9, seed=1, topk_sample_logprobs=asked, on_token=told.append
        )
        (response,) = run(sampler_of(decoder), op, request(tokens(40), 2))[:1]
        for index, sequence in enumerate(response.sequences):
            mine = [drawn for drawn in told if drawn.sample == index]
            assert [drawn.token for drawn in mine] == sequence.tokens
            assert [drawn.logprob for drawn in mine] == pytest.approx(sequence.logprobs)
            assert {len(drawn.top_tokens) for drawn in mine} == {told_topk}
            if asked:
                assert [
                    [*zip(drawn.top_tokens.tolist(), drawn.top_logprobs.tolist(), strict=True)]
                    for drawn in mine
                ] == [[*row] for row in sequence.topk_logprobs]
        assert len(told) == 27


def test_on_token_does_not_change_the_samples(decoder):
    silent, heard = (
        request(tokens(30), 3, max_tokens=9, seed=1, on_token=hook)
        for hook in (None, lambda drawn: None)
    )
    assert drawn(run(sampler_of(decoder), silent)) == drawn(run(sampler_of(decoder), heard))


@pytest.mark.parametrize(
    ("at", "kind"), [(1, LookupError), (5, LookupError), (9, LookupError), (5, CancelledError)]
)
def test_an_on_token_error_fails_only_its_request(decoder, at, kind):
    told: list[SampledToken] = []

    def listen(drawn: SampledToken) -> None:
        told.append(drawn)
        if len(told) == at:
            raise kind("the listener is gone")

    sampler = sampler_of(decoder)
    futures: list[Future[SampleResponse]] = [Future(), Future()]
    sampler.submit(request(tokens(30), 1, max_tokens=9, on_token=listen), None, "base", futures[0])
    sampler.submit(request(tokens(30), 1, max_tokens=9), None, "base", futures[1])
    while sampler.busy:
        sampler.step()
    with pytest.raises(kind, match="the listener is gone"):
        futures[0].result(timeout=0)
    assert len(told) == at
    assert len(futures[1].result(timeout=0).sequences[0].tokens) == 9
    assert_nothing_left(sampler)


@pytest.mark.slow
@pytest.mark.parametrize("size", [float("nan"), 1e20, 1e38])
def test_non_finite_logits_fail_only_their_requests(decoder, tiling, size):
    """Later requests are unaffected too, although they reuse slots with non-finite values."""
    broken = LoraWeights(
        adapter(decoder, 1).layout,
        adapter(decoder, 1).layout.init(1) * 0 + size,
        decoder.backend,
    )
    theirs = [request(tokens(70, seed), 2, seed=seed, max_tokens=70) for seed in range(3)]
    alone = drawn(
        run(sampler_of(decoder, tiling), *((op, adapter(decoder, 2), "fine") for op in theirs))
    )
    sampler, failing, fine = sampler_of(decoder, tiling), [], []
    for op in theirs:
        failing.append(Future())
        sampler.submit(op, broken, "broken", failing[-1])
        fine.append(Future())
        sampler.submit(op, adapter(decoder, 2), "fine", fine[-1])
    while sampler.busy:
        sampler.step()
    for future in failing:
        with pytest.raises(NonFiniteError, match="lower learning_rate"):
            future.result(timeout=0)
    assert drawn([future.result(timeout=0) for future in fine]) == alone
    assert drawn(run(sampler, *((op, adapter(decoder, 2), "fine") for op in theirs))) == alone
    after = drawn(
        run(
            sampler,
            *(
                (request(tokens(90, seed), 3, seed=seed, max_tokens=100), None, "base")
                for seed in range(5)
            ),
        )
    )
    fresh = drawn(
        run(
            sampler_of(decoder, tiling),
            *(request(tokens(90, seed), 3, seed=seed, max_tokens=100) for seed in range(5)),
        )
    )
    assert after == fresh


@pytest.mark.parametrize(
    "scores",
    [
        {"prompt_logprobs": True},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 2},
        {"topk_prompt_logprobs": 2},
        {"target_prompt_logprobs": TensorData.from_numpy(np.full((19, 1), 7, np.int64))},
    ],
    ids=lambda scores: " ".join(scores),
)
def test_prompt_scores_that_are_not_finite_are_an_error(decoder, scores):
    """In a response, None stands for a score that was not requested, not for NaN."""
    layout = adapter(decoder, 1).layout
    broken = LoraWeights(layout, layout.init(1) * 0 + torch.nan, decoder.backend)
    sampler = sampler_of(decoder)
    futures: list[Future[SampleResponse]] = [Future(), Future()]
    op = request(tokens(20), prompt_only=True, **scores)
    sampler.submit(op, broken, "broken", futures[0])
    sampler.submit(op, None, "base", futures[1])
    while sampler.busy:
        sampler.step()
    assert isinstance(futures[0].exception(timeout=0), NonFiniteError)
    futures[1].result(timeout=0)
    assert_nothing_left(sampler)


@pytest.mark.parametrize("kernels", [True, False])
def test_a_slot_with_non_finite_values_does_not_affect_its_next_owner(
    model_dir, monkeypatch, kernels
):
    """Another request keeps the pool in use, so the pool is not reallocated before the slot is
    reused.
    """
    if not kernels:
        monkeypatch.setattr(ops, "load_library", lambda: None)
    decoder = load_on(model_dir, torch.float32, CPU)
    layout = adapter(decoder, 1).layout
    broken = LoraWeights(layout, layout.init(1) * 0 + 1e20, decoder.backend)
    late = request(tokens(40, 3), seed=3, max_tokens=8)
    (alone,) = run(sampler_of(decoder), late)
    sampler = sampler_of(decoder)
    futures: list[Future[SampleResponse]] = [Future() for _ in range(3)]
    sampler.submit(request(tokens(40, 1), max_tokens=60), None, "base", futures[0])
    sampler.submit(request(tokens(60, 2), max_tokens=8), broken, "broken", futures[1])
    while not futures[1].done():
        sampler.step()
    sampler.submit(late, None, "base", futures[2])
    while sampler.busy:
        sampler.step()
    assert isinstance(futures[1].exception(), NonFiniteError)
    assert futures[2].result(timeout=0).sequences[0].tokens == alone.sequences[0].tokens


def test_a_request_cancelled_with_non_finite_logits_ends_once(decoder, monkeypatch):
    """Each of its samples finds the request already ended."""
    layout = adapter(decoder, 1).layout
    broken = LoraWeights(layout, layout.init(1) * 0 + torch.nan, decoder.backend)
    sampler = sampler_of(decoder)
    future: Future[SampleResponse] = Future()
    sampler.submit(request(tokens(20), 3), broken, "broken", future)
    prefill = sampler._prefill_pass
    monkeypatch.setattr(sampler, "_prefill_pass", lambda batch: (future.cancel(), prefill(batch)))
    sampler.step()
    sampler.abort_all(RuntimeError("the device is gone"))
    assert wait([future], timeout=0).done
    assert future.cancelled()


def test_waiting_for_a_cancelled_request_returns(decoder):
    sampler = sampler_of(decoder)
    futures: list[Future[SampleResponse]] = [Future(), Future()]
    for future in futures:
        sampler.submit(request(tokens(20)), None, "base", future)
    sampler.step()
    futures[0].cancel()
    while sampler.busy:
        sampler.step()
    assert wait(futures, timeout=0).done == set(futures)


@pytest.mark.parametrize("fault", ["text", "scores"])
def test_an_error_while_handling_one_request_fails_only_that_request(decoder, monkeypatch, fault):
    def broken(*_):
        raise LookupError("a fault")

    sampler = sampler_of(decoder)
    if fault == "text":
        monkeypatch.setattr(sampler._detokenizer, "decode", broken)
        op = request(tokens(30), 2, stop="x")
    else:
        monkeypatch.setattr(PromptScores, "add", broken)
        op = request(tokens(30), 2, prompt_logprobs=True)
    futures: list[Future[SampleResponse]] = [Future(), Future()]
    for future, asked in zip(futures, (op, request(tokens(30), 2)), strict=True):
        sampler.submit(asked, None, "base", future)
    while sampler.busy:
        sampler.step()
    with pytest.raises(LookupError, match="a fault"):
        futures[0].result(timeout=0)
    assert len(futures[1].result(timeout=0).sequences) == 2
    assert_nothing_left(sampler)


def test_fail_ends_all_requests_and_the_sampler_still_works(decoder):
    sampler = sampler_of(decoder)
    future: Future[SampleResponse] = Future()
    sampler.submit(request(tokens(20)), None, "base", future)
    sampler.step()
    sampler.abort_all(RuntimeError("the device is gone"))
    with pytest.raises(RuntimeError, match="the device is gone"):
        future.result(timeout=0)
    run(sampler, request(tokens(20)))


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (request([]), "prompt is empty"),
        (request([999]), "999"),
        (
            request([1] * 100, n=4096, max_tokens=400, topk_sample_logprobs=48),
            "could have 612 MiB, and the limit is 512",
        ),
        (request(tokens(2000), max_tokens=100), "2000.*48.*100"),
        (request(tokens(3000)), "2048.*3000"),
        (request([1], stop=[5000]), "stop"),
        (request([1, 2], prompt_logprobs_last_n=1), "include_prompt_logprobs"),
        (request([1, 2], prompt_logprobs=True, prompt_logprobs_last_n=0), "prompt_logprobs_last_n"),
        (
            request([1, 2], target_prompt_logprobs=TensorData([[1], [1]], "int64", [2, 1])),
            r"\[1, K\]",
        ),
        (request([1, 2], target_prompt_logprobs=TensorData([[500]], "int64", [1, 1])), "outside"),
        (request([1], prompt_only=True), "prompt_only"),
    ],
)
def test_invalid_requests_are_rejected_by_option_name(decoder, op, message):
    with pytest.raises(ValueError, match=message):
        sampler_of(decoder).validate(op)


def test_a_request_larger_than_the_kv_cache_is_rejected(decoder):
    sampler = sampler_of(
        decoder, kv_cache_bytes=sampler_of(decoder)._slots.spec.bytes_per_position * 100
    )
    with pytest.raises(ValueError, match="kv_cache_bytes"):
        sampler.validate(request(tokens(80), max_tokens=60))


def test_bf16_logprobs_are_close_to_float32(tmp_path):
    tiny_model(tmp_path, family="llama", dtype="bfloat16")
    prompt = tokens(60)
    decoder = load_on(tmp_path, torch.bfloat16, CPU)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    (response,) = run(sampler_of(decoder), request(prompt, 4, max_tokens=40, seed=0))
    gaps = []
    for sequence in response.sequences:
        rows = full_logprobs(exact, prompt + sequence.tokens)[len(prompt) - 1 : -1]
        gaps.append(torch.tensor(sequence.logprobs) - rows[torch.arange(40), sequence.tokens])
    assert torch.cat(gaps).abs().max() < 0.1
    assert torch.cat(gaps).square().mean() / 2 < 2e-4


@pytest.mark.parametrize(("owner", "is_held_up"), [("ben", True), ("anna", False)])
def test_prompts_take_half_of_the_time_beside_samples_of_another_owner(
    decoder, monkeypatch, owner, is_held_up
):
    now = [100.0]
    monkeypatch.setattr(sampler_module, "perf_counter", lambda: now[0])
    sampler = sampler_of(decoder)
    prefill = sampler._prefill_pass

    def slow_prefill(batch) -> None:
        prefill(batch)
        now[0] += 5.0

    monkeypatch.setattr(sampler, "_prefill_pass", slow_prefill)
    first, second = Future(), Future()
    sampler.submit(request(tokens(40, 1), owner="anna"), None, "base", first)
    sampler.step()
    (sample,) = sampler._scheduler.running
    sampler.submit(request(tokens(40, 2), owner=owner), None, "base", second)
    now[0] += 4.0
    sampler.step()
    assert len(sample.tokens) == 3  # the first token, and one decoded in each step
    assert bool(sampler._scheduler.waiting) == is_held_up
    now[0] += 1.0
    sampler.step()
    assert not sampler._scheduler.waiting
    while sampler.busy:
        sampler.step()
    assert len(second.result(timeout=0).sequences[0].tokens) == 12
