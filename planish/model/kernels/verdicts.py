"""Verdicts of the kernels' self-tests, stored as JSON files beside the kernels.

A self-test compares compiled kernels with torch on this machine. It runs once for each combination
of hardware, driver, torch version and kernel sources. The file name contains a hash of these facts.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Verdict:
    """The result of the self-test of one family of kernels."""

    family: str
    """Name of the family, such as "matmul"."""
    passed: bool
    """Whether the kernels of the family may be used on this machine."""
    reason: str = ""
    """Why the family failed, as part of a log message; empty if it passed."""


def verdict_file(directory: Path, kind: str, *key: str) -> Path:
    """Return the path of the file with the verdicts for `key`.

    `kind` is "cpu" or "gpu". `key` contains the facts about machine and kernels on which verdicts
    depend. The file name contains a hash of `key`.
    """
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
    return directory / f"verdicts-{kind}-{digest}.json"


def read_verdicts(path: Path) -> list[Verdict] | None:
    """Return the verdicts in this file; None if it is missing or damaged."""
    try:
        rows = json.loads(path.read_bytes())
        verdicts = [Verdict(**row) for row in rows]
    except (OSError, ValueError, TypeError):
        return None
    types = ((each.family, each.passed, each.reason) for each in verdicts)
    sound = all(
        isinstance(a, str) and isinstance(b, bool) and isinstance(c, str) for a, b, c in types
    )
    return verdicts if verdicts and sound else None


def write_verdicts(path: Path, verdicts: Iterable[Verdict]) -> bool:
    """Replace this file's verdicts atomically. Return False where the directory is read-only."""
    text = json.dumps([asdict(verdict) for verdict in verdicts], indent=1)
    # Other users may share the cache, and they could not read a private temporary file.
    unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        return False
    return True


def describe_exit(status: int) -> str:
    """Return in words how a self-test's process ended.

    `status`: its return code as in `subprocess.Popen`, where a negative number is a signal.
    """
    if status >= 0:
        return f"exit status {status} of the self-test"
    name = signal.strsignal(-status) or f"signal {-status}"
    return f"{name.lower()} in the self-test"
