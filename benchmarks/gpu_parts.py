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
from contender import PeerProcess
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
from report import RESULTS, TITLES
from works import SMALL_WORKS, WORKS, Rounds, Shape, make_round, write_works

import planish
from planish.engine.settings import EngineSettings
from planish.model.config import ModelConfig
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
    works: str = "W1,W1b,W2"
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
        given = {
            "kv_cache_bytes": kv_cache,
            "max_batch": self.max_batch,
            "micro_batch_tokens": self.micro_batch_tokens,
        }
        return {name: value for name, value in given.items() if value is not None}


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
    client = service.create_sampling_client(base_model=str(bench.model))
    found = []
    for prompts, samples in DECODE_ROWS:
        work = bench.round(f"decode {prompts}", prompts, samples, MANY_TOKENS)
        seconds = decode_seconds(bench, [client], work)
        least = (
            decode_bytes(bench.config, work, sum(few_to_many(work)) / 2) / bench.limits.bandwidth
        )
        share = least / statistics.median(seconds)
        found.append(
            Row(
                f"decode, {rows_of(work)}",
                milliseconds(seconds),
                "ms a step",
                share,
                "the memory's speed",
            )
        )
    return found


def tenants(bench: Bench, service: planish.ServiceClient) -> list[Row]:
    counts = [count for count in TENANTS if count <= 8 or not bench.options.small]
    clients = [published_adapter(bench, service, seed) for seed in range(max(counts))]
    work = bench.round("tenants", max(counts), 2, MANY_TOKENS)
    steps = {count: decode_seconds(bench, clients[:count], work) for count in counts}
    one = statistics.median(steps[1])
    return [
        Row(
            f"decode, {rows_of(work)}, {count} adapter{'s' if count > 1 else ''}",
            milliseconds(seconds),
            "ms a step",
            one / statistics.median(seconds),
            "the speed with one",
        )
        for count, seconds in steps.items()
    ]


def decode_seconds(
    bench: Bench, clients: Sequence[planish.SamplingClient], work: Mapping[str, Any]
) -> list[float]:
    """Return the seconds of a step, once per round."""

    def sample(new_tokens: int) -> None:
        rollouts_in_turn(clients, {**work, "new_tokens": new_tokens})

    return step_seconds(sample, *few_to_many(work), bench.options.rounds)


def rows_of(work: Mapping[str, Any]) -> str:
    rows = len(work["prompts"]) * work["samples"]
    return "1 row" if rows == 1 else f"{rows} rows"


def few_to_many(work: Mapping[str, Any]) -> tuple[int, int]:
    many = work["new_tokens"]
    return min(FEW_TOKENS, many // 2), many


def milliseconds(seconds: Sequence[float]) -> list[float]:
    return [1e3 * each for each in seconds]


def published_adapter(
    bench: Bench, service: planish.ServiceClient, seed: int
) -> planish.SamplingClient:
    """Return a sampling client of a new adapter. The training state is freed, because 64 of them
    would not fit beside a large model.
    """
    client = service.create_lora_training_client(
        str(bench.model), rank=RANK, seed=seed, train_unembed=False
    )
    return client.save_weights_and_get_sampling_client()


def training(bench: Bench, service: planish.ServiceClient) -> list[Row]:
    client = service.create_lora_training_client(
        str(bench.model), rank=RANK, seed=0, train_unembed=False
    )
    sampler = client.save_weights_and_get_sampling_client()

    def trained(name: str, new_tokens: int) -> tuple[float, dict[str, Any]]:
        plain = bench.round(f"training {name}", 16, 8, new_tokens)
        work = with_completions(plain, rollouts(sampler, plain))
        begun = time.perf_counter()
        train_step(client, work)
        return time.perf_counter() - begun, work

    trained("warm-up", WARM_UP_TOKENS)
    found = [trained(str(number), NEW_TOKENS) for number in bench.rounds()]
    return training_rows(bench, "training", [seconds for seconds, _ in found], found[0][1])


def training_rows(
    bench: Bench, what: str, seconds: Sequence[float], work: Mapping[str, Any]
) -> list[Row]:
    """Return the rows of rounds that all have the shape of `work`."""
    tokens = work["samples"] * sum(len(prompt) + work["new_tokens"] for prompt in work["prompts"])
    rate = training_flops(bench.config, work) / statistics.median(seconds)
    of_layers = rate / bench.limits.layer_rate
    return [
        Row(
            what,
            [tokens / each for each in seconds],
            "tokens/s",
            rate / bench.limits.product_rate,
            "the product rate",
        ),
        Row(
            f"{what}, useful",
            [rate / 1e12],
            "TFLOP/s",
            of_layers,
            "the product rate of the model's layers",
        ),
    ]


def grpo(bench: Bench, service: planish.ServiceClient, prompts: int, samples: int) -> list[Row]:
    what = f"iteration, {prompts} x {samples}"
    client = service.create_lora_training_client(
        str(bench.model), rank=RANK, seed=0, train_unembed=False
    )
    run_iteration(client, bench.round(f"{what} warm-up", prompts, samples, WARM_UP_TOKENS))
    works, done = [], []
    for number in bench.rounds():
        works.append(bench.round(f"{what} {number}", prompts, samples, NEW_TOKENS))
        done.append(run_iteration(client, works[-1]))
    sampled = [count_tokens(one.groups) / one.sampling_seconds for one in done]
    return [
        Row(what, [one.seconds for one in done], "s"),
        Row(f"{what}: sampling", sampled, "new tokens/s"),
        *training_rows(
            bench, f"{what}: training", [one.training_seconds for one in done], works[0]
        ),
    ]


# Parts that create their own engine or processes.


def peers(bench: Bench, work: str) -> list[Row]:
    """Compare the peers. All of them run in this environment, which has the packages for the
    GPU.
    """
    options, known = bench.options, PEERS | OPTIONAL_PEERS
    names = [name for name in parse_names(options.peers, PEERS, known) if work in known[name].works]
    given = {"OURS_OPTIONS": json.dumps(options.service)}
    with tempfile.TemporaryDirectory(prefix="planish-benchmark-") as directory:
        scratch = Path(directory)
        path = scratch / f"{work}.json"
        write_works(str(bench.model), path, {work: works_of(options)[work]}, options.rounds)
        contenders = [
            PeerProcess(
                name,
                [interpreter(OWN_ENVIRONMENT), HERE / spec.script],
                path,
                {**spec.variables, **given},
            )
            for name, spec in ((name, known[name]) for name in names)
        ]
        measured = measure_interleaved(contenders, work, options.rounds, bench.model, scratch)
        check_same_work(work, json.loads(path.read_text())[work], measured)
    medians = {one.contender.name: one.row()["median_seconds"] for one in measured}
    ours = medians.get("ours")
    return [
        Row(
            f"{work}, {TITLES.get(one.contender.name, one.contender.name)}",
            [facts["seconds"] for facts in one.rounds],
            "s",
            ours and medians[one.contender.name] / ours,
            "planish's time",
        )
        for one in measured
    ]


def profile(bench: Bench) -> list[Row]:
    found = profiles(
        bench.model,
        EngineSettings(**bench.options.service),
        bench.round("profile", 16, 8, NEW_TOKENS),
    )
    for one in found:
        print(one.text(), flush=True)
    return [
        Row(f"profile: {one.title}", [1e3 * one.seconds], "ms", one.idle, "it without a kernel")
        for one in found
    ]


def works_of(options: Options) -> Mapping[str, Rounds]:
    return SMALL_WORKS if options.small else WORKS


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
    works = parse_names(bench.options.works, works_of(bench.options), works_of(bench.options))
    by_work = {f"peers-{work}": partial(peers, bench, work) for work in works}
    known = {"peers": by_work, "profile": {"profile": partial(profile, bench)}}
    return {part: run for name in names if name in known for part, run in known[name].items()}
