"""Which code made a run: the commit it was on and how the files differed from it."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

NOT_TRACKED = "not in a git repository"
NO_GIT = "git is not installed: nothing is known of the code"
NOT_KNOWN = "git diff HEAD failed: what differed is not known"
MOST_BYTES = 1 << 20
"""Of the names of untracked files, and of the diff, of each repository."""
_SECONDS = 30


def code_diff(paths: Iterable[Path]) -> str:
    """For each git repository that holds one of `paths`: its root, its commit, and what was changed
    since.

    Files that git does not track are named, not shown. What is longer than `MOST_BYTES` is cut, and
    says so.
    """
    if shutil.which("git") is None:
        return f"{NO_GIT}\n"
    directories = (path if path.is_dir() else path.parent for path in paths)
    roots = dict.fromkeys(
        root for path in directories if (root := _git(path, "rev-parse", "--show-toplevel"))
    )
    return "\n".join(_describe(Path(root)) for root in roots) or f"{NOT_TRACKED}\n"


def _describe(root: Path) -> str:
    commit = _git(root, "rev-parse", "HEAD") or "no commit"
    untracked = _git(root, "ls-files", "--others", "--exclude-standard") or ""
    names = "".join(f"untracked: {name}\n" for name in untracked.splitlines())
    diff = _git(root, "diff", "--no-ext-diff", "--no-color", "HEAD")
    return f"### repo: {root} @ {commit}\n{names}{NOT_KNOWN if diff is None else diff}\n"


def _git(directory: Path, *arguments: str) -> str | None:
    """What git prints; None when there is no repository or no such commit, or it takes too long."""
    with tempfile.TemporaryFile() as printed:  # not a pipe: it may be more than memory holds
        command = ["git", "-C", str(directory), *arguments]
        try:
            done = subprocess.run(
                command,
                stdout=printed,
                stderr=subprocess.DEVNULL,
                stdin=subprocess.DEVNULL,
                timeout=_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode != 0:
            return None
        size = printed.seek(0, os.SEEK_END)
        printed.seek(0)
        text = printed.read(MOST_BYTES).decode(errors="replace").strip()
    return text if size <= MOST_BYTES else f"{text}\n... cut: {size - MOST_BYTES} bytes more"
