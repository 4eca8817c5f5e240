"""Preempted samples: in a KV cache that is far too small, every sample has the same bits as in a
large one.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backends import CPU, load_on, with_tiling
from test_sampler import adapter, assert_nothing_left, text_of, tokens
from variants import slow_after

from planish.engine.constraints.cache import GrammarCache
from planish.engine.sampling import reservations
from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.errors import UserError
from planish.model.decoder.decoder import Decoder
from planish.model.kernels.cpp import ops
from planish.model.kernels.reference.probe import probe
from planish.model.layers.lora import LoraWeights
from planish.model.layers.recurrence import state_bytes
from planish.model.layers.row_tiling import FIXED
from planish.service import Sample, SampledToken
from planish.testing import EOS_TOKEN_ID, VOCAB_SIZE, tiny_model
from planish.tokenizer import load_tokenizer
from planish.types import Constraint, ModelInput, SampleResponse, SamplingParams

Job = tuple[Sample, LoraWeights | None]
LARGE = 1 << 20


@pytest.fixture(autouse=True)
def _short_expectations(monkeypatch) -> None:
    """Let samples start with one span, so that many start and must be preempted."""
    monkeypatch.setattr(reservations, "_FIRST_EXPECTED_TOKENS", 1)
    monkeypatch.setattr(reservations, "_MIN_HEADROOM_TOKENS", 1)
    monkeypatch.setattr(reservations, "_WEIGHT_OF_LAST", 0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def decoder(model_dir) -> Decoder:
    return load_on(model_dir, torch.float32, CPU)


@dataclass
class Answered:
    """The responses of a run, and how its sampler got there."""

    responses: list[SampleResponse]
    num_preemptions: int
    most_at_once: int

    @property
    def bits(self) -> list[Any]:
        return [
            (s.tokens, s.logprobs, s.stop_reason, s.topk_logprobs)
            for response in self.responses
            for s in response.sequences
        ]


def sampler_of(decoder: Decoder, positions: int, **options: Any) -> Sampler:
    """Return a batch-invariant sampler whose KV cache has this many positions."""
    grammars = options.pop("grammars", None)
    settings = SamplerSettings(
        kv_cache_bytes=positions * decoder.backend.kv_spec.bytes_per_position,
        **{"max_batch": 24, "max_prefill_tokens_per_step": 96, **options},
    )
    invariant = with_tiling(decoder, probe(decoder.backend) or FIXED)
    return Sampler(invariant, settings, text_of, grammars)


def submit(sampler: Sampler, jobs: Sequence[Job]) -> list[Future[SampleResponse]]:
    futures: list[Future[SampleResponse]] = []
    for op, weights in jobs:
        sampler.validate(op)
        futures.append(Future())
        sampler.submit(op, weights, id(weights), futures[-1])
    return futures


def answer(sampler: Sampler, jobs: Sequence[Job], most_steps: int = 20_000) -> Answered:
    futures, most_at_once = submit(sampler, jobs), 0
    for _ in range(most_steps):
        if not sampler.busy:
            break
        sampler.step()
        most_at_once = max(most_at_once, len(sampler._scheduler.running))
    assert not sampler.busy
    assert_nothing_left(sampler)
    assert sampler.num_preempted_samples == 0
    return Answered([f.result(timeout=0) for f in futures], sampler.num_preemptions, most_at_once)


def request(prompt: Sequence[int], n: int = 1, **options: Any) -> Sample:
    rest = {
        name: options.pop(name)
        for name in [*options]
        if name in ("on_token", "owner", "topk_sample_logprobs", "prompt_logprobs")
    }
    params = SamplingParams(**{"stop": [], "max_tokens": 100, "seed": 5, **options})
    return Sample("sampler", ModelInput.from_ints(prompt), n, params, **rest)


def mixed_jobs(decoder: Decoder) -> list[Job]:
    """Return random requests of two owners: shared prompts and prefixes, three adapters, penalties,
    filters, stop strings, and scores of prompts.
    """
    random = np.random.default_rng(0)
    adapters = [None, adapter(decoder, 1), adapter(decoder, 2, rank=4)]
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.5, "top_k": 9},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"stop": ["e", "zq"], "min_tokens": 40},
        {"topk_sample_logprobs": 2},
        {"prompt_logprobs": True},
        {"temperature": 0.0},
    ]
    common = tokens(200, seed=9)
    return [
        (
            request(
                common[: random.integers(0, 150)] + tokens(int(random.integers(1, 90)), seed=i),
                int(random.integers(1, 4)),
                seed=i,
                max_tokens=int(random.integers(40, 120)),
                owner=f"owner {i % 2}",
                **options[i],
            ),
            adapters[i % 3],
        )
        for i in range(len(options))
    ]


@pytest.mark.parametrize(
    ("family", "dtype", "quantize", "kernels"),
    slow_after(
        1,
        [
            ("qwen3", torch.bfloat16, None, "native"),
            ("qwen3", torch.float32, None, "native"),
            ("qwen3", torch.float32, None, "torch"),
            ("qwen3", torch.bfloat16, "int8", "native"),
            ("qwen3", torch.bfloat16, "nf4", "native"),
            ("qwen3", torch.float32, "int8", "torch"),
            ("gemma3", torch.bfloat16, None, "native"),
            ("gemma3", torch.float32, None, "torch"),
            ("gpt_oss", torch.bfloat16, None, "native"),
            ("qwen3_moe", torch.bfloat16, None, "native"),
            ("qwen3_5", torch.bfloat16, None, "native"),
            ("qwen3_5", torch.float32, None, "torch"),
        ],
    ),
)
def test_preempted_samples_have_the_same_bits(
    tmp_path, monkeypatch, family, dtype, quantize, kernels
):
    """The small KV cache has space for about three samples. The cache of prefixes is off in float32."""
    if kernels == "torch":
        monkeypatch.setattr(ops, "load_library", lambda: None)
    name = "bfloat16" if dtype == torch.bfloat16 else "float32"
    tiny_model(tmp_path, family, dtype=name, intermediate=128, vocab_size=320)
    decoder = load_on(tmp_path, dtype, CPU, quantize=quantize)
    jobs = mixed_jobs(decoder)
    expected = answer(sampler_of(decoder, LARGE), jobs)
    assert expected.num_preemptions == 0
    options = {"prefix_cache_bytes": 0} if dtype == torch.float32 else {}
    per_position = decoder.backend.kv_spec.bytes_per_position
    state_positions = state_bytes(decoder.config, decoder.dtype) // per_position
    found = answer(sampler_of(decoder, 700 + 7 * state_positions, **options), jobs)
    assert found.num_preemptions > 0
    assert found.bits == expected.bits
    for one, other in zip(found.responses, expected.responses, strict=True):
        assert one.prompt_logprobs == other.prompt_logprobs


def preempt_after(sampler: Sampler, num_tokens: int) -> Callable[[], bool]:
    """Return a function that preempts each sample once it has this many tokens. It returns whether
    it preempted one.
    """
    done = set()

    @torch.inference_mode()
    def preempt() -> bool:
        victims = [
            sample
            for sample in sampler._scheduler.running
            if len(sample.tokens) >= num_tokens
            and sample not in done
            and sample.prompt.is_ready
            and sample.stop_reason is None
        ]
        for sample in victims:
            done.add(sample)
            sampler._batch.preempt(sample)
        return bool(victims)

    return preempt


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7])
def test_a_stream_continues_without_a_repeated_token(decoder, num_tokens):
    seen: list[SampledToken] = []
    op = request(tokens(70), 3, max_tokens=12, on_token=seen.append)
    expected = answer(sampler_of(decoder, LARGE), [(op, None)])
    undisturbed, sampler = list(seen), sampler_of(decoder, LARGE)
    seen.clear()
    preempt, preempted = preempt_after(sampler, num_tokens), 0
    (future,) = submit(sampler, [(op, None)])
    while sampler.busy:
        sampler.step()
        preempted += preempt()
    assert preempted
    assert Answered([future.result(timeout=0)], 0, 0).bits == expected.bits
    for index in range(3):
        assert [(t.token, t.logprob) for t in seen if t.sample == index] == [
            (t.token, t.logprob) for t in undisturbed if t.sample == index
        ]


@pytest.mark.parametrize("num_tokens", slow_after(1, [4, 0, 1, 9]))
def test_a_constraint_continues_where_it_was(decoder, model_dir, num_tokens):
    """The sample is preempted between forced tokens, and while its mask is computed."""
    grammars = GrammarCache(lambda: load_tokenizer(model_dir), VOCAB_SIZE)
    constraint = Constraint("regex", "a[b-d]{4}hello[ef]{6}world")
    op = request(tokens(30), 2, stop=[EOS_TOKEN_ID], max_tokens=30, constraint=constraint)
    expected = answer(sampler_of(decoder, LARGE, grammars=grammars), [(op, None)])
    sampler = sampler_of(decoder, LARGE, grammars=grammars)
    preempt, preempted = preempt_after(sampler, num_tokens), 0
    (future,) = submit(sampler, [(op, None)])
    while sampler.busy:
        sampler.step()
        preempted += preempt()
    assert preempted
    assert Answered([future.result(timeout=0)], 0, 0).bits == expected.bits
    assert all("hello" in text_of(s.tokens) for s in future.result(timeout=0).sequences)


def test_a_preempted_request_can_be_cancelled(decoder):
    """Its sample leaves the queue, and the others continue with the same bits."""
    jobs: list[Job] = [(request(tokens(40, seed=i), 2, seed=i), None) for i in range(4)]
    expected = answer(sampler_of(decoder, LARGE), jobs)
    sampler = sampler_of(decoder, 500)
    futures = submit(sampler, jobs)
    while not sampler.num_preempted_samples:
        sampler.step()
    cancelled = sampler._scheduler.preempted[-1].request
    number = [op for op, _ in jobs].index(cancelled.op)
    assert futures.pop(number).cancel()
    expected.responses.pop(number)
    sampler.step()
    assert all(sample.request is not cancelled for sample in sampler._scheduler.preempted)
    while sampler.busy:
        sampler.step()
    assert_nothing_left(sampler)
    assert Answered([f.result(timeout=0) for f in futures], 0, 0).bits == expected.bits


def test_an_engine_that_closes_fails_preempted_requests(decoder):
    sampler = sampler_of(decoder, 600)
    futures = submit(sampler, [(request(tokens(9, seed=i), 3), None) for i in range(4)])
    while not sampler.num_preempted_samples:
        sampler.step()
    sampler.abort_all(RuntimeError("closed"))
    assert not sampler.busy
    assert sampler.num_preemptions > 0
    assert all(future.done() for future in futures)
    again = answer(sampler, [(request(tokens(9)), None)])
    assert again.bits == answer(sampler_of(decoder, LARGE), [(request(tokens(9)), None)]).bits


def test_a_request_that_never_fits_is_rejected_before_it_waits(decoder):
    sampler = sampler_of(decoder, 320)
    fits = request(tokens(64), max_tokens=257)
    sampler.validate(fits)
    with pytest.raises(UserError, match=r"64 tokens with max_tokens=258 needs .* kv_cache_bytes"):
        sampler.validate(replace(fits, sampling_params=SamplingParams(max_tokens=258)))
    # A sample of the largest size is preempted twice, and needs one span more when it resumes.
    jobs: list[Job] = [(request([i, *tokens(63)], max_tokens=257), None) for i in range(2)]
    found = answer(sampler, jobs)
    assert found.num_preemptions > 0
    assert found.bits == answer(sampler_of(decoder, LARGE), jobs).bits


def test_more_samples_run_at_once_than_reserved_for_their_limits(decoder):
    """The limit of 2,000 tokens would let one sample run at a time. Each ends soon after 70 tokens."""
    stops_early = request(
        tokens(20), 8, max_tokens=2000, min_tokens=70, stop=list(range(0, VOCAB_SIZE, 2))
    )
    found = answer(sampler_of(decoder, 3000), [(stops_early, None)])
    assert found.most_at_once == 8
    assert found.num_preemptions == 0
    assert found.bits == answer(sampler_of(decoder, LARGE), [(stops_early, None)]).bits
