"""Findings of `planish doctor` about the device and the kernels that an engine would use."""

from __future__ import annotations

import shlex
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from planish.doctor.findings import Finding, collect_warnings, write_problem
from planish.doctor.preparation import PreparationResult
from planish.engine.memory import gib
from planish.engine.settings import EngineSettings, choose_device, choose_dtype, unused_gpu
from planish.errors import UserError
from planish.files import cache_home, short_path
from planish.model.kernels.cpp import ops
from planish.model.kernels.cpp.build import BuildError, find_compiler
from planish.model.kernels.triton.families import wants_graphs
from planish.model.kernels.triton.self_test import driver_version, has_headers, remedy_of
from planish.model.kernels.verdicts import Verdict

_REMEDY = (
    "another compiler may help (CXX=clang++); PLANISH_KERNELS=torch turns planish's kernels off"
)
_AGAIN = "run `planish doctor` again in a minute: the work continues in the background"


def device(settings: EngineSettings) -> Iterator[Finding]:
    """Yield the GPUs of this machine, and the device and dtype that an engine uses."""
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        text = f"{found.name}, compute capability {found.major}.{found.minor}, {gib(found.total_memory)}"
        yield Finding(f"cuda:{number}", text)
    problem, _, remedy = (unused_gpu() or "").rpartition(": ")
    if problem:
        yield Finding("unused_gpu", problem, remedy=remedy)
    chosen = choose_device(settings.device)
    if settings.device != "auto":
        reason = "as requested"
    elif chosen.type == "cuda":
        reason = "the first GPU"
    else:
        reason = "torch cannot use the GPU" if problem else "no NVIDIA GPU was found"
    yield Finding("device", f"{chosen}, {reason}", str(chosen))
    yield Finding("driver", driver_version().strip() or "no NVIDIA driver was found")
    dtype = choose_dtype(settings.dtype, chosen)
    yield Finding("dtype", str(dtype).removeprefix("torch."))


def kernel_findings(
    settings: EngineSettings, prepared: PreparationResult | None
) -> Iterator[Finding]:
    """Yield the compiler, and the kernels in use or the reason why torch is used instead.

    `prepared` is None if the kernels were not ready in time.
    """
    chosen = choose_device(settings.device)
    yield _compiler()
    yield _python_headers(is_needed=chosen.type == "cuda")
    yield _cache(cache_home() / "kernels")
    yield Finding("cpu_instructions", ", ".join(_instructions()), _instructions())
    if prepared is None:
        text = "still being compiled and tested for this machine"
        yield Finding("cpu_kernels", text, {"in_use": False, "reason": text}, _AGAIN)
        return
    yield from _cpu_kernels()
    if chosen.type == "cuda":
        yield Finding("cuda_graphs", "on" if wants_graphs() else "off, by PLANISH_GRAPHS=0")
        yield gpu_self_test(prepared.gpu_verdicts)


def _compiler() -> Finding:
    command = find_compiler()
    if command is None:
        remedy = "install a C++ compiler (Debian, Ubuntu: apt-get install g++), or name one in CXX"
        return Finding("compiler", "no C++ compiler was found", {"path": None}, remedy)
    try:
        done = subprocess.run(
            [*shlex.split(command), "--version"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        text = f"{command} does not run: {error}"
        return Finding("compiler", text, {"path": command}, "name another in CXX")
    version = done.stdout.splitlines()[0] if done.stdout else "version not known"
    return Finding("compiler", f"{command}: {version}", {"path": command, "version": version})


def _python_headers(is_needed: bool) -> Finding:
    """Return whether Python.h is installed.

    Triton needs it to compile its launcher. The C++ kernels do not need it.
    """
    directory = short_path(Path(sysconfig.get_path("include")))
    if has_headers():
        return Finding("python_headers", f"in {directory}", True)
    text = f"Python.h is not in {directory}"
    if not is_needed:
        return Finding("python_headers", f"{text}, which only GPUs need", False)
    remedy = "install Python's headers (Debian, Ubuntu: apt-get install python3-dev)"
    return Finding("python_headers", text, False, remedy)


def _cache(directory: Path) -> Finding:
    problem = write_problem(directory)
    value = {"path": str(directory), "writable": problem is None}
    if problem is None:
        return Finding("kernel_cache", short_path(directory), value)
    remedy = (
        "set PLANISH_HOME to a writable directory; without one, planish can neither compile "
        "kernels that are not in the cache nor store the verdicts of their self-test"
    )
    return Finding("kernel_cache", problem, value, remedy)


def _instructions() -> list[str]:
    found = [torch.backends.cpu.get_cpu_capability()]
    if torch.cpu._is_avx512_bf16_supported():
        found.append("AVX512_BF16")
    if torch.cpu._is_amx_tile_supported():
        found.append("AMX")
    return found


def _cpu_kernels() -> Iterator[Finding]:
    library = None
    with collect_warnings() as warnings:
        try:
            library = ops.load_library()
            if library is None:
                # Only the first call logs the reason, and `choose_dtype` may have made it.
                ops.load_library.cache_clear()
                warnings.clear()
                library = ops.load_library()
        except UserError as error:
            warnings.append(str(error))
    value = {"in_use": library is not None, "switch": ops.kernels_setting(), "warnings": warnings}
    if library is not None:
        text = f"in use, compiled for {ops.instructions()}"
        yield Finding("cpu_kernels", text, value)
        yield _verdict_finding("cpu_self_test", library.verdicts, f"{_REMEDY}; please report it")
    elif ops.kernels_setting() == "torch":
        yield Finding("cpu_kernels", "not in use, because PLANISH_KERNELS=torch", value)
    else:
        text = ": ".join(["not in use; torch's kernels are several times slower", *warnings])
        # There is no remedy for a CPU without AVX2, and a missing compiler is a separate finding.
        is_mendable = bool(warnings) and _has_avx2() and find_compiler() is not None
        yield Finding("cpu_kernels", text, value, _REMEDY * is_mendable)


def gpu_self_test(verdicts: Sequence[Verdict]) -> Finding:
    """Return the self-test results of the GPU kernels, by family."""
    if not verdicts:
        text = "not run: PLANISH_KERNELS turns the kernels off, or no base model is on this machine"
        return Finding("gpu_self_test", text, [])
    reasons = dict.fromkeys(remedy_of(v.reason) for v in verdicts if not v.passed)
    return _verdict_finding("gpu_self_test", verdicts, " ".join(reasons).rstrip("."))


def _verdict_finding(name: str, verdicts: Sequence[Verdict], remedy: str) -> Finding:
    value = [asdict(verdict) for verdict in verdicts]
    failed = [f"{v.family} ({v.reason})" for v in verdicts if not v.passed]
    if not failed:
        return Finding(name, f"passed: {', '.join(v.family for v in verdicts)}", value)
    return Finding(name, f"failed, so torch is used instead: {', '.join(failed)}", value, remedy)


def _has_avx2() -> bool:
    try:
        ops.instructions()
    except BuildError:
        return False
    return True
