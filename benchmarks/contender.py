"""A peer's process as the driver holds it: started, asked for rounds, and stopped while others
work.

While it waits, its whole process group is stopped (SIGSTOP), so that no thread of it spins while
another is measured.
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

SHOWN_LINES = 100


class PeerError(Exception):
    """A peer's process ended."""


@dataclass
class Contender:
    """One peer on one file of works. A context: inside, its process lives."""

    name: str
    command: Sequence[str | Path]
    """What starts it, without the model and the file of works."""
    works: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    load_seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    def start(self, model: Path, log: Path) -> Self:
        """Returns when it has loaded; it is stopped then."""
        self._log = log
        begun = time.perf_counter()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [*self.command, model, self.works],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )
        ready = self._answer()
        self.load_seconds = time.perf_counter() - begun
        self.versions = ready["versions"]
        self._stop()
        return self

    def ask(self, work: str, number: int) -> dict[str, Any]:
        """Round `number` of a work: its facts, with "seconds", "peak_gib" and "others", the share
        of the cores that others used.
        """
        pipe = self._process.stdin
        assert pipe is not None
        self._signal(signal.SIGCONT)
        before = CpuTime.now()
        print(work, number, file=pipe, flush=True)
        facts = self._answer()
        facts["others"] = before.others(facts.pop("cpu_seconds"))
        self._stop()
        return facts

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            shown = "\n".join(self._log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
            raise PeerError(f"{self.name} ended with status {self._process.wait()}:\n{shown}")
        return json.loads(line)

    def _stop(self) -> None:
        """Returns when it has stopped."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
