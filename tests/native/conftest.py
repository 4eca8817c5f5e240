import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from planish.native import build, cpu, cpu_products


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where Triton's kernels run: a GPU if there is one, else the CPU, interpreted (tests/conftest.py)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def emulated_library(tmp_path_factory) -> Path:
    """The kernels with AMX's instructions written out."""
    path = tmp_path_factory.mktemp("kernels") / "emulated.so"
    flags = ["-O1" if flag == "-O3" else flag for flag in build.FLAGS]
    command = ["g++", *flags, *build.INSTRUCTIONS, "-DEMULATED_TILES", str(build.SOURCE), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


@pytest.fixture(params=["as the CPU multiplies", "by emulated tiles"])
def products(request, monkeypatch):
    """Products with bf16 weights, on this machine's CPU and as one with AMX makes them."""
    if not cpu_products.multiplies(32, 32, torch.bfloat16, torch.device("cpu")):
        pytest.skip("this machine has no instruction for pairs of bf16")
    if request.param == "by emulated tiles":
        library = ctypes.CDLL(str(request.getfixturevalue("emulated_library")))
        library.use_tiles(1)
        for module in (cpu, cpu_products):
            monkeypatch.setattr(module, "loaded", lambda: library)
    cpu._function.cache_clear()
    yield
    cpu._function.cache_clear()
