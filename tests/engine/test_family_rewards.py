"""GRPO with a toy reward raises the reward of a tiny random model of each family."""

import numpy as np
import pytest

from planish import ServiceClient
from planish.testing import CONFIGS, tiny_model
from planish.types import AdamParams, Datum, EncodedTextChunk, ModelInput, SamplingParams

PROMPTS = [list(range(start, start + 30)) for start in (40, 80, 120)]
"""Longer than the attention window of the tiny models."""
GROUP = 16
NEW_TOKENS = 6


def reward(tokens: list[int]) -> float:
    """Return the share of even tokens."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_grpo_raises_the_reward(tmp_path, family):
    # The seed and the float32 kernels make the run reproducible on one kind of CPU. The threshold
    # leaves room for other kinds.
    path = tiny_model(tmp_path / "model", family, dtype="float32")
    means = []
    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as service:
        client = service.create_lora_training_client(base_model=str(path), rank=8, seed=0)
        for step in range(12):
            sampler = client.save_weights_and_get_sampling_client()
            params = [
                SamplingParams(max_tokens=NEW_TOKENS, seed=100 * step + i, stop=[])
                for i in range(len(PROMPTS))
            ]
            asked = [
                sampler.sample(ModelInput.from_ints(prompt), GROUP, own)
                for prompt, own in zip(PROMPTS, params, strict=True)
            ]
            data, rewards = [], []
            for prompt, future in zip(PROMPTS, asked, strict=True):
                sequences = future.result().sequences
                group = np.array([reward(sequence.tokens) for sequence in sequences])
                rewards.append(group.mean())
                for sequence, advantage in zip(sequences, group - group.mean(), strict=True):
                    pad = [0.0] * (len(prompt) - 1)
                    inputs = {
                        "target_tokens": [0] * len(pad) + sequence.tokens,
                        "logprobs": pad + list(sequence.logprobs or ()),
                        "advantages": pad + [float(advantage)] * len(sequence.tokens),
                    }
                    chunk = EncodedTextChunk(sequence.tokens[:-1])
                    data.append(Datum(ModelInput.from_ints(prompt).append(chunk), inputs))
            client.forward_backward(data, "importance_sampling")
            client.optim_step(AdamParams(learning_rate=0.02)).result()
            means.append(float(np.mean(rewards)))
    assert np.mean(means[-2:]) > np.mean(means[:2]) + 0.2
