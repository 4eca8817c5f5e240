"""Adapters of one shape are stacked for batched matmuls, without a change of the samples."""

from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch
from backends import CPU, load_on, with_tiling

from planish.engine.sampling.model_runner import EagerRunner
from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.model.decoder.decoder import Decoder
from planish.model.kernels.cpp import ops
from planish.model.kernels.reference.adapter_stacks import AdapterStacks
from planish.model.kernels.reference.probe import probe
from planish.model.layers.lora import AdapterRange, AdapterStackRange, LoraLayout, LoraWeights
from planish.service import Sample
from planish.testing import tiny_model
from planish.types import LoraConfig, ModelInput, SamplingParams


@pytest.fixture(scope="module", autouse=True)
def _torch_multiplies() -> Iterator[None]:
    """Use torch's matmuls: planish's CPU kernels take all adapters in one call without a stack."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "load_library", lambda: None)
        yield


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Decoder:
    return load_on(tiny_model(tmp_path_factory.mktemp("model"), family="qwen3"), torch.float32, CPU)


def adapter(decoder: Decoder, seed: int, rank: int = 8) -> LoraWeights:
    layout = LoraLayout(decoder.config, LoraConfig(rank))
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(layout.size, generator=generator) * 0.05
    return LoraWeights(layout, master, decoder.backend)


def drawn(
    sampler: Sampler, jobs: list[tuple[Sample, LoraWeights | None]]
) -> list[list[tuple[list[int], list[float]]]]:
    futures = [Future() for _ in jobs]
    for future, (operation, weights) in zip(futures, jobs, strict=True):
        sampler.submit(operation, weights, id(weights), future)
    while sampler.busy:
        sampler.step()
    return [
        [(list(s.tokens), list(s.logprobs)) for s in future.result().sequences]
        for future in futures
    ]


def job(decoder: Decoder, index: int) -> tuple[Sample, LoraWeights | None]:
    """Return a request for 1 to 5 samples of 1 to 12 tokens, and its adapter of rank 4, 8, 16 or
    None.
    """
    weights = None if index % 7 == 0 else adapter(decoder, index, rank=(4, 8, 16)[index % 3])
    params = SamplingParams(max_tokens=1 + index % 12, seed=index, stop=[])
    return Sample("sampler", ModelInput.from_ints([1, 2, index]), 1 + index % 5, params), weights


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_requests_sampled_in_one_batch_equal_requests_sampled_alone(
    decoder: Decoder, deterministic: bool
):
    tiling = probe(decoder.backend) if deterministic else None
    if deterministic and tiling is None:
        pytest.skip("matmuls of this machine are not batch-invariant")
    sampler = Sampler(with_tiling(decoder, tiling), SamplerSettings(), lambda _: "")
    jobs = [job(decoder, index) for index in range(24)]
    together = drawn(sampler, jobs)
    for expected, one in zip(together, jobs, strict=True):
        (alone,) = drawn(sampler, [one])
        if deterministic:
            assert alone == expected
        else:
            assert [tokens for tokens, _ in alone] == [tokens for tokens, _ in expected]
            torch.testing.assert_close(
                [values for _, values in alone],
                [values for _, values in expected],
                rtol=1e-3,
                atol=1e-4,
            )


def test_adjacent_adapters_of_one_shape_are_stacked(decoder: Decoder):
    a, b, c, other = (
        adapter(decoder, seed, rank) for seed, rank in ((1, 8), (2, 8), (3, 8), (4, 4))
    )
    rows = [
        AdapterRange(0, 4, a),
        AdapterRange(4, 8, b),
        AdapterRange(8, 16, c),
        AdapterRange(16, 24, other),
    ]
    stacks = AdapterStacks()
    first, *rest = stacks.of([*rows, AdapterRange(24, 32, None)], bool)
    assert isinstance(first, AdapterStackRange)
    assert (first.start, first.stop, first.weights.adapters) == (0, 8, (a, b))
    assert rest == [rows[2], rows[3], AdapterRange(24, 32, None)]


def test_a_stack_is_reused_while_the_batch_has_the_same_adapters(decoder: Decoder):
    a, b, c = (adapter(decoder, seed) for seed in (1, 2, 3))
    stacks = AdapterStacks()

    def stack(*members: LoraWeights) -> AdapterStackRange:
        (rows,) = stacks.of(
            [AdapterRange(4 * i, 4 * i + 4, weights) for i, weights in enumerate(members)], bool
        )
        assert isinstance(rows, AdapterStackRange)
        return rows

    kept = stack(a, b)
    assert stack(a, b).weights is kept.weights
    assert stack(a, c).weights.adapters == (a, c)
    assert stack(a, b).weights is not kept.weights


def test_an_idle_sampler_references_no_adapter(decoder: Decoder):
    sampler = Sampler(decoder, SamplerSettings(), lambda _: "")
    drawn(sampler, [job(decoder, index) for index in (1, 2, 4)])
    assert isinstance(sampler._runner, EagerRunner)
    assert not sampler._runner._stacks._stacks
