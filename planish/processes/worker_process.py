"""Runs a program in a worker process that answers requests, and is killed if one takes too long.

This is for work that cannot be interrupted within a process, such as a computer algebra system that
evaluates 9^{9^{9^{9}}}. The process starts at the first request. worker_program.py, which runs in
it, describes programs and the protocol.
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
    """A request has no result: the program failed, took too long, or ended."""


class WorkerStartError(PlanishError):
    """The program could not start."""


class WorkerProcess:
    """A worker process. Requests of several threads run one after the other."""

    def __init__(
        self,
        program: Path,
        arguments: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is added to the environment variables of this process."""
        # -P: files next to the program must not shadow installed modules.
        runner = Path(__file__).with_name("worker_program.py")
        self._command = [sys.executable, "-P", str(runner), str(program), *arguments]
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, question: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """Return the program's answer to a request, both JSON objects.

        WorkerError if the program fails, takes more than `timeout_seconds` or ends;
        WorkerStartError if it cannot be started.
        """
        with self._lock:
            try:
                process = self._running()
                assert process.stdin is not None
                with suppress(BrokenPipeError):  # the process has ended, which _receive reports
                    process.stdin.write(json.dumps([timeout_seconds, question]).encode() + b"\n")
                reply = self._receive(process, timeout_seconds)
            except BaseException:
                # After Ctrl-C or a timeout, the late answer would be read as the answer to the next
                # request.
                self._stop()
                raise
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def close(self) -> None:
        """End the process. Another request would start a new one."""
        with self._lock:
            self._stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()  # clean up a process that ended between requests
        # Ctrl-C is for this process, which then kills the worker. The worker stays in our process
        # group, so that whatever ends a whole terminal or job ends the worker too.
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
        waiting = select.poll()  # unlike select.select, it allows file numbers above 1023
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
