"""Several adapters in one decode batch, compared with one adapter and the same requests.

    python benchmarks/adapters.py                 writes results/adapters.json
    python benchmarks/adapters.py name=NAME       writes results/NAME.json

There are 1, 8 and 64 training clients in process. Each has a sampling client for its weights after
one optimizer step. There are 64 or 256 samples in total, so each of 8 clients has 8 or 32. All
requests, one prompt per client, run at once. Then one of the clients runs the same requests alone.
Several adapters have one unavoidable cost: their weights are read at every step. The table shows
this time, computed from the measured memory bandwidth. A new version of an adapter is packed at its
first use. The times above exclude packing; it is measured as the first token of a new sampling
client, compared with the first token of one that was used before.
"""

import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz
from compare import header
from iteration import count_tokens, rollouts, rollouts_in_turn, train_step, with_completions
from limits import measure_read_bandwidth
from overheads import time_first_token
from report import RESULTS, adapters_table
from workloads import Shape, make_prompts

import planish
from planish.files import write_atomically
from planish.model.architecture.config import ModelConfig
from planish.model.layers.lora import LoraLayout
from planish.model.sources.resolve import DEFAULT_MODEL, resolve_model
from planish.types import LoraConfig

ADAPTERS = (1, 8, 64)
SAMPLES = (64, 256)
BFLOAT16_BYTES = 2


@chz.chz
class Options:
    name: str = "adapters"
    """Name of the results file."""
    model: str = DEFAULT_MODEL
    rank: int = 16
    prompt_tokens: int = 32
    new_tokens: int = 32
    rounds: int = 3
    small: bool = False
    """A quick check that everything runs; its times mean nothing."""
    directory: Path = RESULTS


def main(options: Options) -> None:
    report = header(options)
    adapter_counts, sample_counts = ((1, 2), (4,)) if options.small else (ADAPTERS, SAMPLES)
    layout = LoraLayout(
        ModelConfig.from_directory(resolve_model(options.model)), LoraConfig(rank=options.rank)
    )
    with planish.ServiceClient() as service_client:
        clients = [
            train_adapter(service_client, options, number) for number in range(max(adapter_counts))
        ]
        samplers = [client.save_weights_and_get_sampling_client() for client in clients]
        first_token_seconds = [
            time_first_tokens(sampler, options, number) for number, sampler in enumerate(samplers)
        ]
        report["first_tokens"] = {
            name: [round(seconds, 6) for seconds in values]
            for name, values in zip(
                ("new", "used"), zip(*first_token_seconds, strict=True), strict=True
            )
        }
        report["points"] = [
            {
                "adapters": count,
                "samples": samples,
                "tokens": samples * options.new_tokens,
                "new_tokens": options.new_tokens,
                **measure_rounds(samplers[:count], options, samples),
            }
            for samples in sample_counts
            for count in adapter_counts
        ]
    # This must come last: after a large torch operation in this thread, OpenMP's threads sleep
    # between kernels, and everything takes a third longer (docs/lab/log.md).
    bandwidth = report["read_bandwidth"] = measure_read_bandwidth()
    for point in report["points"]:
        point["read_seconds_a_step"] = point["adapters"] * layout.size * BFLOAT16_BYTES / bandwidth
    write_atomically(
        options.directory / f"{options.name}.json", json.dumps(report, indent=1) + "\n"
    )
    print(adapters_table(report))


def train_adapter(
    service_client: planish.ServiceClient, options: Options, number: int
) -> planish.TrainingClient:
    """Train one step, so that all adapters differ and none is zero."""
    client = service_client.create_lora_training_client(
        base_model=options.model, rank=options.rank, seed=number
    )
    round_spec = {
        **make_round_spec(client.get_tokenizer(), options, 1, 2, f"training {number}"),
        "new_tokens": 2,
    }
    train_step(
        client,
        with_completions(
            round_spec, rollouts(client.save_weights_and_get_sampling_client(), round_spec)
        ),
    )
    return client


def time_first_tokens(
    sampler: planish.SamplingClient, options: Options, number: int
) -> tuple[float, float]:
    """Return the seconds of a new sampler's first token, and then for another prompt."""
    prompts = make_round_spec(sampler.get_tokenizer(), options, 2, 1, f"first {number}")["prompts"]
    new_sampler_seconds, used_sampler_seconds = (
        time_first_token(sampler, prompt) for prompt in prompts
    )
    return new_sampler_seconds, used_sampler_seconds


def measure_rounds(
    samplers: Sequence[planish.SamplingClient], options: Options, samples: int
) -> dict[str, Any]:
    """Return the seconds of each round with all adapters and with one. The order alternates."""
    seconds: dict[str, list[float]] = {"seconds": [], "alone_seconds": []}
    for number in range(options.rounds + 1):
        variants = [("seconds", samplers), ("alone_seconds", samplers[:1])]
        for name, clients in variants if number % 2 else reversed(variants):
            # Every round has its own prompts, so no cache contains them.
            round_name = f"{name} {samples} {number}"
            count = len(samplers)
            round_spec = make_round_spec(
                samplers[0].get_tokenizer(), options, count, samples // count, round_name
            )
            start_time = time.perf_counter()
            num_tokens = count_tokens(rollouts_in_turn(clients, round_spec))
            elapsed = time.perf_counter() - start_time
            assert num_tokens == samples * options.new_tokens
            if number:  # round 0 warms up
                seconds[name].append(round(elapsed, 4))
    return {**seconds, "median_seconds": statistics.median(seconds["seconds"])}


def make_round_spec(
    tokenizer: Any, options: Options, prompts: int, samples: int, name: str
) -> dict[str, Any]:
    shape = Shape(prompts, samples, options.new_tokens, options.prompt_tokens, 0)
    prompt_tokens = make_prompts(tokenizer, random.Random(name), shape)
    return {
        "prompts": prompt_tokens,
        "samples": samples,
        "new_tokens": options.new_tokens,
        "seed": 0,
    }


if __name__ == "__main__":
    main(chz.entrypoint(Options))
