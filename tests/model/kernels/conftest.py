from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from variants import slow_after

from planish.files import cache_home
from planish.model.kernels.cpp import build, matmul, ops


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device of the Triton kernels: a GPU, or the CPU, where they are interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def emulated_library() -> Path:
    """Return the kernels with emulated AMX instructions. The compiled library is cached, because
    the compilation takes ten seconds.
    """
    with pytest.MonkeyPatch.context() as patch:
        flags = ["-O1" if flag == "-O3" else flag for flag in build.FLAGS]
        patch.setattr(build, "FLAGS", (*flags, "-DEMULATED_TILES"))
        return build.compiled_library(cache_home() / "kernels", ops.instructions())


@pytest.fixture(params=slow_after(1, ["all instructions", "AVX2"]))
def cpu_kernels(request):
    """Run the test with the CPU kernels of this machine and with those for AVX2; skip without
    kernels.
    """
    if ops.load_library() is None:
        pytest.skip("this machine has no AVX2 or no C++ compiler")
    with _served(request.param):
        yield


@pytest.fixture(params=slow_after(1, ["all instructions", "AVX2", "emulated tiles"]))
def products(request):
    """Run the test with the matmuls of this CPU, with those for AVX2, and with those for AMX."""
    if not matmul.supports_bf16_matmul():
        pytest.skip("this machine does not multiply bf16 by our kernels")
    tiles = (
        request.getfixturevalue("emulated_library") if request.param == "emulated tiles" else None
    )
    with _served(request.param, tiles):
        yield


@pytest.fixture
def emulated_tiles(emulated_library):
    """Run the test with the matmuls for AMX, emulated."""
    if not matmul.supports_bf16_matmul():
        pytest.skip("this machine does not multiply bf16 by our kernels")
    with _served("emulated tiles", emulated_library):
        yield


@contextmanager
def _served(by: str, tiles: Path | None = None) -> Iterator[None]:
    """Use the kernels for these instructions during the block."""
    with pytest.MonkeyPatch.context() as patch:
        if by != "all instructions":
            if by == "AVX2" and ops.instructions() == "AVX2":
                pytest.skip("this machine has no more than AVX2")
            library = ops.Library(
                str(tiles or build.compiled_library(cache_home() / "kernels", "AVX2"))
            )
            library.use_amx(int(tiles is not None))
            patch.setattr(ops, "load_library", lambda: library)
        ops._function.cache_clear()
        yield
    ops._function.cache_clear()
