"""The processes of the kernels' self-tests.

A self-test runs in a process of its own, because a faulty kernel may crash or hang its process. The
process gets its request as JSON on its standard input. It writes one line before the test of each
family, and one line with the verdict.

The process has a process group of its own, so that Ctrl-C in a terminal reaches only planish. It
ends with planish: planish ends it if a wait for it is interrupted, and the kernel of the operating
system ends it if planish is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from planish.model.kernels.self_test.verdicts import WRONG_RESULT, Verdict

_PACKAGE_PARENT = Path(__file__).parents[4]
_MAX_REASON_LENGTH = 4000
_PR_SET_PDEATHSIG = 1
_running: set[subprocess.Popen[str]] = set()
_interrupted: set[subprocess.Popen[str]] = set()
_lock = threading.Lock()


class WrongResultError(Exception):
    """A kernel and torch disagree."""


class SelfTestInterruptedError(Exception):
    """`interrupt_self_tests` ended the self-test, so there is no verdict."""


def run_self_test(
    families: Sequence[str],
    request_for: Callable[[Sequence[str], Sequence[Verdict]], Mapping[str, Any]],
    command: Sequence[str],
    seconds: float,
    environment: Mapping[str, str],
    concerns_all: Callable[[str], bool] = lambda reason: False,
) -> list[Verdict]:
    """Test the families and return one verdict for each, in the same order.

    If the test process crashes or hangs, the family that it was testing fails, and a new process
    tests the remaining families.

    `request_for(remaining, verdicts)`: the request for the remaining families, given the verdicts
    so far; `check_families` reads it. `seconds`: the time limit of each process. `environment`:
    variables that are added to those of this process. `concerns_all(reason)`: whether the remaining
    families would fail for the same reason, such as a missing compiler.
    """
    found: dict[str, Verdict] = {}
    while remaining := [family for family in families if family not in found]:
        request = {
            **request_for(remaining, list(found.values())),
            "families": remaining,
            "parent": os.getpid(),
        }
        verdicts = _run(request, command, seconds, environment)
        found |= {verdict.family: verdict for verdict in verdicts if verdict.family in remaining}
        reason = verdicts[-1].reason
        if reason and concerns_all(reason):
            found = {family: Verdict(family, False, reason) for family in families} | found
    return [found[family] for family in families]


def interrupt_self_tests() -> None:
    """End all self-tests of this process; their callers raise SelfTestInterruptedError."""
    with _lock:
        _interrupted.update(_running)
        for process in _running:
            _kill_group(process)


def _run(
    request: Mapping[str, Any],
    command: Sequence[str],
    seconds: float,
    environment: Mapping[str, str],
) -> list[Verdict]:
    """Run one test process and return its verdicts, at least one."""
    families: list[str] = request["families"]
    # The parent may have added planish's directory only to its sys.path, which the test process
    # does not inherit.
    paths = [str(_PACKAGE_PARENT), *(path or os.getcwd() for path in sys.path)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), **environment},
        )
    except OSError as error:
        return [Verdict(family, False, f"cannot be started: {error}") for family in families]
    timeout = ""
    with _registered(process):
        try:
            out, errors = process.communicate(json.dumps(request), timeout=seconds)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            out, errors = process.communicate()
            timeout = f"timeout: no verdict within {seconds:.0f} seconds"
        except BaseException:  # for example KeyboardInterrupt
            _kill_group(process)
            process.communicate()
            raise
        if process in _interrupted:
            raise SelfTestInterruptedError("the self-test of the kernels was interrupted")
    verdicts, begun = _read(out)
    tested = {verdict.family for verdict in verdicts}
    if tested.issuperset(families) or (process.returncode == 1 and begun in tested):
        return verdicts
    # The process ended during the test of a family, or before the first test.
    reason = timeout or describe_exit(process.returncode) + error_text(errors)
    if begun in families and begun not in tested:
        return [*verdicts, Verdict(begun, False, reason)]
    reason = f"the self-test cannot be started: {reason}"
    return [*verdicts, *(Verdict(name, False, reason) for name in families if name not in tested)]


@contextmanager
def _registered(process: subprocess.Popen[str]) -> Iterator[None]:
    """Let `interrupt_self_tests` end the process while the block runs."""
    with _lock:
        _running.add(process)
    try:
        yield
    finally:
        with _lock:
            _running.discard(process)
            _interrupted.discard(process)


def _kill_group(process: subprocess.Popen[str]) -> None:
    """Kill the process and the compilers that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _read(out: str) -> tuple[list[Verdict], str | None]:
    """Return the verdicts in the output of a test process, and the family that it began last.

    Other lines are ignored, because libraries may print too.
    """
    verdicts, begun = [], None
    for line in out.splitlines():
        try:
            fields = json.loads(line)
            if "verdict" in fields:
                verdicts.append(Verdict(**fields["verdict"]))
            else:
                begun = fields["begin"]
        except (ValueError, TypeError, KeyError):
            continue
    return verdicts, begun


def describe_exit(status: int) -> str:
    """Return in words how a self-test's process ended.

    `status`: its return code as in `subprocess.Popen`, where a negative number is a signal.
    """
    if status >= 0:
        return f"exit status {status} of the self-test"
    name = signal.strsignal(-status) or f"signal {-status}"
    return f"{name.lower()} in the self-test"


def error_text(errors: str) -> str:
    """Return the error in the standard error stream of a process, after ": "; empty if none.

    After a traceback, that is the whole message of the exception. The last line alone would be the
    same advice for every error of CUDA.
    """
    lines = errors.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    if frames:
        after = range(frames[-1] + 1, len(lines))
        first = next((number for number in after if not lines[number].startswith("  ")), 0)
        lines = lines[first:]
    text = "\n".join(lines)[:_MAX_REASON_LENGTH]
    return f": {text}" if text else ""


# The test process


def end_with_parent(parent: int) -> None:
    """Let the operating system kill this process when process `parent`, which started it, ends.

    Only Linux supports that. Elsewhere the test process of a killed planish runs to its end.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # The parent ended before the call.
            os._exit(1)


def check_families(
    families: Sequence[str], test: Callable[[str], None], *, ends_on_error: bool
) -> None:
    """Test each family, and write a line before its test and a line with its verdict.

    `test(family)` raises WrongResultError if kernels and torch disagree. `ends_on_error`: whether
    to end this process with status 1 after any other error, because the CUDA context may be lost.
    """
    for family in families:
        print(json.dumps({"begin": family}), flush=True)
        verdict, has_error = Verdict(family, True), False
        try:
            test(family)
        except WrongResultError as error:
            verdict = Verdict(family, False, f"{WRONG_RESULT}{error}")
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:_MAX_REASON_LENGTH]
            verdict, has_error = Verdict(family, False, reason), True
        print(json.dumps({"verdict": asdict(verdict)}), flush=True)
        if has_error and ends_on_error:
            sys.exit(1)
