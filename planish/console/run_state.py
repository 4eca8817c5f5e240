"""Whether a run is finished, running, or stopped, told from its files.

A process that trains holds a lock on `.lock` in the run directory. Trying to take this lock could
make a run fail that starts at the same moment, so the console reads /proc/locks instead. Without
/proc/locks, and for runs of other programs, which take no lock, a run counts as running if its
metrics are recent.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FINISHED, RUNNING, STOPPED, CRASHED, EMPTY = "finished", "running", "stopped", "crashed", "empty"
IDLE = "idle"
"""The states. A crashed run has metrics of steps after its last checkpoint; a stopped run has not,
so no step is trained again. An empty run has no step and no checkpoint, and no process has its
lock. Only runs of a server are idle: they take requests, and got none for a while.
"""
LOCK = ".lock"
_LOCKS = Path("/proc/locks")
_RECENT_SECONDS = 120.0
_RECENT_STEPS = 5.0
"""Metrics are recent if they are younger than _RECENT_SECONDS and than _RECENT_STEPS steps, whichever
is longer.
"""


def is_locked(path: Path) -> bool | None:
    """Return whether a process has a lock on the file; None if the system does not say."""
    try:
        status = os.stat(path)
        locks = _LOCKS.read_text()
    except OSError:
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(device == word for line in locks.splitlines() for word in line.split())


def state_of(
    directory: Path,
    checkpoints: Sequence[Mapping[str, Any]],
    last_step: float | None,
    metrics_time: float | None,
    step_seconds: float | None,
    *,
    now: float | None = None,
) -> str:
    """Return the state of a run. `metrics_time` is the time of the last change of metrics.jsonl,
    and `step_seconds` the duration of its last step; each is None if it is unknown.
    """
    locked = is_locked(directory / LOCK)
    if locked:
        return RUNNING
    last = checkpoints[-1] if checkpoints else {}
    if last.get("final") or last.get("name") == "final":
        return FINISHED
    if locked is None and metrics_time is not None:
        age = (time.time() if now is None else now) - metrics_time
        if age < max(_RECENT_SECONDS, _RECENT_STEPS * (step_seconds or 0.0)):
            return RUNNING
    if last_step is None:
        return STOPPED if checkpoints else EMPTY
    batch = last.get("batch", 0)
    return CRASHED if not isinstance(batch, int | float) or last_step >= batch else STOPPED
