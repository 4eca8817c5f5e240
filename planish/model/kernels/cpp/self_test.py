"""Run the self-test of the C++ kernels once on each machine, and store its verdicts.

The test is checks.py. It runs in a separate process, because a faulty kernel may crash its
process. Later starts read the stored verdicts beside the library and start no process.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from planish.model.kernels.verdicts import (
    Verdict,
    describe_exit,
    read_verdicts,
    verdict_file,
    write_verdicts,
)

FAMILIES = (
    "amx",
    "matmul",
    "lora",
    "attention",
    "norms",
    "rope",
    "swiglu",
    "log_sum_exp",
    "sampling",
    "decode",
    "delta_net",
)
"""The families in the order of the test. "amx" is first, because it decides whether the matmuls of
the other families use AMX.
"""
TIMEOUT = 120
"""The time limit of one test process in seconds. It needs about 3 s, but more on a busy machine."""
PROGRAM = "planish.model.kernels.cpp.checks"
_KERNEL_FAULTS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT)


def verdicts_of(library: Path, has_amx: bool) -> list[Verdict]:
    """Return a verdict for each family of kernels, from the file beside the library if it is valid.

    If the file is missing or damaged, run the self-test and write the file. The verdicts are not
    stored if the test failed for a reason outside the kernels, or if the file cannot be written.
    Then only this process uses them.
    """
    path = verdict_file(library.parent, "cpu", library.name, *_machine())
    families = [family for family in FAMILIES if has_amx or family != "amx"]
    known = read_verdicts(path)
    if known is not None and [verdict.family for verdict in known] == families:
        return known
    verdicts, is_lasting = _run(library, families)
    if is_lasting:
        write_verdicts(path, verdicts)
    return verdicts


def _machine() -> list[str]:
    """Return facts that determine the verdicts: the CPU, torch's version, the test's source."""
    facts = [platform.machine(), torch.__version__]
    facts.append(Path(__file__).with_name("checks.py").read_text())
    try:
        with Path("/proc/cpuinfo").open() as file:
            for line in file:
                if not line.strip():  # Read only the first CPU; the others are the same.
                    break
                if line.startswith(("model name", "flags", "microcode")):
                    facts.append(line.strip())
    except OSError:
        facts.append(platform.processor())
    return facts


def _run(library: Path, families: Sequence[str]) -> tuple[list[Verdict], bool]:
    """Test the families in new processes; return the verdicts and whether they may be stored.

    If a process crashes, the family that it was testing fails, and a new process tests the rest.
    """
    found: dict[str, Verdict] = {}
    is_lasting = True
    environment = os.environ | {
        # The parent may have imported planish from its working directory or from an entry that it
        # added to sys.path. So the test process gets the same path.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        # By default, OpenMP threads spin while they wait. That would take more time than the test.
        "OMP_WAIT_POLICY": "passive",
    }
    while left := [family for family in families if family not in found]:
        tiles = int("amx" in found and found["amx"].passed)
        command = [sys.executable, "-m", PROGRAM, str(library), str(tiles), *left]
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIMEOUT,
                check=False,
            )
            output, status, errors = done.stdout, done.returncode, done.stderr
        except subprocess.TimeoutExpired as error:
            output, status, errors = error.stdout or b"", None, b""
        except OSError as error:
            output, status, errors = b"", 1, str(error).encode()
        for line in output.splitlines():
            verdict = Verdict(**json.loads(line))
            found[verdict.family] = verdict
        left = [family for family in left if family not in found]
        if not left:
            break
        if status is None:
            reason, blamed = f"the self-test did not end within {TIMEOUT} s", left[:1]
        elif status < 0:
            reason, blamed = describe_exit(status), left[:1]
        else:  # The kernels are not to blame; for example, Python could not start.
            lines = errors.decode(errors="replace").strip().splitlines()
            reason, blamed = lines[-1] if lines else describe_exit(status), left
        # A timeout or an out-of-memory kill says nothing about the kernels.
        is_lasting = is_lasting and status is not None and -status in _KERNEL_FAULTS
        found |= {family: Verdict(family, False, reason) for family in blamed}
    return [found[family] for family in families], is_lasting
