"""An owner with few samples does not wait for the many samples of another, and no bit changes."""

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from backends import CPU, load_on, with_tiling

from planish.engine.sampling import decoding_turns
from planish.engine.sampling.decoding_turns import DecodingTurns
from planish.engine.sampling.requests import RunningSample
from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.model.decoder.decoder import Decoder
from planish.model.kernels.reference.probe import probe
from planish.model.layers.lora import LoraLayout, LoraWeights
from planish.model.layers.row_tiling import FIXED
from planish.service import Sample
from planish.testing import tiny_model
from planish.types import LoraConfig, ModelInput, SampleResponse, SamplingParams


def samples(awaits_mask: bool = False, **counts: int) -> list[RunningSample]:
    """Return samples without tensors: `counts` of each owner."""
    found: list[Any] = [
        SimpleNamespace(
            request=SimpleNamespace(op=SimpleNamespace(owner=owner)), awaits_mask=awaits_mask
        )
        for owner, count in counts.items()
        for _ in range(count)
    ]
    return found


def steps(
    running: Sequence[RunningSample], large: float, small: float, count: int
) -> list[tuple[int, float]]:
    """Return the size and the end of each of `count` steps, with these times of the steps."""
    turns, now, taken = DecodingTurns(), 0.0, []
    for _ in range(count):
        chosen = turns.choose(running)
        seconds = large if len(chosen) == len(running) else small
        now += seconds
        taken.append((len(chosen), now))
        turns.charge(len(chosen) < len(running), seconds)
    return taken


def test_few_samples_take_half_of_the_time_and_many_steps():
    """Eight small steps fit into the time of a large one, so eight tokens take two large steps
    instead of eight.
    """
    taken = steps(samples(many=240, few=1), 1.0, 0.125, 90)
    assert [size for size, _ in taken[:10]] == [241, *[1] * 8, 241]
    assert sum(size == 241 for size, _ in taken) / taken[-1][1] == 0.5


def test_small_steps_pause_where_they_gain_nothing():
    """On a GPU a step takes about as long for one sample as for many: two steps in 66 are small."""
    sizes = [size for size, _ in steps(samples(many=240, few=1), 1.0, 0.875, 1320)]
    assert sizes[:10] == [241, 1, 1, 241, 1, 1, 241, 241, 1, 1]
    assert sizes[-66:].count(1) == 2


def test_one_slow_small_step_causes_a_short_pause():
    turns, running = DecodingTurns(), samples(many=240, few=1)
    turns.charge(is_small=False, seconds=1.0)
    turns.charge(is_small=True, seconds=2.0)
    turns.charge(is_small=False, seconds=1.0)
    for _ in range(8):
        assert len(turns.choose(running)) == 1
        turns.charge(is_small=True, seconds=0.125)
    assert len(turns.choose(running)) == 241


@pytest.mark.parametrize("counts", [{"one": 240}, {"one": 8, "other": 2}, {"a": 1, "b": 1}])
def test_owners_with_a_fair_share_decode_together(counts):
    running = samples(**counts)
    assert {size for size, _ in steps(running, 0.05, 0.005, 50)} == {len(running)}


def test_samples_without_a_mask_get_no_small_step():
    running = samples(many=240) + samples(awaits_mask=True, few=1)
    assert {size for size, _ in steps(running, 0.05, 0.005, 50)} == {241}


def tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def adapter(decoder: Decoder, seed: int) -> LoraWeights:
    layout = LoraLayout(decoder.config, LoraConfig(rank=8))
    noise = 0.05 * torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))
    return LoraWeights(layout, layout.init(seed) + noise, decoder.backend)


def request(prompt: list[int], num_samples: int, owner: str) -> Sample:
    params = SamplingParams(max_tokens=8, seed=3, stop=[])
    return Sample("sampler", ModelInput.from_ints(prompt), num_samples, params, owner=owner)


def run(
    decoder: Decoder, jobs: Sequence[tuple[Sample, LoraWeights | None]]
) -> tuple[list[SampleResponse], set[int]]:
    """Return the responses and the numbers of samples in the steps."""
    sampler, sizes, futures = Sampler(decoder, SamplerSettings(), lambda _: ""), set[int](), []
    choose = sampler._turns.choose

    def noted(samples: Sequence[RunningSample]) -> Sequence[RunningSample]:
        chosen = choose(samples)
        if len(chosen) < len(samples):
            sizes.add(len(chosen))
        return chosen

    sampler._turns.choose = noted
    for operation, weights in jobs:
        futures.append(Future[SampleResponse]())
        sampler.submit(operation, weights, id(weights), futures[-1])
    while sampler.busy:
        sampler.step()
    return [future.result(timeout=0) for future in futures], sizes


def bits(response: SampleResponse) -> list[tuple[list[int], list[float]]]:
    return [(sequence.tokens, sequence.logprobs) for sequence in response.sequences]


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("qwen3", "auto"),
        pytest.param("qwen3", "torch", marks=pytest.mark.slow),
        pytest.param("gemma3", "auto", marks=pytest.mark.slow),
        pytest.param("qwen3_5", "auto", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "torch", marks=pytest.mark.slow),
    ],
)
def test_small_steps_change_no_bit(tmp_path, monkeypatch, family, kernels):
    """The samples of the small steps have prompts and adapters of their own, or those of the
    others.
    """
    monkeypatch.setenv("PLANISH_KERNELS", kernels)
    # Small steps may be as slow as large ones with a tiny model.
    monkeypatch.setattr(decoding_turns, "_WORTHWHILE_STEPS", 1)
    decoder = load_on(tiny_model(tmp_path, family=family), torch.float32, CPU)
    decoder = with_tiling(decoder, probe(decoder.backend) or FIXED)
    weights = adapter(decoder, 1)
    many, few = tokens(75, 1), tokens(40, 2)
    jobs = [
        (request(many, 16, "many"), weights),
        (request(few, 1, "few"), weights),
        (request(many, 1, "other"), weights),
        (request(few, 1, "base"), None),
    ]
    together, sizes = run(decoder, jobs)
    assert sizes == {3}
    for response, job in zip(together, jobs, strict=True):
        ((alone,), _) = run(decoder, [job])
        assert bits(response) == bits(alone)
