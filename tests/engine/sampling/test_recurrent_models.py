"""The sampler with recurrent states (Qwen3.5, LFM2, Nemotron-H): the batch, cached prefixes, cancelled
neighbours and late grammar masks change no bit of a sample.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from backends import CPU, with_tiling
from transformers import AutoModelForCausalLM
from variants import slow_after

from planish.engine.constraints.cache import GrammarCache
from planish.engine.constraints.grammar import Grammar
from planish.engine.sampling.plan import StepOutput, StepPlan
from planish.engine.sampling.requests import Prompt, PromptTensors, RunningSample
from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.engine.training.trainer_settings import TrainerSettings
from planish.errors import UserError
from planish.model.architecture.config import ModelConfig
from planish.model.decoder.base_decoder import BaseDecoder
from planish.model.kernels.choose import choose_backend
from planish.model.kernels.reference.probe import probe
from planish.model.layers.lora import LoraLayout, LoraWeights
from planish.model.layers.recurrence import state_bytes
from planish.model.layers.row_tiling import FIXED, RowTiling
from planish.model.loading import load_decoder
from planish.model.sequences.positions import STATE_CHUNK
from planish.service import Sample
from planish.testing import EOS_TOKEN_ID, VOCAB_SIZE, tiny_model, tiny_transformers_model
from planish.tokenizer import load_tokenizer
from planish.types import Constraint, LoraConfig, ModelInput, SampleResponse, SamplingParams

OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "lfm2": {},
    "falcon_h1": {},
    # torch computes the router of its experts, and the last bits depend on the batch.
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
}
"""The models whose layers transformers' code computes, with their options."""


@pytest.fixture(
    scope="module",
    params=slow_after(1, ["qwen3_5", "lfm2", "qwen3_5_moe", "nemotron_h", "falcon_h1"]),
)
def model_dir(tmp_path_factory, request):
    path = tmp_path_factory.mktemp("model")
    if request.param in OF_TRANSFORMERS:
        options = OF_TRANSFORMERS[request.param]
        return tiny_transformers_model(path, request.param, max_position_embeddings=2048, **options)
    return tiny_model(path, request.param, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def decoder(model_dir) -> BaseDecoder:
    config = ModelConfig.from_directory(model_dir)
    return load_decoder(model_dir, choose_backend(config, torch.float32, CPU, deterministic=False))


@pytest.fixture(scope="module")
def tiling(decoder) -> RowTiling:
    return probe(decoder.backend) or FIXED


def sampler_of(decoder: BaseDecoder, tiling: RowTiling, **settings: int) -> Sampler:
    return Sampler(with_tiling(decoder, tiling), SamplerSettings(**settings), str)


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def request(prompt: Sequence[int], n: int = 1, **options) -> Sample:
    params = SamplingParams(**{"stop": [], "max_tokens": 12, "seed": 5, **options})
    return Sample("sampler", ModelInput.from_ints(prompt), n, params)


def submit(
    sampler: Sampler, op: Sample, weights: LoraWeights | None = None
) -> Future[SampleResponse]:
    sampler.validate(op)
    future: Future[SampleResponse] = Future()
    sampler.submit(op, weights, id(weights), future)
    return future


def finish(sampler: Sampler) -> None:
    prompts: set[Prompt] = set()
    samples: set[RunningSample] = set()
    for _ in range(2000):
        if not sampler.busy:
            break
        sampler.step()
        prompts.update(sampler._scheduler.prompts)
        samples.update(sampler._scheduler.running)
    assert not sampler.busy
    assert all(prompt.tensors == PromptTensors() for prompt in prompts)
    assert all(sample.recurrent_state is sample.next_state is None for sample in samples)
    assert sampler._scheduler.reservations.num_reserved == 0


def answer(sampler: Sampler, op: Sample, weights: LoraWeights | None = None) -> SampleResponse:
    future = submit(sampler, op, weights)
    finish(sampler)
    return future.result(timeout=0)


def bits(response: SampleResponse) -> list[tuple[list[int], list[float]]]:
    return [(sequence.tokens, sequence.logprobs) for sequence in response.sequences]


def adapter(decoder: BaseDecoder, seed: int) -> LoraWeights:
    layout = LoraLayout(decoder.config, LoraConfig(rank=8))
    noise = 0.05 * torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))
    return LoraWeights(layout, layout.init(seed) + noise, decoder.backend)


def test_greedy_samples_equal_transformers(decoder, model_dir, tiling):
    prompt = tokens(STATE_CHUNK + 9)
    theirs: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
    found = answer(sampler_of(decoder, tiling), request(prompt, temperature=0.0, max_tokens=20))
    ours, greedy = found.sequences[0].tokens, expected[0, len(prompt) :].tolist()
    assert ours[: len(greedy)] == greedy  # transformers stops at the end of a turn


@pytest.mark.parametrize("settings", slow_after(1, [{"max_prefill_tokens_per_step": 96}, {}]))
@pytest.mark.parametrize("common", [STATE_CHUNK - 1, STATE_CHUNK, 2 * STATE_CHUNK + 40])
def test_a_cached_prefix_changes_no_bit(decoder, tiling, settings, common):
    """The prompts differ within a chunk or at its end, so the hit ends at the chunk's start."""
    sampler = sampler_of(decoder, tiling, **settings)
    prompts = [tokens(common) + tokens(30, seed) for seed in (1, 2)]
    for index, prompt in enumerate(prompts):
        alone = answer(sampler_of(decoder, tiling), request(prompt, 2))
        found = answer(sampler, request(prompt, 2))
        assert bits(found) == bits(alone)
        chunk = sampler._prefill.chunk_size
        assert found.prompt_cache_hit_tokens == (common // chunk * chunk if index else 0)


def test_a_conversation_continues_from_its_cached_turns(decoder, tiling):
    sampler, prompt = sampler_of(decoder, tiling), tokens(STATE_CHUNK + 20)
    for turn in range(3):
        found = answer(sampler, request(prompt))
        assert bits(found) == bits(answer(sampler_of(decoder, tiling), request(prompt)))
        assert (found.prompt_cache_hit_tokens > 0) == (turn > 0)
        prompt += found.sequences[0].tokens + tokens(STATE_CHUNK // 2, seed=turn)


def test_the_prefix_cache_counts_the_bytes_of_states(decoder, tiling):
    size = state_bytes(decoder.config, decoder.dtype)
    sampler = sampler_of(decoder, tiling)
    prompt = tokens(STATE_CHUNK + 1)
    answer(sampler, request(prompt))
    (chunk,) = sampler._prefill.prefix_cache.find((id(None), ""), prompt)
    assert chunk.state is not None
    parts = (
        chunk.keys_values.keys,
        chunk.keys_values.values,
        chunk.hidden,
        chunk.state.conv,
        chunk.state.matrices,
    )
    total = sum(part.nbytes for part in parts)
    assert total > size
    for slack in (-1, 0):
        sampler = sampler_of(decoder, tiling, prefix_cache_bytes=total + slack)
        assert sampler._prefill.prefix_cache.capacity == 1 + slack
        assert bits(answer(sampler, request(prompt))) == bits(answer(sampler, request(prompt)))


def test_many_adapters_in_one_batch_and_each_alone(decoder, tiling):
    weights = [None, adapter(decoder, 1), adapter(decoder, 2)]
    ops = [request(tokens(40 + 3 * i, i), 1 + i) for i in range(3)]
    sampler = sampler_of(decoder, tiling)
    futures = [submit(sampler, op, own) for op, own in zip(ops, weights, strict=True)]
    finish(sampler)
    for op, own, future in zip(ops, weights, futures, strict=True):
        alone = answer(sampler_of(decoder, tiling), op, own)
        assert bits(future.result(timeout=0)) == bits(alone)


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_a_cancelled_request_leaves_its_neighbours_unchanged(decoder, tiling, steps):
    sampler, prompt = sampler_of(decoder, tiling), tokens(50)
    kept = submit(sampler, request(prompt, 3))
    dropped = [submit(sampler, request(prompt, 2, seed=9)), submit(sampler, request(tokens(70, 3)))]
    for _ in range(steps):
        sampler.step()
    for future in dropped:
        future.cancel()
    finish(sampler)
    again = answer(sampler, request(prompt, 3))
    assert bits(kept.result(timeout=0)) == bits(again)
    assert bits(again) == bits(answer(sampler_of(decoder, tiling), request(prompt, 3)))


def test_requests_beyond_memory_wait(decoder, tiling):
    """The KV cache has room for the states of about four sequences."""
    size = state_bytes(decoder.config, decoder.dtype)
    sampler = sampler_of(decoder, tiling, kv_cache_bytes=4 * size + 8 * 64 * 128)
    ops = [request(tokens(40, i), 2, seed=i) for i in range(6)]
    futures = [submit(sampler, op) for op in ops]
    most = 0
    while sampler.busy:
        sampler.step()
        states = [prompt.tensors.state for prompt in sampler._scheduler.prompts]
        states += [sample.recurrent_state for sample in sampler._scheduler.running]
        most = max(most, sum(state is not None for state in states))
    assert 2 <= most <= 4
    for op, future in zip(ops, futures, strict=True):
        expected = answer(sampler_of(decoder, tiling), op)
        assert bits(future.result(timeout=0)) == bits(expected)
    with pytest.raises(UserError, match="kv_cache_bytes"):
        sampler_of(decoder, tiling, kv_cache_bytes=size).validate(ops[0])


@pytest.mark.parametrize("pattern", ["[a-f]{10}", "a[b-d]{2}hello[ef]{2}world"])
def test_a_late_mask_does_not_advance_a_state_twice(
    decoder, tiling, model_dir, monkeypatch, pattern
):
    """Without recurrent states, the sampler would decode a sample again while its mask is missing.

    A decoding step has several rows of a sample where the grammar forces tokens.
    """
    grammars = GrammarCache(lambda: load_tokenizer(model_dir), VOCAB_SIZE)
    constraint = Constraint("regex", pattern)
    op = request(tokens(30), 2, stop=[EOS_TOKEN_ID], max_tokens=20, constraint=constraint)
    rows: list[int] = []

    def sampled() -> list[tuple[list[int], list[float]]]:
        sampler = Sampler(with_tiling(decoder, tiling), SamplerSettings(), str, grammars)
        original = sampler._runner.run

        def counted(plan: StepPlan) -> StepOutput:
            rows.extend(sample.num_rows for sample in plan.sampled.samples)
            return original(plan)

        monkeypatch.setattr(sampler._runner, "run", counted)
        return bits(answer(sampler, op))

    expected = sampled()
    assert max(rows) == 1 or "hello" in pattern
    advance = Grammar._advance

    def late(self, sampled):
        time.sleep(0.05)
        advance(self, sampled)

    monkeypatch.setattr(Grammar, "_advance", late)
    found = sampled()
    for (one, logprobs), (other, others) in zip(found, expected, strict=True):
        assert one == other
        np.testing.assert_allclose(logprobs, others, atol=1e-5)
    # Scoring the whole text computes each position once, in one prefill.
    for sequence, logprobs in found:
        whole = tokens(30) + sequence
        scored = Sample(
            "sampler", ModelInput.from_ints(whole), 1, op.sampling_params, prompt_logprobs=True
        )
        scored = replace(scored, sampling_params=replace(op.sampling_params, constraint=None))
        response = answer(sampler_of(decoder, tiling), scored)
        trained = [value for value in response.prompt_logprobs or () if value is not None]
        np.testing.assert_allclose(logprobs, trained[29:], atol=1e-5)


def test_a_late_mask_delays_only_its_own_sample(decoder, tiling, model_dir, monkeypatch):
    """The mask of one owner is missing until all samples of the others have ended."""
    grammars = GrammarCache(lambda: load_tokenizer(model_dir), VOCAB_SIZE)
    constraint = Constraint("regex", "a[b-d]{2}hello[ef]{2}world")
    sampler = Sampler(with_tiling(decoder, tiling), SamplerSettings(), str, grammars)

    def constrained(owner: str) -> Sample:
        op = request(tokens(30), 2, stop=[EOS_TOKEN_ID], max_tokens=20, constraint=constraint)
        return replace(op, owner=owner)

    expected = bits(answer(sampler, constrained("slow")))
    release = threading.Event()
    advance = Grammar._advance

    def slow(self, sampled):
        if self.owner == "slow":
            assert release.wait(120)
        advance(self, sampled)

    monkeypatch.setattr(Grammar, "_advance", slow)
    waiting, *others = [
        submit(sampler, op)
        for op in (constrained("slow"), constrained("quick"), request(tokens(40), 2))
    ]
    samples: set[RunningSample] = set()
    while not all(other.done() for other in others):
        sampler.step()
        samples.update(sampler._scheduler.running)
    assert not waiting.done()
    assert any(sample.next_state is not None for sample in samples)
    release.set()
    while sampler.busy:
        sampler.step()
    assert bits(waiting.result(timeout=0)) == expected
    assert bits(others[0].result(timeout=0)) == expected
    assert all(sample.recurrent_state is sample.next_state is None for sample in samples)


def test_activation_bytes_include_the_recurrence(decoder):
    backend = decoder.backend
    few, many = (TrainerSettings(4096).activation_bytes(backend, n) for n in (256, 4096))
    config = decoder.config.recurrence
    assert config is not None
    assert many - few > 4 * (4096 - 256) * config.channels
