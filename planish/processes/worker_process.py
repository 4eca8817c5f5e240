"""A program that answers questions in a process of its own, which is killed when it takes too long.

For work that nothing inside a process can stop, such as a computer algebra system on 9^{9^{9^{9}}}.
The process starts at the first question; worker_program.py, which it runs, says what a program is
and what the two say to each other.
"""

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from planish.errors import PlanishError
from planish.processes.interruption import interrupts_held_back

START_SECONDS = 120.0


class WorkerError(PlanishError):
    """A question has no answer: the program failed on it, took too long, or ended."""


class WorkerStartError(PlanishError):
    """The program could not begin its work."""


class WorkerProcess:
    """One process at a time. Questions from several threads take turns."""

    def __init__(
        self,
        program: Path,
        arguments: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: variables that the program has besides those of this process."""
        # -P: the modules beside a program must not stand in front of installed ones.
        runner = Path(__file__).with_name("worker_program.py")
        self._command = [sys.executable, "-P", str(runner), str(program), *arguments]
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, question: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """The program's answer. WorkerError if it has none, WorkerStartError if there is no program
        that could be asked.
        """
        with self._lock:
            try:
                process = self._running()
                assert process.stdin is not None
                with suppress(BrokenPipeError):  # it has ended, which _receive says
                    process.stdin.write(json.dumps([timeout_seconds, question]).encode() + b"\n")
                reply = self._receive(process, timeout_seconds)
            except BaseException:
                # or an answer still to come, after Ctrl-C, say, would be taken for that to the next
                # question
                self._stop()
                raise
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def close(self) -> None:
        """End the process; another question would start the next one."""
        with self._lock:
            self._stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()  # it was killed while nobody asked
        # Only Ctrl-C is kept from it: what ends all processes of a terminal or of a job is to end
        # this one too.
        with interrupts_held_back():
            self._process = process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=self._environment,
            )
        try:
            reply = self._receive(process, START_SECONDS)
        except WorkerError as error:
            reply = {"error": str(error)}
        if "error" in reply:
            raise WorkerStartError(reply["error"])
        return process

    def _receive(self, process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        assert process.stdout is not None
        waiting = select.poll()  # unlike select, it takes any number of a file
        waiting.register(process.stdout, select.POLLIN)
        if not waiting.poll(seconds * 1000):
            raise WorkerError(f"no answer in {seconds:g} s")
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise WorkerError("the process ended without an answer")
        return json.loads(line)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
