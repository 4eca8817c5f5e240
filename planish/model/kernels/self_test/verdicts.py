"""Verdicts of the kernels' self-tests, stored as JSON files beside the kernels.

A self-test compares compiled kernels with torch on this machine. It runs once for each combination
of hardware, driver, torch version and kernel sources. The file name contains a hash of these facts.

Only two outcomes are stored: a family passed, or it gave wrong results. Any other failure may have
a cause outside the kernels: a signal, a full disk, an unwritable cache, a missing compiler, a busy
GPU. Then torch replaces the family in this process, and the next start tests it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

WRONG_RESULT = "wrong result: "
"""The beginning of `Verdict.reason` if kernels and torch disagree."""


@dataclass(frozen=True)
class Verdict:
    """The result of the self-test of one family of kernels."""

    family: str
    """Name of the family, such as "matmul"."""
    passed: bool
    """Whether the kernels of the family may be used on this machine."""
    reason: str = ""
    """Why the family failed, as part of a log message; empty if it passed."""

    @property
    def is_lasting(self) -> bool:
        """Whether to store the verdict, so that later starts do not test the family again."""
        return self.passed or self.reason.startswith(WRONG_RESULT)


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
        verdicts = [Verdict(**row) for row in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError):
        return None
    types = ((each.family, each.passed, each.reason) for each in verdicts)
    sound = all(
        isinstance(a, str) and isinstance(b, bool) and isinstance(c, str) for a, b, c in types
    )
    return verdicts if verdicts and sound else None


def load_verdicts(
    path: Path,
    families: Sequence[str],
    test: Callable[[Sequence[str], Mapping[str, Verdict]], Iterable[Verdict]],
) -> list[Verdict]:
    """Return a verdict for each family, from this file or else from the self-test.

    `test(missing, known)` tests the families without a stored verdict. `known`: the stored verdicts
    on all families by name. Verdicts on other families stay in the file. If the file cannot be
    written, only the caller gets the verdicts.
    """
    known = {verdict.family: verdict for verdict in read_verdicts(path) or []}
    missing = [family for family in families if family not in known]
    if missing:
        known |= {verdict.family: verdict for verdict in test(missing, known)}
        lasting = [verdict for verdict in known.values() if verdict.is_lasting]
        if lasting:
            write_verdicts(path, lasting)
    return [known[family] for family in families]


def delete_verdicts(directory: Path) -> int:
    """Delete all stored verdicts in `directory`, and return the number of deleted files.

    The next start then runs the self-tests again. Raises OSError if a file cannot be deleted.
    """
    paths = list(directory.glob("verdicts-*.json"))
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


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
