"""Each loss equals its formula in float64, written out per position, and its gradient equals finite
differences.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from planish.engine.training.losses import LOSSES, find_loss
from planish.errors import UnsupportedError
from planish.service import LOSS_OPTIONS, complete_config

N = 7
RNG = np.random.default_rng(4)
L = -RNG.uniform(0.1, 3, N)
Q = L + np.array([0.0, 0.5, -0.5, 2.0, -2.0, 0.1, 0.3])
A = np.array([1.0, -1.0, 0.5, -2.0, 3.0, 0.0, -0.4])
MASK = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
W = np.array([1.0, 0.0, -2.5, 0.3, 1.0, 0.0, 4.0])


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def cross_entropy(now):
    return -sum(w * x for w, x in zip(W, now, strict=True))


def importance_sampling(now):
    return -sum(math.exp(x - q) * a for x, q, a in zip(now, Q, A, strict=True))


def ppo(now, low=0.8, high=1.2):
    ratios = [math.exp(x - q) for x, q in zip(now, Q, strict=True)]
    return -sum(min(r * a, clip(r, low, high) * a) for r, a in zip(ratios, A, strict=True))


def cispo(now, low=0.0, high=4.0):
    # stop-gradient: L is a constant here, unlike l
    held = [clip(math.exp(x - q), low, high) for x, q in zip(L, Q, strict=True)]
    return -sum(h * x * a for h, x, a in zip(held, now, A, strict=True))


def dro(now, beta=0.1, mask=None):
    mask = [1.0] * N if mask is None else mask
    return -sum(
        m * (x * a - 0.5 * beta * (x - q) ** 2) for x, q, a, m in zip(now, Q, A, mask, strict=True)
    )


def gspo(now, low=0.8, high=1.2, mask=MASK):
    chosen = [i for i in range(N) if mask[i] != 0]
    s = sum(L[i] - Q[i] for i in chosen) / len(chosen)
    total = 0.0
    for i in range(N):
        ratio = math.exp(s + now[i] - L[i])
        total -= min(ratio * A[i], clip(ratio, low, high) * A[i])
    return total


SAMPLED = {"logprobs": Q, "advantages": A}
CASES = [
    ("cross_entropy", {"weights": W}, {}, cross_entropy),
    ("importance_sampling", SAMPLED, {}, importance_sampling),
    ("ppo", SAMPLED, {}, ppo),
    (
        "ppo",
        SAMPLED,
        {"clip_low_threshold": 0.5, "clip_high_threshold": 1.6},
        lambda now: ppo(now, 0.5, 1.6),
    ),
    ("cispo", SAMPLED, {}, cispo),
    (
        "cispo",
        SAMPLED,
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        lambda now: cispo(now, 0.9, 1.1),
    ),
    ("dro", SAMPLED, {}, dro),
    ("dro", SAMPLED, {"beta": 0.05}, lambda now: dro(now, 0.05)),
    ("dro", {**SAMPLED, "mask": MASK}, {}, lambda now: dro(now, mask=MASK)),
    ("gspo", {**SAMPLED, "sequence_ratio_mask": MASK}, {}, gspo),
    ("gspo", SAMPLED, {"clip_high_threshold": 1.05}, lambda now: gspo(now, 0.8, 1.05, A)),
]


@pytest.mark.parametrize(("name", "inputs", "config", "formula"), CASES)
def test_loss_equals_its_formula(name: str, inputs: dict, config: dict, formula: Callable):
    logprobs = torch.tensor(L, requires_grad=True)
    tensors = {key: torch.tensor(value) for key, value in inputs.items()}
    loss = LOSSES[name].fn(logprobs, tensors, complete_config(name, config))
    assert loss.item() == pytest.approx(formula(L), rel=1e-12)
    loss.backward()
    assert logprobs.grad is not None
    for i in range(N):
        step = np.zeros(N)
        step[i] = 1e-6
        slope = (formula(L + step) - formula(L - step)) / 2e-6
        assert logprobs.grad[i].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_cross_entropy_without_weights_counts_every_target():
    logprobs = torch.tensor(np.stack([L, Q], 1))
    assert LOSSES["cross_entropy"].fn(logprobs, {}, {}).item() == pytest.approx(
        -(L.sum() + Q.sum())
    )


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_a_zero_advantage_ignores_the_ratio(name: str):
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    inputs = {"logprobs": torch.tensor([-1.0, -200.0]), "advantages": torch.tensor([2.0, 0.0])}
    loss = LOSSES[name].fn(logprobs, inputs, complete_config(name, {}))
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-2.0, 0.0]
    assert loss.isfinite()


MASK_NAMES = {"dro": "mask", "gspo": "sequence_ratio_mask"}


@pytest.mark.parametrize("placeholder", [-9999.0, -1e20, -3e38, 1e30])
@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo", "dro"])
def test_the_logprob_of_a_masked_position_has_no_effect(name: str, placeholder: float):
    """Programs mark positions without a logprob by a value such as -1e20."""

    def outcome(masked_logprob: float) -> tuple[float, list[float]]:
        logprobs = torch.tensor([-1.0, -0.5], requires_grad=True)
        inputs = {
            "logprobs": torch.tensor([-1.25, masked_logprob]),
            "advantages": torch.tensor([2.0, 0.0]),
            MASK_NAMES.get(name, "unused"): torch.tensor([1.0, 0.0]),
        }
        loss = LOSSES[name].fn(logprobs, inputs, complete_config(name, {}))
        loss.backward()
        assert logprobs.grad is not None
        return loss.item(), logprobs.grad.tolist()

    assert outcome(placeholder) == outcome(-0.5)
    if name == "dro":
        expected = -(-1.0 * 2.0 - 0.5 * 0.1 * 0.25**2), [-(2.0 - 0.1 * 0.25), 0.0]
        assert outcome(placeholder)[0] == pytest.approx(expected[0], rel=1e-6)
        assert outcome(placeholder)[1] == pytest.approx(expected[1], rel=1e-6)


GAPS = [-700.0, -88.75, -1.0, 0.0, 0.15, 1.0, 60.0, 88.0, 88.5, 88.75, 89.0, 100.0, 600.0]
ADVANTAGES = [1.0, -1.0, 1e-3, -1e-3, 1e-30, -1e-30, -0.0, 0.0, 7.5, -7.5]


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_an_overflowing_ratio_gives_the_float64_result(name, gap):
    """The result is non-finite only if float32 cannot represent the loss or its gradient."""

    def outcome(dtype: torch.dtype, advantage: float) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.tensor([-1.0, -0.5], dtype=dtype, requires_grad=True)
        inputs = {
            "logprobs": torch.tensor([-1.0 - gap, -0.5 - gap], dtype=dtype),
            "advantages": torch.tensor([advantage, advantage], dtype=dtype),
        }
        config = complete_config(name, {})
        if dtype == torch.float64:
            loss = plain[name](logprobs, inputs, config)
        else:
            loss = LOSSES[name].fn(logprobs, inputs, config)
        loss.backward()
        assert logprobs.grad is not None
        return loss.detach(), logprobs.grad

    def importance_sampling(now, inputs, config):
        return -(torch.exp(now - inputs["logprobs"]) * inputs["advantages"]).sum()

    def clipped(ratio, inputs, config):
        bounds = config["clip_low_threshold"], config["clip_high_threshold"]
        a = inputs["advantages"]
        return -torch.minimum(ratio * a, ratio.clamp(*bounds) * a).sum()

    def ppo(now, inputs, config):
        return clipped(torch.exp(now - inputs["logprobs"]), inputs, config)

    def cispo(now, inputs, config):
        bounds = config["clip_low_threshold"], config["clip_high_threshold"]
        weight = torch.exp(now.detach() - inputs["logprobs"]).clamp(*bounds)
        return -(weight * now * inputs["advantages"]).sum()

    def gspo(now, inputs, config):
        mask = inputs["advantages"] != 0
        gaps = (now.detach() - inputs["logprobs"])[mask]
        mean = gaps.mean() if len(gaps) else 0.0
        return clipped(torch.exp(mean + now - now.detach()), inputs, config)

    plain = {"importance_sampling": importance_sampling, "ppo": ppo, "cispo": cispo, "gspo": gspo}
    for advantage in ADVANTAGES:
        expected, expected_grad = outcome(torch.float64, advantage)
        assert expected.isfinite()
        assert expected_grad.isfinite().all()
        found, grad = outcome(torch.float32, advantage)
        if max(expected.abs(), expected_grad.abs().max()) < 3.4e38:
            torch.testing.assert_close(found.double(), expected, rtol=5e-5, atol=1e-37)
            torch.testing.assert_close(grad.double(), expected_grad, rtol=5e-5, atol=1e-37)
        else:
            assert not found.isfinite(), advantage


def test_gspo_with_an_empty_mask_has_ratio_one():
    zero = torch.zeros(N)
    loss = LOSSES["gspo"].fn(
        torch.tensor(L),
        {"logprobs": torch.tensor(Q), "advantages": zero},
        complete_config("gspo", {}),
    )
    assert loss.item() == 0.0


def test_every_loss_has_an_option_table():
    assert LOSSES.keys() == LOSS_OPTIONS.keys()


def test_rejected_losses_and_options_are_named():
    with pytest.raises(UnsupportedError, match="not public"):
        find_loss("stable_reinforce")
    with pytest.raises(UnsupportedError, match="forward_backward_custom"):
        find_loss("custom")
    with pytest.raises(ValueError, match="'grpo' is unknown"):
        find_loss("grpo")
    for name, config, message in [
        ("importance_sampling", {"clip_low_threshold": 0.8}, "clip_low_threshold.*unknown"),
        ("ppo", {"temperature": 0}, "temperature.*above 0"),
        ("ppo", {"temperature": float("nan")}, "temperature.*finite"),
        ("ppo", {"clip_low_threshold": 1.3}, "low <= 1 <= high"),
        ("ppo", {"clip_low_threshold": -0.1}, "low <= 1 <= high"),
        # Other software gives distances from 1. As bounds, they would exclude an on-policy ratio.
        ("ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.28}, "low <= 1 <= high"),
        (
            "gspo",
            {"clip_low_threshold": 3e-4, "clip_high_threshold": 4e-4},
            "0.0003 and clip_high_threshold=0.0004",
        ),
        ("cispo", {"clip_high_threshold": 0.28}, "low <= 1 <= high"),
        ("dro", {"beta": -1}, "beta"),
        ("dro", {"beta": "0.1"}, "finite number"),
        ("cross_entropy", {"beta": 0.1}, "it takes temperature"),
    ]:
        with pytest.raises(ValueError, match=message):
            complete_config(name, config)


def test_loss_options_accept_numpy_numbers():
    given: dict[str, Any] = {"temperature": np.float32(0.5), "beta": np.int64(1)}
    assert complete_config("dro", given) == {
        "temperature": 0.5,
        "skip_unweighted": 0.0,
        "beta": 1.0,
    }
