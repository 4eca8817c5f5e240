"""planish, by its public API."""

import random
from importlib.metadata import version
from typing import Any

import torch
from serving import Peer, serve

import planish


def load(model: str) -> Peer:
    service_client = planish.ServiceClient()
    sampling_client = service_client.create_sampling_client(base_model=model)
    training_client = service_client.create_lora_training_client(base_model=model, rank=32, seed=0, train_unembed=False)

    def sample(work: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": tokens_of(rollouts(sampling_client, work))}

    def train(work: dict[str, Any]) -> dict[str, Any]:
        return train_step(training_client, work)

    def iterate(work: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": iteration(training_client, work)}

    works = {"W1": sample, "W1b": sample, "W1c": sample, "W2": train, "W3": iterate}
    return Peer(works, {"planish": version("planish"), "torch": torch.__version__})


def rollouts(client: planish.SamplingClient, work: dict[str, Any]) -> list[list[planish.SampledSequence]]:
    params = planish.SamplingParams(max_tokens=work["new_tokens"], stop=[], seed=work["seed"])
    futures = [
        client.sample(prompt=planish.ModelInput.from_ints(prompt), num_samples=work["samples"], sampling_params=params)
        for prompt in work["prompts"]
    ]
    return [list(future.result().sequences) for future in futures]


def iteration(client: planish.TrainingClient, work: dict[str, Any]) -> int:
    """Samples with the current weights and trains on that with random advantages; the number of tokens."""
    groups = rollouts(client.save_weights_and_get_sampling_client(), work)
    draw = random.Random(work["seed"])
    answers = {
        "prompts": work["prompts"],
        "completions": [[sequence.tokens for sequence in group] for group in groups],
        "logprobs": [[sequence.logprobs for sequence in group] for group in groups],
        "advantages": [[draw.uniform(-1, 1) for _ in group] for group in groups],
    }
    train_step(client, answers)
    return tokens_of(groups)


def tokens_of(groups: list[list[planish.SampledSequence]]) -> int:
    """Those that came with a logprob."""
    return sum(len(sequence.logprobs or []) for group in groups for sequence in group)


def train_step(client: planish.TrainingClient, work: dict[str, Any]) -> dict[str, Any]:
    data = [
        datum(prompt, *sequence)
        for prompt, *group in zip(
            work["prompts"], work["completions"], work["logprobs"], work["advantages"], strict=True
        )
        for sequence in zip(*group, strict=True)
    ]
    backward = client.forward_backward(data, "importance_sampling")
    update = client.optim_step(planish.AdamParams(learning_rate=1e-5))
    loss = backward.result().metrics["loss:sum"]
    update.result()
    return {"loss": loss}


def datum(prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float) -> planish.Datum:
    before = len(prompt) - 1
    return planish.Datum(
        planish.ModelInput.from_ints(prompt + tokens[:-1]),
        {
            "target_tokens": [0] * before + tokens,
            "logprobs": [0.0] * before + logprobs,
            "advantages": [0.0] * before + [advantage] * len(tokens),
        },
    )


if __name__ == "__main__":
    serve(load)
