import asyncio

import numpy as np
import pytest

from planish.rl import kl
from planish.rl.data_processing import TrainingSequence
from planish.types import ForwardBackwardOutput, TensorData


def sequence(logprobs, mask):
    length = len(mask)
    return TrainingSequence(
        np.arange(length),
        np.array(logprobs, np.float32),
        np.zeros(length, np.float32),
        np.array(mask, np.float32),
    )


def output(*logprobs_D):
    tensors = [{"logprobs": TensorData(list(logprobs), "float32")} for logprobs in logprobs_D]
    return ForwardBackwardOutput("arrays", tensors, {})


def test_kl_v1_and_v2_equal_their_formulas():
    data = [sequence([0, -1.0, -2.0], [0, 1, 1]), sequence([0, 0, -1.0], [0, 0, 1])]
    outputs = [output([-1.5, -2.0]), output([-7.0, -0.5])]
    ratios = [0.5, 0.0, -0.5]
    metrics = kl.kl_metrics("optim/kl_sample_train", data, outputs)
    assert metrics["optim/kl_sample_train_v1"] == pytest.approx(np.mean(ratios))
    assert metrics["optim/kl_sample_train_v2"] == pytest.approx(0.5 * np.mean(np.square(ratios)))
    assert kl.kl_metrics("x", [], []) == {}


class Reference:
    """A sampling client that scores the last tokens: token t has logprob -0.1 t."""

    async def compute_logprobs_async(self, prompt, prompt_logprobs_last_n):
        scores = [-0.1 * token for token in prompt.to_ints()]
        return [None] * (len(scores) - prompt_logprobs_last_n) + scores[-prompt_logprobs_last_n:]


def test_the_kl_penalty_has_mean_zero_and_favours_the_reference():
    data = [sequence([0, -1.0, -2.0], [0, 1, 1]), sequence([0, 0, -0.3], [0, 0, 1])]
    ratios = asyncio.run(kl.log_ratios(data, lambda sequence: Reference()))
    expected = [[0, -1.0 + 0.1, -2.0 + 0.2], [0, 0, -0.3 + 0.2]]
    for gap, want in zip(ratios, expected, strict=True):
        assert gap == pytest.approx(np.array(want), abs=1e-6)
    mean = (-0.9 - 1.8 - 0.1) / 3
    penalised, metrics = asyncio.run(kl.KLPenalty(Reference(), 0.5, 0.0)(data))
    assert metrics == {"kl_policy_base": pytest.approx(mean)}
    assert penalised[0].advantages_N == pytest.approx(
        np.array([0, 0.5 * (mean + 0.9), 0.5 * (mean + 1.8)]), abs=1e-6
    )
    assert sum(float(s.advantages_N.sum()) for s in penalised) == pytest.approx(0, abs=1e-6)


def test_discounted_kl_terms_equal_their_formula():
    values = np.array([1.0, 2.0, 4.0])
    assert kl.discounted_sums(values, 0.5).tolist() == [1 + 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 4]
    data = [sequence([0, -1.0, 0, -2.0], [0, 1, 0, 1])]
    shaped = kl.add_kl_term(data[0], np.array([0, 1.0, 0, 3.0]), 1.0, 0.5, baseline=2.0)
    # The terms are 1 and -1. Two positions before the second, it counts a quarter.
    assert shaped.advantages_N.tolist() == [0, 1 - 0.25, 0, -1]
