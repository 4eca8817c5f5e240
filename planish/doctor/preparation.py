"""The slow part of `planish doctor`, which runs in a separate process.

    python -m planish.doctor.preparation DEVICE [DIRECTORY]

The process compiles and tests the kernels that this machine has not tested yet. For the base model
in DIRECTORY it also determines the dtype, the kernels and the batch invariance (`Numerics`). This
includes a probe of this machine's matmuls. The process prints a `PreparationResult` as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from planish.engine.base_models import BaseModel, checked_backend
from planish.engine.memory import DeviceMemory
from planish.engine.numerics import Numerics, describe_numerics
from planish.engine.settings import EngineSettings
from planish.model.architecture.config import ModelConfig
from planish.model.kernels.cpp import ops
from planish.model.kernels.self_test.verdicts import Verdict


@dataclass(frozen=True)
class PreparationResult:
    """The result of a preparation."""

    gpu_verdicts: Sequence[Verdict] = ()
    """Self-test results of the GPU's kernels; empty without a GPU or a base model."""
    numerics: Numerics | None = None
    """The numerics of the base model; None without a base model."""

    @classmethod
    def read(cls, text: bytes) -> PreparationResult:
        """Return the result in the output of the process; an empty result if the process failed."""
        try:
            fields = json.loads(text.strip().splitlines()[-1])
            numerics = fields["numerics"]
            verdicts = [Verdict(**verdict) for verdict in fields["gpu_verdicts"]]
        except (ValueError, LookupError, TypeError):
            return cls()
        if numerics is not None:
            families = tuple(numerics["torch_families"])
            numerics = Numerics(**{**numerics, "torch_families": families})
        return cls(verdicts, numerics)


class Preparation:
    """A preparation that runs in a separate process.

    The process continues after the time limit. Its results are cached, so the next preparation
    starts from them.
    """

    def __init__(self, device: str, directory: Path | None) -> None:
        """Start the process. `directory`: the base model, or None if this machine has none."""
        self._process = subprocess.Popen(
            command(device, directory),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def result(self, deadline: float) -> PreparationResult | None:
        """Return the result, or None if the process is not done at `deadline`.

        `deadline` is a time of time.monotonic(). Call this method only once.
        """
        try:
            output, _ = self._process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process.returncode = 0  # prevents Python's ResourceWarning
            return None
        return PreparationResult.read(output)


def command(device: str, directory: Path | None) -> list[str]:
    """Return the command line of the preparation's process."""
    model_arguments = [] if directory is None else [str(directory)]
    return [sys.executable, "-m", "planish.doctor.preparation", device, *model_arguments]


def prepare(device_name: str, directory: Path | None) -> PreparationResult:
    """Compile and test the remaining kernels, and describe the base model's numerics."""
    ops.load_library()
    if directory is None:
        return PreparationResult()
    config, settings = ModelConfig.from_directory(directory), EngineSettings(device=device_name)
    if config.hf is not None:
        # Loading the model also measures how far sampler and trainer are apart.
        memory = DeviceMemory(settings).claim(directory)
        return PreparationResult((), BaseModel(directory, settings, memory).numerics())
    backend, verdicts = checked_backend(directory, config, settings)
    return PreparationResult(verdicts, describe_numerics(backend))


if __name__ == "__main__":
    path = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    print(json.dumps(asdict(prepare(sys.argv[1], path))))
