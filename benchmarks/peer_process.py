"""A peer's process, as the driver controls it: started, asked for rounds, and suspended while
others are measured.

While it waits, its whole process group is suspended (SIGSTOP), so none of its threads can spin
while another peer is measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from machine import CpuTime

MAX_LOG_LINES = 100


class PeerError(Exception):
    """A peer's process ended."""


@dataclass
class PeerProcess:
    """One peer on one file of workloads. A context manager: the process runs inside the block."""

    name: str
    command: Sequence[str | Path]
    """The command that starts it, without the model and the file of workloads."""
    rounds_file: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    load_seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    def start(self, model: Path, log: Path) -> Self:
        """Start the process, wait until it has loaded, and suspend it."""
        self._log = log
        start_time = time.perf_counter()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [*self.command, model, self.rounds_file],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )
        ready = self._read_reply()
        self.load_seconds = time.perf_counter() - start_time
        self.versions = ready["versions"]
        self._suspend()
        return self

    def run_round(self, workload: str, number: int) -> dict[str, Any]:
        """Run round `number` of a workload. Returns its facts with "seconds", "peak_gib" and
        "others", the share of the cores that other programs used.
        """
        pipe = self._process.stdin
        assert pipe is not None
        self._signal(signal.SIGCONT)
        cpu_before = CpuTime.now()
        print(workload, number, file=pipe, flush=True)
        result = self._read_reply()
        result["others"] = cpu_before.share_of_others(result.pop("cpu_seconds"))
        self._suspend()
        return result

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _read_reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last_lines = "\n".join(
                self._log.read_text(errors="replace").splitlines()[-MAX_LOG_LINES:]
            )
            raise PeerError(f"{self.name} ended with status {self._process.wait()}:\n{last_lines}")
        return json.loads(line)

    def _suspend(self) -> None:
        """Suspend the process group, and return when it is suspended."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
