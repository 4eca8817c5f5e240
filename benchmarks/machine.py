"""The conditions of a measurement: processor, memory, code, and the load by other programs."""

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
ROOT = Path(__file__).parents[1]


def machine() -> dict[str, Any]:
    fields = cpu_fields()
    flags = fields.get("flags", "").split()
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
        "memory_gib": round(
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30), 1
        ),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def cpu_fields() -> Mapping[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def commit() -> str:
    """Return the commit of this checkout, with "+ changes" if files differ from it. In a copy
    without git's files, return PLANISH_COMMIT.
    """
    if not (ROOT / ".git").exists():
        return os.environ.get("PLANISH_COMMIT", "not known")

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", ROOT, *arguments], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short=12", "HEAD") + (" + changes" if changed else "")


@dataclass(frozen=True)
class CpuTime:
    """Processor seconds that all processes have used so far on all cores, and the time of
    reading.
    """

    used_seconds: float
    read_at: float

    @classmethod
    def now(cls) -> Self:
        user, nice, system, *rest = (
            int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        )
        _idle, _iowait, interrupts, soft_interrupts, stolen = rest
        used = user + nice + system + interrupts + soft_interrupts + stolen
        return cls(used / os.sysconf("SC_CLK_TCK"), time.monotonic())

    def share_of_others(self, own: float) -> float:
        """Return the share of all cores that other processes used since then. `own` are the
        processor seconds of this benchmark.
        """
        now = CpuTime.now()
        available = (now.read_at - self.read_at) * (os.cpu_count() or 1)
        # used is counted in steps of 10 ms
        return min(1.0, max(0.0, (now.used_seconds - self.used_seconds - own) / available))
