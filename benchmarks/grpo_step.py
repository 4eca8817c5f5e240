"""Seconds of one GRPO step, and tokens per second of its two halves, on this machine.

    python benchmarks/grpo_step.py                         16 problems x 8 answers of 128 tokens, the embedded model
    python benchmarks/grpo_step.py problems=4 group=8 new_tokens=64 prompt_tokens=200 steps=3

Prompts share their first half, as prompts with an example in front do. Answers have a fixed length, so runs compare.
One JSON object is printed.
"""

import json
import platform
import random
import resource
import statistics
import time
from typing import Any

import chz
import torch

import planish
from planish.model.sources import DEFAULT_MODEL
from planish.recipes.grpo import Judgement, sample_groups, train_step, training_examples


@chz.chz
class Work:
    model: str = DEFAULT_MODEL
    problems: int = 16
    group: int = 8
    prompt_tokens: int = 200
    new_tokens: int = 128
    rank: int = 32
    steps: int = 3


def main(work: Work) -> None:
    with planish.ServiceClient() as service_client:
        client = service_client.create_lora_training_client(base_model=work.model, rank=work.rank, seed=0)
        step(client, work, 0)  # the first step warms caches and allocators up
        rows = [step(client, work, number) for number in range(1, work.steps + 1)]
    report = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    machine = {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    print(json.dumps({"work": chz.asdict(work), **machine, **report, "peak_memory_gib": peak}, indent=2))


def step(client: Any, work: Work, number: int) -> dict[str, float]:
    """One step on random prompts; rewards are random too, so that every group is trained on."""
    draw = random.Random(number)
    vocabulary = len(client.get_tokenizer())
    shared = [draw.randrange(vocabulary) for _ in range(work.prompt_tokens // 2)]
    own = work.prompt_tokens - len(shared)
    prompts = [
        planish.ModelInput.from_ints(shared + [draw.randrange(vocabulary) for _ in range(own)])
        for _ in range(work.problems)
    ]
    params = planish.SamplingParams(max_tokens=work.new_tokens, stop=[])
    start = time.perf_counter()
    groups = sample_groups(
        client.save_weights_and_get_sampling_client(),
        prompts,
        lambda _, __: Judgement(draw.random(), {}),
        group_size=work.group,
        params=params,
        seeds_P=range(work.problems),
    )
    sampled = time.perf_counter()
    examples = training_examples(groups, "importance_sampling")
    metrics = train_step(
        client,
        examples,
        loss_fn="importance_sampling",
        loss_fn_config=None,
        adam=planish.AdamParams(learning_rate=1e-5),
    )
    trained = time.perf_counter()
    new_tokens = work.problems * work.group * work.new_tokens
    sequence_tokens = sum(example.datum.model_input.length for example in examples)
    return {
        "seconds_per_step": trained - start,
        "seconds_sampling": sampled - start,
        "seconds_training": trained - sampled,
        "sampled_tokens_per_second": new_tokens / (sampled - start),
        "trained_tokens_per_second": sequence_tokens / (trained - sampled),
        "kl_sample_train_v2": metrics["optim/kl_sample_train_v2"],
    }


if __name__ == "__main__":
    main(chz.entrypoint(Work))
