"""code.diff identifies the code of a run, in any state of git."""

import subprocess

import pytest

from planish.runlog import provenance
from planish.runlog.provenance import code_diff


def git(directory, *arguments):
    name = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(
        ["git", *name, "-C", str(directory), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("old = 1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_commit_change_and_untracked_names(repository):
    (repository / "code.py").write_text("new = 1\n")
    (repository / "notes.txt").write_text("secret\n")
    told = code_diff([repository / "code.py", repository])
    root = git(repository, "rev-parse", "--show-toplevel")
    assert told.startswith(
        f"### repo: {root} @ {git(repository, 'rev-parse', 'HEAD')}\nuntracked: notes.txt\n"
    )
    assert "-old = 1\n+new = 1\n" in told
    assert "secret" not in told
    assert told.count("### repo") == 1


def test_a_change_that_is_huge_is_cut(repository, monkeypatch):
    monkeypatch.setattr(provenance, "MOST_BYTES", 300)
    (repository / "code.py").write_text("new = 1\n" * 1000)
    told = code_diff([repository])
    assert "+new = 1" in told
    assert "... cut: " in told
    assert len(told) < 1000


def test_no_commit_no_repository_and_no_git(tmp_path, monkeypatch):
    assert code_diff([tmp_path]) == "not in a git repository\n"
    git(tmp_path, "init", "-q")
    assert code_diff([tmp_path]).endswith(
        "@ no commit\ngit diff HEAD failed, so the uncommitted changes are unknown\n"
    )
    monkeypatch.setenv("PATH", "")
    assert "git is not installed" in code_diff([tmp_path])
