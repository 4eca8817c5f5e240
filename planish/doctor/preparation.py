"""Compiles and self-tests the kernels that this machine has not tried yet, in a process of its own.

    python -m planish.doctor.preparation DEVICE [DIRECTORY]

The process does it, for the shapes of the base model in DIRECTORY where DEVICE is a GPU, and prints
the GPU's verdicts as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from planish.engine.settings import choose_device, choose_dtype, head_shape, kernel_shapes
from planish.model.config import ModelConfig
from planish.native import cpu
from planish.native.gpu_check import admit_checked
from planish.native.verdicts import Verdict


class Preparation:
    """The process. It outlives this one when the time is up: its results are cached."""

    def __init__(self, device: str, directory: Path | None) -> None:
        """`directory`: of a base model; None: there is none to check GPU kernels for."""
        self._process = subprocess.Popen(
            command(device, directory),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def gpu_verdicts(self, deadline: float) -> list[Verdict] | None:
        """Wait until the process is done, or until `deadline` by time.monotonic(). Return what the
        self-test found about the GPU's kernels, none without a GPU; None if it is not done yet.
        """
        try:
            output, _ = self._process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process.returncode = 0  # else Python warns of a process that nobody waited for
            return None
        lines = output.strip().splitlines()
        return [Verdict(**row) for row in json.loads(lines[-1])] if lines else []


def command(device: str, directory: Path | None) -> list[str]:
    named = [] if directory is None else [str(directory)]
    return [sys.executable, "-m", "planish.doctor.preparation", device, *named]


def prepare(device_name: str, directory: Path | None) -> list[Verdict]:
    """Return the verdicts of the GPU's kernels, checked now if they never were."""
    cpu.loaded()
    device = choose_device(device_name)
    if device.type != "cuda" or directory is None:
        return []
    config = ModelConfig.from_directory(directory)
    heads = head_shape(config, choose_dtype("auto", device))
    return admit_checked(directory, kernel_shapes(config), heads, device)


if __name__ == "__main__":
    path = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    print(json.dumps([asdict(verdict) for verdict in prepare(sys.argv[1], path)]))
