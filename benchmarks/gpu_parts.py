"""The parts of gpu.py. Each returns its measurements as rows of the table."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import chz
from compare import (
    HERE,
    OPTIONAL_PEERS,
    OWN_ENVIRONMENT,
    PEERS,
    check_same_work,
    interpreter,
    measure_interleaved,
    parse_names,
)
from gpu_limits import MachineLimits, decode_bytes, training_flops
from gpu_profile import profiles
from iteration import (
    count_tokens,
    rollouts,
    rollouts_in_turn,
    run_iteration,
    step_seconds,
    train_step,
    with_completions,
)
from limits import RANK
from peer_process import PeerProcess
from report import RESULTS, TITLES
from workloads import SMALL_WORKLOADS, WORKLOADS, Shape, Workload, make_round, write_rounds

import planish
from planish.engine.settings import EngineSettings
from planish.model.architecture.config import ModelConfig
from planish.tokenizer import load_tokenizer

NEW_TOKENS, WARM_UP_TOKENS, SMALL_NEW_TOKENS = 256, 32, 8
DECODE_ROWS = ((1, 1), (1, 8), (16, 8))
"""Number of prompts, and of samples per prompt."""
TENANTS = (1, 8, 64)
"""Numbers of adapters. There are 64 prompts in total with two samples each."""
FEW_TOKENS, MANY_TOKENS = 8, 136
"""New tokens of two calls. The difference of their times is the time of the steps in between."""


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    what: str
    values: list[float]
    """One value per round."""
    unit: str
    share: float | None = None
    """The median as a share of the limit that `of` names."""
    of: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@chz.chz
class Options:
    model: str = "Qwen3-8B"
    parts: str = "decode,training,grpo-16x8,tenants"
    """Names separated by commas."""
    rounds: int = 3
    """Number of rounds. The table has their median."""
    minutes: float = 8.0
    kv_cache_gib: float | None = None
    max_batch: int | None = None
    micro_batch_tokens: int | None = None
    """This option and the next two are options of ServiceClient. None uses its default."""
    peers: str = "ours,generate,peft-8"
    workloads: str = "W1,W1b,W2"
    name: str | None = None
    """Name of the results file. Default: "gpu-" and the model's name."""
    directory: Path = RESULTS
    models: Path = Path(tempfile.gettempdir()) / "planish-random-models"
    """Directory for random models."""
    small: bool = False
    """A quick check that everything runs; times mean nothing."""

    @property
    def service(self) -> dict[str, Any]:
        """Return the options for ServiceClient."""
        kv_cache = None if self.kv_cache_gib is None else int(self.kv_cache_gib * (1 << 30))
        service_options = {
            "kv_cache_bytes": kv_cache,
            "max_batch": self.max_batch,
            "micro_batch_tokens": self.micro_batch_tokens,
        }
        return {name: value for name, value in service_options.items() if value is not None}


@dataclass(frozen=True)
class Bench:
    """The objects that all parts share."""

    options: Options
    model: Path
    config: ModelConfig
    limits: MachineLimits
    deadline: float

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.model)

    def rounds(self) -> Iterator[int]:
        """Yield the numbers of the rounds after the warm-up: at least one, and no more once the
        time is over.
        """
        yield 1
        for number in range(2, self.options.rounds + 1):
            if self.is_late:
                return
            yield number

    def round(self, name: str, prompts: int, samples: int, new_tokens: int) -> dict[str, Any]:
        """Return a round of this shape, or a smaller one with `small`."""
        shape = Shape(prompts, samples, new_tokens)
        if self.options.small:
            shape = Shape(min(prompts, 4), min(samples, 2), SMALL_NEW_TOKENS)
        return make_round(self.tokenizer, name, shape, 0)


# Parts on one engine.


def decode(bench: Bench, service: planish.ServiceClient) -> list[Row]:
    """Measure decoding with an adapter of the default modules, as in RL, and without one."""
    adapted = published_adapter(bench, service, 0)
    plain = service.create_sampling_client(base_model=str(bench.model))
    return [
        *decode_rows(bench, adapted, "decode"),
        *decode_rows(bench, plain, "decode without adapter"),
    ]


def decode_rows(bench: Bench, client: planish.SamplingClient, label: str) -> list[Row]:
    rows = []
    for prompts, samples in DECODE_ROWS:
        round_spec = bench.round(f"decode {prompts}", prompts, samples, MANY_TOKENS)
        seconds = decode_seconds(bench, [client], round_spec)
        min_seconds = (
            decode_bytes(bench.config, round_spec, sum(few_and_many_tokens(round_spec)) / 2)
            / bench.limits.bandwidth
        )
        share = min_seconds / statistics.median(seconds)
        rows.append(
            Row(
                f"{label}, {rows_of(round_spec)}",
                milliseconds(seconds),
                "ms a step",
                share,
                "the memory's speed",
            )
        )
    return rows


def tenants(bench: Bench, service: planish.ServiceClient) -> list[Row]:
    adapter_counts = [count for count in TENANTS if count <= 8 or not bench.options.small]
    clients = [published_adapter(bench, service, seed) for seed in range(max(adapter_counts))]
    round_spec = bench.round("tenants", max(adapter_counts), 2, MANY_TOKENS)
    seconds_by_count = {
        count: decode_seconds(bench, clients[:count], round_spec) for count in adapter_counts
    }
    seconds_with_one = statistics.median(seconds_by_count[1])
    return [
        Row(
            f"decode, {rows_of(round_spec)}, {count} adapter{'s' if count > 1 else ''}",
            milliseconds(seconds),
            "ms a step",
            seconds_with_one / statistics.median(seconds),
            "the speed with one",
        )
        for count, seconds in seconds_by_count.items()
    ]


def decode_seconds(
    bench: Bench, clients: Sequence[planish.SamplingClient], round_spec: Mapping[str, Any]
) -> list[float]:
    """Return the seconds of a step, once per round."""

    def sample(new_tokens: int) -> None:
        rollouts_in_turn(clients, {**round_spec, "new_tokens": new_tokens})

    return step_seconds(sample, *few_and_many_tokens(round_spec), bench.options.rounds)


def rows_of(round_spec: Mapping[str, Any]) -> str:
    rows = len(round_spec["prompts"]) * round_spec["samples"]
    return "1 row" if rows == 1 else f"{rows} rows"


def few_and_many_tokens(round_spec: Mapping[str, Any]) -> tuple[int, int]:
    many = round_spec["new_tokens"]
    return min(FEW_TOKENS, many // 2), many


def milliseconds(seconds: Sequence[float]) -> list[float]:
    return [1e3 * value for value in seconds]


def published_adapter(
    bench: Bench, service: planish.ServiceClient, seed: int
) -> planish.SamplingClient:
    """Return a sampling client of a new adapter. The training state is freed, because 64 of them
    would not fit beside a large model.
    """
    client = service.create_lora_training_client(str(bench.model), rank=RANK, seed=seed)
    return client.save_weights_and_get_sampling_client()


def training(bench: Bench, service: planish.ServiceClient) -> list[Row]:
    client = service.create_lora_training_client(str(bench.model), rank=RANK, seed=0)
    sampler = client.save_weights_and_get_sampling_client()

    def train_round(name: str, new_tokens: int) -> tuple[float, dict[str, Any]]:
        prompts_only = bench.round(f"training {name}", 16, 8, new_tokens)
        round_spec = with_completions(prompts_only, rollouts(sampler, prompts_only))
        start_time = time.perf_counter()
        train_step(client, round_spec)
        return time.perf_counter() - start_time, round_spec

    train_round("warm-up", WARM_UP_TOKENS)
    rounds = [train_round(str(number), NEW_TOKENS) for number in bench.rounds()]
    return training_rows(bench, "training", [seconds for seconds, _ in rounds], rounds[0][1])


def training_rows(
    bench: Bench, label: str, seconds: Sequence[float], round_spec: Mapping[str, Any]
) -> list[Row]:
    """Return the rows of rounds that all have the shape of `round_spec`."""
    tokens = round_spec["samples"] * sum(
        len(prompt) + round_spec["new_tokens"] for prompt in round_spec["prompts"]
    )
    rate = training_flops(bench.config, round_spec) / statistics.median(seconds)
    share_of_layers = rate / bench.limits.layer_rate
    return [
        Row(
            label,
            [tokens / value for value in seconds],
            "tokens/s",
            rate / bench.limits.product_rate,
            "the product rate",
        ),
        Row(
            f"{label}, useful",
            [rate / 1e12],
            "TFLOP/s",
            share_of_layers,
            "the product rate of the model's layers",
        ),
    ]


def grpo(bench: Bench, service: planish.ServiceClient, prompts: int, samples: int) -> list[Row]:
    label = f"iteration, {prompts} x {samples}"
    client = service.create_lora_training_client(str(bench.model), rank=RANK, seed=0)
    run_iteration(client, bench.round(f"{label} warm-up", prompts, samples, WARM_UP_TOKENS))
    round_specs, iterations = [], []
    for number in bench.rounds():
        round_specs.append(bench.round(f"{label} {number}", prompts, samples, NEW_TOKENS))
        iterations.append(run_iteration(client, round_specs[-1]))
    sampling_rates = [
        count_tokens(iteration.groups) / iteration.sampling_seconds for iteration in iterations
    ]
    return [
        Row(label, [iteration.seconds for iteration in iterations], "s"),
        Row(f"{label}: sampling", sampling_rates, "new tokens/s"),
        *training_rows(
            bench,
            f"{label}: training",
            [iteration.training_seconds for iteration in iterations],
            round_specs[0],
        ),
    ]


# Parts that create their own engine or processes.


def peers(bench: Bench, workload: str) -> list[Row]:
    """Compare the peers. All of them run in this environment, which has the packages for the
    GPU.
    """
    options, known = bench.options, PEERS | OPTIONAL_PEERS
    names = [
        name
        for name in parse_names(options.peers, PEERS, known)
        if workload in known[name].workloads
    ]
    ours_variables = {"OURS_OPTIONS": json.dumps(options.service)}
    with tempfile.TemporaryDirectory(prefix="planish-benchmark-") as directory:
        scratch = Path(directory)
        path = scratch / f"{workload}.json"
        write_rounds(
            str(bench.model), path, {workload: workloads_of(options)[workload]}, options.rounds
        )
        peer_processes = [
            PeerProcess(
                name,
                [interpreter(OWN_ENVIRONMENT), HERE / spec.script],
                path,
                {**spec.variables, **ours_variables},
            )
            for name, spec in ((name, known[name]) for name in names)
        ]
        measurements = measure_interleaved(
            peer_processes, workload, options.rounds, bench.model, scratch
        )
        check_same_work(workload, json.loads(path.read_text())[workload], measurements)
    medians = {
        measurement.process.name: measurement.row()["median_seconds"]
        for measurement in measurements
    }
    ours = medians.get("ours")
    return [
        Row(
            f"{workload}, {TITLES.get(measurement.process.name, measurement.process.name)}",
            [facts["seconds"] for facts in measurement.rounds],
            "s",
            ours and medians[measurement.process.name] / ours,
            "planish's time",
        )
        for measurement in measurements
    ]


def profile(bench: Bench) -> list[Row]:
    gpu_profiles = profiles(
        bench.model,
        EngineSettings(**bench.options.service),
        bench.round("profile", 16, 8, NEW_TOKENS),
    )
    for gpu_profile in gpu_profiles:
        print(gpu_profile.text(), flush=True)
    return [
        Row(
            f"profile: {gpu_profile.title}",
            [1e3 * gpu_profile.seconds],
            "ms",
            gpu_profile.idle,
            "it without a kernel",
        )
        for gpu_profile in gpu_profiles
    ]


def workloads_of(options: Options) -> Mapping[str, Workload]:
    return SMALL_WORKLOADS if options.small else WORKLOADS


SERVED_PARTS: Mapping[str, Callable[[Bench, planish.ServiceClient], list[Row]]] = {
    "decode": decode,
    "training": training,
    "grpo-16x8": partial(grpo, prompts=16, samples=8),
    "tenants": tenants,
    "grpo-128x16": partial(grpo, prompts=128, samples=16),
}


def other_parts(bench: Bench, names: Sequence[str]) -> dict[str, Callable[[], list[Row]]]:
    """Return those of the named parts that use their own processes or engine. Each workload of
    the peers is a part.
    """
    workloads = parse_names(
        bench.options.workloads, workloads_of(bench.options), workloads_of(bench.options)
    )
    parts_by_workload = {
        f"peers-{workload}": partial(peers, bench, workload) for workload in workloads
    }
    known = {"peers": parts_by_workload, "profile": {"profile": partial(profile, bench)}}
    return {part: run for name in names if name in known for part, run in known[name].items()}
