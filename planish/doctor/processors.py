"""The processors that planish may use, and whether other programs use them too."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from planish.doctor.busy import Load
from planish.doctor.findings import Finding

_SHARE = 0.25
"""Of the processors; more that others use needs attention."""
_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def processors(load: Load | None) -> Iterator[Finding]:
    """`load` of other programs, as measured before anything else was done."""
    whole = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else whole
    yield Finding("cores", f"{usable} of {whole} may be used", {"usable": usable, "all": whole})
    threads = torch.get_num_threads()
    yield Finding("threads", str(threads), threads)
    given = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    text = ", ".join(f"{name}={value}" for name, value in given.items())
    yield Finding("variables", text or "none set", given)
    yield _other_programs(load, usable)


def _other_programs(load: Load | None, usable: float) -> Finding:
    if load is None:
        return Finding("other_programs", "not known on this system", {"cores": None})
    programs = [{"name": name, "pid": pid, "cores": cores} for name, pid, cores in load.programs]
    value = {"cores": round(load.cores, 2), "programs": programs}
    text = f"keep {load.cores:.1f} of {usable:g} cores busy"
    if load.programs:
        named = (f"{name} (process {pid}) {cores:.1f}" for name, pid, cores in load.programs)
        text += f": {', '.join(named)}"
    if load.cores <= _SHARE * usable:
        return Finding("other_programs", text, value)
    left = max(1, round(usable - load.cores))
    remedy = f"end them, or give planish the cores that are left: OMP_NUM_THREADS={left}"
    return Finding("other_programs", text, value, remedy)
