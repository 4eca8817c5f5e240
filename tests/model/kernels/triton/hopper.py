"""Compile Triton kernels for an H100, H200 or another GPU, without such a machine. The compiler
rejects some programs that the interpreter accepts.

Usage: `python hopper.py`, with a list of [module, target, case] as JSON on its input. It needs a
separate process, because a process either interprets or compiles.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One specialization of a kernel."""

    kernel: str
    types: dict[str, str]
    """Types of the arguments that are not constants, in Triton's notation: "*bf16", "*fp32",
    "*i64", "i32", "fp32".
    """
    constants: dict[str, int | bool | float | str | None] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3
    multiples: tuple[str, ...] = ()
    """Names of integer arguments that are multiples of 16, for which Triton specializes kernels."""
    fuses_multiply_add: bool = True


@dataclass(frozen=True)
class Resources:
    """The resources that one specialization needs."""

    kernel: str
    registers: int
    """Registers per thread."""
    spilled: int
    """Bytes of local memory per thread."""
    shared: int
    """Bytes of shared memory per program."""
    wgmma: int = 0
    """The number of Hopper's matmul instructions in the program."""


Target = tuple[str, int | str, int]
"""The backend, the architecture and the threads per warp."""


def resources(module: str, cases: list[Case], target: Target = ("cuda", 90, 32)) -> list[Resources]:
    """Compile each case with the kernels of `module`. Raise RuntimeError with the compiler's
    message if one fails.

    Registers and spills are 0 for AMD.
    """
    return compile_all([(module, target, case) for case in cases])


def compile_all(cases: Sequence[tuple[str, Target, Case]]) -> list[Resources]:
    """Compile cases of several modules and targets in one process (see `resources`)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    given = json.dumps([(module, target, asdict(case)) for module, target, case in cases])
    done = subprocess.run(
        [sys.executable, __file__],
        input=given,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return [Resources(**found) for found in json.loads(done.stdout)]


def main() -> None:
    found = [
        asdict(_compile(importlib.import_module(module), Case(**case), target))
        for module, target, case in json.load(sys.stdin)
    ]
    print(json.dumps(found))


def _compile(module, case: Case, target: list) -> Resources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(module, case.kernel)
    # Triton would take an argument without a type for a constant, and compile another kernel than
    # the one that runs.
    given = [*case.types, *case.constants]
    if sorted(given) != sorted(kernel.arg_names):
        raise ValueError(f"{case.kernel} takes {kernel.arg_names}, and the case has {given}")
    named = {name: case.types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        name for name, kind in case.types.items() if kind.startswith("*") or name in case.multiples
    }
    hints = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in aligned
    }
    source = ASTSource(kernel, named, case.constants, hints)
    options: dict[str, int | bool] = {"num_warps": case.warps, "num_stages": case.stages}
    if not case.fuses_multiply_add:
        options["enable_fp_fusion"] = False
    compiled = triton.compile(source, target=GPUTarget(*target), options=options)
    if target[0] != "cuda":
        return Resources(case.kernel, 0, 0, compiled.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, local = (int(re.findall(rf"{name}:(\d+)", said)[0]) for name in ("REG", "LOCAL"))
    stack = int(re.search(r"STACK:(\d+)", said).group(1))  # type: ignore[union-attr]
    wgmma = compiled.asm["ptx"].count("wgmma.mma_async")
    return Resources(case.kernel, registers, max(local, stack), compiled.metadata.shared, wgmma)


if __name__ == "__main__":
    main()
