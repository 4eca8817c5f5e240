"""A GRPO iteration and its halves with planish's public API, on the rounds of workloads.py."""

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import planish

Groups = Sequence[Sequence[planish.SampledSequence]]


@dataclass(frozen=True)
class Iteration:
    groups: Groups
    loss: float
    sampling_seconds: float
    """Seconds of sampling, including publishing the weights."""
    training_seconds: float

    @property
    def seconds(self) -> float:
        return self.sampling_seconds + self.training_seconds


def run_iteration(client: planish.TrainingClient, round_spec: Mapping[str, Any]) -> Iteration:
    """Sample with the current weights, and train on the samples with random advantages."""
    start_time = time.perf_counter()
    groups = rollouts(client.save_weights_and_get_sampling_client(), round_spec)
    sampling_end = time.perf_counter()
    loss = train_step(client, with_completions(round_spec, groups))
    return Iteration(groups, loss, sampling_end - start_time, time.perf_counter() - sampling_end)


def rollouts(client: planish.SamplingClient, round_spec: Mapping[str, Any]) -> Groups:
    """Send one request per prompt, all at once."""
    return rollouts_in_turn([client], round_spec)


def rollouts_in_turn(
    clients: Sequence[planish.SamplingClient], round_spec: Mapping[str, Any]
) -> Groups:
    """Like `rollouts`, but distribute the prompts over the clients in turn."""
    schema = round_spec.get("schema")
    params = planish.SamplingParams(
        max_tokens=round_spec["new_tokens"],
        stop=[],
        seed=round_spec["seed"],
        constraint=schema and planish.Constraint("json_schema", json.dumps(schema)),
    )
    futures = [
        client.sample(
            prompt=planish.ModelInput.from_ints(prompt),
            num_samples=round_spec["samples"],
            sampling_params=params,
        )
        for client, prompt in zip(cycle(clients), round_spec["prompts"], strict=False)
    ]
    return [future.result().sequences for future in futures]


def step_seconds(sample: Callable[[int], object], few: int, many: int, rounds: int) -> list[float]:
    """Return the seconds of a decode step, once per round. `sample(n)` samples n new tokens. The
    time of the prompts cancels, because it is the same for `few` and `many`.
    """

    def sampling_seconds(new_tokens: int) -> float:
        start_time = time.perf_counter()
        sample(new_tokens)
        return time.perf_counter() - start_time

    sampling_seconds(many)  # a warm-up, which also caches the prompts
    return [(sampling_seconds(many) - sampling_seconds(few)) / (many - few) for _ in range(rounds)]


def with_completions(round_spec: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    """Return the round with completions [prompt][sample][token], their logprobs, and a random
    advantage for each [prompt][sample].
    """
    rng = random.Random(round_spec["seed"])
    return {
        **round_spec,
        "completions": [[sequence.tokens for sequence in group] for group in groups],
        "logprobs": [[sequence.logprobs for sequence in group] for group in groups],
        "advantages": [[rng.uniform(-1, 1) for _ in group] for group in groups],
    }


def count_tokens(groups: Groups) -> int:
    """Return the number of tokens that have a logprob."""
    return sum(len(sequence.logprobs or []) for group in groups for sequence in group)


def train_step(client: planish.TrainingClient, round_spec: Mapping[str, Any]) -> float:
    """Take one optimizer step on a round with answers. Returns the sum of the loss over all
    tokens.
    """
    data = [
        datum(prompt, *sequence)
        for prompt, *group in zip(
            round_spec["prompts"],
            round_spec["completions"],
            round_spec["logprobs"],
            round_spec["advantages"],
            strict=True,
        )
        for sequence in zip(*group, strict=True)
    ]
    backward = client.forward_backward(data, "importance_sampling")
    update = client.optim_step(planish.AdamParams(learning_rate=1e-5))
    loss = backward.result().metrics["loss:sum"]
    update.result()
    return loss


def datum(
    prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float
) -> planish.Datum:
    before = len(prompt) - 1
    return planish.Datum(
        planish.ModelInput.from_ints(prompt + tokens[:-1]),
        {
            "target_tokens": [0] * before + tokens,
            "logprobs": [0.0] * before + logprobs,
            "advantages": [0.0] * before + [advantage] * len(tokens),
        },
    )
