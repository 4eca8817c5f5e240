"""Run `planish serve` in a process for the duration of a benchmark."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_READY = re.compile(r"ready at (http://\S+)")


@contextmanager
def running_server(
    data_dir: Path, *options: str, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield the URL of a server with these options on a free port. It inherits the environment of
    this process, such as OMP_NUM_THREADS, and gets `variables` in addition.
    """
    command = [
        sys.executable,
        "-m",
        "planish",
        "serve",
        "--port",
        "0",
        "--data-dir",
        str(data_dir),
        *options,
    ]
    log_options = ["--log-format", "text", "--log-level", "info"]
    with open(data_dir / "server.log", "w+") as log:
        process = subprocess.Popen(
            [*command, *log_options], stderr=log, env={**os.environ, **(variables or {})}
        )
        try:
            yield _url(process, Path(log.name))
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0, Path(log.name).read_text()
        finally:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    while True:
        text = log.read_text()
        if match := _READY.search(text):
            return match[1]
        if process.poll() is not None:
            raise RuntimeError(f"the server did not start:\n{text}")
        try:
            process.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
