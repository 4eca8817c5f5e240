"""Test the Triton kernels on this machine's GPU before they are used, and store the verdicts.

The tests run in a separate process (engine/kernel_check/gpu.py), because an illegal memory access
destroys the CUDA context of its process, and a kernel may hang. They run once for each combination
of GPU, driver, torch, Triton, kernel sources and model shapes. kernels/choose.py then uses the
families that passed. torch replaces all other families, and one warning gives the reason.

kernels/self_test/verdicts.py says which verdicts are stored.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from planish.files import cache_home
from planish.model.kernels.interface.setting import kernels_setting
from planish.model.kernels.self_test.process import run_self_test
from planish.model.kernels.self_test.verdicts import (
    WRONG_RESULT,
    Verdict,
    load_verdicts,
    verdict_file,
)
from planish.model.kernels.triton.families import FAMILIES, HeadShape, has_triton

CHECKER = (sys.executable, "-m", "planish.engine.kernel_check.gpu")
SECONDS = 600
"""The time limit of a test process in seconds.

Compilation takes one to two minutes, or longer on a busy machine.
"""
_PACKAGE = Path(__file__).parents[3]
_SOURCES = (
    "model/kernels/triton/*.py",
    "engine/kernel_check/*.py",
    "engine/sampling/cuda_graph_runner.py",
)
_COMPILER = ("c compiler", "python.h", "gcc", "clang")
"""Lower-case words in Triton's errors which show that its launcher could not be compiled."""
_MEMORY = ("out of memory", "outofmemory")
_EXCLUSIVE = ("busy or unavailable",)
"""CUDA's error if another process has the GPU in exclusive-process mode. The self-test is a second
process on the GPU, beside planish itself.
"""
_UNWRITABLE = ("no space left", "permission denied", "read-only file system", "disk quota")
_CACHE = ("jsondecodeerror", "stale file handle", "device or resource busy", "filenotfounderror")
"""Errors of a damaged file in Triton's cache, or of a cache on a network file system that several
processes use.
"""
_REMEDIES = (
    (
        ("libcuda.so cannot found", "ldconfig"),
        "Set TRITON_LIBCUDA_PATH to the directory of the GPU driver's libcuda.so.1",
    ),
    (
        ("failed to map segment",),
        "Set TRITON_CACHE_DIR (by default ~/.triton/cache) to a directory on a file system without "
        "the mount option noexec",
    ),
    (
        ("'gpu-name'",),
        "Install a newer torch, or set TRITON_PTXAS_PATH to the ptxas of a CUDA toolkit that "
        "supports this GPU",
    ),
    (("unsupported toolchain",), "Install a newer driver of the GPU"),
)
"""Lower-case words in errors of Triton's installation, with the remedy."""
_CONCERNS_ALL = (
    *_COMPILER,
    *_EXCLUSIVE,
    *_UNWRITABLE,
    *_CACHE,
    *(word for words, _ in _REMEDIES for word in words),
)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """The input of the test process, which reads it from standard input as JSON."""

    directory: str
    """The directory of the base model, whose config.json has the shapes."""
    dtype: str
    device: str
    families: Sequence[str]


def check_kernels(
    directory: Path,
    shapes: Collection[Any],
    heads: HeadShape,
    device: torch.device,
    families: Sequence[str] = FAMILIES,
) -> list[Verdict]:
    """Return the verdicts on the families of kernels for this model on this GPU.

    Families without a stored verdict are tested now, which takes a minute or two. One warning names
    the families that failed, the reason and the remedy.

    `shapes`: the model's other sizes for which kernels are compiled; they are part of the key of
    the stored verdicts. `families`: the families that support the model.
    """
    if kernels_setting() in ("torch", "triton"):
        return []
    if not has_triton():
        verdicts = [Verdict(family, False, "Triton is not installed") for family in families]
    else:
        name = torch.cuda.get_device_name(device)
        dtype = str(heads.dtype).removeprefix("torch.")

        def test(missing: Sequence[str], _: Mapping[str, Verdict]) -> list[Verdict]:
            _logger.info(
                "compiling and checking GPU kernels for %s; this takes about a minute, once", name
            )
            return run_checks(Request(str(directory), dtype, str(device), missing))

        # Another model with the same shapes may share the file. So the file may have verdicts on
        # families that do not support this model.
        verdicts = load_verdicts(verdict_path(shapes, heads, device), families, test)
    warning = warning_of(verdicts)
    if warning:
        _logger.warning("%s", warning)
    return verdicts


def verdict_path(shapes: Collection[Any], heads: HeadShape, device: torch.device) -> Path:
    """Return the file of the verdicts for this GPU, this software and these shapes."""
    return verdict_file(
        cache_home() / "kernels",
        "gpu",
        torch.cuda.get_device_name(device),
        str(torch.cuda.get_device_capability(device)),
        driver_version(),
        torch.__version__,
        triton_version(),
        source_digest(),
        repr(heads),
        repr(shapes),
    )


def run_checks(
    request: Request, command: Sequence[str] = CHECKER, seconds: float = SECONDS
) -> list[Verdict]:
    """Test the families of the request and return one verdict for each.

    `seconds`: the time limit of each test process.
    """
    return run_self_test(
        request.families,
        lambda remaining, verdicts: asdict(request),
        command,
        seconds,
        {"PLANISH_KERNELS": "triton", "PLANISH_GRAPHS": "1"},
        lambda reason: _names(reason, _CONCERNS_ALL),
    )


def warning_of(verdicts: Sequence[Verdict]) -> str:
    """Return the warning about the families that failed; empty if all passed."""
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if not failed:
        return ""
    reasons: dict[str, list[str]] = {}
    for verdict in failed:
        reasons.setdefault(" ".join(verdict.reason.split())[:400], []).append(verdict.family)
    told = "; ".join(f"{', '.join(families)}: {reason}" for reason, families in reasons.items())
    which = "all GPU kernels" if len(failed) == len(verdicts) else "some GPU kernels"
    remedies = dict.fromkeys(remedy_of(reason) for reason in reasons)
    return (
        f"{which} of planish are off, and torch does their work more slowly: {told}. "
        f"{' '.join(remedies)}"
    )


def remedy_of(reason: str) -> str:
    """Return the remedy for this reason of a failure, as one or two sentences."""
    for words, remedy in _REMEDIES:
        if _names(reason, words):
            return f"{remedy}, and start again."
    if _names(reason, ("python.h",)) or (
        _names(reason, _COMPILER) and has_compiler() and not has_headers()
    ):
        return "Install the headers of this Python (python3-dev or python3-devel) and start again."
    if _names(reason, _COMPILER):
        return "Install gcc and the headers of this Python (gcc and python3-dev) and start again."
    if "not installed" in reason:
        return "Install triton, which comes with torch for CUDA on Linux."
    if _names(reason, _MEMORY):
        return "End other programs on the GPU and start again."
    if _names(reason, _EXCLUSIVE):
        return (
            "Set the GPU's compute mode to DEFAULT (nvidia-smi -c 0), or end other programs on the "
            "GPU, and start again: the self-test is a second process on the GPU."
        )
    if _names(reason, _UNWRITABLE):
        return (
            "Make Triton's cache (TRITON_CACHE_DIR, by default ~/.triton) and the directory for "
            "temporary files writable, with free space, and start again."
        )
    if _names(reason, _CACHE):
        return (
            "Delete Triton's cache (TRITON_CACHE_DIR, by default ~/.triton/cache), or set "
            "TRITON_CACHE_DIR to a directory on a local disk, and start again."
        )
    if "timeout" in reason:
        return "Start again when the machine is less busy; PLANISH_KERNELS=torch skips the check."
    report = (
        "Results are right all the same; please report this, with the names of GPU and driver. "
        "PLANISH_KERNELS=torch skips the check."
    )
    if reason.startswith(WRONG_RESULT):
        return f"{report} `planish doctor --retest` tests again."
    return f"The next start tests again. {report}"


def has_compiler() -> bool:
    """Return whether Triton would find a C compiler: CC, gcc or clang."""
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


def has_headers() -> bool:
    """Return whether the headers of this Python are installed."""
    return (Path(sysconfig.get_path("include")) / "Python.h").exists()


@cache
def source_digest() -> str:
    """Return a digest of the sources of the kernels and their tests."""
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(_PACKAGE.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def triton_version() -> str:
    """Return the version of Triton, read from the module.

    Package metadata is no substitute, because several packages with different names install Triton.
    """
    return str(import_module("triton").__version__)


def driver_version() -> str:
    """Return a string that identifies the NVIDIA driver; empty if there is no information."""
    try:
        # The file is absent on WSL, which uses the Windows driver.
        module = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        module = ""
    found: Callable[[], int] | None = getattr(torch._C, "_cuda_getDriverVersion", None)
    return f"{module}{found() if found is not None else ''}"


def _names(text: str, words: Sequence[str]) -> bool:
    return any(word in text.lower() for word in words)
