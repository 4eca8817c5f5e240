"""Places before and after writes at which a test can kill the server's process."""

import os
import signal

CRASH_POINTS = (
    "bodies written",
    "before commit",
    "after commit",
    "before acknowledging",
    "before running",
    "before recording a result",
    "loaded before replay",
    "between replayed operations",
    "save marked",
    "saved before recording",
    "pinned before recording",
    "before snapshot",
    "snapshot saved before recording",
    "snapshot recorded before cleaning",
    "sampler saved before recording",
    "unloaded",
    "checkpoint deleted before recording",
    "session ended before cleaning",
    "model closed before cleaning",
    "sampler closed before cleaning",
)
"""Places in the code, before and after writes, at which a test can kill the process.
PLANISH_CRASH_AT=NAME:N makes the process send SIGKILL to itself when it reaches NAME for the Nth
time. Without the variable, a crash point costs one comparison.
"""

CRASH_ENVIRONMENT = "PLANISH_CRASH_AT"


class _ArmedCrashPoint:
    def __init__(self, setting: str) -> None:
        self.name, _, count = setting.rpartition(":")
        self.num_left = int(count)
        if self.name not in CRASH_POINTS:
            raise ValueError(
                f"{CRASH_ENVIRONMENT}={setting!r}: give NAME:COUNT with one of "
                f"{', '.join(CRASH_POINTS)}"
            )


_armed: _ArmedCrashPoint | None = None


def arm_crash_point(setting: str) -> None:
    """Make the process kill itself at the crash point that `setting` (NAME:COUNT) names."""
    global _armed
    _armed = _ArmedCrashPoint(setting)


def crash_point(name: str) -> None:
    """Kill the process if a test armed the crash point `name`. Otherwise do nothing."""
    if _armed is not None and _armed.name == name:
        _armed.num_left -= 1
        if _armed.num_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


if CRASH_ENVIRONMENT in os.environ:
    arm_crash_point(os.environ[CRASH_ENVIRONMENT])
