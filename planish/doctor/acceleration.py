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
from planish.model.kernels.cpp.build import PREBUILT, BuildError, find_compiler
from planish.model.kernels.interface.setting import kernels_setting
from planish.model.kernels.self_test.verdicts import Verdict
from planish.model.kernels.triton.families import wants_graphs
from planish.model.kernels.triton.self_test import driver_version, has_headers, remedy_of

_KERNEL_REMEDY = (
    "another compiler may help (CXX=clang++); PLANISH_KERNELS=torch turns planish's kernels off"
)
_RETRY_REMEDY = "run `planish doctor` again in a minute: the work continues in the background"


def device_findings(settings: EngineSettings) -> Iterator[Finding]:
    """Yield the GPUs of this machine, and the device and dtype that an engine uses."""
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        capability = f"compute capability {properties.major}.{properties.minor}"
        text = f"{properties.name}, {capability}, {gib(properties.total_memory)}"
        yield Finding(f"cuda:{number}", text)
    problem, _, remedy = (unused_gpu() or "").rpartition(": ")
    if problem:
        yield Finding("unused_gpu", problem, remedy=remedy)
    engine_device = choose_device(settings.device)
    if settings.device != "auto":
        reason = "as requested"
    elif engine_device.type == "cuda":
        reason = "the first GPU"
    else:
        reason = "torch cannot use the GPU" if problem else "no NVIDIA GPU was found"
    yield Finding("device", f"{engine_device}, {reason}", str(engine_device))
    yield Finding("driver", driver_version().strip() or "no NVIDIA driver was found")
    dtype = choose_dtype(settings.dtype, engine_device)
    yield Finding("dtype", str(dtype).removeprefix("torch."))


def kernel_findings(
    settings: EngineSettings, preparation_result: PreparationResult | None
) -> Iterator[Finding]:
    """Yield the compiler, and the kernels in use or the reason why torch is used instead.

    `preparation_result` is None if the kernels were not ready in time.
    """
    engine_device = choose_device(settings.device)
    yield _compiler_finding()
    yield _python_headers_finding(is_needed=engine_device.type == "cuda")
    yield _cache_finding(cache_home() / "kernels")
    yield Finding("cpu_instructions", ", ".join(_instructions()), _instructions())
    if preparation_result is None:
        text = "still being compiled and tested for this machine"
        yield Finding("cpu_kernels", text, {"in_use": False, "reason": text}, _RETRY_REMEDY)
        return
    yield from _cpu_kernel_findings()
    if engine_device.type == "cuda":
        yield Finding("cuda_graphs", "on" if wants_graphs() else "off, by PLANISH_GRAPHS=0")
        yield gpu_self_test(preparation_result.gpu_verdicts)


def _compiler_finding() -> Finding:
    command = find_compiler()
    if command is None and PREBUILT.exists():
        text = "no C++ compiler was found; the kernels of the installed wheel need none"
        return Finding("compiler", text, {"path": None})
    if command is None:
        remedy = "install a C++ compiler (Debian, Ubuntu: apt-get install g++), or name one in CXX"
        return Finding("compiler", "no C++ compiler was found", {"path": None}, remedy)
    try:
        result = subprocess.run(
            [*shlex.split(command), "--version"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        text = f"{command} does not run: {error}"
        return Finding("compiler", text, {"path": command}, "name another in CXX")
    version = result.stdout.splitlines()[0] if result.stdout else "version not known"
    return Finding("compiler", f"{command}: {version}", {"path": command, "version": version})


def _python_headers_finding(is_needed: bool) -> Finding:
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


def _cache_finding(directory: Path) -> Finding:
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
    names = [torch.backends.cpu.get_cpu_capability()]
    if torch.cpu._is_avx512_bf16_supported():
        names.append("AVX512_BF16")
    if torch.cpu._is_amx_tile_supported():
        names.append("AMX")
    return names


def _cpu_kernel_findings() -> Iterator[Finding]:
    library, error_texts = None, list[str]()
    with collect_warnings() as logged:
        try:
            library = ops.load_library()
        except UserError as error:
            error_texts.append(str(error))
    # Only the first call logs why torch replaces kernels, and `choose_dtype` may have made it.
    warnings = list(dict.fromkeys([*logged, *ops.load_warnings, *error_texts]))
    value = {"in_use": library is not None, "switch": kernels_setting(), "warnings": warnings}
    if library is not None:
        text = f"in use, compiled for {ops.instructions()}"
        yield Finding("cpu_kernels", text, value)
        yield _verdict_finding(
            "cpu_self_test", library.verdicts, f"{_KERNEL_REMEDY}; please report it"
        )
    elif kernels_setting() == "torch":
        yield Finding("cpu_kernels", "not in use, because PLANISH_KERNELS=torch", value)
    else:
        text = ": ".join(["not in use; torch's kernels are several times slower", *warnings])
        # There is no remedy for a CPU without AVX2, and a missing compiler is a separate finding.
        has_remedy = bool(warnings) and _has_avx2() and find_compiler() is not None
        yield Finding("cpu_kernels", text, value, _KERNEL_REMEDY * has_remedy)


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
