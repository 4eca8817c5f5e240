"""The equality tests on a GPU; `PLANISH_TEST_DEVICE=cpu` tries them on a CPU.

Most are those of tests/engine, collected here once more: a module imports them, and the fixtures
and names that say "CPU" there are others here.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from planish.testing import tiny_model

pytest.register_assert_rewrite("test_sampler", "test_sampler_equals_trainer", "test_trainer")

KERNEL_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "intermediate": 96,
}
"""Heads as wide as real ones, and a width of the MLP that is no multiple of a block."""


@pytest.fixture(scope="session")
def device() -> torch.device:
    name = os.environ.get("PLANISH_TEST_DEVICE", "cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device; PLANISH_TEST_DEVICE=cpu runs these tests on the CPU")
    return torch.device(name)


@pytest.fixture(autouse=True)
def _kernels_serve_without_a_check(device, monkeypatch) -> None:
    """These tests are about the kernels; test_gpu_check.py is about the check."""
    if device.type == "cuda":
        monkeypatch.setenv("PLANISH_KERNELS", "triton")


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """The directory of a small model of a family, made once for each set of options."""
    made: dict[tuple, Path] = {}

    def directory(family: str, **options) -> Path:
        key = (family, *sorted(options.items()))
        if key not in made:
            made[key] = tiny_model(
                tmp_path_factory.mktemp(family), family, **KERNEL_SIZES | options
            )
        return made[key]

    return directory
