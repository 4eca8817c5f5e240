"""`planish serve` in a process of its own, on a tiny random model, for tests that use a socket."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

COMMAND = (
    "import argparse, sys; from planish.commands import serve; parser = argparse.ArgumentParser(); "
    "serve.add_arguments(parser); sys.exit(serve.run(parser.parse_args()))"
)
BASE_MODEL = "planish/tiny-model"
# Enough for compiling the kernels on a busy machine: tests that hide the cache need it.
START_TIMEOUT = 300.0


@dataclass
class ServerProcess:
    """A server that is ready."""

    process: subprocess.Popen[str]
    url: str
    output: list[str] = field(default_factory=list)
    """Lines that it has written."""

    def stop(self, sig: int = signal.SIGTERM, seconds: float = 60.0) -> int:
        """Send a signal, wait for the end, and return the exit status."""
        self.process.send_signal(sig)
        return self.process.wait(seconds)


def start_server(
    data_dir: Path,
    model: Path,
    *options: str,
    environment: Mapping[str, str] | None = None,
    prelude: str = "",
) -> ServerProcess:
    """Start a server for `model` on any free port, without access to a network. `prelude` is Python
    that the process runs first.
    """
    model_option = f"{BASE_MODEL}={model}"
    arguments: Sequence[str] = (
        "--port",
        "0",
        "--data-dir",
        str(data_dir),
        "--model",
        model_option,
        *options,
    )
    process = subprocess.Popen(
        [sys.executable, "-c", prelude + COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(environment or {})},
    )
    server = ServerProcess(process, "")
    Thread(target=_read_output, args=(server,), daemon=True).start()
    deadline = time.monotonic() + START_TIMEOUT
    while not server.url:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise RuntimeError("the server did not start:\n" + "\n".join(server.output))
        time.sleep(0.02)
    return server


def _read_output(server: ServerProcess) -> None:
    assert server.process.stdout is not None
    with server.process.stdout as output:
        for line in output:
            server.output.append(line.rstrip("\n"))
            match = re.search(r'ready at (http://[^\s"]+)', line)
            if match:
                server.url = match.group(1)


@contextmanager
def running_server(
    data_dir: Path,
    model: Path,
    *options: str,
    environment: Mapping[str, str] | None = None,
    prelude: str = "",
) -> Iterator[ServerProcess]:
    """Run a server for the length of a block. The process ends whatever happens in it."""
    server = start_server(data_dir, model, *options, environment=environment, prelude=prelude)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
