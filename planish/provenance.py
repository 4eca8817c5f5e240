"""Which code made a run: the commit it was on and how the files differed from it."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

NOT_TRACKED = "not in a git repository"


def code_diff(paths: Iterable[Path]) -> str:
    """For each git repository that holds one of `paths`: its root, its commit, and what was changed since.

    Files that git does not track are named, not shown.
    """
    roots = {
        root: None
        for path in paths
        if (root := _git(path if path.is_dir() else path.parent, "rev-parse", "--show-toplevel"))
    }
    if not roots:
        return f"{NOT_TRACKED}\n"
    return "\n".join(_describe(Path(root)) for root in roots)


def _describe(root: Path) -> str:
    commit = _git(root, "rev-parse", "HEAD") or "no commit"
    untracked = _git(root, "ls-files", "--others", "--exclude-standard") or ""
    names = "".join(f"untracked: {name}\n" for name in untracked.splitlines())
    return f"### repo: {root} @ {commit}\n{names}{_git(root, 'diff', 'HEAD') or ''}\n"


def _git(directory: Path, *arguments: str) -> str | None:
    """What git prints; None when there is no git, no repository or no such commit."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, timeout=30, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
