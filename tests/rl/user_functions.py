"""Advantages and losses as a user would write them in a module of their own."""

import numpy as np
import torch

SHAPES = {
    "a list": lambda rewards_G: [reward - 0.5 for reward in rewards_G],
    "a tuple": lambda rewards_G: tuple(reward - 0.5 for reward in rewards_G),
    "an array": lambda rewards_G: np.asarray(rewards_G, np.float32) - 0.5,
    "a tensor": lambda rewards_G: torch.tensor(rewards_G) - 0.5,
    "numbers of numpy": lambda rewards_G: [np.float32(reward) - 0.5 for reward in rewards_G],
}
"""The same advantage in every form that is taken."""


def halved(rewards_G):
    mean = sum(rewards_G) / len(rewards_G)
    return [0.5 * (reward - mean) for reward in rewards_G]


def against_a_half(rewards_G):
    """A baseline that is not the group's: groups with equal rewards have advantages too."""
    return [reward - 0.5 for reward in rewards_G]


def powered(rewards_G, power=1.0, *, scale=1.0):
    """Numbers of the run shape the advantage."""
    return [scale * (reward - 0.5) ** power for reward in rewards_G]


def zero(rewards_G):
    return [0.0] * len(rewards_G)


def two_of_them(rewards_G):
    return [1.0, -1.0]


def nothing(rewards_G):
    return None


def a_word(rewards_G):
    return ["up"] * len(rewards_G)


def not_finite(rewards_G):
    return [reward / (len(rewards_G) - len(rewards_G) + 1e-60) for reward in rewards_G]


def failing(rewards_G):
    raise LookupError("no baseline")


async def later(rewards_G):
    return rewards_G


class Rules:
    @staticmethod
    def doubled(rewards_G):
        return [2 * value for value in halved(rewards_G)]

    def bound(self, rewards_G):
        return rewards_G


def plain_gradient(data, logprobs_D):
    """Importance sampling, and two metrics."""
    loss = torch.zeros(())
    for datum, logprobs_N in zip(data, logprobs_D, strict=True):
        inputs = {name: tensor.to_torch() for name, tensor in datum.loss_fn_inputs.items()}
        ratio_N = torch.exp(logprobs_N - inputs["logprobs"]) * inputs["mask"]
        loss = loss - (ratio_N * inputs["advantages"]).sum()
    num_sampled = sum(datum.loss_fn_inputs["mask"].to_torch().sum() for datum in data)
    return loss, {"sampled:sum": num_sampled, "value": loss}


def scaled_gradient(data, logprobs_D, scale=1.0):
    loss, metrics = plain_gradient(data, logprobs_D)
    return scale * loss, metrics


def no_metrics(data, logprobs_D):
    return sum(logprobs_N.sum() for logprobs_N in logprobs_D)


def nan_metric(data, logprobs_D):
    return sum(logprobs_N.sum() for logprobs_N in logprobs_D), {"spread": float("nan")}


def failing_loss(data, logprobs_D):
    raise LookupError("no reference")
