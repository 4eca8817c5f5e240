"""The processors that planish may use, and whether other programs use them too."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from planish.doctor.busy import Load
from planish.doctor.findings import Finding
from planish.model.kernels.cpp.threads import cpu_quota, limit_threads, usable_cpus

_SHARE = 0.25
"""The share of the processors that other programs may use before the report has a remedy."""
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def processors(load: Load | None) -> Iterator[Finding]:
    """Yield the processors and threads. `load`: the load of other programs, or None if unknown."""
    whole, usable, quota = os.cpu_count() or 1, usable_cpus(), cpu_quota()
    yield Finding("cores", f"{usable} of {whole} may be used", {"usable": usable, "all": whole})
    yield _quota(quota)
    limit_threads()  # as an engine does at its start
    threads = torch.get_num_threads()
    remedy = ""
    if threads > usable:
        remedy = (
            f"set OMP_NUM_THREADS={usable}: with more threads than cores, the threads wait for "
            "each other"
        )
    yield Finding("threads", str(threads), threads, remedy)
    given = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    text = ", ".join(f"{name}={value}" for name, value in given.items())
    yield Finding("variables", text or "none set", given)
    yield _other_programs(load, usable if quota is None else min(usable, quota))


def _quota(quota: float | None) -> Finding:
    if quota is None:
        return Finding("quota", "no limit on processor time", {"cores": None})
    text = f"{quota:g} cores, by this process's control groups"
    remedy = "give the container or the service at least one whole core (--cpus, CPUQuota)"
    return Finding("quota", text, {"cores": quota}, remedy if quota < 1 else "")


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
