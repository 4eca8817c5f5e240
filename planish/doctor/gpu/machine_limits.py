"""The measured speeds of a device: reading memory, and large matmuls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from planish.model.device import Device

REPEATS = 3
SQUARE_SIZE, SMALL_SQUARE_SIZE = 8192, 256
MATMULS_PER_TIMING = 10
"""Repetitions in one timing, so that launch and synchronization count little."""


def seconds(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Return the seconds of all calls, one after the other: the median of several runs after a
    warm-up.
    """
    synchronize, times = Device(device).synchronize, []
    for _ in range(REPEATS + 1):
        synchronize()
        start = time.perf_counter()
        for call in calls:
            call()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def read_bandwidth(device: torch.device, size: int) -> float:
    """Return bytes per second, with the fastest torch function for reading uncached memory.

    `size`: the bytes that are read; more than any cache holds.
    """
    x = torch.ones(size // 4, device=device)
    readers = (
        partial(torch.sum, x),
        partial(torch.amax, x),
        partial(torch.dot, x[: x.numel() // 2], x[x.numel() // 2 :]),
    )
    return size / min(seconds([reader], device) for reader in readers)


def square_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the FLOP/s of torch's matmuls of large squares of random numbers."""
    a, b = (torch.empty(size, size, dtype=dtype, device=device).normal_(0, 0.02) for _ in range(2))
    calls = [partial(torch.mm, a, b)] * MATMULS_PER_TIMING
    return float(2 * size**3 * MATMULS_PER_TIMING / seconds(calls, device))
