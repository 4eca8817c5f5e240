"""Which code made a run: its git commit, and how the files differed from that commit."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

NOT_TRACKED = "not in a git repository"
NO_GIT = "git is not installed, so the commit and the changes are unknown"
NOT_KNOWN = "git diff HEAD failed, so the uncommitted changes are unknown"
MOST_BYTES = 1 << 20
"""The maximum size of each repository's diff and of its list of untracked files, in bytes."""
_SECONDS = 30


def code_diff(paths: Iterable[Path]) -> str:
    """Describe each git repository that contains one of `paths`: its root, commit and diff.

    Untracked files are listed without their contents. Output longer than `MOST_BYTES` is truncated
    and ends with a note.
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
    """Return git's output. None if git takes too long or fails, e.g. without a repository."""
    with tempfile.TemporaryFile() as printed:  # not a pipe: the output may not fit in memory
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
