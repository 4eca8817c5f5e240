"""A program that answers questions, one JSON object a line each way, and is killed when it takes too long.

For work that nothing inside a process can stop, such as a computer algebra system on 9^{9^{9^{9}}}. The program starts at the
first question, says {"ready": true}, and ends when its standard input does; so it never outlives the process that asks.
"""

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planish.errors import PlanishError

START_SECONDS = 120.0


class WorkerError(PlanishError):
    """The program gave no answer; the next question gets a fresh one."""


class WorkerStartError(PlanishError):
    """The program could not begin its work."""


class WorkerProcess:
    """One program at a time. Questions from several threads take turns."""

    def __init__(
        self,
        program: Path,
        arguments: Sequence[str] = (),
        *,
        timeout_seconds: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: variables that the program has besides those of this process."""
        self.timeout_seconds = timeout_seconds
        self._environment = {**os.environ, **(environment or {})}
        self._command = [str(program), *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, question: dict[str, Any], *, timeout_seconds: float | None = None) -> dict[str, Any]:
        """The program's answer. WorkerError if it ends or takes longer than `timeout_seconds` (None: the process's own)."""
        with self._lock:
            try:
                process = self._process or self._start()
                assert process.stdin is not None
                process.stdin.write(json.dumps(question).encode() + b"\n")
                process.stdin.flush()
                return self._receive(process, self.timeout_seconds if timeout_seconds is None else timeout_seconds)
            except (TimeoutError, EOFError, BrokenPipeError) as error:
                self._stop()
                raise WorkerError(str(error) or "the process ended") from error
            except BaseException:  # Ctrl-C: the answer that is still to come would be taken for the next question's
                self._stop()
                raise

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: the modules beside the program must not stand in front of installed ones.
        # A session of its own: Ctrl-C is for the process that asks, which closes this one when it is done.
        process = subprocess.Popen(
            [sys.executable, "-P", *self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=self._environment,
            start_new_session=True,
        )
        self._process = process
        try:
            reply = self._receive(process, START_SECONDS)
        except (TimeoutError, EOFError) as error:
            reply = {"error": str(error)}
        if "ready" not in reply:
            self._stop()
            raise WorkerStartError(reply["error"])
        return process

    def _receive(self, process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        assert process.stdout is not None
        waiting = select.poll()  # unlike select, it takes any number of a file
        waiting.register(process.stdout, select.POLLIN)
        if not waiting.poll(seconds * 1000):
            raise TimeoutError(f"no answer in {seconds:g} s")
        line = process.stdout.readline()
        if not line:
            raise EOFError("the process ended without an answer")
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
