"""What holds for all tests: without a GPU, Triton's kernels are interpreted on the CPU; kernels are
compiled once, also for tests with a cache of their own.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch

from planish.files import cache_home
from planish.native import cpu

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before their first import
    import interpreted_faster

    interpreted_faster.install()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has those that it puts in the background ignore Ctrl-C, of which tests send some.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine that stands still for a moment is no fault of what is tested.
hypothesis.settings.register_profile("planish", deadline=None)
hypothesis.settings.load_profile("planish")


@pytest.fixture(scope="session")
def planish_home() -> Callable[[Path], Path]:
    """Makes a directory for PLANISH_HOME, empty but for the kernels, which take twenty seconds to
    compile.
    """
    kernels = cache_home() / "kernels"

    def made(directory: Path) -> Path:
        directory.mkdir(parents=True)
        if cpu.loaded() is not None:
            (directory / "kernels").symlink_to(kernels)
        return directory

    return made


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_loaded() -> None:
    """Before a test gives this process another cache."""
    cpu.loaded()
