"""Test the Triton kernels on this machine's GPU before they are used, and store the verdicts.

The tests run in a separate process (engine/gpu_kernel_checks.py), because an illegal memory access
destroys the CUDA context of its process, and a kernel may hang. They run once for each combination
of GPU, driver, torch, Triton, kernel sources and model shapes. kernels/choose.py then uses the
families that passed. torch replaces all other families, and one warning gives the reason.

The verdict is stored if a family passed or gave wrong results. A failure that the user can remedy,
such as a missing compiler or too little memory, is not stored, so the next start tests again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from planish.files import cache_home
from planish.model.kernels.cpp import ops
from planish.model.kernels.triton.families import FAMILIES, HeadShape, has_triton
from planish.model.kernels.verdicts import (
    Verdict,
    describe_exit,
    read_verdicts,
    verdict_file,
    write_verdicts,
)

CHECKER = (sys.executable, "-m", "planish.engine.gpu_kernel_checks")
SECONDS = 600
"""The time limit of a test process in seconds.

Compilation takes one to two minutes, or longer on a busy machine.
"""
_PACKAGE = Path(__file__).parents[3]
_SOURCES = (
    "model/kernels/triton/*.py",
    "engine/gpu_kernel_checks.py",
    "engine/sampling/cuda_graph_runner.py",
)
_COMPILER = ("c compiler", "python.h", "gcc", "clang")
"""Lower-case words in Triton's errors which show that its launcher could not be compiled."""
_MEMORY = ("out of memory", "outofmemory")

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
    if ops.kernels_setting() in ("torch", "triton"):
        return []
    if not has_triton():
        verdicts = [Verdict(family, False, "Triton is not installed") for family in families]
    else:
        name = torch.cuda.get_device_name(device)
        path = verdict_path(shapes, heads, device)
        # Another model with the same shapes may share the file. So the file may have verdicts on
        # families that do not support this model.
        known = known_verdicts(path)
        missing = [family for family in families if family not in {v.family for v in known}]
        if missing:
            _logger.info(
                "compiling and checking GPU kernels for %s; this takes about a minute, once", name
            )
            dtype = str(heads.dtype).removeprefix("torch.")
            request = Request(str(directory), dtype, str(device), missing)
            known += run_checks(request)
            write_verdicts(path, filter(is_lasting, known))
        verdicts = [verdict for verdict in known if verdict.family in families]
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


def known_verdicts(path: Path) -> list[Verdict]:
    """Return the stored verdicts; an empty list if the file is missing or damaged."""
    return [verdict for verdict in read_verdicts(path) or [] if verdict.family in FAMILIES]


def run_checks(
    request: Request, command: Sequence[str] = CHECKER, seconds: float = SECONDS
) -> list[Verdict]:
    """Test the families of the request and return one verdict for each.

    If the test process crashes or hangs, the family that it was testing fails, and a new process
    tests the remaining families. `seconds`: the time limit of each process.
    """
    left, verdicts = list(request.families), list[Verdict]()
    while left:
        found = _run(
            Request(request.directory, request.dtype, request.device, left), command, seconds
        )
        verdicts += found
        left = [family for family in left if family not in {v.family for v in found}]
        if found and left and _names(found[-1].reason, _COMPILER):
            # No family can be compiled.
            verdicts += [Verdict(family, False, found[-1].reason) for family in left]
            break
    order = {family: place for place, family in enumerate(request.families)}
    return sorted(verdicts, key=lambda verdict: order[verdict.family])


def _run(request: Request, command: Sequence[str], seconds: float) -> list[Verdict]:
    """Run one test process and return its verdicts, at least one."""
    # The parent may have added planish's directory only to its sys.path, which the test process
    # does not inherit.
    paths = [str(_PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PLANISH_KERNELS": "triton",
        "PLANISH_GRAPHS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    except OSError as error:
        return [
            Verdict(family, False, f"cannot be started: {error}") for family in request.families
        ]
    ended = ""
    try:
        out, errors = process.communicate(json.dumps(asdict(request)), timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        ended = f"timeout: no verdict within {seconds:.0f} seconds"
    verdicts, begun = _read(out)
    verdicts = [verdict for verdict in verdicts if verdict.family in request.families]
    known = {verdict.family for verdict in verdicts}
    if len(known) < len(request.families) and (process.returncode != 1 or begun not in known):
        # The process ended during the test of a family, or before the first test.
        said = errors.strip().splitlines()
        ended = ended or describe_exit(process.returncode) + (f": {said[-1]}" if said else "")
        failed = [family for family in request.families if family == begun]
        if not failed:
            failed, ended = list(request.families), f"the self-test cannot be started: {ended}"
        verdicts += [Verdict(family, False, ended) for family in failed if family not in known]
    return verdicts


def _read(out: str) -> tuple[list[Verdict], str | None]:
    """Return the verdicts in the output of a test process, and the family that it began last.

    Other lines are ignored, because libraries may print too.
    """
    verdicts, begun = [], None
    for line in out.splitlines():
        try:
            said = json.loads(line)
            if "verdict" in said:
                verdicts.append(Verdict(**said["verdict"]))
            else:
                begun = said["begin"]
        except (ValueError, TypeError, KeyError):
            continue
    return verdicts, begun


def is_lasting(verdict: Verdict) -> bool:
    """Return whether to store the verdict. A failure that the user can remedy is not stored."""
    mendable = _names(verdict.reason, (*_COMPILER, *_MEMORY, "timeout", "cannot be started"))
    return verdict.passed or not mendable


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
    if "timeout" in reason:
        return "Start again when the machine is less busy; PLANISH_KERNELS=torch skips the check."
    return (
        "Results are right all the same; please report this, with the names of GPU and driver. "
        "PLANISH_KERNELS=torch skips the check."
    )


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
