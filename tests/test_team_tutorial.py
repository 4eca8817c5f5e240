"""The tutorial about a server for a team, as one script of bash: each block as it stands, with a
tiny model in the place of the default one. Only the port differs.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from doc_commands import ROOT, TUTORIALS, shell_blocks

from planish.model.sources.resolve import DEFAULT_MODEL
from planish.testing import tiny_model

[PAGE] = TUTORIALS
SECONDS = 400


@pytest.fixture
def reader(tmp_path_factory) -> dict[str, str]:
    """The environment of a reader who has `planish`, the SDK, and no network."""
    commands = tmp_path_factory.mktemp("commands")
    for name, words in (("python", ""), ("planish", "-m planish")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (commands / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PLANISH_MODELS": f"{DEFAULT_MODEL}={tiny_model(tmp_path_factory.mktemp('model'))}",
        "HF_HOME": str(tmp_path_factory.mktemp("hub")),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_the_page_runs_from_its_first_block_to_its_last(reader, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    script = "\n".join(shell_blocks(ROOT / PAGE)).replace("8000", port)
    with (tmp_path / "errors.txt").open("w+") as errors:
        reading = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=reader,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = reading.communicate(timeout=SECONDS)
        finally:
            # A server that is left is in the group of the shell.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(reading.pid, signal.SIGKILL)
        errors.seek(0)
        complaints = errors.read()
    assert reading.returncode == 0, complaints + (tmp_path / "server.log").read_text()
    assert "no sampler: " in complaints
    assert_the_page_is_right(printed, tmp_path)


def assert_the_page_is_right(printed: str, directory: Path) -> None:
    """Check that the blocks print what the page says about them."""
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", printed)]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert printed.count("Bob has no such checkpoint") == 1
    # Bob samples from the published checkpoint before the backup, and with a new key after it.
    before, after = re.findall(r"^sampled: .*$", printed, re.MULTILINE)
    assert before == after
    *opened, refused = (directory / "bob.log").read_text().splitlines()
    assert [line.partition(":")[0] for line in opened] == ["model 0", "model 1"]
    assert "max_models" in refused
    assert re.search(r'planish_trained_tokens_total\{tenant="alice"\} [1-9]', printed)
    assert (directory / "keys").stat().st_mode & 0o077 == 0
