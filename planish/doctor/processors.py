"""The processors that planish may use, and whether other programs use them too."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from planish.doctor.busy import Load
from planish.doctor.findings import Finding
from planish.processes.threads import cpu_quota, limit_threads, usable_cpus

_MAX_OTHER_SHARE = 0.25
"""The share of the processors that other programs may use before the report has a remedy."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def processor_findings(load: Load | None) -> Iterator[Finding]:
    """Yield the processors and threads. `load`: the load of other programs, or None if unknown."""
    num_cpus, num_usable, quota = os.cpu_count() or 1, usable_cpus(), cpu_quota()
    yield Finding(
        "cores", f"{num_usable} of {num_cpus} may be used", {"usable": num_usable, "all": num_cpus}
    )
    yield _quota_finding(quota)
    limit_threads()  # as an engine does at its start
    threads = torch.get_num_threads()
    remedy = ""
    if threads > num_usable:
        remedy = (
            f"set OMP_NUM_THREADS={num_usable}: with more threads than cores, the threads wait for "
            "each other"
        )
    yield Finding("threads", str(threads), threads, remedy)
    variables = {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ}
    text = ", ".join(f"{name}={value}" for name, value in variables.items())
    yield Finding("variables", text or "none set", variables)
    yield _other_programs_finding(load, num_usable if quota is None else min(num_usable, quota))


def _quota_finding(quota: float | None) -> Finding:
    if quota is None:
        return Finding("quota", "no limit on processor time", {"cores": None})
    text = f"{quota:g} cores, by this process's control groups"
    remedy = "give the container or the service at least one whole core (--cpus, CPUQuota)"
    return Finding("quota", text, {"cores": quota}, remedy if quota < 1 else "")


def _other_programs_finding(load: Load | None, usable_cores: float) -> Finding:
    if load is None:
        return Finding("other_programs", "not known on this system", {"cores": None})
    programs = [{"name": name, "pid": pid, "cores": cores} for name, pid, cores in load.programs]
    value = {"cores": round(load.cores, 2), "programs": programs}
    text = f"keep {load.cores:.1f} of {usable_cores:g} cores busy"
    if load.programs:
        program_texts = (
            f"{name} (process {pid}) {cores:.1f}" for name, pid, cores in load.programs
        )
        text += f": {', '.join(program_texts)}"
    if load.cores <= _MAX_OTHER_SHARE * usable_cores:
        return Finding("other_programs", text, value)
    remaining_cores = max(1, round(usable_cores - load.cores))
    remedy = f"end them, or give planish the cores that are left: OMP_NUM_THREADS={remaining_cores}"
    return Finding("other_programs", text, value, remedy)
