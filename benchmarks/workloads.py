"""The workloads of the benchmarks, as data.

    W1   rollouts: 16 prompts of 200 tokens that share their first 120, 8 samples each, 64 new
         tokens, temperature 1, logprobs
    W1b  one prompt of 200 tokens, one sample, 128 new tokens
    W1c  8 prompts of 200 tokens, 8 samples each, 256 new tokens
    W1j  W1 with a JSON schema that every sample follows: an endless list of objects
    W2   training on 128 such sequences: LoRA of rank 32 on all linear layers of the blocks,
         importance sampling on the new tokens, one AdamW step
    W3   one iteration: W1 with the current weights, then W2 on the samples

Round 0 of each workload is smaller and warms up caches, allocators and compilers. Every round has
its own prompts, so no cache contains them. Prompts consist of words whose text is tokenized to the
same tokens again, because some peers take text. The sequences of W2 are sampled from the model. No
stop sequence applies, so samples always have their full length.
"""

import json
import random
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from iteration import rollouts, with_completions

import planish

PROMPT_TOKENS, SHARED_TOKENS = 200, 120
LIST_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
"""A JSON schema whose documents are longer than any sample of a benchmark."""


@dataclass(frozen=True)
class Shape:
    prompts: int
    samples: int
    """Tokens of each prompt."""
    new_tokens: int
    """Tokens of each sample."""
    prompt_tokens: int = PROMPT_TOKENS
    shared_tokens: int = SHARED_TOKENS
    """Tokens at the beginning of a prompt that all prompts of a round share."""


@dataclass(frozen=True)
class Workload:
    warm_up: Shape
    shape: Shape
    has_completions: bool = False
    """Whether rounds contain sampled completions to train on."""
    is_constrained: bool = False
    """Whether samples follow LIST_SCHEMA."""


WORKLOADS = {
    "W1": Workload(Shape(4, 8, 16), Shape(16, 8, 64)),
    "W1b": Workload(Shape(1, 1, 32), Shape(1, 1, 128)),
    "W1c": Workload(Shape(2, 8, 32), Shape(8, 8, 256)),
    "W1j": Workload(Shape(4, 8, 16), Shape(16, 8, 64), is_constrained=True),
    "W2": Workload(Shape(4, 8, 64), Shape(16, 8, 64), has_completions=True),
    "W3": Workload(Shape(4, 8, 64), Shape(16, 8, 64)),
}
SMALL_WORKLOADS = {
    "W1": Workload(Shape(1, 2, 2), Shape(2, 4, 8)),
    "W1b": Workload(Shape(1, 1, 2), Shape(1, 1, 8)),
    "W1c": Workload(Shape(1, 2, 2), Shape(2, 2, 16)),
    "W1j": Workload(Shape(1, 2, 2), Shape(2, 4, 8), is_constrained=True),
    "W2": Workload(Shape(4, 4, 8), Shape(4, 4, 8), has_completions=True),
    "W3": Workload(Shape(2, 4, 8), Shape(4, 4, 8)),
}
"""Small workloads for a quick check; their times mean nothing."""


def write_rounds(model: str, path: Path, workloads: Mapping[str, Workload], rounds: int) -> None:
    """Write the file {workload: [round 0, round 1, ...]} in a subprocess, so that this process
    stays small.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        path.write_text(json.dumps(pool.submit(make_rounds, model, workloads, rounds).result()))


def make_rounds(
    model: str, workloads: Mapping[str, Workload], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Return the warm-up round of each workload, followed by `rounds` rounds."""
    with planish.ServiceClient() as service_client:
        client = service_client.create_sampling_client(base_model=model)
        rounds_by_workload = {}
        for name, workload in workloads.items():
            shapes = [workload.warm_up, *[workload.shape] * rounds]
            round_specs = [
                make_round(client.get_tokenizer(), f"{name} {number}", shape, number)
                for number, shape in enumerate(shapes)
            ]
            if workload.is_constrained:
                round_specs = [{**round_spec, "schema": LIST_SCHEMA} for round_spec in round_specs]
            rounds_by_workload[name] = (
                [
                    with_completions(round_spec, rollouts(client, round_spec))
                    for round_spec in round_specs
                ]
                if workload.has_completions
                else round_specs
            )
        return rounds_by_workload


def make_round(tokenizer: Any, name: str, shape: Shape, seed: int) -> dict[str, Any]:
    """Make a round. Rounds with different names have different prompts."""
    prompts = make_prompts(tokenizer, random.Random(name), shape)
    return {
        "prompts": prompts,
        "shared_tokens": shape.shared_tokens,
        "texts": [tokenizer.decode(prompt) for prompt in prompts],
        "samples": shape.samples,
        "new_tokens": shape.new_tokens,
        "seed": seed,
    }


def make_prompts(tokenizer: Any, rng: random.Random, shape: Shape) -> list[list[int]]:
    """Return prompts made of words, or of letters if the tokenizer has no words."""
    words = [token for token in range(1000, 20000) if is_word(tokenizer.decode([token]))]
    words = words or [token for token in range(256) if is_letter(tokenizer.decode([token]))]
    shared = rng.choices(words, k=shape.shared_tokens)
    num_own_tokens = shape.prompt_tokens - shape.shared_tokens
    prompts = [shared + rng.choices(words, k=num_own_tokens) for _ in range(shape.prompts)]
    for prompt in prompts:
        assert tokenizer.encode(tokenizer.decode(prompt), add_special_tokens=False) == prompt
    return prompts


def is_word(text: str) -> bool:
    return text[:1] == " " and text[1:].isalpha() and text.isascii() and text.islower()


def is_letter(text: str) -> bool:
    return len(text) == 1 and text.isalpha() and text.isascii()
