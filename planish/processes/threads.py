"""Settings of threads: how many compute on the CPU, and how they wait.

The module also sets how long Python's threads wait for the interpreter lock.

Our kernels run on a thread pool of their own (model/kernels/cpp/src/pool.h). torch's operations
run on OpenMP threads. By default, OpenMP threads spin for milliseconds after each operation, on
cores that the pool and other processes need.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from threading import Lock

SPIN_VARIABLE = "GOMP_SPINCOUNT"
"""The variable with the number of spin iterations before a waiting OpenMP thread sleeps. GNU's
OpenMP reads this variable when torch is loaded; other OpenMP libraries ignore it.
"""
SPINS = "1000"
"""planish's value of SPIN_VARIABLE: about ten microseconds. docs/lab/log.md has measurements with
1000 and with 10000.
"""
_WAITING = (SPIN_VARIABLE, "OMP_WAIT_POLICY")
_COUNTING = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_GROUPS = Path("/sys/fs/cgroup")

SWITCH_SECONDS = 2e-4
"""Python's switch interval in seconds while an engine runs.

Every torch operation releases the interpreter lock and then takes it back. If another Python thread
is busy, taking it back can wait for one switch interval. With Python's default of 5 ms, a decoding
step of 45 operations takes 58 ms instead of 1 ms.
"""
_PYTHON_DEFAULT_SECONDS = 5e-3
_lock = Lock()
_holders = 0


def spin_shortly() -> None:
    """Make torch's OpenMP threads sleep soon after an operation.

    planish calls this function when it is imported. The call has no effect if torch is already
    loaded, or if an environment variable sets how OpenMP threads wait.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _WAITING):
        os.environ[SPIN_VARIABLE] = SPINS


def limit_threads() -> None:
    """Limit the number of threads of torch and of our kernels to `usable_cpus()`, and log a change.

    This function does nothing if the user has chosen the number with OMP_NUM_THREADS,
    MKL_NUM_THREADS or torch.set_num_threads.
    """
    import torch

    allowed, chosen = usable_cpus(), torch.get_num_threads()
    torch_defaults = {
        count // threads_per_core
        for count in (_affinity(), os.cpu_count() or 1)
        for threads_per_core in (1, 2)
    }
    if any(name in os.environ for name in _COUNTING) or chosen not in torch_defaults:
        return
    if allowed < chosen:
        torch.set_num_threads(allowed)
        logging.getLogger(__name__).info(
            "computing with %d threads instead of %d: the CPU affinity or quota of this process "
            "allows no more",
            allowed,
            chosen,
        )


def usable_cpus() -> int:
    """Return how many CPUs this process may keep busy.

    This is the number of CPUs in its affinity mask, or the CPU quota of its control groups, rounded
    up, if the quota is smaller.
    """
    quota = cpu_quota()
    return _affinity() if quota is None else max(1, min(_affinity(), math.ceil(quota)))


def cpu_quota(
    memberships: Path = Path("/proc/self/cgroup"), groups: Path = _GROUPS
) -> float | None:
    """Return the CPU quota of this process's control groups (version 1 or 2), in CPUs.

    For example, 1.5 allows 1.5 seconds of CPU time per second. Return None if the groups set no
    limit or cannot be read.
    """
    found: list[float] = []
    with suppress(OSError):
        for line in memberships.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                found += _limits(groups, path, _quota_v2)
            elif "cpu" in controllers.split(","):
                for mount in {controllers, "cpu"}:
                    found += _limits(groups / mount, path, _quota_v1)
    return min(found, default=None)


def _limits(mount: Path, path: str, quota: Callable[[Path], float | None]) -> Iterator[float]:
    """Yield the quotas of a group and of all groups that contain it.

    In a container the path is often the path on the host, but the container's own group is the root
    of the mount. So the root is read too.
    """
    inner = PurePosixPath(path.lstrip("/"))
    for group in (inner, *inner.parents):
        with suppress(OSError, ValueError, ZeroDivisionError):
            found = quota(mount / group)
            if found is not None:
                yield found


def _quota_v2(group: Path) -> float | None:
    quota, period = (group / "cpu.max").read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(group: Path) -> float | None:
    quota = int((group / "cpu.cfs_quota_us").read_text())
    return None if quota < 0 else quota / int((group / "cpu.cfs_period_us").read_text())


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Set Python's switch interval to SWITCH_SECONDS, unless the program has changed it.

    Several threads may hold this context. The last thread that leaves it restores Python's default.
    """
    global _holders
    with _lock:
        _holders += 1
        if _is_interval(_PYTHON_DEFAULT_SECONDS):
            sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if not _holders and _is_interval(SWITCH_SECONDS):
                sys.setswitchinterval(_PYTHON_DEFAULT_SECONDS)


def _is_interval(seconds: float) -> bool:
    return math.isclose(sys.getswitchinterval(), seconds, rel_tol=1e-3)
