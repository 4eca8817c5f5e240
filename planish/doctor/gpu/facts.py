"""Facts about a GPU and its software, without anything personal."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from planish.engine.base_models import is_wsl
from planish.engine.memory import main_memory_bytes
from planish.model.device import Device
from planish.model.kernels.triton.self_test import driver_version, has_compiler, has_headers

_QUERIED = (
    *("name", "driver_version", "compute_mode", "mig.mode.current", "persistence_mode"),
    *("power.limit", "clocks.max.sm", "clocks.max.memory", "ecc.mode.current", "pcie.link.gen.max"),
)
_VARIABLES = (
    *("PLANISH_KERNELS", "PLANISH_GRAPHS", "PLANISH_OVERLAP"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS"),
)
"""Variables that change what is measured."""


def device_facts(device: torch.device) -> dict[str, Any]:
    """Return the facts about this device and its software."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "wsl": is_wsl(),
        "cuda": torch.version.cuda or "none",
        "driver": driver_version().strip() or "none",
        "c_compiler": has_compiler(),
        "python_headers": has_headers(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "main_memory_bytes": main_memory_bytes(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    if not Device(device).is_gpu:
        return facts | {"gpu": "not run here: no GPU"}
    found = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return facts | {
        "gpu": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": total,
        "free_bytes": free,
        "gpus": torch.cuda.device_count(),
        "nvidia_smi": _nvidia_smi(),
    }


def _nvidia_smi() -> Mapping[str, str]:
    """Return what nvidia-smi says about the first GPU; empty if it is missing or fails."""
    program = shutil.which("nvidia-smi") or "/usr/lib/wsl/lib/nvidia-smi"
    if not Path(program).exists():
        return {}
    command = [program, f"--query-gpu={','.join(_QUERIED)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return dict(zip(_QUERIED, values, strict=False))
