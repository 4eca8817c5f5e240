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

SETTLING_STEPS, STEPS = 8, 4
"""Decode steps before the profile, and in each timing."""
SHOWN = 25
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
            for name, calls, seconds in self.kernels[:SHOWN]
        ]
        return "\n".join(lines)


def profiles(directory: Path, settings: EngineSettings, work: Mapping[str, Any]) -> list[Profile]:
    """Profile one decode step of all samples of the round, and one training micro-batch."""
    base = BaseModel(directory, settings, DeviceMemory(settings).claim(directory))
    return [decode_profile(base, work), training_profile(base, work)]


def decode_profile(base: BaseModel, work: Mapping[str, Any]) -> Profile:
    sampler = base.sampler
    # Prompts with a common prefix are computed in two waves.
    prompt_steps = 2 * math.ceil(
        sum(map(len, work["prompts"])) / sampler.settings.max_prefill_tokens_per_step
    )
    params = SamplingParams(max_tokens=prompt_steps + SETTLING_STEPS + 4 * STEPS, stop=[], seed=0)
    futures: list[Future[SampleResponse]] = []
    for prompt in work["prompts"]:
        op = Sample("profile", ModelInput.from_ints(prompt), work["samples"], params)
        sampler.validate(op)
        futures.append(Future())
        sampler.submit(op, None, "base", futures[-1])
    for _ in range(prompt_steps + SETTLING_STEPS):
        sampler.step()

    def steps() -> None:
        for _ in range(STEPS):
            sampler.step()

    found = profiled(
        f"a decode step of {len(work['prompts']) * work['samples']} rows", steps, STEPS
    )
    if any(future.done() for future in futures):
        raise SystemExit(
            "samples ended before the profile did, so not all ran at once: raise kv_cache_gib or "
            "max_batch"
        )
    while sampler.busy:
        sampler.step()
    return found


def training_profile(base: BaseModel, work: Mapping[str, Any]) -> Profile:
    layout = LoraLayout(base.config, LoraConfig(rank=RANK, seed=0, train_unembed=False))
    adapter = Adapter(layout, base.backend)
    data = micro_batch(work, base.trainer.settings.micro_batch_tokens)
    sizes: list[float] = []

    def train() -> None:
        call = base.trainer.forward_backward(adapter, data, "importance_sampling")
        while True:
            try:
                next(call)
            except StopIteration as end:
                sizes.append(end.value.metrics["computed_tokens:sum"])
                return

    found = profiled("a micro-batch", train, 1)
    return replace(found, title=f"a micro-batch of {sizes[0]:,.0f} rows")


def micro_batch(work: Mapping[str, Any], budget: int) -> list[Datum]:
    """Return datums for as many of the round's prompts as fit, with answers of random tokens. Their
    logprobs do not matter.
    """
    draw = torch.Generator().manual_seed(0)
    new, data, rows = work["new_tokens"], [], 0
    for prompt in work["prompts"]:
        rows += len(prompt) + work["samples"] * new
        if data and rows > budget:
            break
        answers = torch.randint(
            min(prompt), max(prompt) + 1, (work["samples"], new), generator=draw
        ).tolist()
        data += [datum(prompt, answer, [0.0] * new, 1.0) for answer in answers]
    return data


def profiled(title: str, run: Callable[[], None], times: int) -> Profile:
    """Call `run` three times: to warm up, for the time, and for the profile. One call contains
    `times` steps or micro-batches.
    """
    run()
    synchronize()
    begun = time.perf_counter()
    run()
    synchronize()
    seconds = time.perf_counter() - begun
    on_gpu = DEVICE.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as record:
        run()
        synchronize()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in record.events() or ()
        if event.device_type.name == "CUDA"
    ]
    if on_gpu:
        kernels = by_name((name, 1, end - start) for name, start, end in spans)
        idle = max(0.0, 1 - 1e-6 * covered((start, end) for _, start, end in spans) / seconds)
    else:
        kernels = by_name(
            (row.key, row.count, row.self_cpu_time_total) for row in record.key_averages()
        )
        idle = None
    each = [(name, round(calls / times), 1e-6 * micros / times) for name, calls, micros in kernels]
    return Profile(title, seconds / times, idle, each)


def by_name(events: Iterable[tuple[str, int, float]]) -> list[tuple[str, int, float]]:
    """Return the total calls and microseconds of each name, the longest first."""
    calls: Counter[str] = Counter()
    micros: dict[str, float] = {}
    for name, count, duration in events:
        calls[name] += count
        micros[name] = micros.get(name, 0.0) + duration
    return [
        (name, calls[name], micros[name])
        for name in sorted(micros, key=micros.__getitem__, reverse=True)
    ]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
