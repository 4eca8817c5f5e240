"""The pieces of work that peers are compared on, as data: python benchmarks/works.py MODEL FILE [ROUNDS]

    W1   rollouts: 16 prompts of 200 tokens that share their first 120, 8 samples each, 64 new tokens, temperature 1, logprobs
    W1b  one prompt of 200 tokens, one sample, 128 new tokens
    W1c  8 prompts of 200 tokens, 8 samples each, 256 new tokens
    W2   training on 128 such sequences: LoRA of rank 32 on all linears of the layers, importance sampling on the new tokens, one AdamW step
    W3   one iteration: W1 with the current weights, then W2 on what came out

Every round has prompts of its own, so nobody finds them in a cache. Prompts are words, of which text makes the same tokens again: some
peers take text. The sequences of W2 are sampled from the model. New tokens are never cut short: no stop sequence counts.
"""

import json
import random
import sys
from typing import Any

import planish

PROMPT_TOKENS, SHARED_TOKENS = 200, 120
SHAPES = {"W1": (16, 8, 64), "W1b": (1, 1, 128), "W1c": (8, 8, 256), "W2": (16, 8, 64), "W3": (16, 8, 64)}
"""Prompts, samples of each, new tokens of each."""


def main(model: str, path: str, rounds: int = 4) -> None:
    with planish.ServiceClient() as service_client:
        client = service_client.create_sampling_client(base_model=model)
        works = {name: [make_round(client, name, number) for number in range(rounds)] for name in SHAPES}
    with open(path, "w") as file:
        json.dump(works, file)


def make_round(client: planish.SamplingClient, name: str, number: int) -> dict[str, Any]:
    prompts, samples, new_tokens = SHAPES[name]
    draw = random.Random(f"{name} {number}")
    tokenizer = client.get_tokenizer()
    tokens = make_prompts(tokenizer, draw, prompts)
    work = {
        "prompts": tokens,
        "texts": [tokenizer.decode(prompt) for prompt in tokens],
        "samples": samples,
        "new_tokens": new_tokens,
        "seed": number,
    }
    return work | sampled(client, work, draw) if name == "W2" else work


def make_prompts(tokenizer: Any, draw: random.Random, count: int) -> list[list[int]]:
    """Prompts of PROMPT_TOKENS words, of which the first SHARED_TOKENS are the same in all."""
    words = [token for token in range(1000, 20000) if is_word(tokenizer.decode([token]))]
    shared = draw.choices(words, k=SHARED_TOKENS)
    prompts = [shared + draw.choices(words, k=PROMPT_TOKENS - SHARED_TOKENS) for _ in range(count)]
    for prompt in prompts:
        assert tokenizer.encode(tokenizer.decode(prompt), add_special_tokens=False) == prompt
    return prompts


def is_word(text: str) -> bool:
    return text[:1] == " " and text[1:].isalpha() and text.isascii() and text.islower()


def sampled(client: planish.SamplingClient, work: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Completions [prompt][sample][token], their logprobs, and an advantage [prompt][sample] for each."""
    params = planish.SamplingParams(max_tokens=work["new_tokens"], stop=[], seed=work["seed"])
    futures = [
        client.sample(prompt=planish.ModelInput.from_ints(prompt), num_samples=work["samples"], sampling_params=params)
        for prompt in work["prompts"]
    ]
    groups = [future.result().sequences for future in futures]
    return {
        "completions": [[sequence.tokens for sequence in group] for group in groups],
        "logprobs": [[sequence.logprobs for sequence in group] for group in groups],
        "advantages": [[draw.uniform(-1, 1) for _ in group] for group in groups],
    }


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:4]))
