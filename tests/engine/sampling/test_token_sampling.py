"""Sampling tokens from logits: distribution, filters, logprobs, random streams and batch
invariance.
"""

import numpy as np
import pytest
import torch
from backends import backend_of, torch_backend
from hypothesis import given, settings, strategies as st

from planish.engine.sampling.randomness import UniformStream, uniforms
from planish.engine.sampling.token_sampling import sample_many, sample_tokens, top_logprobs
from planish.model.kernels.cpp import ops
from planish.model.kernels.reference import token_sampling as reference
from planish.types import SamplingParams

OWN = backend_of()


def logits_of(probabilities: list[float], rows: int) -> torch.Tensor:
    return torch.tensor(probabilities).log().repeat(rows, 1)


def test_sampled_frequencies_match_the_distribution():
    probabilities = [0.5, 0.25, 0.125, 0.0625, 0.0625]
    n = 20_000
    uniforms = np.random.default_rng(0).random(n).tolist()
    drawn = sample_tokens(OWN, logits_of(probabilities, n), [SamplingParams()] * n, uniforms).tokens
    share = torch.bincount(drawn, minlength=5) / n
    assert (share - torch.tensor(probabilities)).abs().max() < 0.015


def test_a_sampled_token_inverts_the_cumulative_distribution():
    probabilities = torch.rand(7, 1000, generator=torch.Generator().manual_seed(0))
    uniforms = [0.0, 1e-9, 0.25, 0.5, 0.75, 0.999, 1 - 2**-53]
    drawn = sample_tokens(OWN, probabilities.log(), [SamplingParams()] * 7, uniforms).tokens
    cumulative = probabilities.double().cumsum(-1) / probabilities.double().sum(-1, keepdim=True)
    for row, (token, u) in enumerate(zip(drawn.tolist(), uniforms, strict=True)):
        assert cumulative[row, token] >= u - 1e-6
        assert token == 0 or cumulative[row, token - 1] <= u + 1e-6


@pytest.mark.parametrize("by_torch", [False, True])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    u=st.floats(0, 1, exclude_max=True) | st.just(1 - 2**-53),
    vocab=st.sampled_from([1, 5, 127, 128, 129, 300]),
)
def test_a_token_of_zero_probability_is_never_sampled(
    by_torch: bool, seed: int, u: float, vocab: int
):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocab, generator=generator) * 40
    logits[:, torch.rand(vocab, generator=generator) < 0.5] = -torch.inf
    logits[0, seed % vocab] = 0.0
    backend = torch_backend() if by_torch else OWN
    token = int(sample_tokens(backend, logits, [SamplingParams()], [u]).tokens[0])
    assert logits[0, token] > -torch.inf


def test_temperature_zero_is_argmax_with_unscaled_logprobs():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    drawn = sample_tokens(OWN, logits, [SamplingParams(temperature=0.0)] * 4, [0.9] * 4)
    assert drawn.tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(drawn.log_normalizer, logits.logsumexp(-1))


def test_logprobs_are_normalized_after_temperature_and_before_filters():
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1)) * 5
    params = [
        SamplingParams(temperature=0.5, top_k=2),
        SamplingParams(temperature=2.0, top_p=0.1),
        SamplingParams(min_p=0.9),
    ]
    drawn = sample_tokens(OWN, logits, params, [0.5] * 3)
    scaled = logits / torch.tensor([[0.5], [2.0], [1.0]])
    torch.testing.assert_close(drawn.log_normalizer, scaled.logsumexp(-1))


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=2), {0, 1}),
        (SamplingParams(top_k=100), {0, 1, 2, 3, 4}),
        (SamplingParams(top_p=0.5), {0}),
        (SamplingParams(top_p=0.51), {0, 1}),
        (SamplingParams(top_p=0.76), {0, 1, 2}),
        (SamplingParams(min_p=0.5), {0, 1}),
        (SamplingParams(min_p=0.24), {0, 1, 2}),
        (SamplingParams(top_k=3, top_p=0.8), {0, 1}),
        (SamplingParams(temperature=0.5, min_p=0.2), {0, 1}),
    ],
)
def test_top_k_top_p_and_min_p_keep_exactly_the_allowed_tokens(
    params: SamplingParams, allowed: set[int]
):
    n = 2000
    uniforms = np.random.default_rng(0).random(n).tolist()
    drawn = sample_tokens(
        OWN, logits_of([0.5, 0.25, 0.125, 0.0625, 0.0625], n), [params] * n, uniforms
    ).tokens
    assert set(drawn.tolist()) == allowed


def test_batched_filtering_equals_filtering_row_by_row():
    """The two functions are those for a GPU and for a CPU. A NaN row does not affect other rows."""
    generator = torch.Generator().manual_seed(0)
    choices = {"top_k": (-1, 1, 7, 500), "top_p": (1.0, 0.9, 0.3, 0.001), "min_p": (0.0, 0.05, 0.9)}
    params = [
        SamplingParams(top_k=k, top_p=p, min_p=least)
        for k in choices["top_k"]
        for p in choices["top_p"]
        for least in choices["min_p"]
    ]
    weights = (3 * torch.randn(len(params), 300, generator=generator)).exp()
    weights /= weights.amax(1, keepdim=True)
    weights[:, 40:60] = 0
    weights[5] = torch.nan
    expected = weights.clone()
    reference.filter_(expected, params)
    found = reference._filtered(weights, params)
    finite = torch.arange(len(params)) != 5
    assert torch.equal(found[finite], expected[finite])
    assert len({int((row > 0).sum()) for row in found}) > 10


def test_sampling_a_row_does_not_depend_on_the_batch():
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(2)) * 6
    uniforms = np.random.default_rng(1).random(64).tolist()
    whole = sample_tokens(OWN, logits, [SamplingParams()] * 64, uniforms)
    for row in range(0, 64, 7):
        alone = sample_tokens(
            OWN, logits[row : row + 1], [SamplingParams()], uniforms[row : row + 1]
        )
        assert torch.equal(alone.tokens, whole.tokens[row : row + 1])
        assert torch.equal(alone.log_normalizer, whole.log_normalizer[row : row + 1])
    ones = torch.ones(len(logits))
    assert torch.equal(OWN.log_sum_exp(logits[5:6], ones[5:6]), OWN.log_sum_exp(logits, ones)[5:6])


def test_top_logprobs_are_those_of_a_log_softmax():
    logits = torch.randn(5, 400, generator=torch.Generator().manual_seed(3)) * 3
    temperatures = torch.tensor([1.0, 0.5, 2.0, 0.8, 1.0])
    tokens, values = top_logprobs(logits, OWN.log_sum_exp(logits, temperatures), temperatures, 4)
    expected = (logits / temperatures[:, None]).log_softmax(-1).topk(4)
    assert torch.equal(tokens, expected.indices)
    torch.testing.assert_close(values, expected.values)


def test_random_streams_repeat_and_differ_by_seed_index_and_purpose():
    def numbers(*key: int) -> list[float]:
        stream = UniformStream(*key)
        return [stream.at(i) for i in range(200)]

    assert numbers(7, 0) == numbers(7, 0)
    keys = [(7, 0), (8, 0), (7, 1), (7, 0, 1), (-7, 0), (2**64 + 7, 0)]
    assert len({tuple(numbers(*key)) for key in keys}) == len(keys)
    everything = [u for key in keys for u in numbers(*key)]
    assert len(set(everything)) == len(everything)
    assert min(everything) >= 0
    assert max(everything) < 1


def test_a_random_stream_can_be_read_in_any_order_of_positions():
    forward, backward = UniformStream(3, 1), UniformStream(3, 1)
    expected = [forward.at(i) for i in range(130)]
    assert [backward.at(i) for i in reversed(range(130))] == expected[::-1]


def test_the_cpu_kernel_samples_the_same_tokens_as_torch():
    logits = torch.randn(40, 3001, generator=torch.Generator().manual_seed(4)) * 4
    uniforms = np.random.default_rng(2).random(60).tolist()
    params = [SamplingParams(temperature=t) for t in (1.0, 0.7, 0.0)] * 20
    rows = [(7 * i) % 40 for i in range(60)]
    own = sample_tokens(OWN, logits, params, uniforms, rows)
    if ops.load_library() is None:
        pytest.skip("this machine has no AVX2 or no C++ compiler")
    chosen = logits[torch.tensor(rows)]
    assert torch.equal(sample_tokens(OWN, chosen, params, uniforms).tokens, own.tokens)
    # A filter of one row does not change the other rows.
    mixed = sample_tokens(OWN, chosen, [SamplingParams(top_k=5), *params[1:]], uniforms)
    assert torch.equal(mixed.tokens[1:], own.tokens[1:])
    assert torch.equal(mixed.log_normalizer, own.log_normalizer)
    plain = sample_tokens(torch_backend(), logits, params, uniforms, rows)
    assert torch.equal(plain.tokens, own.tokens)
    torch.testing.assert_close(plain.log_normalizer, own.log_normalizer)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=9, top_p=0.9),
        SamplingParams(temperature=0),
    ],
)
def test_several_samples_per_row_equal_single_samples(params, own, monkeypatch):
    backend = OWN if own else torch_backend()
    monkeypatch.setattr(reference, "_ENTRIES", 5000)
    logits = torch.randn(6, 3001, generator=torch.Generator().manual_seed(6)) * 4
    numbers = torch.from_numpy(np.random.default_rng(3).random((6, 50)))
    found = sample_many(backend, logits, params, numbers)
    for column in range(50):
        one = sample_tokens(backend, logits, [params] * 6, numbers[:, column].tolist())
        assert torch.equal(found.tokens[:, column], one.tokens)
        assert torch.equal(found.log_normalizer, one.log_normalizer)


def test_uniforms_equal_the_numbers_of_each_stream():
    streams = [UniformStream(5, index, 1) for index in range(7)]
    for positions in (range(0, 9), range(3, 4), range(126, 260)):
        expected = [[stream.at(position) for stream in streams[2:]] for position in positions]
        assert uniforms(5, 1, positions, range(2, 7)).tolist() == expected


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9)])
def test_a_non_finite_row_does_not_affect_other_rows(params):
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(5))
    expected = sample_tokens(OWN, logits, [params] * 4, [0.5] * 4).tokens
    logits[1, 7], logits[2, 9] = torch.nan, torch.inf
    found = sample_tokens(OWN, logits, [params] * 4, [0.5] * 4)
    assert found.log_normalizer.isfinite().tolist() == [True, False, False, True]
    assert torch.equal(found.tokens[[0, 3]], expected[[0, 3]])
    assert ((found.tokens >= 0) & (found.tokens < 300)).all()
