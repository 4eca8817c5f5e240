"""Places at which a test can kill this process, by name: before and after everything that is
written.

The variable PLANISH_CRASH_AT=NAME:N sends SIGKILL at the Nth time that NAME is reached. Without it
a place costs one comparison.
"""

from __future__ import annotations

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

ENVIRONMENT = "PLANISH_CRASH_AT"


class _Armed:
    def __init__(self, setting: str) -> None:
        self.name, _, count = setting.rpartition(":")
        self.left = int(count)
        if self.name not in CRASH_POINTS:
            raise ValueError(
                f"{ENVIRONMENT}={setting!r}: give NAME:COUNT with one of {', '.join(CRASH_POINTS)}"
            )


_armed: _Armed | None = None


def arm(setting: str) -> None:
    """Be killed at NAME:COUNT."""
    global _armed
    _armed = _Armed(setting)


def crash_point(name: str) -> None:
    if _armed is not None and _armed.name == name:
        _armed.left -= 1
        if _armed.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


if ENVIRONMENT in os.environ:
    arm(os.environ[ENVIRONMENT])
