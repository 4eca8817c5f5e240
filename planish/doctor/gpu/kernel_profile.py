"""Profile of a device: the share of each kernel, and the share of idle time.

The time of a step is measured without the profiler, which slows down the CPU. Idle time is this
time minus the kernels' time in the profile. On a CPU, operators take the place of kernels.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from planish.model.device import Device

MAX_KERNELS_SHOWN = 25
NAME_CHARACTERS = 100


@dataclass(frozen=True)
class Profile:
    """The time of a step, and of each kernel in it."""

    title: str
    seconds: float
    """Seconds of one step or micro-batch."""
    idle: float | None
    """Share of the time without a running kernel; None on a CPU."""
    kernels: list[tuple[str, int, float]]
    """(name, calls, seconds) of each kernel, the longest first."""

    def text(self) -> str:
        """Return the profile for people, one line for each of the slowest kernels."""
        idle = "" if self.idle is None else f"; the GPU is idle for {self.idle:.0%}"
        lines = [f"{self.title}: {1e3 * self.seconds:.2f} ms{idle}"]
        total = sum(seconds for *_, seconds in self.kernels) or 1.0
        lines += [
            f"  {1e3 * seconds:9.3f} ms {seconds / total:6.1%} {calls:6d}  {name[:NAME_CHARACTERS]}"
            for name, calls, seconds in self.kernels[:MAX_KERNELS_SHOWN]
        ]
        return "\n".join(lines)


def profile_run(title: str, run: Callable[[], None], times: int, device: torch.device) -> Profile:
    """Call `run` three times: to warm up, for the time, and for the profile. One call contains
    `times` steps or micro-batches.
    """
    synchronize, is_on_gpu = Device(device).synchronize, Device(device).is_gpu
    run()
    synchronize()
    start_time = time.perf_counter()
    run()
    synchronize()
    seconds = time.perf_counter() - start_time
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
