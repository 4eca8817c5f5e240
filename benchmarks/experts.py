"""Speed of a mixture of experts beside transformers and PEFT: decoding and LoRA gradients.

    OMP_NUM_THREADS=2 python benchmarks/experts.py
    python benchmarks/experts.py model=tiny-experts samples=2 new_tokens=4    # a quick check

The model has two layers with the widths of Qwen3-30B-A3B, half of its experts, a small vocabulary
and random weights in bf16. It is made at the first use (1.3 GB below `home`). Both programs compute
the same work in turns: `samples` continuations of one prompt, and the cross-entropy gradient of
LoRA on attention and experts. The script prints one JSON object: for both workloads the median
seconds of both programs, and the ratio of transformers' seconds to planish's.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chz
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from planish import ServiceClient
from planish.doctor.gpu.random_model import random_model
from planish.files import cache_home
from planish.types import Datum, ModelInput, SamplingParams


@chz.chz
class Options:
    model: str = "Qwen3-30B-A3B-slice"
    home: str = str(cache_home() / "benchmarks")
    samples: int = 4
    prompt_tokens: int = 64
    new_tokens: int = 32
    datums: int = 4
    datum_tokens: int = 256
    rank: int = 8
    rounds: int = 3


def main(options: Options) -> None:
    path = random_model(options.model, Path(options.home), torch.device("cpu"))
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 256, options.prompt_tokens).tolist()
    rows = rng.integers(0, 256, (options.datums, options.datum_tokens + 1)).tolist()
    service = ServiceClient(dtype="bfloat16")
    found = {
        "decode": rounds(
            options, decode(options, service, path, prompt), their_decode(options, path, prompt)
        ),
        "gradient": rounds(
            options, gradient(options, service, path, rows), their_gradient(options, path, rows)
        ),
    }
    service.close()
    print(json.dumps(found))


def rounds(
    options: Options, ours: Callable[[], None], theirs: Callable[[], None]
) -> dict[str, float]:
    """Run both in turns; the first round warms up."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(options.rounds + 1):
        for run, measured in zip((ours, theirs), seconds, strict=True):
            began = time.perf_counter()
            run()
            if number:
                measured.append(time.perf_counter() - began)
    own, other = map(statistics.median, seconds)
    return {"planish": own, "transformers": other, "ratio": other / own}


def decode(
    options: Options, service: ServiceClient, path: Path, prompt: list[int]
) -> Callable[[], None]:
    sampler = service.create_sampling_client(base_model=str(path))

    def run() -> None:
        params = SamplingParams(max_tokens=options.new_tokens, stop=[])
        sampler.sample(ModelInput.from_ints(prompt), options.samples, params).result()

    return run


def their_decode(options: Options, path: Path, prompt: list[int]) -> Callable[[], None]:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    tokens = torch.tensor([prompt] * options.samples)

    @torch.inference_mode()
    def run() -> None:
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=True,
            min_new_tokens=options.new_tokens,
            max_new_tokens=options.new_tokens,
        )

    return run


def gradient(
    options: Options, service: ServiceClient, path: Path, rows: list[list[int]]
) -> Callable[[], None]:
    client = service.create_lora_training_client(str(path), rank=options.rank, train_unembed=False)
    data = [Datum(ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:]}) for row in rows]
    return lambda: client.forward_backward(data, "cross_entropy").result() and None


def their_gradient(options: Options, path: Path, rows: list[list[int]]) -> Callable[[], None]:
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    config = LoraConfig(
        r=options.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model, tokens = get_peft_model(base, config), torch.tensor(rows)

    def run() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()

    return run


if __name__ == "__main__":
    chz.nested_entrypoint(main)
