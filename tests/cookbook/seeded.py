"""Run a module with seeded samples and adapters, and write down what was sampled: `python seeded.py
TOKENS_FILE MODULE ARGUMENTS`. The module itself is unmodified; without seeds two runs would differ.
"""

import hashlib
import json
import runpy
import sys
from collections import Counter
from typing import Any

import tinker

TOKENS_FILE = sys.argv[1]
seen: Counter[str] = Counter()


def seeded(params: Any, prompt: Any) -> tuple[Any, str]:
    """Return the parameters with a seed that depends on the prompt and on how often it came
    before.
    """
    name = hashlib.sha256(json.dumps(prompt.to_ints()).encode()).hexdigest()[:12]
    seen[name] += 1
    name = f"{name}-{seen[name]}"
    seed = int(hashlib.sha256(name.encode()).hexdigest()[:7], 16)
    fields = ("max_tokens", "stop", "temperature", "top_k", "top_p")
    given = {field: getattr(params, field) for field in fields}
    return tinker.SamplingParams(**given, seed=seed), name


def write_down(name: str, response: Any) -> None:
    tokens = [list(sequence.tokens) for sequence in response.sequences]
    with open(TOKENS_FILE, "a") as file:
        file.write(json.dumps([name, tokens]) + "\n")


plain_sample = tinker.SamplingClient.sample
plain_create = tinker.ServiceClient.create_lora_training_client


def sample(self, prompt, num_samples, sampling_params, **options):
    params, name = seeded(sampling_params, prompt)
    pending = plain_sample(self, prompt, num_samples, params, **options)
    pending.future().add_done_callback(lambda future: write_down(name, future.result()))
    return pending


async def sample_async(self, prompt, num_samples, sampling_params, **options):
    params, name = seeded(sampling_params, prompt)
    response = await plain_sample(self, prompt, num_samples, params, **options)
    write_down(name, response)
    return response


def create_lora_training_client(self, base_model, rank=32, seed=None, **options):
    return plain_create(self, base_model, rank, 7, **options)


setattr(tinker.SamplingClient, "sample", sample)  # noqa: B010
setattr(tinker.SamplingClient, "sample_async", sample_async)  # noqa: B010
setattr(tinker.ServiceClient, "create_lora_training_client", create_lora_training_client)  # noqa: B010
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
