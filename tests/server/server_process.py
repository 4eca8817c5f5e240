"""`planish serve` in a process of its own, on a tiny random model, for tests that use a socket."""

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

COMMAND = (
    "import argparse, sys; from planish.commands import serve; parser = argparse.ArgumentParser(); "
    "serve.add_arguments(parser); sys.exit(serve.run(parser.parse_args()))"
)
BASE_MODEL = "planish/tiny-model"
SLOW_ENGINE = """
import time
from planish.engine.engine_thread import EngineThread
turn = EngineThread._run_turn
EngineThread._run_turn = lambda thread: (time.sleep(0.003), turn(thread))
"""
# Enough for compiling the kernels on a busy machine: tests that hide the cache need it.
START_TIMEOUT = 300.0
_ports = itertools.count(os.getpid() * 97)


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for up to five minutes, so that a busy machine fails no test."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "the condition is still false"
        time.sleep(0.02)


def free_port() -> int:
    """Return a port outside of the kernel's range (from 32768), which no other socket is given
    before a server listens on it. Processes with consecutive numbers return different ports.
    """
    for number in _ports:
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", 20_000 + number % 12_000)) as one,
        ):
            return one.getsockname()[1]
    raise AssertionError


@dataclass
class ServerProcess:
    """A server that is ready."""

    process: subprocess.Popen[str]
    url: str
    output: list[str] = field(default_factory=list)
    """Lines that it has written. A thread reads them, so a line may come late."""

    def __post_init__(self) -> None:
        self._reader = Thread(target=_read_output, args=(self,), daemon=True)
        self._reader.start()

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit status."""
        self.process.send_signal(sig)
        return self.process.wait(240) if sig == signal.SIGKILL else self.wait()

    def wait(self) -> int:
        """Wait for the end and for the last line, and return the exit status."""
        status = self.process.wait(240)
        self._reader.join(60)  # a process that outlives the server may keep the pipe open
        return status

    def wait_for_line(self, text: str) -> None:
        """Wait for a line with `text`."""
        wait_until(lambda: any(text in line for line in self.output))


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
    arguments = ("--port", "0", "--data-dir", str(data_dir), "--model", f"{BASE_MODEL}={model}")
    process = subprocess.Popen(
        [sys.executable, "-c", prelude + COMMAND, *arguments, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(environment or {})},
    )
    server = ServerProcess(process, "")
    deadline = time.monotonic() + START_TIMEOUT
    while not server.url:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            server.wait()
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
