"""Run the self-test of the C++ kernels once on each machine, and store its verdicts.

The test is engine/kernel_check/cpu.py. It runs in a separate process, because a faulty kernel may
crash its process.
Later starts read the stored verdicts beside the library and start no process.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from planish.model.kernels.self_test.process import run_self_test
from planish.model.kernels.self_test.verdicts import Verdict, load_verdicts, verdict_file

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
COMMAND = (sys.executable, "-m", "planish.engine.kernel_check.cpu")
_SOURCES = Path(__file__).parents[3] / "engine" / "kernel_check"
"""The directory that contains the test."""
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
"""By default, OpenMP threads spin while they wait. That would take more time than the test."""


def verdicts_of(library: Path, has_amx: bool) -> list[Verdict]:
    """Return a verdict for each family of kernels, from the file beside the library if it is valid.

    Families without a stored verdict are tested now, and verdicts that last are stored.
    """
    path = verdict_file(library.parent, "cpu", library.name, *_machine())
    families = [family for family in FAMILIES if has_amx or family != "amx"]

    def test(missing: Sequence[str], known: Mapping[str, Verdict]) -> list[Verdict]:
        def request_for(_: Sequence[str], verdicts: Sequence[Verdict]) -> dict[str, Any]:
            passed = {verdict.family for verdict in (*known.values(), *verdicts) if verdict.passed}
            return {"library": str(library), "uses_amx": "amx" in passed}

        return run_self_test(missing, request_for, COMMAND, TIMEOUT, _ENVIRONMENT)

    return load_verdicts(path, families, test)


def _machine() -> list[str]:
    """Return facts that determine the verdicts: the CPU, torch's version, the test's source."""
    facts = [platform.machine(), torch.__version__]
    facts += [path.read_text() for path in sorted(_SOURCES.glob("*.py"))]
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
