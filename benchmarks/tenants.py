"""Many tenants on one server, compared with one tenant that does the same work in the same calls.

    python benchmarks/tenants.py                                  64 tenants, the embedded model
    python benchmarks/tenants.py tenants=16 rounds=2 group=4

Each tenant has its own key, session and adapter; ranks differ. A call samples `group` answers to
one prompt, or trains on them (forward_backward and optim_step). In every round, all tenants sample,
train, and create a sampling client for the new weights. The single tenant has one adapter of the
tenants' median rank and sends the same calls: `tenants` of them sample at once, then the same
number train and create a sampling client, one after another.

`throughput_ratio` is the median over rounds of the single tenant's seconds divided by the tenants'
seconds. `longest_wait` is the longest time that one of the tenants waited for its answers, divided
by the average of all tenants. The script prints one JSON object.
"""

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chz
import torch
from served import running_server

import planish
from planish.model.sources.resolve import DEFAULT_MODEL

RANKS = (4, 8, 16, 32)
MIDDLE_RANK = 16
PhaseSeconds = dict[str, float]
"""Seconds of the parts of a round."""


@chz.chz
class Options:
    model: str = DEFAULT_MODEL
    tenants: int = 64
    rounds: int = 3
    group: int = 8
    prompt_tokens: int = 32
    new_tokens: int = 32
    adapter_memory: str = "16GiB"


@dataclass
class Tenant:
    """One adapter, and how long its tenant waited for answers."""

    client: planish.TrainingClient
    sampler: planish.SamplingClient
    wait_seconds: list[float] = field(default_factory=list)


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory(prefix="planish-") as directory, ExitStack() as stack:
        keys = [f"tml-benchmark-{number:04d}" for number in range(options.tenants + 1)]
        file = Path(directory) / "keys"
        file.write_text("".join(f"tenant-{number} {key}\n" for number, key in enumerate(keys)))
        limits = ("--set", f"adapter_memory_bytes={options.adapter_memory}")
        url = stack.enter_context(
            running_server(Path(directory), "--api-key-file", str(file), *limits)
        )
        services = [
            stack.enter_context(planish.ServiceClient(base_url=url, api_key=key)) for key in keys
        ]
        pool = stack.enter_context(ThreadPoolExecutor(options.tenants))
        single_tenant = create_tenant(services[-1], options, MIDDLE_RANK)
        tenants = list(
            pool.map(
                lambda n: create_tenant(services[n], options, RANKS[n % len(RANKS)]),
                range(options.tenants),
            )
        )
        round_of_both(pool, single_tenant, tenants, options, 0)  # warm-up
        for tenant in tenants:
            tenant.wait_seconds.clear()
        rounds = [
            round_of_both(pool, single_tenant, tenants, options, number)
            for number in range(1, options.rounds + 1)
        ]
    print(json.dumps(report(options, rounds, tenants), indent=2))


def report(
    options: Options, rounds: Sequence[tuple[PhaseSeconds, PhaseSeconds]], tenants: Sequence[Tenant]
) -> Any:
    ratios = {
        phase: [alone[phase] / shared[phase] for alone, shared in rounds] for phase in rounds[0][0]
    }
    waits = [sum(tenant.wait_seconds) for tenant in tenants]
    tokens = options.tenants * options.group * options.new_tokens
    seconds = statistics.median(sum(shared.values()) for _, shared in rounds)
    return {
        "work": chz.asdict(options),
        "threads": torch.get_num_threads(),
        "throughput_ratio": statistics.median(
            sum(alone.values()) / sum(shared.values()) for alone, shared in rounds
        ),
        "ratios": {
            phase: [round(value, 3) for value in values] for phase, values in ratios.items()
        },
        "longest_wait": max(waits) / statistics.fmean(waits),
        "seconds_a_round": seconds,
        "sampled_tokens_per_second": tokens / seconds,
    }


def create_tenant(service: planish.ServiceClient, options: Options, rank: int) -> Tenant:
    client = service.create_lora_training_client(base_model=options.model, rank=rank, seed=rank)
    return Tenant(client, client.save_weights_and_get_sampling_client())


def round_of_both(
    pool: ThreadPoolExecutor,
    single_tenant: Tenant,
    tenants: Sequence[Tenant],
    options: Options,
    number: int,
) -> tuple[PhaseSeconds, PhaseSeconds]:
    """Return the seconds of the single tenant and of the many tenants. The order alternates."""
    if number % 2:
        return round_of_one(pool, single_tenant, options, number), round_of_many(
            pool, tenants, options, number
        )
    shared = round_of_many(pool, tenants, options, number)
    return round_of_one(pool, single_tenant, options, number), shared


def round_of_many(
    pool: ThreadPoolExecutor, tenants: Sequence[Tenant], options: Options, number: int
) -> PhaseSeconds:
    """Return the seconds until all tenants have sampled, and until all have trained. No tenant
    begins to train before all have sampled, so that both variants are comparable.
    """
    all_sampled, all_trained = (threading.Barrier(len(tenants) + 1) for _ in range(2))

    def run_tenant(index: int) -> None:
        tenant = tenants[index]
        start_time = time.perf_counter()
        answer = sample(tenant, options, number, index).result()
        tenant.wait_seconds.append(time.perf_counter() - start_time)
        all_sampled.wait()
        start_time = time.perf_counter()
        for pending in train(tenant, options, number, index, answer):
            pending.result()
        tenant.sampler = tenant.client.save_weights_and_get_sampling_client()
        tenant.wait_seconds.append(time.perf_counter() - start_time)
        all_trained.wait()

    start_time = time.perf_counter()
    futures = [pool.submit(run_tenant, index) for index in range(len(tenants))]
    all_sampled.wait()
    sampled_time = time.perf_counter()
    all_trained.wait()
    trained_time = time.perf_counter()
    for future in futures:
        future.result()
    return {"sampling": sampled_time - start_time, "training": trained_time - sampled_time}


def round_of_one(
    pool: ThreadPoolExecutor, single_tenant: Tenant, options: Options, number: int
) -> PhaseSeconds:
    """Send the same calls for one tenant, as many at once as `round_of_many` has tenants."""
    start_time = time.perf_counter()
    pending = [sample(single_tenant, options, number, index) for index in range(options.tenants)]
    answers = [answer.result() for answer in pending]
    sampled_time = time.perf_counter()
    steps = [
        step
        for index, answer in enumerate(answers)
        for step in train(single_tenant, options, number, index, answer)
    ]
    for step in steps:
        step.result()
    single_tenant.sampler, *_ = pool.map(
        lambda _: single_tenant.client.save_weights_and_get_sampling_client(),
        range(options.tenants),
    )
    return {"sampling": sampled_time - start_time, "training": time.perf_counter() - sampled_time}


def sample(tenant: Tenant, options: Options, number: int, index: int) -> Any:
    params = planish.SamplingParams(
        max_tokens=options.new_tokens, stop=[], seed=number * options.tenants + index
    )
    return tenant.sampler.sample(
        planish.ModelInput.from_ints(prompt(options, number, index)), options.group, params
    )


def train(tenant: Tenant, options: Options, number: int, index: int, answer: Any) -> list[Any]:
    """Train on the group with one forward_backward and one optim_step."""
    prompt_tokens = prompt(options, number, index)
    data = []
    for position, sequence in enumerate(answer.sequences):
        tokens = [*prompt_tokens, *sequence.tokens]
        advantage = 1.0 if position % 2 else -1.0
        num_sampled = len(sequence.tokens)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * (len(prompt_tokens) - 1) + list(sequence.logprobs),
            "advantages": [0.0] * (len(prompt_tokens) - 1) + [advantage] * num_sampled,
        }
        data.append(planish.Datum(planish.ModelInput.from_ints(tokens[:-1]), inputs))
    return [
        tenant.client.forward_backward(data, "importance_sampling"),
        tenant.client.optim_step(planish.AdamParams(learning_rate=1e-5)),
    ]


def prompt(options: Options, number: int, index: int) -> list[int]:
    """Return a prompt. No two prompts have a common prefix."""
    return [
        (number * 7919 + index * 104729 + position * 31) % 40000
        for position in range(options.prompt_tokens)
    ]


if __name__ == "__main__":
    main(chz.entrypoint(Options))
