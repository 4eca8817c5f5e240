"""Profile of a GPU: the share of each kernel, and the share of idle time.

Unlike the other benchmarks this calls the sampler and the trainer directly, in one thread, so that
steps can be separated. The time of a step is measured without the profiler, which slows down the
CPU. Idle time is this time minus the kernels' time in the profile. On a CPU, operators take the
place of kernels.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from iteration import datum
from limits import DEVICE, RANK, synchronize
from torch.profiler import ProfilerActivity, profile

from planish.engine.base_models import BaseModel
from planish.engine.memory import DeviceMemory
from planish.engine.settings import EngineSettings
from planish.engine.training.adapters import Adapter
from planish.model.lora import LoraLayout
from planish.service import Sample
from planish.types import Datum, LoraConfig, ModelInput, SampleResponse, SamplingParams

WARM_UP_STEPS, STEPS = 8, 4
"""Decode steps before the profile, and in each timing."""
MAX_KERNELS_SHOWN = 25
NAME_CHARACTERS = 100


@dataclass(frozen=True)
class Profile:
    title: str
    seconds: float
    """Seconds of one step or micro-batch."""
    idle: float | None
    """Share of the time without a running kernel; None on a CPU."""
    kernels: list[tuple[str, int, float]]
    """(name, calls, seconds) of each kernel, the longest first."""

    def text(self) -> str:
        idle = "" if self.idle is None else f"; the GPU is idle for {self.idle:.0%}"
        lines = [f"{self.title}: {1e3 * self.seconds:.2f} ms{idle}"]
        total = sum(seconds for *_, seconds in self.kernels) or 1.0
        lines += [
            f"  {1e3 * seconds:9.3f} ms {seconds / total:6.1%} {calls:6d}  {name[:NAME_CHARACTERS]}"
            for name, calls, seconds in self.kernels[:MAX_KERNELS_SHOWN]
        ]
        return "\n".join(lines)


def profiles(
    directory: Path, settings: EngineSettings, round_spec: Mapping[str, Any]
) -> list[Profile]:
    """Profile one decode step of all samples of the round, and one training micro-batch."""
    base = BaseModel(directory, settings, DeviceMemory(settings).claim(directory))
    return [decode_profile(base, round_spec), training_profile(base, round_spec)]


def decode_profile(base: BaseModel, round_spec: Mapping[str, Any]) -> Profile:
    sampler = base.sampler
    # Prompts with a common prefix are computed in two waves.
    prompt_steps = 2 * math.ceil(
        sum(map(len, round_spec["prompts"])) / sampler.settings.max_prefill_tokens_per_step
    )
    params = SamplingParams(max_tokens=prompt_steps + WARM_UP_STEPS + 4 * STEPS, stop=[], seed=0)
    futures: list[Future[SampleResponse]] = []
    for prompt in round_spec["prompts"]:
        operation = Sample("profile", ModelInput.from_ints(prompt), round_spec["samples"], params)
        sampler.validate(operation)
        futures.append(Future())
        sampler.submit(operation, None, "base", futures[-1])
    for _ in range(prompt_steps + WARM_UP_STEPS):
        sampler.step()

    def run_steps() -> None:
        for _ in range(STEPS):
            sampler.step()

    profile_of_steps = profile_run(
        f"a decode step of {len(round_spec['prompts']) * round_spec['samples']} rows",
        run_steps,
        STEPS,
    )
    if any(future.done() for future in futures):
        raise SystemExit(
            "samples ended before the profile did, so not all ran at once: raise kv_cache_gib or "
            "max_batch"
        )
    while sampler.busy:
        sampler.step()
    return profile_of_steps


def training_profile(base: BaseModel, round_spec: Mapping[str, Any]) -> Profile:
    layout = LoraLayout(base.config, LoraConfig(rank=RANK, seed=0))
    adapter = Adapter(layout, base.backend)
    data = micro_batch(round_spec, base.trainer.settings.micro_batch_tokens)
    row_counts: list[float] = []

    def train() -> None:
        call = base.trainer.forward_backward(adapter, data, "importance_sampling")
        while True:
            try:
                next(call)
            except StopIteration as end:
                row_counts.append(end.value.metrics["computed_tokens:sum"])
                return

    profile_of_batch = profile_run("a micro-batch", train, 1)
    return replace(profile_of_batch, title=f"a micro-batch of {row_counts[0]:,.0f} rows")


def micro_batch(round_spec: Mapping[str, Any], budget: int) -> list[Datum]:
    """Return datums for as many of the round's prompts as fit, with answers of random tokens. Their
    logprobs do not matter.
    """
    generator = torch.Generator().manual_seed(0)
    new_tokens, data, rows = round_spec["new_tokens"], [], 0
    for prompt in round_spec["prompts"]:
        rows += len(prompt) + round_spec["samples"] * new_tokens
        if data and rows > budget:
            break
        answers = torch.randint(
            min(prompt), max(prompt) + 1, (round_spec["samples"], new_tokens), generator=generator
        ).tolist()
        data += [datum(prompt, answer, [0.0] * new_tokens, 1.0) for answer in answers]
    return data


def profile_run(title: str, run: Callable[[], None], times: int) -> Profile:
    """Call `run` three times: to warm up, for the time, and for the profile. One call contains
    `times` steps or micro-batches.
    """
    run()
    synchronize()
    start_time = time.perf_counter()
    run()
    synchronize()
    seconds = time.perf_counter() - start_time
    is_on_gpu = DEVICE.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CUDA if is_on_gpu else ProfilerActivity.CPU]
    ) as profiler:
        run()
        synchronize()
    kernel_spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]
    if is_on_gpu:
        kernels = total_by_name((name, 1, end - start) for name, start, end in kernel_spans)
        idle = max(
            0.0, 1 - 1e-6 * union_length((start, end) for _, start, end in kernel_spans) / seconds
        )
    else:
        kernels = total_by_name(
            (row.key, row.count, row.self_cpu_time_total) for row in profiler.key_averages()
        )
        idle = None
    kernels_per_step = [
        (name, round(calls / times), 1e-6 * microseconds / times)
        for name, calls, microseconds in kernels
    ]
    return Profile(title, seconds / times, idle, kernels_per_step)


def total_by_name(events: Iterable[tuple[str, int, float]]) -> list[tuple[str, int, float]]:
    """Return the total calls and microseconds of each name, the longest first."""
    calls: Counter[str] = Counter()
    microseconds: dict[str, float] = {}
    for name, count, duration in events:
        calls[name] += count
        microseconds[name] = microseconds.get(name, 0.0) + duration
    return [
        (name, calls[name], microseconds[name])
        for name in sorted(microseconds, key=microseconds.__getitem__, reverse=True)
    ]


def union_length(kernel_spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(kernel_spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
