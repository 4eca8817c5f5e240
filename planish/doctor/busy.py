"""The processor time that other programs on this machine use."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""Columns of a line of /proc/stat: user, nice, system, irq, softirq, steal."""
_MAX_PROGRAMS = 3
_MIN_CORES = 0.1


@dataclass(frozen=True)
class Load:
    """Processor time of other programs over an interval, in cores."""

    cores: float
    programs: tuple[tuple[str, int, float], ...]
    """(name, process id, cores) of the busiest programs, at most three."""


def measure_load(seconds: float = 0.5, proc: Path = Path("/proc")) -> Load | None:
    """Return the load of other programs on the processors that this process may use.

    The load is measured while this call sleeps for `seconds`. The result is None if the system has
    no /proc/stat.
    """
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    start_time = time.monotonic()
    ticks_before = _busy_ticks(proc)
    own_seconds_before = _own_cpu_seconds()
    programs_before = _ticks_by_program(proc)
    if ticks_before is None:
        return None
    time.sleep(seconds)
    interval = time.monotonic() - start_time
    ticks_after = _busy_ticks(proc)
    own_seconds_after = _own_cpu_seconds()
    if ticks_after is None:
        return None
    loads = [
        (name, pid, (ticks - programs_before[pid][1]) / ticks_per_second / interval)
        for pid, (name, ticks) in _ticks_by_program(proc).items()
        if pid in programs_before and pid != os.getpid()
    ]
    busiest = sorted(loads, key=lambda entry: -entry[2])[:_MAX_PROGRAMS]
    return Load(
        max(
            0.0,
            (ticks_after - ticks_before) / ticks_per_second
            - (own_seconds_after - own_seconds_before),
        )
        / interval,
        tuple(entry for entry in busiest if entry[2] >= _MIN_CORES),
    )


def _busy_ticks(proc: Path) -> int | None:
    """Return the busy clock ticks of the processors that this process may use."""
    try:
        lines = (proc / "stat").read_text().splitlines()
        allowed = os.sched_getaffinity(0)
    except (OSError, AttributeError):
        return None
    fields_by_cpu = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("cpu")}
    usable_cpus = [fields_by_cpu[name] for cpu in allowed if (name := f"cpu{cpu}") in fields_by_cpu]
    if not usable_cpus:
        return None
    return sum(int(fields[field]) for fields in usable_cpus for field in _BUSY_FIELDS)


def _own_cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _ticks_by_program(proc: Path) -> dict[int, tuple[str, int]]:
    """Return (name, clock ticks) of every process, by id."""
    ticks_by_pid = {}
    for directory in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # the process has just ended
            # The name is in parentheses and may hold spaces and parentheses itself.
            head, _, rest = (directory / "stat").read_text().rpartition(")")
            fields = rest.split()
            name = head.partition("(")[2]
            ticks_by_pid[int(directory.name)] = (name, int(fields[11]) + int(fields[12]))
    return ticks_by_pid
