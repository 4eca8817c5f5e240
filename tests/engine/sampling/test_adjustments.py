"""Penalties, min_tokens and masks of single rows, against plain formulas over the vocabulary."""

from collections import Counter

import numpy as np
import pytest
import torch
from backends import backend_of, torch_backend
from hypothesis import given, settings, strategies as st

from planish.engine.sampling.adjustments import Adjustment, adjust_, sample_batch
from planish.engine.sampling.token_sampling import sample_tokens
from planish.types import SamplingParams

OWN = backend_of()
NONE = np.zeros(0, np.int64)
VOCAB = 300


def logits_of(seed: int, rows: int, scale: float = 4.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def packed(allowed: np.ndarray) -> np.ndarray:
    """Pack bool [..., V] into words (see `Adjustment.allowed`)."""
    padded = np.pad(allowed, [*[(0, 0)] * (allowed.ndim - 1), (0, -VOCAB % 32)])
    return np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)


def penalized(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int], tokens: list[int]
) -> torch.Tensor:
    """Compute the definition of vLLM token by token."""
    out, counts = logits.numpy().copy(), Counter(tokens)
    for token in range(len(out)):
        out[token] += params.logit_bias.get(token, 0.0)
        if token in counts or token in prompt:
            factor = params.repetition_penalty
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        out[token] -= params.frequency_penalty * counts[token]
        out[token] -= params.presence_penalty * (counts[token] > 0)
    return torch.from_numpy(out)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=20),
    tokens=st.lists(st.integers(0, 30), max_size=40),
    repetition=st.floats(0.1, 5),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
    biases=st.dictionaries(st.integers(0, 30), st.floats(-100, 100), max_size=5),
)
def test_penalties_and_biases_equal_their_definition(
    seed, prompt, tokens, repetition, frequency, presence, biases
):
    params = SamplingParams(
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=biases,
    )
    logits = logits_of(seed, 1)[0]
    expected = penalized(logits, params, prompt, tokens)
    adjustment = Adjustment(None, np.unique(np.array(prompt, np.int64)), tokens)
    adjust_(logits, params, adjustment)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_torch", [False, True])
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    share=st.sampled_from([0.004, 0.02, 0.5, 1.0]),
    scale=st.sampled_from([1.0, 30.0, 300.0]),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 50.0]),
        top_k=st.sampled_from([-1, 2]),
        top_p=st.sampled_from([1.0, 0.7]),
        min_p=st.sampled_from([0.0, 0.3]),
        presence_penalty=st.sampled_from([0.0, 1.5]),
    ),
)
def test_a_masked_row_is_sampled_as_if_other_tokens_did_not_exist(
    by_torch: bool, seed: int, share: float, scale: float, params: SamplingParams
):
    backend = torch_backend() if by_torch else OWN
    rng = np.random.default_rng(seed)
    allowed = rng.random((8, VOCAB)) < share
    allowed[:, seed % VOCAB] = True
    logits, uniforms = logits_of(seed, 8, scale), rng.random(8).tolist()
    before = logits.clone()
    adjustments = {i: Adjustment(packed(allowed[i]), NONE, [1, 2]) for i in range(8)}
    sampled = sample_batch(backend, logits, [params] * 8, uniforms, range(8), adjustments)
    assert torch.equal(logits, before)
    for row in range(8):
        kept = np.flatnonzero(allowed[row])
        assert sampled.tokens[row] in kept
        # The reference samples from a vocabulary that has the allowed tokens only.
        small = penalized(logits[row], params, [], [1, 2])[torch.from_numpy(kept)]
        scaled = small.double() / (params.temperature or 1.0)
        probabilities = scaled.softmax(0)
        chosen = int(np.searchsorted(kept, int(sampled.tokens[row])))
        if params.temperature == 0:
            assert small[chosen] == small.max()
            continue
        order = probabilities.argsort(descending=True, stable=True)
        if params.top_k > 0:
            probabilities[order[params.top_k :]] = 0
        if params.top_p < 1:
            mass = probabilities[order]
            probabilities[order[mass.cumsum(0) - mass >= params.top_p * mass.sum() + 1e-6]] = 0
        if params.min_p:
            probabilities[probabilities < params.min_p * probabilities.max() - 1e-6] = 0
        ends = probabilities.cumsum(0) / probabilities.sum()
        assert probabilities[chosen] > 0
        assert ends[chosen] >= uniforms[row] - 1e-4
        assert chosen == 0 or ends[chosen - 1] <= uniforms[row] + 1e-4


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("filtered", [False, True])
def test_adjusted_rows_do_not_change_the_bits_of_others(by_torch: bool, filtered: bool):
    backend = torch_backend() if by_torch else OWN
    logits = logits_of(3, 16)
    params = [SamplingParams(top_k=5 if filtered and i % 3 == 0 else -1) for i in range(16)]
    uniforms = np.random.default_rng(3).random(16).tolist()
    alone = sample_tokens(backend, logits, params, uniforms, list(range(16)))
    allowed = np.zeros(VOCAB, bool)
    allowed[7] = True
    adjustments = {i: Adjustment(packed(allowed), NONE, []) for i in (0, 5, 6)}
    mixed = sample_batch(backend, logits, params, uniforms, range(16), adjustments)
    others = [i for i in range(16) if i not in adjustments]
    assert torch.equal(mixed.tokens[others], alone.tokens[others])
    assert torch.equal(mixed.log_normalizer[others], alone.log_normalizer[others])
    assert mixed.tokens[[0, 5, 6]].tolist() == [7, 7, 7]
    # Returned logprobs are those of the whole distribution.
    whole = torch.logsumexp(logits.double(), 1)
    torch.testing.assert_close(mixed.log_normalizer.double(), whole, rtol=1e-5, atol=1e-5)


def test_a_row_with_logits_that_are_not_finite_has_no_finite_normalizer():
    logits = logits_of(0, 2)
    logits[0, 5] = torch.nan
    adjustments = {i: Adjustment(packed(np.ones(VOCAB, bool)), NONE, []) for i in range(2)}
    sampled = sample_batch(OWN, logits, [SamplingParams()] * 2, [0.5, 0.5], range(2), adjustments)
    assert not sampled.log_normalizer[0].isfinite()
    assert sampled.log_normalizer[1].isfinite()
