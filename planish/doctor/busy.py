"""The processor time that other programs on this machine use."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""Columns of a line of /proc/stat: user, nice, system, irq, softirq, steal."""
_NAMED = 3
_LEAST_NAMED = 0.1


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
    ticks = os.sysconf("SC_CLK_TCK")
    started, before, own, programs = time.monotonic(), _busy(proc), _own(), _programs(proc)
    if before is None:
        return None
    time.sleep(seconds)
    interval, after, own_after = time.monotonic() - started, _busy(proc), _own()
    if after is None:
        return None
    used = [
        (name, pid, (count - programs[pid][1]) / ticks / interval)
        for pid, (name, count) in _programs(proc).items()
        if pid in programs and pid != os.getpid()
    ]
    busiest = sorted(used, key=lambda entry: -entry[2])[:_NAMED]
    return Load(
        max(0.0, (after - before) / ticks - (own_after - own)) / interval,
        tuple(entry for entry in busiest if entry[2] >= _LEAST_NAMED),
    )


def _busy(proc: Path) -> int | None:
    """Return the busy clock ticks of the processors that this process may use."""
    try:
        lines = (proc / "stat").read_text().splitlines()
        allowed = os.sched_getaffinity(0)
    except (OSError, AttributeError):
        return None
    counts = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("cpu")}
    usable = [counts[name] for cpu in allowed if (name := f"cpu{cpu}") in counts]
    if not usable:
        return None
    return sum(int(count[field]) for count in usable for field in _BUSY_FIELDS)


def _own() -> float:
    spent = os.times()
    return spent.user + spent.system


def _programs(proc: Path) -> dict[int, tuple[str, int]]:
    """Return (name, clock ticks) of every process, by id."""
    found = {}
    for directory in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # the process has just ended
            # The name is in parentheses and may hold spaces and parentheses itself.
            head, _, rest = (directory / "stat").read_text().rpartition(")")
            fields = rest.split()
            name = head.partition("(")[2]
            found[int(directory.name)] = (name, int(fields[11]) + int(fields[12]))
    return found
