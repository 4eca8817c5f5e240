"""`planish doctor --gpu-report`: tests and measurements on a GPU, for a file to attach to an issue.

Each part runs in a process of its own (measurements.py), whose lines are printed and recorded as
they come. No part needs the network. The command ends after `minutes`. Parts that were not begun or
not finished then are those with which the next call continues.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import planish
from planish.doctor.gpu.report_file import (
    DONE,
    FAILED,
    NOT_RUN,
    UNFINISHED,
    Line,
    PartResult,
    ReportFile,
)
from planish.doctor.gpu.request import Request, models_home
from planish.engine.settings import choose_device
from planish.model.architecture.weight_sizes import SCHEMES
from planish.model.device import Device

MINUTES = 10.0
MODELS = ("Qwen3-0.6B", "Qwen3-8B")
COMMAND = (sys.executable, "-m", "planish.doctor.gpu.measurements")
MIN_PART_SECONDS = 20.0
"""The remaining time in which no part is begun."""
_ERROR_CHARACTERS = 4000
_TESTS = Path(planish.__file__).parents[1] / "tests"


@dataclass(frozen=True)
class ReportOptions:
    """The options of a report."""

    path: Path
    """The file of the report."""
    device: str = "auto"
    minutes: float = MINUTES
    models: Sequence[str] = MODELS
    """Names in SHAPES."""
    small: bool = False
    """Whether measurements are tiny and also run on a CPU, for tests."""
    command: Sequence[str] = COMMAND
    say: Callable[[str], None] = field(default=print, repr=False)


class GpuReport:
    """One call of `planish doctor --gpu-report`."""

    def __init__(self, options: ReportOptions) -> None:
        """Open the file. Raises UserError if it is not a report of this software."""
        self._options, self._file = options, ReportFile(options.path)
        self._deadline = time.monotonic() + 60 * options.minutes
        self._is_gpu = Device(choose_device(options.device)).is_gpu

    def run(self) -> bool:
        """Run the parts that are not finished. Return whether all are finished then."""
        for name, run in self._parts():
            if self._file.is_finished(name):
                continue
            if self._remaining() < MIN_PART_SECONDS:
                break
            self._options.say(f"{name}:")
            start_time = time.monotonic()
            try:
                result = run()
            except OSError as error:
                result = PartResult(FAILED, f"{type(error).__name__}: {error}")
            self._file.add(name, replace(result, seconds=round(time.monotonic() - start_time, 1)))
            if result.status != DONE:
                self._options.say(f"  {result.status}: {_first_line(result.reason)}")
        names = [name for name, _ in self._parts()]
        is_complete = all(self._file.is_finished(name) for name in names)
        if is_complete:
            shutil.rmtree(models_home(), ignore_errors=True)
        return is_complete

    def _parts(self) -> Iterator[tuple[str, Callable[[], PartResult]]]:
        yield "machine", lambda: self._measure(self._request("machine"))
        yield "limits", lambda: self._measure(self._request("limits"), needs_gpu=True)
        for model in self._options.models:
            yield f"self-test {model}", lambda model=model: self._with_model("self-test", model)
            for scheme in (None, *reversed(SCHEMES)):
                yield (
                    f"{model} {scheme or 'bf16'}",
                    lambda model=model, scheme=scheme: self._with_model("model", model, scheme),
                )
        yield "gpu tests", self._gpu_tests

    def _remaining(self) -> float:
        return self._deadline - time.monotonic()

    def _request(self, part: str, **fields: Any) -> Request:
        options = self._options
        return Request(part, options.device, os.getpid(), small=options.small, **fields)

    def _with_model(self, part: str, model: str, scheme: str | None = None) -> PartResult:
        request = self._request(part, model=model, scheme=scheme, limits=self._limits())
        return self._measure(request, needs_gpu=True)

    def _limits(self) -> tuple[float, float] | None:
        found = self._file.parts.get("limits")
        if found is None or found.status != DONE:
            return None
        return found.details["bandwidth"], found.details["matmul_rate"]

    def _measure(self, request: Request, *, needs_gpu: bool = False) -> PartResult:
        """Run the process of a part until it ends or the time is over."""
        if needs_gpu and not self._is_gpu and not self._options.small:
            return PartResult(NOT_RUN, "no GPU")
        lines: list[Line] = []
        details: dict[str, Any] = {}
        not_run = ""
        process = _Process(self._options.command, json.dumps(asdict(request)), self._deadline)
        for text in process.lines():
            with suppress(ValueError):
                fields = json.loads(text)
                if "line" in fields:
                    lines.append(Line(**fields["line"]))
                    self._options.say(f"  {lines[-1].text}")
                details |= fields.get("details", {})
                not_run = fields.get("not_run", not_run)
        status, reason = DONE, ""
        if not_run:
            status, reason = NOT_RUN, not_run
        elif process.is_late:
            status, reason = UNFINISHED, "the time was over; the next call runs this part again"
        elif process.returncode:
            status, reason = FAILED, f"exit status {process.returncode}: {process.errors}"
        return PartResult(status, reason, 0.0, tuple(lines), details)

    def _gpu_tests(self) -> PartResult:
        """Run the repository's own tests that need a GPU, if they are here."""
        if not self._is_gpu:
            return PartResult(NOT_RUN, "no GPU")
        if not _TESTS.is_dir() or find_spec("pytest") is None:
            return PartResult(NOT_RUN, "needs a clone of the repository with its extra [dev]")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--tb=short", str(_TESTS)]
        process = _Process(command, "", self._deadline)
        printed = list(process.lines())
        if process.is_late:
            return PartResult(UNFINISHED, "the time was over; the next call runs the tests again")
        summary = printed[-1].strip() if printed else process.errors
        line = Line("pytest -m gpu", summary, expected="passed")
        self._options.say(f"  {line.text}")
        details = {"failures": "".join(printed)[-_ERROR_CHARACTERS:]} if process.returncode else {}
        status = FAILED if process.returncode else DONE
        return PartResult(status, summary if process.returncode else "", 0.0, (line,), details)


class _Process:
    """A process whose lines can be read until a deadline, at which it is killed."""

    def __init__(self, command: Sequence[str], given: str, deadline: float) -> None:
        """Start it with `given` on its standard input. `deadline`: a time of time.monotonic()."""
        self._deadline, self.is_late = deadline, False
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # so that its own processes can be ended with it
        )
        self._errors: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._threads = [threading.Thread(target=read) for read in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(given)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                self._queue.put(line)
        self._queue.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            self._errors.append(stderr.read())

    def lines(self) -> Iterator[str]:
        """Yield the lines of its output. At the deadline, kill it with its own processes."""
        try:
            while (line := self._next_line()) is not None:
                yield line
        finally:
            if self._process.poll() is None and (self.is_late or sys.exc_info()[0] is not None):
                self._kill()
            self._process.wait()
            for thread in self._threads:
                thread.join()

    def _next_line(self) -> str | None:
        try:
            return self._queue.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            self.is_late = True
            return None

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def returncode(self) -> int:
        """The exit status."""
        return self._process.wait()

    @property
    def errors(self) -> str:
        """The end of what it wrote to standard error."""
        return "".join(self._errors).strip()[-_ERROR_CHARACTERS:]


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
