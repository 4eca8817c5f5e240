"""What it costs that cached prefixes belong to a tenant, where tenants share one system prompt.

    OMP_NUM_THREADS=2 python benchmarks/shared_prompts.py
    python benchmarks/shared_prompts.py tenants=4 system_tokens=256

Each tenant sends `questions` requests, one after another, with the same system prompt and
different questions. All requests of all tenants are sent with `share_prefix_cache` off and on, each
time to a new engine. The script prints one JSON object: for both settings the seconds, the mean
seconds of a tenant's first and later requests, and the share of the prompt tokens that came from
the prefix cache.
"""

import json
import statistics
import time

import chz
import numpy as np

from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.model.sources.resolve import DEFAULT_MODEL
from planish.service import CreateSampler, Sample
from planish.types import ModelInput, SamplingParams


@chz.chz
class Options:
    model: str = DEFAULT_MODEL
    tenants: int = 16
    questions: int = 4
    system_tokens: int = 1024
    question_tokens: int = 64
    new_tokens: int = 16


def main(options: Options) -> None:
    print(
        json.dumps(
            {str(is_shared): measure(options, is_shared) for is_shared in (False, True)}, indent=1
        )
    )


def measure(options: Options, is_shared: bool) -> dict[str, float]:
    rng = np.random.default_rng(0)
    system = rng.integers(100, 40_000, options.system_tokens).tolist()
    engine = Engine(settings=EngineSettings(share_prefix_cache=is_shared))
    try:
        engine.submit(CreateSampler("sampler", options.model)).result()
        first_seconds, later_seconds, cached_tokens, prompt_tokens = [], [], 0, 0
        for question in range(-1, options.questions):
            for tenant in range(options.tenants if question >= 0 else 1):
                words = rng.integers(100, 40_000, options.question_tokens).tolist()
                prompt = [*(system if question >= 0 else []), *words]
                operation = Sample(
                    "sampler",
                    ModelInput.from_ints(prompt),
                    1,
                    SamplingParams(max_tokens=options.new_tokens, stop=[], seed=0),
                    owner=f"tenant-{tenant}",
                )
                start_time = time.perf_counter()
                response = engine.submit(operation).result()
                if question < 0:
                    continue  # the first request warms up
                (later_seconds if question else first_seconds).append(
                    time.perf_counter() - start_time
                )
                cached_tokens, prompt_tokens = (
                    cached_tokens + response.prompt_cache_hit_tokens,
                    prompt_tokens + len(prompt),
                )
    finally:
        engine.close()
    return {
        "seconds": round(sum(first_seconds) + sum(later_seconds), 2),
        "first_request_seconds": round(statistics.mean(first_seconds), 3),
        "later_request_seconds": round(statistics.mean(later_seconds), 3),
        "cached_share": round(cached_tokens / prompt_tokens, 3),
    }


if __name__ == "__main__":
    chz.nested_entrypoint(main)
